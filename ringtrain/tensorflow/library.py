"""Our library of TensorFlow operations: which releases it serves, loading it, its links to the core, and ``init``.

``native/tensorflow`` is the source. The library gets the core's functions as a table (``rt_functions`` in
``ringtrain.h``), and contexts by slot (``ringtrain._training.adapter.slots``). ``operations`` and the modules beside it call ``ops`` with
the slot of the current context.
"""

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import ringtrain
from ringtrain._binding import cuda_arrays, options
from ringtrain._binding.log import logger
from ringtrain._runtime import exits
from ringtrain._runtime.arguments import check_among
from ringtrain._training.adapter.slots import Slots, core_functions
from ringtrain.errors import UnsupportedError

TESTED_RELEASES = ("2.20", "2.21")
ANY_RELEASE = "RINGTRAIN_TENSORFLOW_ANY_RELEASE"
GPU = "RINGTRAIN_TENSORFLOW_GPU"

_PATH = Path(__file__).with_name("libringtrain_tensorflow.so")
_AROUND_THE_WORDS = re.compile(r"^\s*(?:\(\d+\) \w+: )?(?:\{\{function_node [^}]*\}\} ?)*| \[Op:\w+\].*$")


def _is_tested(release: str) -> bool:
    return ".".join(release.split(".")[:2]) in TESTED_RELEASES


def check_release(release: str, any_release: str = "") -> None:
    """Raises UnsupportedError for a release of TensorFlow that this was not tested with, unless the user insists."""
    if not _is_tested(release) and any_release != "1":
        raise UnsupportedError(
            f"TensorFlow '{release}': expected one of the releases {', '.join(TESTED_RELEASES)}, with whose C API for "
            f"kernels this was tested, but found another. Install one of them, or set {ANY_RELEASE}=1 to try."
        )


def tensors_stay_on_gpus(choice: str, release: str, with_cuda: bool) -> bool:
    """Whether operations take GPU tensors where they are, and not copied to the host by TensorFlow; pure.

    Args:
        choice: of the user, the value of ``RINGTRAIN_TENSORFLOW_GPU``: "" or "auto", "device", "host".
        release: of TensorFlow. Of one that is not tested nobody knows where it keeps the stream of a GPU.
        with_cuda: whether TensorFlow was built with CUDA: other GPUs than NVIDIA's have no stream for us.
    """
    check_among(f"{GPU} must be auto, device or host", choice, ("", "auto", "device", "host"))
    return choice == "device" or (choice != "host" and _is_tested(release) and with_cuda)


def _load() -> tuple[Any, ctypes.CDLL]:
    """Loads the library: its operations as Python functions, and its own functions. TensorFlow must load it first."""
    check_release(tf.__version__, options.environment().get(ANY_RELEASE, ""))
    operations = tf.load_op_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    library.rt_tensorflow_missing.restype = ctypes.c_char_p
    missing = library.rt_tensorflow_missing().decode()
    if missing:
        raise UnsupportedError(
            f"TensorFlow '{tf.__version__}': expected its C API for kernels but did not find {missing}. "
            f"Install one of the releases {', '.join(TESTED_RELEASES)}."
        )
    library.rt_tensorflow_connect.argtypes = [ctypes.c_void_p]
    library.rt_tensorflow_connect.restype = None
    library.rt_tensorflow_register_kernels.argtypes = [ctypes.c_int32]
    library.rt_tensorflow_register_kernels.restype = None
    library.rt_tensorflow_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p]
    library.rt_tensorflow_bind.restype = None
    library.rt_tensorflow_next_name.argtypes = [
        ctypes.c_int64, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    library.rt_tensorflow_next_name.restype = None
    library.rt_tensorflow_connect(core_functions("TensorFlow", library.rt_tensorflow_abi_version()))
    choice = options.environment().get(GPU, "")
    library.rt_tensorflow_register_kernels(tensors_stay_on_gpus(choice, tf.__version__, tf.test.is_built_with_cuda()))
    exits.count_as_errors_of_peers(tf.errors.UnknownError)  # lost ranks and ended worlds: see kCodes in collective.cc
    exits.take_words_from(tf.errors.OpError, words_of)
    return operations, library


def words_of(problem: tf.errors.OpError) -> str:
    """What went wrong, in one line, without what TensorFlow puts around it: where its node was made, and the node."""
    before_node, node, _ = problem.message.partition("\n\t [[")
    lines = before_node.rstrip().split("\n")
    return _AROUND_THE_WORDS.sub("", lines[-1 if node else 0])


def current_slot() -> int:
    """The slot of the current context, for the attribute of an operation. Raises NotInitializedError without one."""
    return _slots.current()


def next_name(operation: str, process_set_id: int) -> str:
    """The name of this rank's next unnamed eager operation of a kind; counts it, as running the operation does."""
    name = ctypes.create_string_buffer(256)
    _library.rt_tensorflow_next_name(current_slot(), operation.encode(), process_set_id, name, len(name))
    return name.value.decode()


def on_new_world(function: Callable[[], None]) -> None:
    """Has a function called when ``init`` has opened a world in which graphs of an earlier one may run."""
    _listeners.append(function)


def _bind(slot: int, context: int | None) -> None:
    _library.rt_tensorflow_bind(slot, context, os.fsencode(cuda_arrays.driver()))
    if slot == Slots.DEFAULT and context is not None:
        for listener in _listeners:
            listener()


_listeners: list[Callable[[], None]] = []


ops, _library = _load()
_slots = Slots(_bind)
_slots.read_logs()


def init(comm: object = None, process_sets: object = None, **arguments: Any) -> None:
    """``ringtrain.init``; graphs that were traced in an earlier world run in this one from now on.

    Example:
        >>> hvd.init()
        >>> print(f"rank {hvd.rank()} of {hvd.size()}")
    """
    ringtrain.init(comm, process_sets, **arguments)
    current_slot()
    if ringtrain.rank() == 0:
        _warn_of_tf_config()


@functools.cache
def _warn_of_tf_config() -> None:
    """Says once that the variable is ignored, if it is set."""
    if "TF_CONFIG" in options.environment():
        logger.warning(
            "TF_CONFIG is set, and ignored: the launcher decides which ranks there are. It describes the workers of "
            "tf.distribute; remove it from the environment to be rid of this line."
        )
