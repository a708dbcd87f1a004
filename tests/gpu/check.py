"""bin/gpu-check: runs the parts of the plan, each in processes of its own and under a deadline, and prints their results as a table.

A GPU that hangs takes its process with it, not the check. The file of --json has each result as soon as it is there, so that a
call that is cut off has lost nothing but the part that it was at. The exit code is 0 if everything is right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpu import baggage, machine

ROOT = Path(__file__).resolve().parents[2]
GRACE = 20.0  # seconds, for a part that was asked to end


class Part(NamedTuple):
    """A part of the plan.

    ``body`` is what it runs (see ``part.PARTS``), in so many ``processes``; ``seconds`` is how long that should take. A part
    that measures runs ``alone``; others run several at a time.
    """

    name: str
    body: str
    processes: int
    seconds: int
    alone: bool
    about: str


BESIDE, ALONE = False, True
# What tells most comes first: a call that is cut off has it. The seconds are estimates, with room for imports.
PARTS = [
    Part("machine", "machine", 1, 30, BESIDE, "what the figures belong to: the card, the driver, NCCL, MPI, tools"),
    Part("load", "load", 1, 60, BESIDE, "the driver and NCCL are found, torch's NCCL first"),
    Part("smoke", "smoke", 2, 60, BESIDE, "whether NCCL takes two ranks on this GPU at all: 4 bytes, then 64 MB"),
    Part("kernels", "kernels", 1, 60, BESIDE, "pack and unpack, bit for bit"),
    Part("order", "order", 1, 60, BESIDE, "streams, lifetime and refusals, a world of one"),
    Part("torch", "torch", 1, 90, BESIDE, "PyTorch's tensors, streams, training, mixed precision; a world of one"),
    Part("staged", "staged", 2, 60, BESIDE, "two ranks on one GPU through pinned host memory, as processes"),
    Part("torch-ranks", "torch_ranks", 2, 90, BESIDE, "PyTorch on two ranks of one GPU: training as of one process, views of buckets"),
    Part("torch-ddp", "torch_ddp", 2, 90, BESIDE, "DDP on the backend ringtrain, two ranks of one GPU"),
    Part("torch-fsdp", "torch_fsdp", 2, 90, BESIDE, "FSDP2 on the backend ringtrain, two ranks of one GPU"),
    Part("elastic", "elastic", 1, 120, BESIDE, "an elastic job with PyTorch, of which a rank is killed"),
    Part("torch-modes", "torch_modes", 2, 90, BESIDE, "each way of training with PyTorch, beside the same on the CPU"),
    Part("graphs", "graphs", 1, 60, BESIDE, "CUDA graphs are captured beside operations, by NCCL"),
    Part("graphs-staged", "graphs_staged", 1, 60, BESIDE, "the same, staged"),
    Part("arrays", "arrays", 1, 60, BESIDE, "arrays of CuPy, JAX and Numba, in a world of one"),
    Part("nccl", "nccl", 2, 90, BESIDE, "two ranks on one GPU by NCCL (2.30 or newer), as processes"),
    Part("killed", "killed_staged", 1, 60, BESIDE, "rank 1 is killed: rank 0 raises, staged"),
    Part("tensorflow", "tensorflow", 1, 90, BESIDE, "TensorFlow's GPU tensors in the order of its stream, in a world of one"),
    Part("staged-threads", "staged", 1, 60, BESIDE, "as staged, as threads of one process"),
    Part("nccl-nccl", "nccl_nccl", 2, 60, BESIDE, "sums by ncclAllReduce, on two ranks of one GPU"),
    Part("nccl-scatter", "nccl_scatter_gather", 2, 60, BESIDE, "sums by ncclReduceScatter and ncclAllGather"),
    Part("nccl-ordered", "nccl_ordered", 2, 60, BESIDE, "sums in the order of the ranks"),
    Part("nccl-killed", "killed_nccl", 1, 60, BESIDE, "rank 1 is killed: rank 0 raises, by NCCL"),
    Part("floors", "floors", 1, 60, ALONE, "pack and unpack against a copy of the same bytes, and against torch's _foreach_copy_"),
    Part("staging", "staging", 2, 45, ALONE, "two ranks' staging against the bus, and gloo's time"),
    Part("steps", "torch_steps", 1, 60, ALONE, "training steps of a world of one beside DDP's and a plain optimizer's"),
    Part("memory", "memory", 1, 45, ALONE, "what 1,000 steps and 20 worlds leave on the GPU"),
    Part("memcheck", "memcheck", 1, 90, ALONE, "the kernels under compute-sanitizer"),
]  # fmt: skip
BY_NCCL = {part.body for part in PARTS if "nccl" in part.body} | {"smoke"}  # bodies with two ranks on one GPU
# What NCCL needs to take two ranks on one GPU, and to fail soon where it cannot.
TWO_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo",
              "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_DEBUG": "WARN"}  # fmt: skip


def nccl_of(library: Path | None) -> dict[str, str]:
    """The environment that names an NCCL; empty for the one that ringtrain finds."""
    return {} if library is None else {"RINGTRAIN_NCCL_LIB": str(library.resolve())}


def run(part: Part, device: str, seconds: float, nccl: Path | None = None) -> Iterator[dict]:
    """The results of a part as they come; at the end one that says what happened if it failed or came to no end."""
    command = [sys.executable, "-m", "gpu.part", part.body]
    if part.processes > 1:
        command = [*machine.LAUNCH, "-np", str(part.processes), *command]
    environment = machine.environment(device) | (TWO_ON_ONE | nccl_of(nccl) if part.body in BY_NCCL else {})
    begin, said = time.monotonic(), False
    with tempfile.TemporaryFile("w+") as problems:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=problems, text=True, start_new_session=True
        )
        ends = [
            threading.Timer(seconds, process.terminate),
            threading.Timer(seconds + GRACE, os.killpg, (process.pid, signal.SIGKILL)),
        ]
        for end in ends:
            end.start()
        for line in process.stdout:
            if '{"what"' in line:
                said = True
                yield {"part": part.name, **json.loads(line[line.index("{") :])}
        process.wait()
        for end in ends:
            end.cancel()
        problems.seek(0)
        lines = [line for line in problems.read().splitlines() if line.strip()]
    if time.monotonic() - begin >= seconds:
        yield _wrong(part, f"the part came to no end in {seconds:.0f} s", lines)
    elif process.returncode:
        yield _wrong(part, f"the part returned {process.returncode}", lines)
    elif not said:
        yield _wrong(part, "the part said nothing", lines)


def _wrong(part: Part, what: str, lines: list[str]) -> dict:
    errors = [line for line in lines if "Error: " in line] or lines or [""]
    return {"part": part.name, "what": what, "right": False, "figure": errors[-1], "target": "", "said": lines[-60:]}


class Record:
    """The results of this call and of one before it, in a file that is whole at any time; any thread."""

    def __init__(self, file: Path | None, before: Path | None, about: str):
        earlier = json.loads(before.read_text()) if before else {"results": [], "whole": []}
        self.whole: list[str] = earlier["whole"]
        self.results: list[dict] = [each for each in earlier["results"] if each["part"] in self.whole]
        self.about, self._file, self._lock = about, file, threading.Lock()
        self._write()

    def add(self, result: dict) -> None:
        with self._lock:
            self.results.append(result)
            self._write()

    def close(self, part: Part) -> None:
        """All results of a part are there."""
        with self._lock:
            self.whole.append(part.name)
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        text = json.dumps({"machine": self.about, "whole": self.whole, "results": self.results}, indent=1)
        new = self._file.with_suffix(".new")
        new.write_text(text + "\n")
        new.replace(self._file)


def run_all(
    parts: list[Part], device: str, seconds: float, until: float, record: Record, nccl: Path | None = None
) -> list[Part]:
    """Runs parts until a moment of ``time.monotonic``; returns those for which no time was left.

    First those that may run beside each other, then those that measure, one after the other.
    """
    left = []

    def run_one(part: Part) -> None:
        remaining = until - time.monotonic()
        if remaining < part.seconds + GRACE:
            left.append(part)
            return
        for result in run(part, device, min(seconds, remaining - GRACE), nccl):
            record.add(result)
            print(f"{part.name}: {_verdict(result)}: {result['what']} {result['figure']}".rstrip(), flush=True)
        record.close(part)

    # Two cores suffice for a part of one or two processes.
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        list(pool.map(run_one, [part for part in parts if not part.alone]))
    for part in parts:
        if part.alone:
            run_one(part)
    return sorted(left, key=parts.index)


def machine_text(device: str) -> str:
    """What the figures belong to."""
    if device == "fake":
        return f"the fakes on {platform.node()}: the figures say nothing about a GPU"
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return f"{said.stdout.strip() or 'no GPU that nvidia-smi knows'}, on {platform.node()}"


def _verdict(result: dict) -> str:
    return "absent" if result.get("absent") else "right" if result["right"] else "WRONG"


def lines_of(results: list[dict]) -> list[str]:
    """The table."""
    rows = [["part", "check", "", "figure", "target"]]
    rows += [[each["part"], each["what"], _verdict(each), each["figure"], each["target"]] for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    options.add_argument("--seconds", type=float, default=120, help="that a part may take (120)")
    options.add_argument(
        "--minutes", type=float, default=600, help="that this call may take: a part that would not fit is left (600)"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="file for the results, written after each")
    options.add_argument(
        "--after",
        type=Path,
        metavar="FILE",
        help="results of an earlier call, whose whole parts are not run again",
    )
    options.add_argument(
        "--pack",
        type=Path,
        metavar="FOLDER",
        help="fill a folder with what another machine lacks, and run nothing",
    )
    options.add_argument("--python", default="3.12", help="version of Python there, for --pack (3.12)")
    options.add_argument(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="that --pack has filled: what the parts need and this machine lacks",
    )
    options.add_argument(
        "--nccl", type=Path, metavar="FILE", help="libnccl.so.2 of 2.30 or newer, for the parts with two ranks by NCCL"
    )
    options.add_argument("--list", action="store_true", help="name the parts with their seconds, and run none")
    options.add_argument("parts", nargs="*", metavar="PART", help="parts to run (all)")
    return options  # fmt: skip


def main() -> int:
    options = parser()
    arguments = options.parse_args()
    if arguments.list:
        print("\n".join(f"{part.name:16}{part.seconds:4} s  {part.about}" for part in PARTS))
        return 0
    if arguments.pack:
        print("\n".join(str(wheel) for wheel in baggage.pack(arguments.pack, arguments.python)))
        return 0
    names = [part.name for part in PARTS]
    unknown = set(arguments.parts) - set(names)
    if unknown:
        options.error(f"no such part: {', '.join(sorted(unknown))}; --list names them")
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as site:
        if arguments.wheels:
            baggage.unpack(arguments.wheels, Path(site))
            os.environ["PYTHONPATH"] += f"{os.pathsep}{site}"
        record = Record(arguments.json, arguments.after, machine_text(arguments.device))
        wanted = [
            part for part in PARTS
            if (part.name in arguments.parts or not arguments.parts) and part.name not in record.whole
        ]  # fmt: skip
        left = run_all(wanted, arguments.device, arguments.seconds, until, record, arguments.nccl)
    record.results.sort(key=lambda result: names.index(result["part"]))
    print("\n".join(["", record.about, "", *lines_of(record.results)]))
    if left:
        print(
            f"\nNo time was left for: {' '.join(part.name for part in left)}. Go on with --after and this call's --json."
        )
    return 0 if not left and all(each["right"] for each in record.results) else 1


if __name__ == "__main__":
    sys.exit(main())
