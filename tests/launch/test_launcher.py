"""The variables of each launcher, read from plain mappings."""

import pytest

from ringtrain._rendezvous import launcher
from ringtrain.errors import UnsupportedError

STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
STARTED = {
    "Open MPI's mpirun": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 3, 4),
    "MPICH's mpiexec": ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 1, 2),
    "srun": (STEP, 1, 4),
    "srun with the step's own size": ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, 1, 2),
    "PMIx": ({"PMIX_RANK": "5"}, 5, None),
}
NOT_STARTED = {
    "nothing": {},
    "a batch script": {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)},
    "an allocation": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "an interactive shell": {**STEP, "SLURM_PTY_PORT": "40000"},
    "a step of one task": {**STEP, "SLURM_NTASKS": "1"},
}


@pytest.mark.parametrize("case", STARTED)
def test_started(case):
    variables, rank, size = STARTED[case]
    found = launcher.find(variables)
    assert (found.rank, found.size) == (rank, size) and found.announces_several
    assert found.variable in variables and found.name.split()[0] in ("Open", "MPICH's", "Slurm's", "a")


@pytest.mark.parametrize("case", NOT_STARTED)
def test_not_started(case):
    assert launcher.find(NOT_STARTED[case]) is None


def test_one_rank_is_not_several():
    assert not launcher.find({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}).announces_several


def test_torchrun():
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "host"}
    with pytest.raises(UnsupportedError, match="ringtrainrun -np 8"):
        launcher.refuse_announced(torchrun)
    for harmless in ({}, {**torchrun, "WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}):
        launcher.refuse_announced(harmless)
    under_ringtrainrun = {**torchrun, "RINGTRAIN_LAUNCHER": "ringtrainrun-1", "RINGTRAIN_SIZE": "8"}
    launcher.refuse_announced(under_ringtrainrun)
    with pytest.raises(UnsupportedError):  # torchrun, started by a rank
        launcher.refuse_announced({**under_ringtrainrun, "WORLD_SIZE": "2"})
