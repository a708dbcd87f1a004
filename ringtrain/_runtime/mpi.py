"""The world under a launcher: imports mpi4py, checks that its MPI fits the launcher, and makes the communicator.

Imported by ``context`` only once a launcher or a communicator asks for it, so a world of one never loads MPI.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringtrain._binding import options
from ringtrain._binding._native import as_text, lib
from ringtrain._binding.log import logger
from ringtrain._rendezvous.launcher import OPENMPI_TCP_SETTINGS, SLURM_PLUGINS, UCX_SETTINGS, Launcher
from ringtrain._runtime import exits
from ringtrain.errors import InvalidArgumentError, UnsupportedError

_attached: list[int] = []  # the attribute's key, once it is there


def is_communicator(comm: object) -> bool:
    """Whether ``comm`` is one of mpi4py's; imports nothing to find out."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(comm, module.Comm)


def load(launcher: Launcher | None, seconds: float) -> Any:
    """``mpi4py.MPI``, initialised with thread level multiple; finalised at exit if it was not imported before.

    MPI waits for all ranks while it starts. It cannot be told to give up, so where that takes longer than ``seconds``
    the process ends, with the reason on stderr.

    Raises:
        UnsupportedError: mpi4py or MPI is missing, the level is lower, or it is another MPI than the launcher's.
    """
    users = sys.modules.get("mpi4py.MPI")
    if users is None:
        options.set_defaults(
            UCX_SETTINGS
        )  # which it reads while it is loaded; of a variable that comes later it complains
    MPI = users or _import(launcher)
    exits.finalize_at_exit(str(MPI.__file__), ours=users is None)
    if not MPI.Is_initialized():
        if launcher is not None:
            _refuse_unfit(MPI, launcher)
        options.set_defaults(OPENMPI_TCP_SETTINGS)  # which it reads while it is initialised
        with _deadline(launcher, seconds):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UnsupportedError(
            "init: MPI's thread level must be MPI_THREAD_MULTIPLE, but MPI was initialised with less. "
            "Let ringtrain initialise MPI, or ask mpi4py for thread_level='multiple'."
        )
    if launcher is not None:
        _refuse_foreign(MPI, launcher)
    return MPI


def before_finalize(MPI: Any, leave: Callable[[], None]) -> None:
    """Has MPI call ``leave`` when anybody calls MPI_Finalize, before that waits for the other ranks; the first time counts.

    MPI deletes the attributes of MPI_COMM_SELF first of all then, while all of MPI still works.
    """
    if _attached:
        return

    def on_delete(comm: Any, key: int, value: object) -> None:
        try:
            leave()
        except Exception:  # MPI would end the job at an exception of a callback
            logger.exception("MPI_Finalize: the world must be shut down before, but that failed")

    _attached.append(MPI.Comm.Create_keyval(delete_fn=on_delete))
    MPI.COMM_SELF.Set_attr(_attached[0], leave)


def version_text(MPI: Any) -> str:
    """Name and version of the MPI library, in a few words. MPI need not be initialised."""
    return " ".join(MPI.Get_library_version().strip("\0").replace(",", " ").split()[:3])


def communicator(MPI: Any, comm: Any) -> Any:
    """The communicator for ``init``'s argument: all ranks, a list of them, or mpi4py's own.

    Raises:
        InvalidArgumentError: another type, ranks that do not exist, or a list without this rank.
    """
    if isinstance(comm, MPI.Comm):
        return comm
    if comm is None or len(comm) == 0:
        return MPI.COMM_WORLD
    ranks = ranks_with(MPI.COMM_WORLD.Get_rank(), comm, MPI.COMM_WORLD.Get_size())
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks))


def ranks_with(rank: int, comm: Sequence[int], size: int) -> list[int]:
    """The ranks of ``init(comm=[...])`` in ascending order, this one among them, checked against the world's size."""
    ranks = sorted_ranks(comm, size)
    if rank not in ranks:
        raise InvalidArgumentError(
            f"init: comm must contain this rank, but rank {rank} is not in {ranks}. Call init on the listed ranks only."
        )
    return ranks


def sorted_ranks(comm: Sequence[int], size: int) -> list[int]:
    """The ranks of ``init(comm=[...])`` in ascending order, checked against the world's size."""
    try:
        ranks = sorted({int(rank) for rank in comm})
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"init: comm must be None, a list of ranks or an mpi4py communicator, but is {comm!r}."
        ) from None
    if ranks[0] < 0 or ranks[-1] >= size:
        raise InvalidArgumentError(f"init: comm must list ranks in [0, {size}), but is {ranks}.")
    return ranks


