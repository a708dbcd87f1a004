"""``ringtrain.torch.elastic.sampler``, as scripts for Horovod import it."""

from typing import Any

from ringtrain.common.elastic import refuse

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Shards what an elastic job has not processed; making one raises UnsupportedError."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0):
        refuse("ElasticSampler")
