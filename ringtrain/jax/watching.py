"""``ringtrain._training.watch`` in steps of JAX: at once, or in a program, where nothing on the host waits for other ranks.

A program makes its rows by itself. A call of the host, which costs a step more than all else, says now and then whether a look
is asked for, and gives the digests of the parameters; operations of the program take the maxima. Gradients come out behind all
that, so that no update is made before it is known that ranks step alike.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import ArrayLike

from ringtrain._binding.log import logger
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Max
from ringtrain._runtime.process_sets import ProcessSet, is_alone, members_of
from ringtrain._training.drift import Settings, Words, digest_of, kind_with_cores
from ringtrain._training.session import Session
from ringtrain._training.watch import ARRAYS, Forms, Watch, shortest
from ringtrain.jax import names
from ringtrain.jax.library import REST, slots
from ringtrain.jax.operations import start
from ringtrain.jax.trees import Tree

_CALLED = Words("broadcast_parameters()", "DistributedGradientTransformation")


def _processor() -> str:
    gpu = None if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    return kind_with_cores(f"jax {jax.__version__}", gpu)


FORMS = Forms(*ARRAYS[:2], _processor)


class Watching:
    """The steps of one transformation, of each rank that has it in this process.

    Args:
        name: of the gradients.
        process_set: the ranks that step alike.
        given: further settings, by name.
    """

    def __init__(self, name: str, process_set: ProcessSet, given: Mapping[str, float]):
        self._name, self._process_set = name, process_set
        self._given = given
        self._watches: dict[int, Watch] = {}  # by slot
        self._has_warned = False

    def watched(self, parameters: object, state: object, reduce: Callable[[], Tree]) -> Tree:
        """What ``reduce`` returns, once ranks have found that they step alike.

        Args:
            parameters: a tree of arrays, or None: then the floating-point arrays of the state are compared.
            state: of the optimizer; where it has ``hyperparams``, as optax.inject_hyperparams makes them, these are compared.
            reduce: the gradients of all ranks, as a tree.

        Raises:
            MismatchError: outside of programs. A program raises a ``jax.errors.JaxRuntimeError`` with its text.
        """
        process_set = self._process_set
        if is_alone(process_set) or not process_set.included() or names.batching():
            return reduce()
        if parameters is None:
            self._warn()
        watch = self._watch()
        settings = {**_hyperparameters(state), **self._given}
        compared = _named(state, only_floats=True) if parameters is None else _named(parameters)
        if not names.tracing() and not any(map(_is_traced, [*settings.values(), *compared.values()])):
            row = watch.begin(_as_settings(settings, settings.values()))
            watch.meet(list(compared.items()))
            gradients = watch.reduced(reduce, lambda: list(compared.items()))
            watch.end(row, lambda: [(name, np.asarray(each)) for name, each in compared.items()])
            return gradients
        return watched_in_a_program(watch, process_set, settings, compared, reduce)

    def _warn(self) -> None:
        if not self._has_warned and current().rank == members_of(self._process_set)[0]:
            logger.warning(
                "DistributedGradientTransformation: update() got no parameters, so that replicas which part are not noticed. Call "
                "update(gradients, state, parameters), or give it mode=Synchronous(replicas='differ')."
            )
        self._has_warned = True

    def _watch(self) -> Watch:
        slot = slots.current()
        if slot not in self._watches:
            self._watches[slot] = Watch(Session(self._process_set), self._name, _CALLED, FORMS, first_look=1)
        return self._watches[slot]


def watched_in_a_program(
    watch: Watch,
    process_set: ProcessSet,
    settings: Mapping[str, ArrayLike],
    compared: Mapping[str, jax.Array],
    reduce: Callable[[], Tree],
) -> Tree:
    """What ``reduce`` returns, in a program that fails where ranks do not step alike.

    Args:
        watch: of whatever steps.
        process_set: the ranks that step alike.
        settings: numbers by name, of the program or known when it is traced.
        compared: arrays by name.
        reduce: the gradients of all ranks, as a tree.
    """
    own = _row(watch, settings)
    most = _maximum(own, f"{watch.name}.settings", process_set)
    gradients = reduce()
    names_of_settings, names_of_compared = list(settings), list(compared)

    def look() -> jax.Array:
        def digests(most: jax.Array, *arrays: jax.Array) -> np.ndarray:
            numbers, values = arrays[: len(names_of_settings)], map(np.asarray, arrays[len(names_of_settings) :])
            told = _as_settings(names_of_settings, numbers)
            return watch.digests(np.asarray(most), list(zip(names_of_compared, values, strict=True)), told)

        own = _on_host(digests, 16 * len(compared), [most, *settings.values(), *compared.values()])
        return _judged(watch, _maximum(own, f"{watch.name}.parameters", process_set))

    # Behind the gradients: a small program runs one instruction after the other, and the look is the last of the step.
    most = jax.lax.optimization_barrier((jax.lax.stop_gradient(gradients), most))[1]
    quiet = _are_equal(most[:-1]) & (most[-1] == 0)
    alike = jax.lax.cond(quiet, lambda: jnp.array(True), look)
    return jax.lax.optimization_barrier((gradients, alike))[0]


def _maximum(own: jax.Array, name: str, process_set: ProcessSet) -> jax.Array:
    return start("allreduce", own, names.claim(name) or name, process_set, op=Max)()


def _hyperparameters(state: object) -> dict[str, jax.Array]:
    """Numbers of a state that are settings, by name."""
    found: dict[str, jax.Array] = {}
    for each in jax.tree_util.tree_leaves(state, is_leaf=lambda node: hasattr(node, "hyperparams")):
        for name, value in getattr(each, "hyperparams", {}).items():
            if jnp.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.number):
                found.setdefault(name, jax.lax.stop_gradient(value))
    return found


def _as_settings(names: Iterable[str], numbers: Iterable[ArrayLike]) -> Settings:
    return {name: shortest(number) for name, number in zip(names, numbers, strict=True)}


# ---- rows of programs ----


def _row(watch: Watch, settings: Mapping[str, ArrayLike]) -> jax.Array:
    """What this rank says in a step, as ``Watch.row``, but with a digest that a program can compute."""
    left, named = _rest_of(watch), list(settings)

    def ask(*numbers: jax.Array) -> np.ndarray:
        row = watch.row(_as_settings(named, numbers))
        left.value = watch.rest()
        return np.array([row[:-1].any(), row[-1]], np.uint8)  # whether it counts, and asks for a look

    over = jax.ffi.ffi_call(REST, jax.ShapeDtypeStruct((1,), np.uint8), has_side_effect=True)
    asked = jax.lax.cond(
        over(steps=np.int64(ctypes.addressof(left)))[0] > 0,
        lambda: _on_host(ask, 2, settings.values()),
        lambda: jnp.array([1, 0], jnp.uint8),
    )
    said = _digest(settings)
    own = jnp.where(asked[0] > 0, jnp.concatenate([said, ~said]), jnp.uint8(0))
    return jnp.concatenate([own, asked[1:]])


def _digest(settings: Mapping[str, ArrayLike]) -> jax.Array:
    """uint8[8] of numbers by name: one that differs always gives another one."""
    begin = digest_of(dict.fromkeys(settings))
    if not settings:
        return jnp.asarray(np.array([begin], np.uint64).view(np.uint8))
    words = jnp.concatenate([_words(each) for each in settings.values()])
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = words ^ (words >> 13)
    factors = np.random.default_rng(begin).integers(1 << 32, size=(2, words.size), dtype=np.uint32) | np.uint32(1)
    return jax.lax.bitcast_convert_type(jnp.sum(words * factors, axis=1, dtype=jnp.uint32), jnp.uint8).reshape(-1)


def _words(number: ArrayLike) -> jax.Array:
    """The bits of a number as uint32, those of whole numbers as if it were none.

    optax gives what it injects the type of the parameters, which may be complex.
    """
    if jnp.iscomplexobj(number):
        return jnp.concatenate([_words(jnp.real(number)), _words(jnp.imag(number))])
    wide = jnp.asarray(number).astype(jnp.promote_types(jnp.result_type(number), jnp.float32))
    return jax.lax.bitcast_convert_type(wide, jnp.uint32).reshape(-1)


def _rest_of(watch: Watch) -> ctypes.c_int64:
    """In how many of the next steps a watch's programs need not ask. Programs keep it alive, by what they call."""
    if (left := _rests.get(watch)) is None:
        left = _rests[watch] = ctypes.c_int64(0)
        watch.wakes(lambda: setattr(left, "value", 0))
    return left


_rests: "weakref.WeakKeyDictionary[Watch, ctypes.c_int64]" = weakref.WeakKeyDictionary()


def _named(tree: object, only_floats: bool = False) -> dict[str, jax.Array]:
    """Arrays of numbers by their ways from the root."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    kinds = jnp.floating if only_floats else jnp.number
    return {
        jax.tree_util.keystr(path): jax.lax.stop_gradient(leaf)
        for path, leaf in leaves
        if isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, kinds)
    }


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _on_host(function: Callable[..., np.ndarray], size: int, arguments: Iterable[ArrayLike]) -> jax.Array:
    """The bytes that a function returns when the program runs."""
    return io_callback(function, jax.ShapeDtypeStruct((size,), np.uint8), *arguments)


def _judged(watch: Watch, found: jax.Array) -> jax.Array:
    def judge(found: jax.Array) -> np.ndarray:
        watch.judge(np.asarray(found))
        return np.array(True)

    return io_callback(judge, jax.ShapeDtypeStruct((), np.bool_), found)


def _are_equal(most: jax.Array) -> jax.Array:
    """``watch.are_equal``, in a program."""
    half = most.shape[0] // 2
    return jnp.all(most[:half] == ~most[half:]) | jnp.all(most == 0)
