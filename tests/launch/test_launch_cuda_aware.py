"""Whether an MPI takes GPU memory: PyPI's two do not and say so; one that says so wrongly is found out, and one that is right, too."""

import subprocess
import types
from collections.abc import Callable

import fakes
import pytest
from environments import EACH_MPI, python_with

from ringtrain.launch import cuda_aware

# A GPU's memory cannot be read by the host, and neither can the stand-in's.
CLAIMS_FALSELY = """
from ringtrain.launch import cuda_aware
cuda_aware.claim = lambda MPI: "MPIX_Query_cuda_support"
cuda_aware.main()
"""
# The host's memory under the interface of a GPU's: this an MPI does take, and what is read elsewhere was not sent
# there.
TAKES_IT = """
import numpy as np
from mpi4py import MPI
from ringtrain.launch.cuda_aware import DeviceInteger, comes_back

numbers = np.zeros(2, np.int32)
here, there = (DeviceInteger(numbers[place:].ctypes.data) for place in (0, 1))
assert comes_back(MPI, here) and numbers[0] != 0

class Forgetful:
    @property
    def __cuda_array_interface__(self):
        return (there if numbers[0] else here).__cuda_array_interface__

numbers[0] = 0
assert not comes_back(MPI, Forgetful())
"""


def ended(mpi: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs Python in the environment with this MPI, on the stand-in for a GPU."""
    return subprocess.run(
        [python_with(mpi), *arguments],
        env=fakes.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@EACH_MPI
def test_check_build_says_what_mpi_says(mpi: str) -> None:
    done = ended(mpi, "-m", "ringtrain.launch", "--check-build")
    assert "  CUDA-aware MPI: no, by its own account" in done.stdout.splitlines(), done


@EACH_MPI
def test_a_false_claim_is_found_out(mpi: str) -> None:
    done = ended(mpi, "-c", CLAIMS_FALSELY)
    assert done.returncode != 0
    assert cuda_aware.in_words(done.stdout.splitlines()).startswith("no, though MPIX_Query_cuda_support says so"), done


@EACH_MPI
def test_a_message_proves_a_claim(mpi: str) -> None:
    done = ended(mpi, "-c", TAKES_IT)
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    "said, words",
    [
        ([], "not known: MPI does not start here"),
        (["MPIX_GPU_query_support", "came back"], "yes, by MPIX_GPU_query_support and a message from a GPU's memory"),
        (["mpi_memory_alloc_kinds", "was changed"], "no, by mpi_memory_alloc_kinds and a message from a GPU's memory"),
    ],
)
def test_words(said: list[str], words: str) -> None:
    assert cuda_aware.in_words(said) == words


def test_a_rank_does_not_ask() -> None:
    assert cuda_aware.answer({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}) == "not asked within a job"


def test_each_way_of_asking() -> None:
    """A library that answers in one of three ways, or in none."""

    class Info(dict):
        Get = dict.get

    def mpi(kinds: str | None = None) -> types.SimpleNamespace:
        world = types.SimpleNamespace(Get_info=lambda: Info(mpi_memory_alloc_kinds=kinds))
        return types.SimpleNamespace(COMM_WORLD=world, __file__=None)

    def found(kinds: str | None = None, **functions: Callable) -> str:
        return cuda_aware.claim_of(types.SimpleNamespace(**functions), mpi(kinds))

    def query(kind: int, supported) -> int:
        supported._obj.value = int(kind == 0)
        return 0

    assert found() == found("system,mpi") == found(MPIX_Query_cuda_support=lambda: 0) == ""
    assert found(MPIX_Query_cuda_support=lambda: 1) == "MPIX_Query_cuda_support"
    assert found(MPIX_GPU_query_support=query) == "MPIX_GPU_query_support"
    assert found("system,cuda:device") == "mpi_memory_alloc_kinds"
