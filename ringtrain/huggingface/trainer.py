"""Hugging Face's Trainer, but for what becomes of model and optimizer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringtrain.huggingface.accelerator import adopt

if TYPE_CHECKING:  # a Trainer comes behind it
    import accelerate
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class TrainerMixin(_Trainer):
    """A Trainer that averages gradients by ``ringtrain.torch.DistributedOptimizer``; the model is not wrapped.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, distributed_optimizer={"compression": hvd.Compression.int8})

    It stands before the Trainer that is to be changed: ``class Mine(TrainerMixin, Seq2SeqTrainer): pass``.

    Args:
        arguments: the Trainer's.
        distributed_optimizer: arguments for ``DistributedOptimizer``: ``compression``, ``groups``, ``op`` and others.

    Raises:
        InvalidArgumentError, UnsupportedError: as ``Accelerator``.
    """

    accelerator: "accelerate.Accelerator"

    def __init__(self, *arguments: object, distributed_optimizer: Mapping[str, object] | None = None, **named: object):
        self._distributed_arguments = distributed_optimizer
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; its Accelerator becomes ringtrain's."""
        super().create_accelerator_and_postprocess()
        adopt(self.accelerator, self._distributed_arguments)
