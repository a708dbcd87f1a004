"""What command lines of benchmarks have in common: this package's, and that of ``benchmarks`` in the source tree.

Outside of a job a benchmark starts itself on the ranks that ``-np`` asks for, through ringtrainrun, or on the hosts that
``shaped`` makes; within one it runs. Exit code 1 means that a result was wrong. Numbers
of bytes are as people write them, in powers of 1024.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain._binding.options import environment
from ringtrain._rendezvous import launcher
from ringtrain.bench import documents, namespaces, shaped
from ringtrain.errors import UnsupportedError
from ringtrain.launch import progress

TRANSPORTS = ("mpi", "tcp")
OF_THE_START = ("benchmark", "ranks", "rate", "ranks_a_host", "package", "command")  # which are no benchmark's own
_UNITS = {"GB": 1 << 30, "MB": 1 << 20, "KB": 1 << 10, "B": 1}


@dataclass(frozen=True)
class Benchmark:
    """What can be measured; its name is that of its module, whose ``run`` takes the options.

    Attributes:
        text: what it measures.
        add_options: adds its own options.
        start: of one that starts jobs of its own: takes what was chosen, returns the exit code.
        measures: whether it has ranks and results; a plot has neither.
    """

    text: str
    add_options: Callable[[argparse.ArgumentParser], None]
    start: Callable[[argparse.Namespace], int] | None = None
    measures: bool = True


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        package: whose modules the benchmarks are, and which ``python -m`` starts.
        name: of the command, as people type it.
    """

    package: str
    name: str
    benchmarks: Mapping[str, Benchmark]
    epilog: str = ""

    def parser(self) -> argparse.ArgumentParser:
        """The options of all benchmarks."""
        parser = Parser(
            prog=self.name,
            description="Measures ringtrain beside its peers.",
            epilog=self.epilog,
            allow_abbrev=False,
        )
        benchmarks = parser.add_subparsers(dest="benchmark", required=True)
        for name, benchmark in self.benchmarks.items():
            options = benchmarks.add_parser(name, help=benchmark.text, allow_abbrev=False)
            benchmark.add_options(options)
            if benchmark.measures:
                options.add_argument(
                    "-np", dest="ranks", type=count, default=2, metavar="N", help="number of ranks (2)"
                )
                options.add_argument("--json", metavar="FILE", help="write the results there too")
            options.set_defaults(package=self.package, command=self.name)
        return parser

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs it with these arguments (the process's own by default) and returns its exit code."""
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        chosen = self.parser().parse_args(arguments)
        try:
            return self._run(chosen, arguments)
        except namespaces.NotMade as problem:
            print(problem, file=sys.stderr)
            return 1

    def _run(self, chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
        benchmark = self.benchmarks[chosen.benchmark]
        if benchmark.measures:
            _prepare(chosen)
        if benchmark.start is not None:
            return benchmark.start(chosen)
        if launcher.has_started_this(environment()):
            return 0 if run(chosen, chosen.benchmark, options_of(chosen)) else 1
        if hasattr(chosen, "measured_rate"):  # it runs on links of a known rate
            return shaped.start(chosen, arguments)
        if getattr(chosen, "rate", None):
            return shaped.start_apart(chosen, arguments)
        return _start_ranks(chosen, arguments)


def options_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """What the benchmark's ``run`` takes of what was chosen."""
    return {name: value for name, value in vars(chosen).items() if name not in OF_THE_START}


def run(chosen: argparse.Namespace, module: str, options: Mapping[str, Any]) -> bool:
    """Runs a module of the benchmarks; whether all results were right."""
    # Imported only now: it joins the other ranks, which the process that only starts them must not.
    try:
        return importlib.import_module(f"{chosen.package}.{module}").run(**options)
    except UnsupportedError as error:  # on all ranks alike
        told = str(error)
    except ModuleNotFoundError as missing:
        name = (missing.name or "").split(".")[0]
        if name in ("", chosen.package.split(".")[0]):  # a fault of ours
            raise
        told = f"{_what_needs(name, module, options)} needs {name}, which is not installed. Run: pip install {name}"
    if environment().get("RINGTRAIN_RANK", "0") == "0":
        print(f"{chosen.command}: {told}", file=sys.stderr)
    return False


def _what_needs(package: str, module: str, options: Mapping[str, Any]) -> str:
    """gloo is PyTorch's: who has none can leave it out."""
    return "--peers gloo" if package == "torch" and "gloo" in options.get("peers", ()) else module


def _prepare(chosen: argparse.Namespace) -> None:
    documents.begin(chosen.benchmark, chosen.command)
    if not launcher.has_started_this(environment()):
        environment().update(progress.for_ranks())
    if chosen.json and documents.OTHERS not in os.environ:
        os.environ[documents.OTHERS] = str(documents.look_at_others())  # before this one's ranks are the others


def _start_ranks(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    itself = [sys.executable, "-m", chosen.package, *arguments]
    flags = ["--transport", "mpi"] if shaped.needs_mpi(chosen) and "RINGTRAIN_TRANSPORT" not in environment() else []
    return subprocess.call(
        [sys.executable, "-m", "ringtrain.launch", "-np", str(chosen.ranks), "--share-gpus", *flags, *itself]
    )


class Parser(argparse.ArgumentParser):
    """argparse's, but for its silence where nobody takes the help."""

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message or "")


# ---- options of several benchmarks ----


def hosts_options(
    parser: argparse.ArgumentParser, ranks_per_host: list[int], transports: Sequence[str] = TRANSPORTS
) -> None:
    """What ``shaped.start`` reads."""
    parser.add_argument(
        "--rate",
        type=rates,
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
    parser.add_argument("--ranks-per-host", type=numbers, default=ranks_per_host, metavar="1,2,...")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="turns of each (5)")
    transports_options(parser, default=list(transports))
    parser.add_argument(
        "--pythons",
        type=lambda text: text.split(","),
        metavar="FILE,...",
        help="interpreters of the environments to measure, whose MPIs differ, one job each (this one)",
    )
    parser.add_argument("--measured-rate", type=float, help=argparse.SUPPRESS)  # bytes per second, for its own ranks


def transports_options(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """What carries ours between hosts: without mpi4py no MPI does, unless it is asked for."""
    if importlib.util.find_spec("mpi4py") is None:
        default = ["tcp"]
    parser.add_argument(
        "--transports",
        type=choices(*TRANSPORTS),
        default=default,
        metavar="mpi,tcp",
        help=f"what carries ours between hosts, one after the other ({','.join(default)})",
    )
    # For its own ranks: of each host's links, by the host's name.
    parser.add_argument("--addresses", type=addresses, default={}, help=argparse.SUPPRESS)


def apart_option(parser: argparse.ArgumentParser) -> None:
    """The options that put ranks on hosts of their own."""
    parser.add_argument(
        "--rate", type=rates, metavar="1gbit", help="put the ranks on hosts made on this machine; as root"
    )
    parser.add_argument(
        "--ranks-per-host", dest="ranks_a_host", type=count, default=1, metavar="N", help="on each of these (1)"
    )


def repetitions_option(parser: argparse.ArgumentParser) -> None:
    """How often each system has its turn."""
    parser.add_argument("--repetitions", type=int, metavar="N", help="default: by size")


def sizes(text: str) -> list[int]:
    """Reads `4KB,1MB` or `1000`."""
    try:
        return [parse_bytes(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 4KB,1MB or 1000 but found '{text}'") from None


def count(text: str) -> int:
    """Reads a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1 but found '{text}'")
    return int(text)


def numbers(text: str) -> list[int]:
    """Reads `1,2,4`."""
    numbers = [int(number) if number.isdigit() else 0 for number in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4 but found '{text}'")
    return numbers


def rates(text: str) -> str:
    """Checks `1gbit,500mbit`, or `unlimited`."""
    for rate in text.split(","):
        if rate != shaped.UNLIMITED and not re.fullmatch(r"[0-9]+(\.[0-9]+)?([kmgt]i?)?(bit|bps)", rate.lower()):
            raise argparse.ArgumentTypeError(
                f"expected rates such as 1gbit, 2.5gbit, 100mbit or {shaped.UNLIMITED} but found '{rate}'"
            )
    return text


def addresses(text: str) -> dict[str, list[str]]:
    """Reads what ``shaped`` tells ranks: `host-1=10.0.0.1,10.1.0.1;host-2=...`."""
    return {name: links.split(",") for name, _, links in (host.partition("=") for host in text.split(";"))}


def choices(*allowed: str) -> Callable[[str], list[str]]:
    """Reads some of these words, with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",") if text else []
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)} but found '{name}'")
        return names

    return parse


def bytes_text(count: int) -> str:
    """A number of bytes in its largest unit: ``64MB``."""
    for unit, factor in _UNITS.items():
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return "0B"


def parse_bytes(text: str) -> int:
    """The number behind ``4KB``, ``64MB`` or ``1000``; raises ValueError for anything else."""
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)
