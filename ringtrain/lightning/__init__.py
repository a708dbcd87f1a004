"""PyTorch Lightning and Fabric: ``Trainer(strategy="ringtrain")``.

>>> import ringtrain.lightning
>>> trainer = Trainer(strategy="ringtrain", accelerator="cpu", max_epochs=3)

The optimizers of a module become those of ``ringtrain.torch``; torch.distributed runs over the backend "ringtrain", for
metrics, samplers and whatever else asks it. Both ``lightning`` and ``pytorch_lightning`` are served: the one that the
program has imported, or else the one that is installed. docs/lightning.md is the guide.
"""

import importlib
import importlib.util
import sys

import ringtrain.torch.distributed  # torch knows the backend from here on
from ringtrain.errors import UnsupportedError
from ringtrain.lightning.classes import Classes, made

__all__ = ["FabricStrategy", "RingtrainEnvironment", "RingtrainStrategy", "classes_for"]

_PARTS = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
_made: dict[str, Classes] = {}


def classes_for(package: str) -> Classes:
    """The strategies and the environment for Lightning's package of this name, registered there as "ringtrain".

    Example:
        >>> strategy, strategy_of_fabric, environment = classes_for("lightning")

    Args:
        package: ``"lightning"`` or ``"pytorch_lightning"``.
    """
    if package not in _made:
        _made[package] = made(*(importlib.import_module(part) for part in _PARTS[package]))
    return _made[package]


def _package() -> str:
    """That of the program."""
    for package, parts in _PARTS.items():
        if any(part in sys.modules for part in parts):
            return package
    for package in _PARTS:
        if importlib.util.find_spec(package) is not None:
            return package
    raise UnsupportedError(
        "ringtrain.lightning: expected lightning or pytorch-lightning but found neither. Install one of them: pip install lightning"
    )


RingtrainStrategy, FabricStrategy, RingtrainEnvironment = classes_for(_package())


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
