"""Elastic training for PyTorch, by Horovod's names; each raises UnsupportedError with the reason when it is used."""

from typing import Any, NoReturn

from ringtrain.common.elastic import ObjectState, State, refuse
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(func: Any) -> NoReturn:
    """Raises UnsupportedError where a script decorates its training function."""
    refuse("run")
