"""PyTorch Lightning and Fabric: ``Trainer(strategy="ringtrain")``.

>>> import ringtrain.lightning
>>> trainer = Trainer(strategy="ringtrain", accelerator="cpu", max_epochs=3)

The optimizers of a module become those of ``ringtrain.torch``; torch.distributed runs over the backend "ringtrain", for
metrics, samplers and whatever else asks it. Both ``lightning`` and ``pytorch_lightning`` are served: the one that the
program has imported, or else the one that is installed. docs/lightning.md is the guide.
"""

import ringtrain.torch.distributed  # torch knows the backend from here on
from ringtrain.lightning.packages import classes_for, package_of_the_program

__all__ = ["FabricStrategy", "RingtrainEnvironment", "RingtrainStrategy", "classes_for"]

RingtrainStrategy, FabricStrategy, RingtrainEnvironment = classes_for(package_of_the_program())


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
