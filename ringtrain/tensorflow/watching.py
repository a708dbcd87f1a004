"""``ringtrain._training.watch`` in steps of TensorFlow: eager, or in a graph, where nothing on the host waits for other ranks.

A graph makes its rows by itself; where a look is asked for, a call of the host gives the digests of the parameters.
Operations of the graph take the maxima. Gradients come out behind all that, so that no update is
made before it is known that ranks step alike.
"""

import weakref
from collections.abc import Callable, Container, Sequence

import numpy as np
import tensorflow as tf

from ringtrain._runtime.operations import Max
from ringtrain._runtime.process_sets import ProcessSet, id_of, is_alone
from ringtrain._training.adapter.slots import Slots
from ringtrain._training.drift import Settings, Words, digest_of, kind_with_cores
from ringtrain._training.session import Session
from ringtrain._training.watch import ARRAYS, Comparison, Forms, Watch
from ringtrain.elastic.followed import followed
from ringtrain.tensorflow import names as naming
from ringtrain.tensorflow import nodes
from ringtrain.tensorflow.kept import Kept
from ringtrain.tensorflow.library import current_slot, on_new_world, ops
from ringtrain.tensorflow.types import Gradient, Source, Takes, Variable

Gradients = list[Gradient]


def _processor() -> str:
    gpus = tf.config.list_physical_devices("GPU")
    gpu = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else None
    return kind_with_cores(f"tensorflow {tf.__version__}", gpu)


_CALLED = Words("broadcast_variables()", "DistributedGradientTape")
_watches: Kept[Watch] = Kept()

_FIRST_LOOK_OF_A_TAPE = 20  # of a step some ask several
FORMS = Forms(*ARRAYS[:2], _processor)


def watched_by_names(
    compares: bool,
    stem: str,
    sources: Sequence[Source],
    local: Container[int],
    process_set: ProcessSet,
    reduce: Callable[[], Gradients],
    values: Sequence[tf.Tensor] | None = None,
) -> Gradients:
    """``watched`` for gradients whose optimizer is not known: their variables are compared.

    Args:
        compares: whether replicas are to be equal; if not, nothing is done but to reduce.
        stem: of the gradients' names.
        sources: what the gradients belong to.
        local: those that differ on purpose, by identity.
        process_set: the ranks that step alike.
        reduce: as for ``watched``.
        values: that the variables had before the step, and which are compared; None for those that they have. Then all
            sources are variables, and none is local.
    """
    variables = [each for each in sources if naming.is_variable(each) and id(each) not in local]
    if not compares or not variables or is_alone(process_set) or not process_set.included():
        return reduce()

    def make() -> Watch:
        return Watch(Session(process_set), stem, _CALLED, FORMS, _FIRST_LOOK_OF_A_TAPE)

    watch = _watches.find(stem, variables, process_set, make)
    paths = [naming.path_of(each) for each in variables]
    compared = list(zip(paths, variables if values is None else values, strict=True))
    return watched(comparison(watch, {}, None, compared), process_set, reduce)


def comparison(
    watch: Watch, settings: Settings, rate: Takes | None, parameters: Sequence[tuple[str, Variable]]
) -> Comparison:
    """What a step compares.

    Args:
        watch: of the optimizer, or whatever else steps.
        settings: what it steps with.
        rate: the learning rate, which is among the settings when the step runs: a number, a tensor, or None.
        parameters: variables with their names.
    """
    return Comparison(watch, settings, rate, parameters, lambda each: _values(each).numpy())


@nodes.as_it_is
def watched(compared: Comparison, process_set: ProcessSet, reduce: Callable[[], Gradients]) -> Gradients:
    """What ``reduce`` returns, once ranks have found that they step alike.

    Args:
        compared: of this step.
        process_set: the ranks that take it.
        reduce: the gradients of all ranks, None for those that nobody has.

    Raises:
        MismatchError: in an eager step. A graph raises a ``tf.errors.InvalidArgumentError`` with its text.
    """
    if (state := followed()) is not None:
        with state.comparing(compared):
            return reduce()
    watch, settings, rate, parameters = compared.watch, compared.settings, compared.rate, compared.parameters
    if tf.executing_eagerly():
        return compared.around(reduce, rate)
    # Behind a look at the variables, and so in a loop of steps behind the update before: its row has the same name.
    read = [_values(variable) for _, variable in parameters]
    with tf.device("CPU:0"), tf.control_dependencies(read):  # there calls of the host are
        rates = [] if rate is None else [tf.convert_to_tensor(rate)]
        most = _maximum(_row(watch, settings, rates), f"{watch.name}.settings", process_set)
    reduced = reduce()
    # Behind the gradients: where ranks differ a call of the host waits for the others, which may wait for a gradient.
    there = [each.values if isinstance(each, tf.IndexedSlices) else each for each in reduced if each is not None]
    with tf.device("CPU:0"), tf.control_dependencies(there):
        alike = tf.cond(
            ops.ringtrain_is_quiet(most),
            lambda: tf.constant(True),
            lambda: _looked(compared, rates, read, process_set, most),
        )
    with tf.control_dependencies([alike]):
        return [
            None if each is None else tf.nest.map_structure(tf.identity, each, expand_composites=True)
            for each in reduced
        ]


def _row(watch: Watch, settings: Settings, rates: list[tf.Tensor]) -> tf.Tensor:
    """``Watch.row``, by an operation of our library: a call of the host would cost a step more than all else."""
    _of_graphs[watch] = current_slot()
    rate = tf.cast(rates[0], tf.float64) if rates else tf.zeros([], tf.float64)
    return ops.ringtrain_step_row(
        rate, gates=[nodes.gate()], digest=digest_of(settings), schedule=watch.schedule.address
    )


def _enter_world() -> None:
    for watch, slot in list(_of_graphs.items()):
        if slot == Slots.DEFAULT:
            watch.enter_world()


_of_graphs: "weakref.WeakKeyDictionary[Watch, int]" = weakref.WeakKeyDictionary()  # with the slots of their ranks
on_new_world(_enter_world)


def _looked(
    compared: Comparison, rates: list[tf.Tensor], read: list[tf.Tensor], process_set: ProcessSet, most: tf.Tensor
) -> tf.Tensor:
    """Compares settings if they differ, and the parameters; fails where ranks differ."""
    watch, settings, parameters = compared.watch, compared.settings, compared.parameters
    names = [name for name, _ in parameters]

    def digests(most: tf.Tensor | np.ndarray, *arrays: tf.Tensor | np.ndarray) -> np.ndarray:
        found = list(map(np.asarray, arrays))
        rate, values = (found[0], found[1:]) if rates else (None, found)
        return watch.digests(np.asarray(most), list(zip(names, values, strict=True)), settings, rate)

    def judge(found: tf.Tensor | np.ndarray) -> np.ndarray:
        watch.judge(np.asarray(found))
        return np.array(True)

    own = tf.numpy_function(digests, [most, *rates, *read], tf.uint8)
    return tf.numpy_function(judge, [_maximum(own, f"{watch.name}.parameters", process_set)], tf.bool)


def _maximum(own: tf.Tensor, name: str, process_set: ProcessSet) -> tf.Tensor:
    return nodes.run(
        "allreduce", [[own]], naming.claim(name), id_of(process_set), reduction=Max,
        prescale_bits=nodes.bits(1.0), postscale_bits=nodes.bits(1.0), compression=0,
    )[0]  # fmt: skip


def _values(variable: Variable) -> tf.Tensor:
    return tf.convert_to_tensor(variable)
