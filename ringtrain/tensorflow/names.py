"""Names of operations in graphs: alike on all ranks that trace alike, and never twice in one function.

Ranks are matched by names. TensorFlow and Keras number what they make, in each process: a rank that has built one model
more, or loaded its model from a file, has ``dense_1`` where the others have ``dense``. So a name is made of the
function that is being traced, of what is reduced without such numbers, and of the place among those that would be
called alike, in the order of the calls. A function that is traced again starts anew, so a rank may do that alone. What
the user names keeps that name. In a loop of a graph for sessions our library adds the number of the iteration.
"""

import re
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

import tensorflow as tf

from ringtrain.tensorflow.types import Source, Variable

_FunctionGraph = tf.__internal__.FuncGraph

# Names that were given out, for the graph of each function; it ends with its graph.
_claimed: "weakref.WeakKeyDictionary[tf.Graph, Counter[str]]" = weakref.WeakKeyDictionary()


def in_session_graph() -> bool:
    """Whether a graph for sessions of TensorFlow 1 is being built, where nothing runs that no session is asked for."""
    return not tf.executing_eagerly() and not tf.inside_function()


def claim(name: str) -> str:
    """The name, with a number if it was given out before in the function that is being traced; in eager mode the name.

    Eager operations run one after the other, so they may share a name.
    """
    if tf.executing_eagerly():
        return name
    claimed = _claimed.setdefault(_function(), Counter())
    claimed[name] += 1
    return name if claimed[name] == 1 else claim(f"{name}.{claimed[name]}")


def claim_in_function(label: str) -> str:
    """``claim`` of the label after the name of the function: for what ringtrain names by itself.

    Functions that call each other may be traced in any order, and earlier on some ranks, so each counts for itself.
    """
    function = None if tf.executing_eagerly() else _function()
    return claim(f"{without_counters(function.name)}/{label}" if isinstance(function, _FunctionGraph) else label)


def claim_for(operation: str, tensors: Sequence[tf.Tensor], ignore_name_scope: bool = False) -> str:
    """A name for an operation on tensors of the current graph, made of the first and the last one's."""
    named = [tensor for tensor in tf.nest.flatten(list(tensors)) if hasattr(tensor, "name")]
    ends = [_stable(tensor.name) for tensor in (named if len(named) < 2 else (named[0], named[-1]))]
    if ignore_name_scope:
        ends = [end.rpartition("/")[2] for end in ends]
    label = "_".join(re.sub(r"[^A-Za-z0-9_/]", "_", end) for end in ends)
    return claim_in_function(f"{operation}.{label}")


def of_gradients(stem: str, sources: Sequence[Source]) -> list[str]:
    """A name for each source's gradient: its place, and for the reader the layer and the variable.

    Of a Keras path the last two parts are the same in a model that was loaded and in one that was made.
    """
    return [f"{stem}.{place}.{_described(source)}" for place, source in enumerate(sources)]


def without_counters(name: str) -> str:
    """A path without the numbers that TensorFlow and Keras add: ``model_1/dense_2/kernel:0`` is ``model/dense/kernel:0``."""
    return re.sub(r"_\d+(?=[/:]|$)", "", name)


def _described(source: Source) -> str:
    if not is_variable(source):
        return "source"
    return "/".join(without_counters(path_of(source).partition(":")[0]).split("/")[-2:])


def path_of(variable: Variable) -> str:
    """What Keras or TensorFlow calls a variable: ``sequential_1/dense_2/kernel``, ``weights:0``."""
    path: str = getattr(variable, "path", None) or variable.name
    return path


def is_variable(source: Source) -> TypeGuard[Variable]:
    """Whether it is a variable, of TensorFlow or Keras, that is the same object whenever a function is traced."""
    return isinstance(source, tf.Variable) or hasattr(source, "path")


def _function() -> tf.Graph:
    """The graph of the function that is being traced. Branches of conditions and bodies of loops are traced with it."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, _FunctionGraph) and type(graph) is not _FunctionGraph:
        graph = graph.outer_graph
    return graph


def _stable(name: str) -> str:
    """A tensor's name without what differs between ranks: TensorFlow numbers what a graph captures, in each process."""
    return without_counters(re.sub(r"(^|/)\d+(_\d+)?(?=:)", r"\1captured", name))
