"""Spares each Python process of the tests what TensorFlow, Keras and PyTorch import, and no test needs there.

Python imports this module by itself at its start, since the tests' PYTHONPATH names this folder.

`import tensorflow` imports scikit-learn, Matplotlib and JAX, if they are there, for a wrapper, a plot and a converter that
no test uses: half of its 5 s of a core, in each of hundreds of processes. Here these imports fail, as on a machine without
the packages, which TensorFlow and Keras allow for. All other code finds them.

The first optimizer of PyTorch imports its compiler, 4 s of a core, to keep it out of a few functions. Here these run as they are
while nobody has imported the compiler. Keras on PyTorch imports it for the same reason, and is given what stays out of it, too.
Ringtrain imports it into ranks of elastic jobs, since PyTorch's optimizers would do it while others wait: here they do not.

Keras on PyTorch and JAX imports TensorFlow, 4 s of a core, to ask whether what it writes into a file is a type of TensorFlow's.
There this import fails, unless the program has imported TensorFlow itself.

Lightning imports PyTorch's compiler for the class of what it compiles, and for metrics of texts and sounds transformers and
SciPy: half of its 8 s of a core. Here there is no such class, and metrics find none of these packages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

# What is spared, and the modules that import it in passing.
SPARED = {
    "sklearn": ("keras.src.wrappers.",),
    "matplotlib": ("keras.src.visualization.",),
    "jax": ("tensorflow.lite.", "keras.src.callbacks.orbax_checkpoint"),
    "scipy": ("tensorflow.python.keras.",),
}
if os.environ.get("KERAS_BACKEND") in ("jax", "torch"):
    SPARED["tensorflow"] = ("keras.src.utils.module_utils",)
# Modules of Lightning that import PyTorch's compiler.
OF_LIGHTNING = (
    "lightning_fabric.wrappers",
    "pytorch_lightning.trainer.connectors.logger_connector.result",
    "pytorch_lightning.utilities.compile",
)


class Spared:
    """A finder of modules, asked before all others, that refuses a package to modules that import it in passing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in SPARED and importer().startswith(SPARED[name]):
            raise ModuleNotFoundError(f"'{name}' is spared to '{importer()}' by tests/sitecustomize.py", name=name)


class Patched:
    """A finder of one module, and its loader, that has it changed once it has been executed, or is around its execution."""

    def __init__(
        self,
        name: str,
        change: Callable[[ModuleType], None] = lambda module: None,
        around: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        self._name, self._change, self._around = name, change, around

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                with self._around():
                    execute(module)
                self._change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def disable_later(module: ModuleType) -> None:
    """Of ``torch._compile``: what keeps the compiler out of a function."""
    disable = module._disable_dynamo

    def _disable_dynamo(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(_disable_dynamo, recursive=recursive)
        return _until_compiled(fn, disable(fn, recursive))

    module._disable_dynamo = _disable_dynamo


def step_without_breaks(module: ModuleType) -> None:
    """Of ``torch.optim.optimizer``: what is around each step, where it tells the compiler of a break."""
    whole = module._use_grad_for_differentiable

    def _use_grad_for_differentiable(func: Callable) -> Callable:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return func(self, *args, **kwargs)

        return _until_compiled(step, whole(func))

    module._use_grad_for_differentiable = _use_grad_for_differentiable


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """What imports ``torch._dynamo`` meanwhile, to call its ``disable()``, gets that of ``torch._compile``; and what asks for
    the class of compiled modules, one of which there are none."""
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    disable = importlib.import_module("torch._compile")._disable_dynamo
    sys.modules[name] = ModuleType(name)
    sys.modules[name].disable = lambda fn=None, recursive=True, reason=None: disable(fn, recursive)  # type: ignore[attr-defined]
    sys.modules[name].OptimizedModule = type("OptimizedModule", (), {})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del sys.modules[name]


def joins_without_compiler(module: ModuleType) -> None:
    """Of ``ringtrain._bootstrap.membership``: what a rank loads before it joins."""
    needs = module.needs_to_join
    module.needs_to_join = lambda *modules: needs(*(name for name in modules if name != "torch._dynamo"))


def without_packages_of_metrics(module: ModuleType) -> None:
    """Of the modules that say what is installed, to metrics and to Lightning: packages of metrics are not."""
    for name in vars(module):
        if name.startswith(("_MATPLOTLIB_", "_SCIPI_", "_SCIPY_", "_TRANSFORMERS_")):
            setattr(module, name, False)
    if available := getattr(module, "package_available", None):
        module.package_available = lambda name: name != "scipy" and available(name)  # type: ignore[attr-defined]


def _until_compiled(plain: Callable, whole: Callable) -> Callable:
    """One of two forms of a function: the plain one while nobody has imported the compiler."""

    @functools.wraps(whole)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (whole if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return either


def importer() -> str:
    """The name of the module whose import statement is being executed."""
    frame = sys._getframe(1)
    while frame and frame.f_globals.get("__name__") in (
        __name__,
        "importlib",
        "importlib._bootstrap",
        "_frozen_importlib",
    ):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path[:0] = [
    Spared,
    Patched("torch._compile", disable_later),
    Patched("torch.optim.optimizer", step_without_breaks),
    Patched("ringtrain._bootstrap.membership", joins_without_compiler),
    *(
        Patched(name, without_packages_of_metrics)
        for name in ("lightning_utilities.core.imports", "torchmetrics.utilities.imports")
    ),
    *(Patched(name, around=without_compiler) for name in OF_LIGHTNING),
    *(Patched(f"keras.src.backend.torch.{each}", around=without_compiler) for each in ("image", "random")),
]
