"""Who started this process: the variables that MPI's launchers, Slurm and torchrun leave in the environment.

A pure function of a mapping; ``context`` asks it before it decides between a world of one and MPI.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ringtrain.errors import UnsupportedError

# Above its own limits (64 KiB) Open MPI asks the receiver before it sends by TCP, so that each direction of a ring waits
# for the other and the wire idles. Messages up to this size are sent at once. Where TCP carries nothing, it has no effect.
OPENMPI_TCP_BYTES = 2 * 1024 * 1024
OPENMPI_TCP_SETTINGS = {
    f"OMPI_MCA_btl_tcp_{name}": str(OPENMPI_TCP_BYTES)
    for name in ("eager_limit", "rndv_eager_limit", "max_send_size")
}
# What makes srun introduce the ranks to each other in the way that their MPI library asks for.
SLURM_PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2"}


class Launcher(NamedTuple):
    """A launcher that announced a world.

    Attributes:
        name: for a person, such as ``Open MPI's mpirun``.
        variable: the one that gave it away.
        rank: this process's rank, or None if it was not announced.
        size: number of ranks, or None if it was not announced.
        extra: the extra of this package that brings the MPI it needs.
        binding: how to tell it to leave processes unbound.
    """

    name: str
    variable: str
    rank: int | None
    size: int | None
    extra: str
    binding: str

    @property
    def announces_several(self) -> bool:
        """Whether more than this rank was announced; an unknown size counts as several."""
        return self.size is None or self.size > 1


def find(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher whose variables stand in ``environ``, or None."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _announced(environ, "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "openmpi")
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        return _announced(environ, "MPICH's mpiexec (or srun)", "PMI_RANK", "PMI_SIZE", "mpich")
    if _slurm_step(environ):
        return _announced(environ, "Slurm's srun", "SLURM_PROCID", _slurm_size(environ), "openmpi", "--cpu-bind=none")
    if "PMIX_RANK" in environ:
        return _announced(environ, "a PMIx launcher", "PMIX_RANK", None, "openmpi")
    return None


def refuse_torchrun(environ: Mapping[str, str]) -> None:
    """Raises UnsupportedError if only torchrun announced several ranks: it brings no MPI to connect them."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdigit() and int(size) > 1 and "RANK" in environ and "MASTER_ADDR" in environ:
        raise UnsupportedError(
            f"init: torchrun (WORLD_SIZE={size}) started this process, and it brings no MPI that connects the ranks. "
            f"Start the script with: ringtrainrun -np {size} python script.py"
        )


def _announced(
    environ, name: str, rank: str, size: str | None, extra: str, binding: str = "--bind-to none"
) -> Launcher:
    return Launcher(name, size or rank, _number(environ, rank), _number(environ, size), extra, binding)


def _number(environ: Mapping[str, str], variable: str | None) -> int | None:
    text = environ.get(variable, "") if variable else ""
    return int(text) if text.isdigit() else None


def _slurm_size(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _slurm_step(environ: Mapping[str, str]) -> bool:
    """True within a step of srun; a batch script and an interactive shell carry step ids from the reserved range."""
    step = _number(environ, "SLURM_STEP_ID")
    if "SLURM_PROCID" not in environ or step is None or step >= 0xFFFFFFF0 or "SLURM_PTY_PORT" in environ:
        return False
    return (_number(environ, _slurm_size(environ)) or 1) > 1
