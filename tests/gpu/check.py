"""bin/gpu-check: runs the parts of the plan, each in processes of its own and under a deadline, and prints their results as a table.

A GPU that hangs takes its process with it, not the check. The exit code is 0 if everything is right.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from gpu import machine

ROOT = Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """A part of the plan: its name, what it runs (see ``part.PARTS``), in how many processes, and what it is about."""

    name: str
    body: str
    processes: int
    about: str


PARTS = [
    Part("load", "load", 1, "the driver and NCCL are found"),
    Part("kernels", "kernels", 1, "pack and unpack, bit for bit"),
    Part("floors", "floors", 1, "pack and unpack against a copy of the same bytes"),
    Part("order", "order", 1, "streams, lifetime and refusals, a world of one"),
    Part("torch", "torch", 1, "PyTorch's tensors, training, mixed precision, DDP's time; a world of one"),
    Part("staged", "staged", 2, "two ranks on one GPU through pinned host memory, as processes"),
    Part("staged-threads", "staged", 1, "the same, as threads of one process"),
    Part(
        "torch-ranks",
        "torch_ranks",
        2,
        "PyTorch on two ranks of one GPU: gradients as views of buckets, and gloo's time",
    ),
    Part("nccl", "nccl", 2, "two ranks on one GPU by NCCL (2.30 or newer), as processes"),
    Part("nccl-threads", "nccl", 1, "the same, as threads of one process"),
]
# What NCCL needs to take two ranks on one GPU, and to fail soon where it cannot.
TWO_ON_ONE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo",
              "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_DEBUG": "WARN"}  # fmt: skip


def run(part: Part, device: str, seconds: float) -> list[dict]:
    """The results of a part; one that says what happened if it failed or came to no end."""
    command = [sys.executable, "-m", "gpu.part", part.body]
    if part.processes > 1:
        command = [sys.executable, "-m", "ringtrain.launch", "-np", str(part.processes), *command]
    environment = machine.environment(device) | (TWO_ON_ONE if part.body == "nccl" else {})
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, problem = started.communicate(timeout=seconds)
        ended = f"returned {started.returncode}"
    except subprocess.TimeoutExpired:
        started.terminate()
        out, problem = started.communicate()
        ended = f"came to no end in {seconds:.0f} s"
        started.returncode = started.returncode or 1
    found = [json.loads(line[line.index("{") :]) for line in out.splitlines() if '{"what"' in line]
    if started.returncode:
        lines = [line for line in problem.splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line] or lines or [""]
        found.append({"what": f"the part {ended}", "right": False, "figure": errors[-1], "target": ""})
    elif not found:
        found.append({"what": "the part said nothing", "right": False, "figure": "", "target": ""})
    return [{"part": part.name, **each} for each in found]


def machine_text(device: str) -> str:
    """What the figures belong to."""
    if device == "fake":
        return f"the fakes on {platform.node()}: the figures say nothing about a GPU"
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return f"{said.stdout.strip() or 'no GPU that nvidia-smi knows'}, on {platform.node()}"


def lines_of(results: list[dict]) -> list[str]:
    """The table."""
    rows = [["part", "check", "", "figure", "target"]]
    rows += [
        [each["part"], each["what"], "right" if each["right"] else "WRONG", each["figure"], each["target"]]
        for each in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--seconds", type=float, default=300, help="that a part may take (300)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--list", action="store_true", help="name the parts, and run none")
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run (all)")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{part.name:16}{part.about}" for part in PARTS))
        return 0
    unknown = set(arguments.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; --list names them")
    results = []
    for part in PARTS:
        if not arguments.parts or part.name in arguments.parts:
            results += run(part, arguments.device, arguments.seconds)
    about = machine_text(arguments.device)
    print("\n".join([about, "", *lines_of(results)]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0 if all(each["right"] for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
