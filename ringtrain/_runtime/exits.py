"""How the process ends: peers learn the cause of an uncaught exception, contexts close, MPI is finalised.

MPI_Finalize waits for all ranks. A rank that ends well waits too: the others may still save a checkpoint, and the
launcher would end them if it left first. It waits before that, in its world, which is told if one of them dies or is
stopped. A rank that failed, or whose world did, has a few seconds for all that is left: some rank may never come to
MPI_Finalize, and a rank that leaves with a code other than 0 makes the launcher end the job.

``start.init`` installs this once. Order at the end: exception hook (traceback, abort), exit handler (shutdown,
MPI_Finalize).

Python does not tell an exit handler the exit code. It is 1 if the exception hook was called, and 0 if the main
program's outermost frame came to its ``return``. Else a SystemExit has left that frame: its code is noted in
``sys.exit`` and in ``exit`` on the way, and is not known if the program raised SystemExit by itself, or had taken
``sys.exit`` before ``init``. Then the launcher is told the moment in which this rank began to leave, and takes the code
from the process's end.
"""

import _sitebuiltins
import atexit
import contextlib
import ctypes
import functools
import logging
import math
import opcode
import os
import re
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ringtrain._rendezvous.announce import announce_failure, announce_leaving
from ringtrain.errors import ClosedError, ForkedError, PeerLostError, RingtrainError

SECONDS_AFTER_A_FAILURE = 5.0  # until a rank that failed, or learnt that its world did, has ended
SECONDS_TO_LEAVE = 2.0  # of these, for the others to end their part of the world
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
CODE_OF_AN_INTERRUPT = 128 + signal.SIGINT  # with which Python ends after Ctrl-C


class _Ending:
    """What is known about the end of this process: its owner and its exit code."""

    def __init__(self) -> None:
        self.process = 0  # id of the process that installed it; a fork's child ends on its own
        self.main_frame: FrameType | None = None  # outermost of the main thread
        self.code: int | None = 0  # None if it is not known; final once the exit handler runs
        self.noted: int | None = None  # code of the last sys.exit in the main thread, which may have been caught since
        self.thread_failed = False  # an exception ended a thread
        self.because: BaseException | None = None  # the error of a peer that the code came of
        self.on_host: RingtrainError | None = None  # of a function that a graph has called, the last one
        self.is_announced = False  # whether the launcher has been told
        self.errors_of_peers: tuple[type[BaseException], ...] = (PeerLostError, ClosedError)
        self.readers: list[tuple[type[BaseException], Callable[[Any], str]]] = []
        self.world_failed = False
        self.library: str | None = None  # path of the MPI in use
        self.finalizes = False  # whether we, and not the user's mpi4py, call MPI_Finalize
        self.hurries = threading.Event()  # its end has a deadline
        self.finalized = threading.Event()


_ending = _Ending()


def install(abort: Callable[[str, bool], None], leave: Callable[[float], str]) -> None:
    """Makes an uncaught exception call ``abort``, and every end of the process ``leave``.

    Args:
        abort: gets one line of text, and whether that says what became of a peer; then it is that peer's error, and not
            the one that came of it.
        leave: leaves the world; takes the seconds that it may wait for the other ranks, returns why the world has
            failed if nobody was told so.
    """
    if _ending.process == os.getpid():
        return
    _ending.process = os.getpid()
    _ending.main_frame = _outermost_frame()
    _watch_exceptions(abort)
    _watch_threads()
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


def take_words_from(kind: type[BaseException], words: Callable[[Any], str]) -> None:
    """Has errors of a framework's class say in one line what went wrong, where their text begins with something else.

    Args:
        kind: the class.
        words: gets an error of it, returns that line.
    """
    _ending.readers.append((kind, words))


def note_on_host(problem: RingtrainError) -> None:
    """A function that a graph or a program has called raises this; its framework makes an error of its own of the text."""
    _ending.on_host = problem


def raised_on_host(problem: BaseException) -> RingtrainError | None:
    """The error that a framework's error was made of, by its text: the framework puts its own stacks around that."""
    noted = _ending.on_host
    if noted is None or isinstance(problem, RingtrainError) or str(noted) not in str(problem):
        return None
    return type(noted)(str(noted))


def words_of(problem: BaseException) -> str:
    """What an error says that others shall hear of: its text, or what its framework's reader makes of it."""
    read = next((words for kind, words in _ending.readers if isinstance(problem, kind)), str)
    return read(problem)


