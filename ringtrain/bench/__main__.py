"""The command line of ``ringtrain bench``, also ``python -m ringtrain.bench``."""

import argparse
import sys

from ringtrain._binding import tables
from ringtrain.bench import plot
from ringtrain.bench.command import (
    Benchmark,
    Command,
    apart_option,
    choices,
    count,
    hosts_options,
    repetitions_option,
    sizes,
    transports_options,
)

ALGORITHMS = next(option for option in tables.OPTIONS if option.name == "algorithm").lowest.split("|")
# A receive belongs to a send.
OPERATIONS = tuple(name for name, row in tables.OPERATIONS.items() if row.layout != "kNone" and name != "receive")
NETWORKS = ("convnet", "mlp", "transformer", "wide", "tables", "vgg16")
TRAINING_PEERS = (
    "buckets",
    "uncompared",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "4-passes",
    "every-32",
    "sharded-step",
    "tcp",
    "horovod",
    "ddp",
    "ddp-ringtrain",
    "ddp-silent",
)


def _allreduce_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=sizes, default=sizes("4KB,1MB,16MB,64MB,256MB"), metavar="4KB,1MB,...")
    parser.add_argument("--peers", type=choices("gloo", "mpi", "adasum"), default=[], metavar="gloo,mpi,adasum")
    parser.add_argument(
        "--algorithm", dest="algorithms", type=choices(*ALGORITHMS), default=["auto"], metavar="auto,ring,..."
    )
    parser.add_argument("--operation", choices=OPERATIONS, default="allreduce", help="another collective (allreduce)")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="MS",
        help="of other work before each operation, in milliseconds (0)",
    )
    repetitions_option(parser)


def _idle_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0)
    transports_options(parser, default=["mpi"])
    apart_option(parser)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--networks", type=choices(*NETWORKS), default=list(NETWORKS[:4]), metavar=",".join(NETWORKS))
    parser.add_argument("--peers", type=choices(*TRAINING_PEERS), default=[], metavar=",".join(TRAINING_PEERS))
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="makes each system when its turn comes, which then lasts: for networks that memory holds but once",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="of a rank in a step, which says how long it computes; default: by network",
    )
    apart_option(parser)
    repetitions_option(parser)


def _wire_options(parser: argparse.ArgumentParser) -> None:
    hosts_options(parser, ranks_per_host=[1, 2])
    parser.set_defaults(cores="apart")
    parser.add_argument("--sizes", type=sizes, default=sizes("1KB,250000000"), metavar="1KB,250000000,...")
    parser.add_argument("--peers", type=choices("gloo", "mpi"), default=[], metavar="gloo,mpi")
    parser.add_argument(
        "--operation", choices=("allreduce", "send"), default="allreduce", help="send: to the next rank"
    )
    parser.add_argument(
        "--tensors",
        type=count,
        default=1,
        metavar="N",
        help="that a sum has, under way at once, of the bytes together; all of a model's gradients, say (1)",
    )
    parser.add_argument(
        "--compressions",
        type=choices("fp16", "bf16", "int8", "int4"),
        default=["fp16"],
        metavar="fp16,int8,...",
        help="of what ours sends, beside none (fp16)",
    )


def _plot_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="of any benchmark")
    parser.add_argument("-o", dest="output", required=True, metavar="DIR", help="where the plots go")


def _plot(chosen: argparse.Namespace) -> int:
    return plot.main(chosen.files, chosen.output)


COMMAND = Command(
    "ringtrain.bench",
    "ringtrain bench",
    {
        "allreduce": Benchmark(
            "one tensor of several sizes, or another collective: ours, the peers, the floors", _allreduce_options
        ),
        "idle": Benchmark("context switches of our threads while nothing is pending", _idle_options),
        "train": Benchmark(
            "training steps with PyTorch: ours, DDP over gloo and over us, and without communication", _train_options
        ),
        "wire": Benchmark(
            "one tensor between hosts made on this machine, beside the floor that their links set; as root",
            _wire_options,
        ),
        "plot": Benchmark("draws what --json has written, as SVG", _plot_options, _plot, measures=False),
    },
    epilog="The source tree has more: python -m benchmarks --help",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs ``ringtrain bench`` with these arguments (the process's own by default) and returns its exit code."""
    return COMMAND.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
