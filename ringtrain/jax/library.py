"""Our library for XLA: which releases of JAX it serves, its handler, its two links to the core, and ``init``.

``native/jax`` is the source. XLA calls its handler for every operation of a compiled program (``TARGET``). The library
gets the core's functions as a table (``rt_functions`` in ``ringtrain.h``), and contexts by slot (``ringtrain._training.adapter.slots``).
A second handler (``REST``) counts down in which steps a program need not call Python (``watching``).
"""

import ctypes
import re
from pathlib import Path
from typing import Any

import jax

import ringtrain
from ringtrain._runtime import exits
from ringtrain._training.adapter.slots import Slots, core_functions
from ringtrain.errors import UnsupportedError

TARGET, REST = "ringtrain_collective", "ringtrain_rest"
OLDEST_RELEASE = "0.7.2"  # of those that were tried
_BEFORE_THE_WORDS = re.compile(r"^[A-Z_]+: (?:Error dispatching computation: )*")

_PATH = Path(__file__).with_name("libringtrain_jax.so")


def check_release(release: str) -> None:
    """Raises UnsupportedError for a release of JAX that is older than those that this was tried with."""
    if _numbers(release) < _numbers(OLDEST_RELEASE):
        raise UnsupportedError(
            f"JAX '{release}': expected {OLDEST_RELEASE} or newer, with which this was tried. Run: pip install --upgrade jax"
        )


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:3] if part.isdigit()]


class _MeetsErrorsOfPeers(type):
    def __instancecheck__(cls, problem: object) -> bool:
        kinds = (
            jax.errors.JaxRuntimeError,
            ValueError,
        )  # the second from a program's second call on, where it runs inline
        return isinstance(problem, kinds) and (str(problem).startswith("ABORTED: ") or _has_passed_on_an_abort(problem))


class ErrorOfAPeer(Exception, metaclass=_MeetsErrorsOfPeers):
    """Stands for JAX's errors that say what became of another rank, by their code: see kCodes in collective.cc.

    The code is lost where later programs have taken the result; then the text at the end is that of the last abort.
    """


def _has_passed_on_an_abort(problem: BaseException) -> bool:
    last = last_abort()
    return bool(last) and str(problem).endswith(last)


def last_abort() -> str:
    """What the last operation that met the end of another rank, or of the world, was told; "" if none has."""
    text = ctypes.create_string_buffer(_library.rt_jax_last_abort(None, 0) + 1)
    _library.rt_jax_last_abort(text, len(text))
    return text.value.decode(errors="replace")


def words_of(problem: BaseException) -> str:
    """What an operation said, without XLA's code, and without what each program that takes its result puts in front."""
    return _BEFORE_THE_WORDS.sub("", str(problem))


def _load() -> ctypes.CDLL:
    check_release(jax.__version__)
    library = ctypes.CDLL(str(_PATH))
    library.rt_jax_connect.argtypes = [ctypes.c_void_p]
    library.rt_jax_connect.restype = None
    library.rt_jax_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.rt_jax_bind.restype = None
    library.rt_jax_last_abort.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.rt_jax_last_abort.restype = ctypes.c_int64
    library.rt_jax_connect(core_functions("JAX", library.rt_jax_abi_version()))
    for target, handler in ((TARGET, library.rt_jax_collective), (REST, library.rt_jax_rest)):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    exits.count_as_errors_of_peers(ErrorOfAPeer)
    for kind in (ErrorOfAPeer, jax.errors.JaxRuntimeError):
        exits.take_words_from(kind, words_of)
    return library


_library = _load()
slots = Slots(_library.rt_jax_bind)
slots.read_logs()


def init(comm: object = None, process_sets: object = None, **arguments: Any) -> None:
    """``ringtrain.init``; programs that were compiled in an earlier world of as many ranks run in this one from now on.

    Example:
        >>> import ringtrain.jax as hvd
        >>> hvd.init()
    """
    ringtrain.init(comm, process_sets, **arguments)
    slots.current()
