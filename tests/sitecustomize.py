"""Spares each Python process of the tests the packages that TensorFlow and Keras import wherever these are installed.

Python imports this module by itself at its start, since the tests' PYTHONPATH names this folder.

`import tensorflow` imports scikit-learn, Matplotlib and JAX, if they are there, for a wrapper, a plot and a converter that
no test uses: half of its 5 s of a core, in each of hundreds of processes. Here these imports fail, as on a machine without
the packages, which TensorFlow and Keras allow for. All other code finds them.
"""

from __future__ import annotations

import sys

# What is spared, and the modules that import it in passing.
SPARED = {
    "sklearn": ("keras.src.wrappers.",),
    "matplotlib": ("keras.src.visualization.",),
    "jax": ("tensorflow.lite.", "keras.src.callbacks.orbax_checkpoint"),
    "scipy": ("tensorflow.python.keras.",),
}


class Spared:
    """A finder of modules, asked before all others, that refuses a package to modules that import it in passing."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in SPARED and importer().startswith(SPARED[name]):
            raise ModuleNotFoundError(f"'{name}' is spared to '{importer()}' by tests/sitecustomize.py", name=name)


def importer() -> str:
    """The name of the module whose import statement is being executed."""
    frame = sys._getframe(1)
    while frame and frame.f_globals.get("__name__") in (__name__, "importlib._bootstrap", "_frozen_importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, Spared)
