"""Whether the MPI library takes tensors in a GPU's memory: what it says of itself, and whether a message proves it.

`check-build` asks, in a process of its own, since an MPI that is wrong about itself ends the process; `doctor` only
looks at what the library says. Nothing hangs on the answer: tensors on GPUs travel by NCCL or through pinned host
memory with any MPI.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain._rendezvous import launcher
from ringtrain.launch.interpreter import module

_SECONDS = 60.0  # to start a process and MPI in it
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA
_SENT, _BYTES = 1234567, 4


def answer(environment: Mapping[str, str]) -> str:
    """What a process of its own finds out about the MPI of this environment, in words.

    Args:
        environment: of that process. If it is a rank's, nothing is asked: MPI would take the process for that rank.
    """
    if launcher.find(environment) is not None:
        return "not asked within a job"
    command = module("ringtrain.launch.cuda_aware")
    try:
        done = subprocess.run(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, timeout=_SECONDS)  # fmt: skip
        said = done.stdout
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode()
    return in_words(said.splitlines())


def in_words(said: Sequence[str]) -> str:
    """The answer, from the lines that ``main`` had printed when its process ended, well or not."""
    if not said:
        return "not known: MPI does not start here"
    claimed, *proof = said
    if not claimed:
        return "no, by its own account"
    if not proof:
        return f"no, though {claimed} says so: the process ended over a message from a GPU's memory"
    return f"{'yes' if proof == ['came back'] else 'no'}, by {claimed} and a message from a GPU's memory"


def claim(MPI: Any) -> str:
    """Which of its answers says that this MPI, mpi4py's and initialised, takes CUDA memory; "" if none does."""
    return claim_of(ctypes.CDLL(MPI.__file__), MPI)


def claim_of(library: Any, MPI: Any) -> str:
    """``claim``, by the functions of a library and the information of MPI's world."""
    if _call(library, "MPIX_Query_cuda_support"):
        return "MPIX_Query_cuda_support"
    supported = ctypes.c_int(0)
    _call(library, "MPIX_GPU_query_support", _CUDA, ctypes.byref(supported))
    if supported.value:
        return "MPIX_GPU_query_support"
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""  # since MPI 4.1
    return "mpi_memory_alloc_kinds" if any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")) else ""


def comes_back(MPI: Any, memory: object) -> bool:
    """Whether a number that is sent into memory, and from there back, is what it was.

    Args:
        MPI: mpi4py's module.
        memory: one int32 that speaks the CUDA array interface.
    """
    import numpy as np  # in the process of its own alone: the launcher starts sooner without it

    sent, received = np.array([_SENT], np.int32), np.zeros(1, np.int32)
    MPI.COMM_SELF.Sendrecv(sent, 0, 0, memory, 0, 0)
    MPI.COMM_SELF.Sendrecv(memory, 0, 0, received, 0, 0)
    return bool(received[0] == _SENT)


class DeviceInteger:
    """One int32 at an address, as the CUDA array interface describes it."""

    def __init__(self, address: int):
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i4", "data": (address, False), "version": 3}


def _call(library: Any, name: str, *arguments: object) -> int:
    """What a function of the library returns; 0 if it has none of this name."""
    function = getattr(library, name, None)
    return 0 if function is None else int(function(*arguments))


def main() -> None:
    """Prints the claim, and in a second line what became of a message, if the process has lived on."""
    from mpi4py import MPI

    from ringtrain._binding import device_memory
    from ringtrain.testing import World

    claimed = claim(MPI)
    print(claimed, flush=True)
    if claimed:
        with World(1) as world:
            memory = device_memory.allocate_on_device(world.contexts[0].native, 0, _BYTES)
            print("came back" if comes_back(MPI, DeviceInteger(memory.address)) else "was changed")


if __name__ == "__main__":
    main()
