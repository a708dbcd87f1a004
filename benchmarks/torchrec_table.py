"""TorchRec's sharded table, beside which ``python -m benchmarks embedding`` puts ours: rows dealt in blocks, over gloo.

SGD is fused into the backward pass. Each id is asked for as often as it occurs: what asks once (``use_index_dedup``) has
no kernel for CPUs.
"""

import importlib.util
import logging
import shutil

import torch
import torch.distributed

from ringtrain.bench import ranks
from ringtrain.errors import UnsupportedError

_NAME, _IDS = "table", "ids"


class TorchRecTable:
    """An ``EmbeddingCollection`` of one table under ``DistributedModelParallel``. Raises UnsupportedError without TorchRec.

    rows, width: of the table. rate: of SGD. sent: None, since gloo counts no bytes. within: how far off its rows may be.
    """

    sent, steps = None, 0
    within = 1e-3  # it adds a row's gradients one after the other, thousands of them in a step

    def __init__(self, rows: int, width: int, rate: float):
        if importlib.util.find_spec("torchrec") is None:
            raise UnsupportedError(
                "peer 'torchrec': it is not installed. Leave it out, or install torchrec and fbgemm-gpu-cpu, of the release "
                "that is made for this torch (1.8.0 for torch 2.13)."
            )
        logging.getLogger("torchrec").setLevel(logging.ERROR)  # it warns of plans made without a factory
        self._folder = ranks.shared_folder()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self._folder}/store", rank=ranks.rank(), world_size=ranks.size()
        )
        self.table = _sharded(rows, width, rate)

    def take_rows(self, first: int, rows: torch.Tensor) -> None:
        """Sets those of these rows, from number `first` on, that lie on this rank."""
        for shard in self.table.state_dict()[f"embeddings.{_NAME}.weight"].local_shards():
            start = shard.metadata.shard_offsets[0]
            low, high = max(first, start), min(first + len(rows), start + len(shard.tensor))
            if low < high:
                shard.tensor[low - start : high - start] = rows[low - first : high - first]

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of these ids, in their shape and one dimension more; all ranks call it together."""
        from torchrec import KeyedJaggedTensor

        flat = ids.reshape(-1)
        features = KeyedJaggedTensor(keys=[_IDS], values=flat, lengths=torch.ones(len(flat), dtype=torch.int32))
        return self.table(features)[_IDS].values().reshape(*ids.shape, -1)

    def step(self, ids: torch.Tensor) -> None:
        """One training step on this rank's ids."""
        (self.rows_of(ids).square().sum() / len(ids)).backward()
        self.steps += 1

    def close(self) -> None:
        """Gives back what it holds."""
        torch.distributed.destroy_process_group()
        ranks.wait_for_all()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sharded(rows: int, width: int, rate: float) -> torch.nn.Module:
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    config = EmbeddingConfig(name=_NAME, embedding_dim=width, num_embeddings=rows, feature_names=[_IDS])
    collection = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": rate})
    sharders = [EmbeddingCollectionSharder()]
    by_row = ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
    planner = EmbeddingShardingPlanner(Topology(ranks.size(), "cpu"), constraints={_NAME: by_row})
    plan = planner.collective_plan(collection, sharders, torch.distributed.group.WORLD)
    return DistributedModelParallel(collection, device=torch.device("cpu"), plan=plan, sharders=sharders)
