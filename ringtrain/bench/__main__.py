"""The command line of ``ringtrain bench``, also ``python -m ringtrain.bench``.

Outside of a job it starts itself on the ranks that ``-np`` asks for, through ringtrainrun; within one it runs the
benchmark. Exit code 1 means that a result was wrong.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from ringtrain import launcher, tables
from ringtrain.bench.models import MODELS
from ringtrain.bench.sizes import parse_bytes
from ringtrain.options import environment

ALGORITHMS = next(option for option in tables.OPTIONS if option.name == "algorithm").lowest.split("|")
PEER_NAMES = ("gloo", "mpi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``ringtrain bench`` with these arguments (the process's own by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = make_parser().parse_args(arguments)
    if launcher.find(environment()) is None:
        return _start_ranks(chosen.ranks, arguments)
    return 0 if _run(chosen) else 1


def make_parser() -> argparse.ArgumentParser:
    """The options of all benchmarks."""
    parser = argparse.ArgumentParser(
        prog="ringtrain bench", description="Measures ringtrain beside its peers.", allow_abbrev=False
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    allreduce = benchmarks.add_parser("allreduce", help="one tensor of several sizes: ours, the peers, a memcpy")
    allreduce.add_argument("--sizes", type=_sizes, default=_sizes("4KB,1MB,16MB,64MB,256MB"), metavar="4KB,1MB,...")
    allreduce.add_argument("--peers", type=_choices(PEER_NAMES), default=[], metavar="gloo,mpi")
    allreduce.add_argument("--algorithm", type=_choices(ALGORITHMS), default=["auto"], metavar="auto,ring,...")
    step = benchmarks.add_parser("step", help="all gradients of a model against one operation of as many bytes")
    step.add_argument("--model", choices=MODELS, default="resnet50")
    step.add_argument("--fusion-bytes", type=_sizes, default=[None], metavar="0,1MB,...", help="thresholds to try")
    idle = benchmarks.add_parser("idle", help="context switches of our threads while nothing is pending")
    idle.add_argument("--seconds", type=float, default=5.0)
    for benchmark in (allreduce, step):
        benchmark.add_argument("--repetitions", type=int, metavar="N", help="default: by size")
    for benchmark in (allreduce, step, idle):
        benchmark.add_argument("-np", dest="ranks", type=int, default=2, metavar="N", help="number of ranks (2)")
        benchmark.add_argument("--json", metavar="FILE", help="write the results there too")
    return parser


def _start_ranks(count: int, arguments: Sequence[str]) -> int:
    itself = [sys.executable, "-m", "ringtrain.bench", *arguments]
    return subprocess.call([sys.executable, "-m", "ringtrain.launch", "-np", str(count), *itself])


def _run(chosen: argparse.Namespace) -> bool:
    # Imported only now: these start MPI, which the process that only starts the ranks must not.
    from ringtrain.bench import allreduce, idle, step

    if chosen.benchmark == "allreduce":
        return allreduce.run(chosen.sizes, chosen.peers, chosen.algorithm, chosen.repetitions, chosen.json)
    if chosen.benchmark == "step":
        return step.run(chosen.model, chosen.fusion_bytes, chosen.repetitions, chosen.json)
    return idle.run(chosen.seconds, chosen.json)


def _sizes(text: str) -> list[int]:
    try:
        return [parse_bytes(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 4KB,1MB or 1000 but found '{text}'") from None


def _choices(allowed: Sequence[str]):
    def parse(text: str) -> list[str]:
        names = text.split(",") if text else []
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)} but found '{name}'")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
