"""Hugging Face's Accelerate and Trainer with the optimizers of ``ringtrain.torch``, and no wrapper around the model.

>>> import torch.distributed as dist
>>> from ringtrain.huggingface import Trainer  # in place of transformers.Trainer
>>> dist.init_process_group("ringtrain")
>>> trainer = Trainer(model, TrainingArguments(use_cpu=True), train_dataset=data)

Who wants DDP over the backend "ringtrain" needs the call of ``init_process_group`` alone, and nothing from here.
docs/other-trainers.md is the guide.
"""

from typing import TYPE_CHECKING

import ringtrain.torch.distributed  # torch knows the backend from here on
from ringtrain.huggingface.accelerator import Accelerator
from ringtrain.huggingface.trainer import TrainerMixin

if TYPE_CHECKING:
    from ringtrain.huggingface.trainer import TrainerMixin as Trainer

__all__ = ["Accelerator", "Trainer", "TrainerMixin"]


def __getattr__(name: str) -> type:
    """``Trainer``, once somebody asks for it: who uses Accelerate alone need not have transformers."""
    if name != "Trainer":
        raise AttributeError(f"module 'ringtrain.huggingface' has no attribute '{name}'")
    import transformers

    made = type(
        "Trainer", (TrainerMixin, transformers.Trainer), {"__module__": __name__, "__doc__": TrainerMixin.__doc__}
    )
    globals()["Trainer"] = made
    return made


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
