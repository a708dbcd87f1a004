"""``ringtrain.torch.elastic.state``, as scripts for Horovod import it."""

from ringtrain.common.elastic import State

__all__ = ["TorchState"]


class TorchState(State):
    """Models, optimizers and samplers of an elastic job; making one raises UnsupportedError."""
