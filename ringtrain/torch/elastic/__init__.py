"""Elastic training for PyTorch, by Horovod's names; ``ringtrain.elastic`` says what it is."""

from ringtrain.elastic import ObjectState, State, run
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
