"""The command line of these benchmarks: ``python -m benchmarks NAME``, in the root of the source tree."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from benchmarks.wide import SETTINGS
from ringtrain.bench.__main__ import NETWORKS
from ringtrain.bench.command import (
    Benchmark,
    Command,
    addresses,
    apart_option,
    choices,
    count,
    hosts_options,
    numbers,
    options_of,
    parse_bytes,
    repetitions_option,
    run,
    sizes,
)
from ringtrain.launch.modes import FURTHER, MODES

TASKS = ("digits", "bytes")
WAYS = ("float32", "bf16", "int8", "int4", "int4-without-feedback",
        "every-8", "every-8-int8", "every-32", "every-32-fragments", "every-32-diloco-half", "one-step-late", "one-step-late-int8",
        "powersgd-2", "powersgd-4", "ddp-powersgd-2", "ddp-powersgd-4", "alone")  # fmt: skip
FRAMEWORKS = ("torch", "keras", "tensorflow", "jax")
ELASTIC_PARTS = ("faults", "goodput", "overhead")
ELASTIC_SYSTEMS = ("ringtrain", "torchrun", "torchft")
ELASTIC_OPTIONS = {
    "elastic", "systems", "sizes", "minutes", "every", "together", "pace_ms", "checkpoint_steps", "seed",
}  # fmt: skip
MOST_BATCHES = 4  # that share an exchange in a mode that is measured by default


def _step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--fusion-bytes", type=sizes, default=[None], metavar="0,1MB,...", help="thresholds to try")
    repetitions_option(parser)


def _accumulation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--passes", type=numbers, default=[1, 2, 4, 8], metavar="1,2,...", help="batches in a step")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    apart_option(parser)
    repetitions_option(parser)


def _accuracy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=choices(*TASKS), default=list(TASKS), metavar=",".join(TASKS))
    parser.add_argument("--ways", type=choices(*WAYS), default=list(WAYS), metavar=",".join(WAYS), help="all")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="trainings of each (3)")
    parser.add_argument("--steps", type=count, metavar="N", help="default: by task")


def _tensorflow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--floats", type=int, default=28_000_000, metavar="N", help="in all gradients (28000000)")
    parser.add_argument("--tensors", type=int, default=160, metavar="N", help="how many gradients (160)")
    parser.add_argument("--layers", type=numbers, default=[1024, 2048, 2048, 2048, 1024], metavar="1024,2048,...")
    parser.add_argument("--peers", type=choices("mwms", "torch"), default=[], metavar="mwms,torch")
    repetitions_option(parser)


def _jax_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--floats", type=count, default=16 << 20, metavar="N", help="in all gradients (16777216)")
    parser.add_argument("--tensors", type=count, default=100, metavar="N", help="how many gradients (100)")
    parser.add_argument("--peers", type=choices("psum"), default=[], metavar="psum", help="over jax.distributed")
    repetitions_option(parser)


def _replicas_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--frameworks", type=choices(*FRAMEWORKS), default=list(FRAMEWORKS), metavar=",".join(FRAMEWORKS), help="all"
    )
    parser.add_argument("--layers", type=numbers, default=[256, 1024, 1024, 256], metavar="256,1024,...")
    repetitions_option(parser)


def _faults_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="of each fault (20)")
    parser.add_argument(
        "--dead-after",
        dest="dead_after_seconds",
        type=float,
        default=15,
        metavar="S",
        help="silence that counts as death, in seconds (15)",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="faults with this word in their name")
    elastic = parser.add_argument_group("jobs that go on")
    elastic.add_argument(
        "--elastic",
        nargs="?",
        type=choices(*ELASTIC_PARTS),
        const=list(ELASTIC_PARTS),
        metavar=",".join(ELASTIC_PARTS),
        help="what faults cost an elastic job of four ranks; these parts, or all",
    )
    elastic.add_argument(
        "--systems",
        type=choices(*ELASTIC_SYSTEMS),
        default=["ringtrain"],
        metavar=",".join(ELASTIC_SYSTEMS),
        help="one after the other (ringtrain); torchft must be installed",
    )
    elastic.add_argument(
        "--sizes", type=sizes, default=sizes("1MB,25MB"), metavar="1MB,25MB,...", help="of the network"
    )
    elastic.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of goodput (10)")
    elastic.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds from fault to fault (15)")
    elastic.add_argument("--together", action="store_true", help="measures the goodput of all systems at the same time")
    elastic.add_argument("--pace-ms", type=float, metavar="C", help="a step takes at least (20; 100 for goodput)")
    elastic.add_argument(
        "--checkpoint-steps", type=count, default=50, metavar="K", help="of torchrun, from one to the next (50)"
    )
    elastic.add_argument("--seed", type=int, default=11, metavar="N", help="of victims and moments (11)")


def _overlap_options(parser: argparse.ArgumentParser) -> None:
    hosts_options(parser, ranks_per_host=[1])
    _gradients_options(parser)


def _compress_options(parser: argparse.ArgumentParser) -> None:
    hosts_options(parser, ranks_per_host=[1], transports=["tcp"])
    _gradients_options(parser)
    parser.add_argument("--step-ms", type=float, default=480.0, metavar="C", help="to compute a batch alone (480)")
    parser.add_argument(
        "--modes",
        type=choices(*(mode.name for mode in MODES), *FURTHER),
        default=[*(mode.name for mode in MODES if mode.batches <= MOST_BATCHES), FURTHER[0]],
        metavar="float32,int8,...",
        help=f"those of at most {MOST_BATCHES} batches; of others a turn takes as many times --step-ms",
    )
    parser.add_argument(
        "--free-cores",
        type=choices("none", "one"),
        default=["none", "one"],
        metavar="none,one",
        help="how many cores of this machine never compute, one after the other (none,one)",
    )


def _gradients_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bytes",
        dest="size_bytes",
        type=parse_bytes,
        default=100_000_000,
        metavar="N",
        help="in all gradients (100000000)",
    )
    parser.add_argument("--tensors", type=int, default=64, metavar="N", help="how many gradients (64)")


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="turns of each launcher (5)")
    parser.add_argument(
        "--hosts", type=count, default=1, metavar="N", help="spread over so many, made on this machine (1)"
    )


def _embedding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=count, default=1_000_000, metavar="N", help="of the table (1000000)")
    parser.add_argument("--width", type=count, default=64, metavar="N", help="numbers in a row (64)")
    parser.add_argument("--batch", type=count, default=8192, metavar="N", help="samples of all ranks together (8192)")
    parser.add_argument("--columns", type=count, default=26, metavar="N", help="ids of a sample (26)")
    parser.add_argument("--zipf", type=float, default=1.2, metavar="A", help="exponent of the ids' distribution (1.2)")
    parser.add_argument(
        "--folder", metavar="DIR", help="a table in files there alone, as one larger than memory must be"
    )
    parser.add_argument(
        "--peers", type=choices("torchrec"), default=[], metavar="torchrec", help="beside ours; it must be installed"
    )
    apart_option(parser)
    repetitions_option(parser)


def _wide_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mbit", type=float, default=200.0, metavar="N", help="of packets a second, each way (200)")
    parser.add_argument(
        "--rtt-ms", dest="round_trip_ms", type=float, default=50.0, metavar="N", help="there and back (50)"
    )
    parser.add_argument("--losses", type=_shares, default=[0.0, 0.01, 0.1], metavar="0,0.01,...",
                        help="percent of the packets that get lost, one line after the other (0,0.01,0.1)")  # fmt: skip
    parser.add_argument("--buffer-ms", type=float, default=50.0, metavar="N", help="that the line holds back (50)")
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=2, metavar="N", help="how many to make (2)")
    parser.add_argument(
        "--sites", type=int, default=0, metavar="N", help="that share the line; a divisor of the hosts (each is one)"
    )
    parser.add_argument("--sizes", type=sizes, default=sizes("25000000,1KB"), metavar="25000000,1KB,...")
    parser.add_argument("--ways", type=choices(*SETTINGS), default=["ringtrain", "cubic"], metavar=",".join(SETTINGS),
                        help="what ours is told: nothing (ringtrain), or congestion control and streams")  # fmt: skip
    parser.add_argument("--peers", type=choices("gloo"), default=["gloo"], metavar="gloo")
    parser.add_argument("--congestion", default="cubic", metavar="NAME", help="default of the kernel there (cubic)")
    parser.add_argument("--packages", type=lambda text: text.split(","), metavar="DIR,...",
                        help="folders that ringtrain is imported from, one job each (this one)")  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="turns of each (5)")
    # For its own ranks.
    parser.add_argument("--addresses", type=addresses, default={}, help=argparse.SUPPRESS)
    for name in ("--measured-rate", "--raw-rate", "--loss"):
        parser.add_argument(name, type=float, default=0.0, help=argparse.SUPPRESS)


def _shares(text: str) -> list[float]:
    return [float(share) for share in text.split(",")]


def _wide(chosen: argparse.Namespace) -> int:
    from benchmarks import wide

    if chosen.measured_rate:
        return 0 if run(chosen, "wide", options_of(chosen)) else 1
    return wide.start(options_of(chosen), sys.argv[1:])


def chosen_faults(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The module that does them, and what it takes of the options: faults that end a job, or that it goes on after."""
    of_elastic = ELASTIC_OPTIONS | {"runs", "only", "json"}
    if options["elastic"] is None:
        return "faults", {name: value for name, value in options.items() if name not in ELASTIC_OPTIONS}
    return "elastic", {name: value for name, value in options.items() if name in of_elastic}