def _watch_exceptions(abort: Callable[[str, bool], None]) -> None:
    earlier = sys.excepthook

    def hook(kind: type[BaseException], problem: BaseException, traceback: TracebackType | None) -> None:
        _ending.code = CODE_OF_AN_INTERRUPT if issubclass(kind, KeyboardInterrupt) else 1
        ours = _ending.process == os.getpid()
        of_a_peer = error_of_a_peer(problem)
        if ours:
            because = "" if of_a_peer is None else words_of(of_a_peer)
            announce_failure(_ending.code, follows=of_a_peer is not None, because=because)
            _ending.is_announced = True
        shortens = earlier is sys.__excepthook__ and not logging.getLogger("ringtrain").isEnabledFor(logging.DEBUG)
        on_host = raised_on_host(problem)
        if shortens and on_host is not None:
            kind, problem = type(on_host), on_host
        if shortens and (of_a_peer is problem or on_host is problem):
            problem.__traceback__ = of_the_program(traceback)  # the cause is on the other rank, and nothing of it here
        earlier(kind, problem, traceback)  # first of all: once the peers know, the launcher may end this rank
        if ours:
            flush()
            in_its_words = isinstance(of_a_peer, RingtrainError)
            text = str(of_a_peer) if in_its_words else f"{kind.__name__}: {words_of(problem)}".rstrip(": ")
            abort(text.strip().split("\n")[0], in_its_words)

    sys.excepthook = hook


def of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package, and down to the last one that is of no library: what follows waited.

    Where all frames are of libraries, as those of a trainer that is installed, without those of this package alone; all of it
    if it has no others.
    """
    entries = []
    entry = traceback
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            entries.append(entry)
        entry = entry.tb_next
    while any(map(_is_of_the_program, entries)) and not _is_of_the_program(entries[-1]):
        entries.pop()
    made = None
    for each in reversed(entries):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made or traceback


def place_of_caller() -> str:
    """Where this package was called, as ``train.py:12``; of the innermost call that it has not made itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_of_the_program(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return not (
        file.startswith(("<frozen ", sysconfig.get_path("stdlib"))) or re.search("/(site|dist)-packages/", file)
    )


def error_of_a_peer(problem: BaseException | None) -> BaseException | None:
    """The error that says what another rank did, if this exception came of one."""
    while problem is not None and not _says_what_a_peer_did(problem):
        problem = problem.__cause__ or problem.__context__
    return problem


def _says_what_a_peer_did(problem: BaseException) -> bool:
    return isinstance(problem, _ending.errors_of_peers) and not isinstance(problem, ForkedError)


def _watch_threads() -> None:
    """An exception that ends a thread ends no process, but is the cause if the others then time out waiting for this rank."""
    earlier = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit and error_of_a_peer(arguments.exc_value) is None:
            _ending.thread_failed = True
        earlier(arguments)

    threading.excepthook = hook


def _watch_exit_codes() -> None:
    leave, quit = sys.exit, _sitebuiltins.Quitter.__call__

    def note(status: object) -> None:
        if threading.current_thread() is threading.main_thread():
            _ending.noted = exit_code(status)
            _ending.because = error_of_a_peer(sys.exc_info()[1])

    @functools.wraps(leave)
    def noting_exit(status: Any = None, /) -> NoReturn:
        note(status)
        leave(status)

    @functools.wraps(quit)
    def noting_quit(self: Any, code: Any = None) -> None:
        note(code)
        quit(self, code)

    sys.exit = noting_exit
    setattr(_sitebuiltins.Quitter, "__call__", noting_quit)  # noqa: B010 - exit() and quit()


def exit_code(status: object) -> int:
    """The code with which a process ends after ``sys.exit(status)``."""
    return status & 0xFF if isinstance(status, int) else int(status is not None)


def _outermost_frame() -> FrameType | None:
    """That of the main thread's program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _code_of_the_end() -> int | None:
    """The exit code, now that the program has ended; None if it is not known."""
    if _ending.code != 0:  # the exception hook has seen the end
        return _ending.code
    return 0 if _has_returned(_ending.main_frame) else _ending.noted


def _has_returned(frame: FrameType | None) -> bool:
    """Whether a frame that is no longer executed came to its end, and no exception has left it."""
    return frame is None or opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _at_exit(leave: Callable[[float], str]) -> None:
    if _ending.process != os.getpid():
        return
    flush()
    _ending.code = _code_of_the_end()
    if _ending.code is None or (_ending.code == 0 and _ending.world_failed):
        announce_leaving()  # well, or knowing that its world has failed: no cause of what the others see
    elif _ending.code != 0 and not _ending.is_announced:
        because = "" if _ending.because is None else words_of(_ending.because)
        announce_failure(_ending.code, follows=_ending.because is not None, because=because)
    if _has_failed():
        _ending.hurries.set()
        leave(SECONDS_TO_LEAVE)
    else:
        _leave_well(leave)
    # A code that is not known may be that of a failure, which ends the job, if only this process ends.
    stays_away = _ending.code is None and _ending.world_failed
    if _ending.library is not None and not stays_away and (_ending.finalizes or _has_failed()):
        _finalize(_ending.library)
    _ending.finalized.set()


def _leave_well(leave: Callable[[float], str]) -> None:
    """Waits for the others; if that ends in an error, says so, and whether it came of this rank after all."""
    if cause := leave(math.inf):
        print(f"ringtrain: {cause}", file=sys.stderr, flush=True)
        if _ending.thread_failed:
            announce_failure()
        elif _ending.code is not None:
            announce_failure(follows=True, because=cause)
    if _has_failed():
        _ending.hurries.set()


def _has_failed() -> bool:
    return bool(_ending.code) or _ending.world_failed


def flush() -> None:
    """Writes out what the program has printed."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # a full disk; a file that the program has closed
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
