"""XLA and ``torch.compile``, where they cannot compile the operations between ranks: switched off where Keras would use them.

Keras decides when a model is compiled, before anything of ringtrain's is asked, and builds its step in
``make_train_function``, which it offers for overriding. That is where a model with a distributed optimizer is noticed.
"""

import functools
from collections.abc import Callable
from typing import Any

from ringtrain._binding.log import logger
from ringtrain._runtime.context import current
from ringtrain._runtime.process_sets import ProcessSet, members_of
from ringtrain.keras.backends import backend
from ringtrain.keras.types import Model


def switch_off(model: Model, process_set: ProcessSet) -> bool:
    """Makes a model train without compilation, says so on the set's lowest rank, and returns whether it had any."""
    if backend.compiles_operations or not model.jit_compile:
        return False
    model.jit_compile = False
    if current().rank == members_of(process_set)[0]:
        logger.warning(
            "fit: jit_compile is switched off, since the operations between ranks cannot be compiled. Pass "
            "compile(jit_compile=False) to be rid of this line."
        )
    return True


def look_at_models(
    model_class: Any,
    communicates_on: Callable[[object], ProcessSet | None],
    put_right: Callable[[object], object] = lambda optimizer: None,
) -> None:
    """Puts ``switch_off`` before the ``make_train_function`` of a class of models, once.

    Args:
        model_class: ``keras.Model``, or that of tf_keras.
        communicates_on: the process set on which an optimizer reduces gradients; None if it does not.
        put_right: is called with the optimizer of a model that is about to train.
    """
    original = model_class.make_train_function

    @functools.wraps(original)
    def make_train_function(self: Model, force: bool = False) -> Callable:
        optimizer = getattr(self, "optimizer", None)
        put_right(optimizer)
        process_set = communicates_on(optimizer)
        if process_set is not None:
            switch_off(self, process_set)
        return original(self, force)

    model_class.make_train_function = make_train_function