def _faults(chosen: argparse.Namespace) -> int:
    return 0 if run(chosen, *chosen_faults(options_of(chosen))) else 1


def _delays_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=Path, metavar="FILE", help="what bin/simulate --scale --delays reads")


def _delays(chosen: argparse.Namespace) -> int:
    from benchmarks import delays

    return delays.start(chosen.output)


def _launch(chosen: argparse.Namespace) -> int:
    from benchmarks import launch

    return launch.start(chosen.ranks, chosen.repetitions, chosen.json, chosen.hosts)


COMMAND = Command(
    "benchmarks",
    "python -m benchmarks",
    {
        "step": Benchmark("all gradients of a model against one operation of as many bytes", _step_options),
        "tensorflow": Benchmark(
            "gradients in a graph and training steps: ours beside MultiWorkerMirroredStrategy", _tensorflow_options
        ),
        "jax": Benchmark("gradients in a compiled program: ours beside psum over jax.distributed", _jax_options),
        "replicas": Benchmark(
            "training steps that compare what ranks step with, or their parameters, beside steps that do not",
            _replicas_options,
        ),
        "overlap": Benchmark(
            "a step that computes while it sends, between such hosts, beside either alone; as root", _overlap_options
        ),
        "compress": Benchmark(
            "such a step in each mode of sending: bytes, time, and what the doctor would foretell; as root",
            _compress_options,
        ),
        "faults": Benchmark(
            "how long until all know of a fault, nothing is left of the job, or it goes on (--elastic)",
            _faults_options,
            _faults,
        ),
        "launch": Benchmark("jobs that do next to nothing: ringtrainrun beside torchrun", _launch_options, _launch),
        "accuracy": Benchmark(
            "trainings in each mode of sending, and with DDP's PowerSGD: losses and accuracy", _accuracy_options
        ),
        "embedding": Benchmark(
            "steps of a sharded embedding beside a replicated one: time, and bytes beside the least", _embedding_options
        ),
        "wide": Benchmark(
            "one tensor between hosts far apart, on lines of a rate, delay and loss made on this machine; as root",
            _wide_options,
            _wide,
        ),
        "delays": Benchmark(
            "how long a small message takes between two such hosts, as a distribution; as root",
            _delays_options,
            _delays,
            measures=False,
        ),
        "accumulation": Benchmark("bytes and seconds a batch when several make a step", _accumulation_options),
    },
    epilog="What users measure is in the package: ringtrain bench --help",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs ``python -m benchmarks`` with these arguments (the process's own by default) and returns its exit code."""
    return COMMAND.main(arguments)


def let_ranks_find_us() -> None:
    """Wherever they start."""
    paths = [str(Path(__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))


if __name__ == "__main__":
    let_ranks_find_us()
    sys.exit(main())