def warn_if_bound(launcher: Launcher | None, local_rank: int) -> None:
    """Says once a host that the launcher left this rank a single core of several: its threads would take turns there."""
    if local_rank == 0 and len(os.sched_getaffinity(0)) == 1 and (os.cpu_count() or 1) > 1:
        flag = launcher.binding if launcher is not None else "--bind-to none"
        logger.warning("the launcher bound each rank to one core of %d; give it the flag %s", os.cpu_count(), flag)


def warn_if_wire_waits(MPI: Any, hosts: int, rank: int) -> None:
    """Says once that the user's code initialised Open MPI with limits that leave a TCP wire half idle."""
    unset = [name for name in OPENMPI_TCP_SETTINGS if name not in options.environment()]
    if rank == 0 and hosts > 1 and unset and "Open MPI" in MPI.Get_library_version():
        settings = " ".join(f"{name}={OPENMPI_TCP_SETTINGS[name]}" for name in unset)
        logger.warning("MPI was initialised before ringtrain: if TCP connects the hosts, it needs %s in the environment "
                       "before that. Start with ringtrainrun, or call ringtrain.init() first", settings)  # fmt: skip


@contextlib.contextmanager
def _deadline(launcher: Launcher | None, seconds: float) -> Iterator[None]:
    """By a native thread: mpi4py keeps the GIL in MPI_Init."""
    size = "the" if launcher is None or launcher.size is None else launcher.size
    rank = "this one" if launcher is None or launcher.rank is None else f"rank {launcher.rank}"
    text = (
        f"init of MPI: expected all {size} ranks to call init() within {seconds:g} s but not all did, seen on {rank}. "
        "Call init() on every rank before what takes long, or raise start_timeout_seconds.\n"
    )
    exits.flush()  # nothing else does if the process ends here
    alarm = lib.rt_alarm_set(seconds, as_text(text))
    try:
        yield
    finally:
        lib.rt_alarm_cancel(alarm)


def _import(launcher: Launcher | None) -> Any:
    try:
        import mpi4py

        # We initialise and finalise ourselves: finalising needs a deadline (exits.py).
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as problem:
        started = (
            f"{launcher.name} started this process ({launcher.variable} is set)"
            if launcher
            else "a communicator was given"
        )
        extra = launcher.extra if launcher else "openmpi"
        raise UnsupportedError(
            f"init: {started}, but no MPI library could be loaded: {problem}. Run: pip install ringtrain[{extra}]"
        ) from problem
    return MPI


def _refuse_unfit(MPI: Any, launcher: Launcher) -> None:
    """Before MPICH is initialised by PMIx alone, which it does not speak unless it was built so: it would end the process."""
    variables, library = options.environment(), MPI.Get_library_version().lower()
    by_pmix_alone = "PMIX_NAMESPACE" in variables and "PMI_RANK" not in variables
    if by_pmix_alone and library.startswith("mpich") and "pmix" not in library:  # it lists what it was configured with
        raise _foreign(MPI, launcher, sees="none of them")


def _refuse_foreign(MPI: Any, launcher: Launcher) -> None:
    """Never N silent worlds of one: the launcher's MPI must be the one that mpi4py loads."""
    size = MPI.COMM_WORLD.Get_size()
    if (launcher.size or 1) > size or (launcher.rank or 0) >= size:
        raise _foreign(MPI, launcher, sees=size)


def _foreign(MPI: Any, launcher: Launcher, sees: int | str) -> UnsupportedError:
    library = MPI.Get_library_version().strip("\0").splitlines()[0].strip()
    announced = f"{launcher.size} ranks" if launcher.size else f"rank {launcher.rank}"
    plugin = next((plugin for name, plugin in SLURM_PLUGINS.items() if name in library), "pmix")
    other = (
        f"with srun --mpi={plugin}"
        if "SLURM_STEP_ID" in options.environment()
        else "with the mpirun that belongs to that library"
    )
    return UnsupportedError(
        f"init: {launcher.name} announced {announced} ({launcher.variable}), but the MPI that mpi4py loaded ({library}) "
        f"sees {sees}. Start the script with ringtrainrun, or {other}."
    )
