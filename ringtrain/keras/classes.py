"""Classes of distributed optimizers: subclasses of the user's own, which files, pickles and messages cannot tell from it.

A Keras file names an object by the module, the name and the registration of its class. With those of the user's class
it loads without ringtrain.
"""

from types import ModuleType

from ringtrain.keras.types import Optimizer

_REGISTERED = ">"  # between the package and the name of a class that ``register_keras_serializable`` knows


def likened(methods: type, plain: type, keras: ModuleType, **attributes: object) -> type:
    """A subclass of ``plain`` with ``methods`` in front, under the name, module and registration of ``plain``.

    Args:
        methods: a class that has ``user_class`` know its subclasses.
        plain: the user's class.
        keras: the Keras that ``plain`` belongs to, 3 or tf_keras.
        attributes: further attributes of the class.
    """
    is_public = getattr(keras.optimizers, plain.__name__, None) is plain
    described = {
        "__module__": keras.optimizers.__name__ if is_public else plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        **attributes,
    }
    kind = type(plain.__name__, (methods, plain), described)
    registered = keras.saving.get_registered_name(plain)
    if _REGISTERED in registered:
        package, _, name = registered.partition(_REGISTERED)
        register = keras.saving.register_keras_serializable(package, name)
        register(kind)
        register(plain)  # again, so that loading makes the user's class
    return kind


def user_class(optimizer: Optimizer, methods: type) -> type:
    """The user's class of an optimizer, distributed or not."""
    kind = type(optimizer)
    return kind.__bases__[1] if issubclass(kind, methods) else kind
