"""The command line of ``ringtrain bench``, also ``python -m ringtrain.bench``.

Outside of a job it starts itself on the ranks that ``-np`` asks for, through ringtrainrun, or on the hosts that
``shaped`` makes; within one it runs the benchmark. Exit code 1 means that a result was wrong.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringtrain import launcher, tables
from ringtrain.bench import documents, launch, plot, shaped
from ringtrain.bench.models import MODELS
from ringtrain.bench.sizes import parse_bytes
from ringtrain.errors import UnsupportedError
from ringtrain.launch import progress
from ringtrain.launch.modes import FURTHER, MODES
from ringtrain.options import environment

ALGORITHMS = next(option for option in tables.OPTIONS if option.name == "algorithm").lowest.split("|")
OPERATIONS = tuple(name for name, row in tables.OPERATIONS.items() if row.layout != "kNone")
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
TASKS = ("digits", "bytes")
WAYS = ("float32", "bf16", "int8", "int4", "int4-without-feedback",
        "every-8", "every-8-int8", "every-32", "every-32-fragments", "every-32-diloco-half", "one-step-late", "one-step-late-int8",
        "powersgd-2", "powersgd-4", "ddp-powersgd-2", "ddp-powersgd-4", "alone")  # fmt: skip
TRANSPORTS = ("mpi", "tcp")
ELASTIC_PARTS = ("faults", "goodput", "overhead")
ELASTIC_SYSTEMS = ("ringtrain", "torchrun", "torchft")
ELASTIC_OPTIONS = {
    "elastic", "systems", "sizes", "minutes", "every", "together", "pace_ms", "checkpoint_steps", "seed",
}  # fmt: skip
MOST_BATCHES = 4  # that share an exchange in a mode that is measured by default


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``ringtrain bench`` with these arguments (the process's own by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    chosen = make_parser().parse_args(arguments)
    if chosen.benchmark == "plot":
        return plot.main(chosen.files, chosen.output)
    documents.begin(chosen.benchmark)
    if not launcher.has_started_this(environment()):
        environment().update(progress.for_ranks())
    if chosen.json and documents.OTHERS not in os.environ:
        os.environ[documents.OTHERS] = str(documents.look_at_others())  # before this one's ranks are the others
    if chosen.benchmark == "faults":  # which starts jobs of its own
        return 0 if _run(*_chosen_faults(_options_of(chosen))) else 1
    if chosen.benchmark == "launch":  # so does this, with its number of ranks
        return launch.start(chosen.ranks, chosen.repetitions, chosen.json, chosen.hosts)
    if not launcher.has_started_this(environment()):
        if hasattr(chosen, "measured_rate"):  # it runs on links of a known rate
            return shaped.start(chosen, arguments)
        if getattr(chosen, "rate", None):
            return shaped.start_apart(chosen, arguments)
        return _start_ranks(
            chosen.ranks, arguments, needs_mpi=bool({"mpi", "horovod"} & set(getattr(chosen, "peers", ())))
        )
    return 0 if _run(chosen.benchmark, _options_of(chosen)) else 1


def _options_of(chosen: argparse.Namespace) -> dict[str, Any]:
    of_the_start = ("benchmark", "ranks", "rate", "ranks_a_host")
    return {name: value for name, value in vars(chosen).items() if name not in of_the_start}


def _chosen_faults(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The module that does them, and what it takes of the options: faults that end a job, or that it goes on after."""
    of_elastic = ELASTIC_OPTIONS | {"runs", "only", "json"}
    if options["elastic"] is None:
        return "faults", {name: value for name, value in options.items() if name not in ELASTIC_OPTIONS}
    return "elastic", {name: value for name, value in options.items() if name in of_elastic}


