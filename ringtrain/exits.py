"""How the process ends: peers learn the cause of an uncaught exception, contexts close, MPI is finalised.

MPI_Finalize waits for all ranks. A rank that ends well waits too: the others may still save a checkpoint, and the
launcher would end them if it left first. It waits before that, in its world, which is told if one of them dies or is
stopped. A rank that failed, or whose world did, has a few seconds for all that is left: some rank may never come to
MPI_Finalize, and a rank that leaves with a code other than 0 makes the launcher end the job.

``context.init`` installs this once. Order at the end: exception hook (traceback, abort), exit handler (shutdown, MPI_Finalize).
"""

import atexit
import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable

from ringtrain.announce import announce_failure
from ringtrain.errors import ClosedError, PeerLostError, RingtrainError

SECONDS_AFTER_A_FAILURE = 5.0  # until a rank that failed, or learnt that its world did, has ended
SECONDS_TO_LEAVE = 2.0  # of these, for the others to end their part of the world
CODE_OF_AN_INTERRUPT = 128 + signal.SIGINT  # with which Python ends after Ctrl-C


class _Ending:
    """What is known about the end of this process: its owner and its exit code."""

    def __init__(self):
        self.process = 0  # id of the process that installed it; a fork's child ends on its own
        self.code = 0
        self.follows = False  # whether the code came of what a peer did
        self.is_announced = False  # whether the launcher has been told
        self.errors_of_peers: tuple[type[BaseException], ...] = (PeerLostError, ClosedError)
        self.world_failed = False
        self.library: str | None = None  # path of the MPI in use
        self.finalizes = False  # whether we, and not the user's mpi4py, call MPI_Finalize
        self.hurries = threading.Event()  # its end has a deadline
        self.finalized = threading.Event()


_ending = _Ending()


def install(abort: Callable[[str, bool], None], leave: Callable[[float], str]) -> None:
    """Makes an uncaught exception call ``abort``, and every end of the process ``leave``.

    Args:
        abort: gets one line of text, and whether that says what became of a peer; then it is that peer's error, and not the
            one that came of it.
        leave: leaves the world; takes the seconds that it may wait for the other ranks, returns why the world has failed
            if nobody was told so.
    """
    if _ending.process == os.getpid():
        return
    _ending.process = os.getpid()
    _watch_exceptions(abort)
    _watch_exit_codes()
    atexit.register(_at_exit, leave)


def finalize_at_exit(library: str, ours: bool) -> None:
    """Sees to MPI_Finalize of the library at this path: always if MPI is ours, else only after a failure."""
    if _ending.library is not None:
        return
    _ending.library, _ending.finalizes = library, ours
    # Started now: a thread cannot be started any more while the interpreter ends. It sleeps until then.
    threading.Thread(target=_end_by_deadline, name="ringtrain-exit", daemon=True).start()


def note_failed_world() -> None:
    """The world has failed, even if the user's code has dealt with it: not all ranks will come to MPI_Finalize."""
    _ending.world_failed = True


def forget_failed_world() -> None:
    """All ranks have joined another world since: each will come to MPI_Finalize, and may take its time."""
    _ending.world_failed = False


def count_as_errors_of_peers(*kinds: type[BaseException]) -> None:
    """Adds classes in which a framework raises what became of another rank."""
    _ending.errors_of_peers += tuple(kind for kind in kinds if kind not in _ending.errors_of_peers)


def _watch_exceptions(abort: Callable[[str, bool], None]) -> None:
    earlier = sys.excepthook

    def hook(kind, problem, traceback):
        _ending.code = CODE_OF_AN_INTERRUPT if issubclass(kind, KeyboardInterrupt) else 1
        ours = _ending.process == os.getpid()
        of_a_peer = error_of_a_peer(problem)
        if ours:
            announce_failure(_ending.code, follows=of_a_peer is not None)
            _ending.is_announced = True
        earlier(kind, problem, traceback)  # first of all: once the peers know, the launcher may end this rank
        if ours:
            flush()
            in_its_words = isinstance(of_a_peer, RingtrainError)
            text = str(of_a_peer) if in_its_words else f"{kind.__name__}: {problem}".rstrip(": ")
            abort(text.strip().split("\n")[0], in_its_words)

    sys.excepthook = hook


def error_of_a_peer(problem: BaseException | None) -> BaseException | None:
    """The error that says what another rank did, if this exception came of one."""
    while problem is not None and not isinstance(problem, _ending.errors_of_peers):
        problem = problem.__cause__ or problem.__context__
    return problem


def _watch_exit_codes() -> None:
    """Python does not tell an exit handler the code, so ``sys.exit`` notes it on the way."""
    leave = sys.exit

    def exit(status=None, /):
        _ending.code = status if isinstance(status, int) else int(status is not None)
        _ending.follows = error_of_a_peer(sys.exc_info()[1]) is not None
        leave(status)

    sys.exit = exit


def _at_exit(leave: Callable[[float], str]) -> None:
    if _ending.process != os.getpid():
        return
    flush()
    if _ending.code != 0 and not _ending.is_announced:
        announce_failure(_ending.code, _ending.follows)
    if _has_failed():
        _ending.hurries.set()
        leave(SECONDS_TO_LEAVE)
    else:
        if cause := leave(math.inf):
            print(f"ringtrain: {cause}", file=sys.stderr, flush=True)
            announce_failure(follows=True)
        if _has_failed():
            _ending.hurries.set()
    if _ending.library is not None and (_ending.finalizes or _has_failed()):
        _finalize(_ending.library)
    _ending.finalized.set()


def _has_failed() -> bool:
    return _ending.code != 0 or _ending.world_failed


def flush() -> None:
    """Writes out what the program has printed."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()


def _finalize(library: str) -> None:
    # By ctypes because it releases the GIL, which the thread with the deadline needs.
    mpi = ctypes.CDLL(library)
    finalized = ctypes.c_int(0)
    mpi.MPI_Finalized(ctypes.byref(finalized))
    if not finalized.value:
        mpi.MPI_Finalize()


def _end_by_deadline() -> None:
    _ending.hurries.wait()
    if not _ending.finalized.wait(SECONDS_AFTER_A_FAILURE):
        os._exit(_ending.code or 1)
