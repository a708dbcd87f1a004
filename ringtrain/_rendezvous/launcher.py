"""Who started this process: the variables that MPI's launchers, Slurm and torchrun leave in the environment.

Pure functions of a mapping; ``start`` asks them before it decides between a world of one, MPI and TCP.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ringtrain.errors import InvalidArgumentError, UnsupportedError

# Above its own limits (64 KiB) Open MPI asks the receiver before it sends by TCP, so that each direction of a ring
# waits for the other and the wire idles. Messages up to this size are sent at once. Where TCP carries nothing, it has
# no effect.
OPENMPI_TCP_BYTES = 2 * 1024 * 1024
OPENMPI_TCP_SETTINGS = {
    f"OMPI_MCA_btl_tcp_{name}": str(OPENMPI_TCP_BYTES) for name in ("eager_limit", "rndv_eager_limit", "max_send_size")
}
# UCX takes a signal over (SIGHUP) to switch its debug log on, also where `nohup` has a rank ignore it. An empty list: none.
UCX_SETTINGS = {"UCX_DEBUG_SIGNO": ""}
# What makes srun introduce the ranks to each other in the way that their MPI library asks for.
SLURM_PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2"}


# What `init` leaves in a rank's environment for the processes that the rank starts: "ALONE" is the user's word.
RANK_PROCESS = "RINGTRAIN_RANK_PROCESS"
ALONE = "RINGTRAIN_ALONE"
# What tells one job from another that a rank of it has started.
AUTHORITY = "RINGTRAIN_AUTHORITY"
_JOB_VARIABLES = (
    "RINGTRAIN_LAUNCHER",
    AUTHORITY,
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
)


class Launcher(NamedTuple):
    """A launcher that announced a world.

    Attributes:
        name: for a person, such as ``Open MPI's mpirun``.
        variable: the one that gave it away.
        rank: this process's rank, or None if it was not announced.
        size: number of ranks, or None if it was not announced.
        extra: the extra of this package that brings the MPI it needs.
        binding: how to tell it to leave processes unbound.
        step: Slurm's name of what it has started, if nothing introduces the ranks to an MPI; "" else.
    """

    name: str
    variable: str
    rank: int | None
    size: int | None
    extra: str
    binding: str
    step: str = ""

    @property
    def announces_several(self) -> bool:
        """Whether more than this rank was announced; an unknown size counts as several."""
        return self.size is None or self.size > 1


def find(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher whose variables stand in ``environ``, or None; also if the user wants a world of one nevertheless."""
    if is_alone(environ):
        return None
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _announced(environ, "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "openmpi")
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        return _announced(environ, "MPICH's mpiexec (or srun)", "PMI_RANK", "PMI_SIZE", "mpich")
    if _slurm_step(environ):
        announced = _announced(
            environ, "Slurm's srun", "SLURM_PROCID", _slurm_size(environ), "openmpi", "--cpu-bind=none"
        )
        return announced if "PMIX_RANK" in environ else announced._replace(step=_name_of_step(environ))
    if "PMIX_RANK" in environ:
        return _announced(environ, "a PMIx launcher", "PMIX_RANK", None, "openmpi")
    return None


class Introduced(NamedTuple):
    """A rank of a job without MPI, whose launcher introduces the ranks to each other.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        listens: where it is to listen for the others.
    """

    rank: int
    size: int
    listens: str


def find_introduced(environ: Mapping[str, str]) -> Introduced | None:
    """This process's place among several ranks that `ringtrainrun` started without an MPI, or None."""
    listens = environ.get("RINGTRAIN_LISTEN", "")
    if is_alone(environ) or not listens or "RINGTRAIN_LAUNCHER" not in environ:
        return None
    rank, size = (_told_number(environ, variable) for variable in ("RINGTRAIN_RANK", "RINGTRAIN_SIZE"))
    if rank is None or size is None:
        return None
    return Introduced(rank, size, listens) if size > 1 else None


class ElasticPlace(NamedTuple):
    """A process of an elastic job.

    Attributes:
        uid: its own, for its whole life; 32 hexadecimal digits.
        number: of its slot in the job, under which its output is shown.
        slot: on its host.
        host: its name in the launcher's list.
        listens: where it is to listen for the others.
    """

    uid: str
    number: int
    slot: int
    host: str
    listens: str


def find_elastic(environ: Mapping[str, str]) -> ElasticPlace | None:
    """This process's place in an elastic job of `ringtrainrun`, or None."""
    uid, _, host = environ.get("RINGTRAIN_ELASTIC", "").partition(" ")
    number, slot = _number(environ, "RINGTRAIN_RANK"), _number(environ, "RINGTRAIN_LOCAL_RANK")
    listens = environ.get("RINGTRAIN_ELASTIC_LISTEN") or environ.get("RINGTRAIN_LISTEN", "")
    if is_alone(environ) or not uid or "RINGTRAIN_LAUNCHER" not in environ or number is None or slot is None:
        return None
    return ElasticPlace(uid, number, slot, host, listens)


def find_authority(environ: Mapping[str, str]) -> str:
    """Where the authority of an elastic job listens, one of whose processes this is, though no launcher of ours has started it; ""
    without one."""
    return "" if is_alone(environ) or "RINGTRAIN_LAUNCHER" in environ else environ.get(AUTHORITY, "")


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to an elastic job, of `ringtrainrun` or under an authority."""
    return find_elastic(environ) is not None or bool(find_authority(environ))


def has_started_replicas(environ: Mapping[str, str]) -> bool:
    """Whether each of several ranks of another launcher is a torchrun, so that this process is part of a rank (``ShardedGuard``)."""
    found = find_introduced(environ) or find(environ)
    several = is_elastic(environ) or (found is not None and (found.size is None or found.size > 1))
    return several and "TORCHELASTIC_RUN_ID" in environ and environ.get("GROUP_WORLD_SIZE") == "1"


def has_started_this(environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank that an MPI's launcher or `ringtrainrun` has started, perhaps the only one."""
    return (
        find(environ) is not None
        or bool(find_authority(environ))
        or ("RINGTRAIN_LAUNCHER" in environ and "RINGTRAIN_RANK" in environ)
    )


def is_alone(environ: Mapping[str, str]) -> bool:
    """Whether the user wants a world of one, whatever a launcher has announced."""
    said = environ.get(ALONE, "")
    if said not in ("", "0", "1"):
        raise InvalidArgumentError(
            f"{ALONE} must be 1 or 0, but is {said!r}. Set it to 1 for a world of this process alone."
        )
    return said == "1"


def mark_of_rank(environ: Mapping[str, str], process: int, rank: int) -> str:
    """The value of RANK_PROCESS in a rank, which its children inherit."""
    return f"{process} {rank} {_job(environ)}"


def refuse_child(environ: Mapping[str, str], process: int) -> None:
    """Raises UnsupportedError in a child of a rank: the variables are its parent's, and MPI would take it for that rank."""
    parent, rank, job = (environ.get(RANK_PROCESS, "").split(" ", 2) + ["", ""])[:3]
    if parent not in ("", str(process)) and job == _job(environ) and not is_alone(environ):
        raise UnsupportedError(
            f"init: this process ({process}) must be a rank of its own, but is a child of rank {rank} (process {parent}), "
            f"whose variables it has inherited. Call init() in the rank alone; set {ALONE}=1 in the child's environment "
            "where it is to be a world of one."
        )


def refuse_part_of_rank(environ: Mapping[str, str]) -> None:
    """Raises UnsupportedError in all but the first process that torchrun has started in a slot of `ringtrainrun`, which is one rank."""
    if has_started_replicas(environ) and "RINGTRAIN_LAUNCHER" in environ and environ.get("LOCAL_RANK", "0") != "0":
        raise UnsupportedError(
            f"init: one process must be the rank of a slot of ringtrainrun, but this is process {environ['LOCAL_RANK']} of "
            f"{environ.get('LOCAL_WORLD_SIZE')} that torchrun has started there. Leave torchrun out, and give ringtrainrun as many "
            "slots; or train replicas of a sharded model with ringtrain.torch.distributed.ShardedGuard, which calls init() itself."
        )


def _job(environ: Mapping[str, str]) -> str:
    return ":".join(environ.get(name, "") for name in _JOB_VARIABLES)


def refuse_announced(environ: Mapping[str, str]) -> None:
    """Raises UnsupportedError if torchrun's variables alone announce several ranks, and no secret keeps others out where they meet."""
    if "RINGTRAIN_LAUNCHER" in environ and environ.get("RINGTRAIN_SIZE") == environ.get("WORLD_SIZE"):
        return  # ringtrainrun has set them, for scripts that were written for torchrun
    size = environ.get("WORLD_SIZE", "")
    if not is_alone(environ) and size.isdigit() and int(size) > 1 and "RANK" in environ and "MASTER_ADDR" in environ:
        raise UnsupportedError(
            f"init: the ranks of WORLD_SIZE={size} must meet where no other process can join, but MASTER_ADDR="
            f"{environ['MASTER_ADDR']} is open to all and there is no secret. Start the script with ringtrainrun -np {size} or "
            "torchrun, give all ranks the same RINGTRAIN_SECRET (openssl rand -hex 32), let MASTER_ADDR be 127.0.0.1 if they "
            "are processes of one host and user, or give init rank, size and a rendezvous."
        )


def _announced(
    environ: Mapping[str, str], name: str, rank: str, size: str | None, extra: str, binding: str = "--bind-to none"
) -> Launcher:
    return Launcher(name, size or rank, _number(environ, rank), _number(environ, size), extra, binding)


def _number(environ: Mapping[str, str], variable: str | None) -> int | None:
    text = environ.get(variable, "") if variable else ""
    return int(text) if text.isdigit() else None


def _told_number(environ: Mapping[str, str], variable: str) -> int | None:
    """What ringtrainrun has told; raises InvalidArgumentError if somebody has put something else there."""
    found = _number(environ, variable)
    if found is None and variable in environ:
        raise InvalidArgumentError(
            f"{variable} must be the number that ringtrainrun has given this process, but is {environ[variable]!r}. Leave the "
            "variable alone."
        )
    return found


def _slurm_size(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _name_of_step(environ: Mapping[str, str]) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")  # a job that is queued anew keeps its number
    return ".".join(filter(None, (environ.get(name, "") for name in names)))


def _slurm_step(environ: Mapping[str, str]) -> bool:
    """True within a step of srun; a batch script and an interactive shell carry step ids from the reserved range."""
    step = _number(environ, "SLURM_STEP_ID")
    if "SLURM_PROCID" not in environ or step is None or step >= 0xFFFFFFF0 or "SLURM_PTY_PORT" in environ:
        return False
    return (_number(environ, _slurm_size(environ)) or 1) > 1