class Parser(argparse.ArgumentParser):
    """argparse's, but for its silence where nobody takes the help."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message or "")


def make_parser() -> argparse.ArgumentParser:
    """The options of all benchmarks."""
    parser = Parser(prog="ringtrain bench", description="Measures ringtrain beside its peers.", allow_abbrev=False)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    for name, (text, add_options) in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=text, allow_abbrev=False)
        add_options(benchmark)
        benchmark.add_argument("-np", dest="ranks", type=_count, default=2, metavar="N", help="number of ranks (2)")
        benchmark.add_argument("--json", metavar="FILE", help="write the results there too")
    drawn = benchmarks.add_parser("plot", help="draws what --json has written, as SVG", allow_abbrev=False)
    drawn.add_argument("files", nargs="+", metavar="FILE", help="of any benchmark")
    drawn.add_argument("-o", dest="output", required=True, metavar="DIR", help="where the plots go")
    return parser


def _start_ranks(count: int, arguments: Sequence[str], needs_mpi: bool) -> int:
    itself = [sys.executable, "-m", "ringtrain.bench", *arguments]
    flags = ["--transport", "mpi"] if needs_mpi and "RINGTRAIN_TRANSPORT" not in environment() else []
    return subprocess.call(
        [sys.executable, "-m", "ringtrain.launch", "-np", str(count), "--share-gpus", *flags, *itself]
    )


def _run(benchmark: str, options: dict[str, Any]) -> bool:
    # Imported only now: it joins the other ranks, which the process that only starts them must not.
    try:
        return importlib.import_module(f"ringtrain.bench.{benchmark}").run(**options)
    except UnsupportedError as error:  # on all ranks alike
        if environment().get("RINGTRAIN_RANK", "0") == "0":
            print(f"ringtrain bench: {error}", file=sys.stderr)
        return False


# ---- options ----


def _allreduce_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=_sizes, default=_sizes("4KB,1MB,16MB,64MB,256MB"), metavar="4KB,1MB,...")
    parser.add_argument("--peers", type=_choices("gloo", "mpi", "adasum"), default=[], metavar="gloo,mpi,adasum")
    parser.add_argument(
        "--algorithm", dest="algorithms", type=_choices(*ALGORITHMS), default=["auto"], metavar="auto,ring,..."
    )
    parser.add_argument("--operation", choices=OPERATIONS, default="allreduce", help="another collective (allreduce)")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="MS",
        help="of other work before each operation, in milliseconds (0)",
    )
    _repetitions_option(parser)


def _step_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--fusion-bytes", type=_sizes, default=[None], metavar="0,1MB,...", help="thresholds to try")
    _repetitions_option(parser)


def _idle_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0)
    _transports_options(parser, default=["mpi"])
    _apart_option(parser)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--networks", type=_choices(*NETWORKS), default=list(NETWORKS[:4]), metavar=",".join(NETWORKS))
    parser.add_argument("--peers", type=_choices(*TRAINING_PEERS), default=[], metavar=",".join(TRAINING_PEERS))
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
    _apart_option(parser)
    _repetitions_option(parser)


def _accumulation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--passes", type=_numbers, default=[1, 2, 4, 8], metavar="1,2,...", help="batches in a step")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    _apart_option(parser)
    _repetitions_option(parser)


def _accuracy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=_choices(*TASKS), default=list(TASKS), metavar=",".join(TASKS))
    parser.add_argument("--ways", type=_choices(*WAYS), default=list(WAYS), metavar=",".join(WAYS), help="all")
    parser.add_argument("--seeds", type=_count, default=3, metavar="N", help="trainings of each (3)")
    parser.add_argument("--steps", type=_count, metavar="N", help="default: by task")


def _tensorflow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--floats", type=int, default=28_000_000, metavar="N", help="in all gradients (28000000)")
    parser.add_argument("--tensors", type=int, default=160, metavar="N", help="how many gradients (160)")
    parser.add_argument("--layers", type=_numbers, default=[1024, 2048, 2048, 2048, 1024], metavar="1024,2048,...")
    parser.add_argument("--peers", type=_choices("mwms", "torch"), default=[], metavar="mwms,torch")
    _repetitions_option(parser)


def _jax_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--floats", type=_count, default=16 << 20, metavar="N", help="in all gradients (16777216)")
    parser.add_argument("--tensors", type=_count, default=100, metavar="N", help="how many gradients (100)")
    parser.add_argument("--peers", type=_choices("psum"), default=[], metavar="psum", help="over jax.distributed")
    _repetitions_option(parser)


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
        type=_choices(*ELASTIC_PARTS),
        const=list(ELASTIC_PARTS),
        metavar=",".join(ELASTIC_PARTS),
        help="what faults cost an elastic job of four ranks; these parts, or all",
    )
    elastic.add_argument(
        "--systems",
        type=_choices(*ELASTIC_SYSTEMS),
        default=["ringtrain"],
        metavar=",".join(ELASTIC_SYSTEMS),
        help="one after the other (ringtrain); torchft must be installed",
    )
    elastic.add_argument(
        "--sizes", type=_sizes, default=_sizes("1MB,25MB"), metavar="1MB,25MB,...", help="of the network"
    )
    elastic.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of goodput (10)")
    elastic.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds from fault to fault (15)")
    elastic.add_argument("--together", action="store_true", help="measures the goodput of all systems at the same time")
    elastic.add_argument("--pace-ms", type=float, metavar="C", help="a step takes at least (20; 100 for goodput)")
    elastic.add_argument(
        "--checkpoint-steps", type=_count, default=50, metavar="K", help="of torchrun, from one to the next (50)"
    )
    elastic.add_argument("--seed", type=int, default=11, metavar="N", help="of victims and moments (11)")


def _wire_options(parser: argparse.ArgumentParser) -> None:
    _hosts_options(parser, ranks_per_host=[1, 2])
    parser.set_defaults(cores="apart")
    parser.add_argument("--sizes", type=_sizes, default=_sizes("1KB,250000000"), metavar="1KB,250000000,...")
    parser.add_argument("--peers", type=_choices("gloo", "mpi"), default=[], metavar="gloo,mpi")
    parser.add_argument(
        "--compressions",
        type=_choices("fp16", "bf16", "int8", "int4"),
        default=["fp16"],
        metavar="fp16,int8,...",
        help="of what ours sends, beside none (fp16)",
    )


def _overlap_options(parser: argparse.ArgumentParser) -> None:
    _hosts_options(parser, ranks_per_host=[1])
    _gradients_options(parser)


def _compress_options(parser: argparse.ArgumentParser) -> None:
    _hosts_options(parser, ranks_per_host=[1], transports=["tcp"])
    _gradients_options(parser)
    parser.add_argument("--step-ms", type=float, default=480.0, metavar="C", help="to compute a batch alone (480)")
    parser.add_argument(
        "--modes",
        type=_choices(*(mode.name for mode in MODES), *FURTHER),
        default=[*(mode.name for mode in MODES if mode.batches <= MOST_BATCHES), FURTHER[0]],
        metavar="float32,int8,...",
        help=f"those of at most {MOST_BATCHES} batches; of others a turn takes as many times --step-ms",
    )
    parser.add_argument(
        "--free-cores",
        type=_choices("none", "one"),
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
        "--hosts", type=_count, default=1, metavar="N", help="spread over so many, made on this machine (1)"
    )


def _hosts_options(
    parser: argparse.ArgumentParser, ranks_per_host: list[int], transports: Sequence[str] = TRANSPORTS
) -> None:
    """What ``shaped.start`` reads."""
    parser.add_argument(
        "--rate",
        default="1gbit",
        metavar="1gbit,...",
        help="of the links, both ways, as tc spells it (1gbit): of each, or one after the other; or unlimited",
    )
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=2, metavar="N", help="how many to make (2)")
    parser.add_argument("--links", type=int, choices=range(1, 5), default=1, metavar="N", help="of each host (1)")
    parser.add_argument(
        "--cores",
        choices=("apart", "shared"),
        default="shared",
        help="whether each host has cores of its own, if there are enough (wire: apart, overlap: shared)",
    )
    parser.add_argument("--ranks-per-host", type=_numbers, default=ranks_per_host, metavar="1,2,...")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="turns of each (5)")
    _transports_options(parser, default=list(transports))
    parser.add_argument(
        "--pythons",
        type=lambda text: text.split(","),
        metavar="FILE,...",
        help="interpreters of the environments to measure, whose MPIs differ, one job each (this one)",
    )
    parser.add_argument("--measured-rate", type=float, help=argparse.SUPPRESS)  # bytes per second, for its own ranks


def _transports_options(parser: argparse.ArgumentParser, default: list[str]) -> None:
    parser.add_argument(
        "--transports",
        type=_choices(*TRANSPORTS),
        default=default,
        metavar="mpi,tcp",
        help=f"what carries ours between hosts, one after the other ({','.join(default)})",
    )
    # For its own ranks: of each host's links, by the host's name.
    parser.add_argument("--addresses", type=_addresses, default={}, help=argparse.SUPPRESS)


def _apart_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", metavar="1gbit", help="put the ranks on hosts made on this machine; as root")
    parser.add_argument(
        "--ranks-per-host", dest="ranks_a_host", type=_count, default=1, metavar="N", help="on each of these (1)"
    )


def _embedding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=_count, default=1_000_000, metavar="N", help="of the table (1000000)")
    parser.add_argument("--width", type=_count, default=64, metavar="N", help="numbers in a row (64)")
    parser.add_argument("--batch", type=_count, default=8192, metavar="N", help="samples of all ranks together (8192)")
    parser.add_argument("--columns", type=_count, default=26, metavar="N", help="ids of a sample (26)")
    parser.add_argument("--zipf", type=float, default=1.2, metavar="A", help="exponent of the ids' distribution (1.2)")
    parser.add_argument(
        "--folder", metavar="DIR", help="a table in files there alone, as one larger than memory must be"
    )
    parser.add_argument(
        "--peers", type=_choices("torchrec"), default=[], metavar="torchrec", help="beside ours; it must be installed"
    )
    _apart_option(parser)
    _repetitions_option(parser)


def _repetitions_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: by size")


# A benchmark's name, which is that of its file; what it measures; its own options, which are the arguments of its
# run().
BENCHMARKS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "allreduce": (
        "one tensor of several sizes, or another collective: ours, the peers, the floors",
        _allreduce_options,
    ),
    "step": ("all gradients of a model against one operation of as many bytes", _step_options),
    "idle": ("context switches of our threads while nothing is pending", _idle_options),
    "train": (
        "training steps with PyTorch: ours, DDP over gloo and over us, and without communication",
        _train_options,
    ),
    "tensorflow": (
        "gradients in a graph and training steps: ours beside MultiWorkerMirroredStrategy",
        _tensorflow_options,
    ),
    "jax": ("gradients in a compiled program: ours beside psum over jax.distributed", _jax_options),
    "wire": (
        "one tensor between hosts made on this machine, beside the floor that their links set; as root",
        _wire_options,
    ),
    "overlap": (
        "a step that computes while it sends, between such hosts, beside either alone; as root",
        _overlap_options,
    ),
    "compress": (
        "such a step in each mode of sending: bytes, time, and what the doctor would foretell; as root",
        _compress_options,
    ),
    "faults": (
        "how long until all know of a fault, nothing is left of the job, or it goes on (--elastic)",
        _faults_options,
    ),
    "launch": ("jobs that do next to nothing: ringtrainrun beside torchrun", _launch_options),
    "accuracy": ("trainings in each mode of sending, and with DDP's PowerSGD: losses and accuracy", _accuracy_options),
    "embedding": (
        "steps of a sharded embedding beside a replicated one: time, and bytes beside the least",
        _embedding_options,
    ),
    "accumulation": ("bytes and seconds a batch when several make a step", _accumulation_options),
}


def _sizes(text: str) -> list[int]:
    try:
        return [parse_bytes(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 4KB,1MB or 1000 but found '{text}'") from None


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1 but found '{text}'")
    return int(text)


def _numbers(text: str) -> list[int]:
    numbers = [int(number) if number.isdigit() else 0 for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4 but found '{text}'")
    return numbers


def _addresses(text: str) -> dict[str, list[str]]:
    return {name: links.split(",") for name, _, links in (host.partition("=") for host in text.split(";"))}


def _choices(*allowed: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",") if text else []
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)} but found '{name}'")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
