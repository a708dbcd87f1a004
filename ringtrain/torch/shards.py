"""Parameters that differ from rank to rank by design: a rank's rows of a sharded table.

Whatever makes parameters equal on all ranks, or takes them for equal, asks ``is_shard`` and leaves them out: the
gradient of a shard has come from all ranks when ``backward()`` returns (``embedding``), and goes to no other.
"""

from collections.abc import Iterable

import torch

from ringtrain._binding import tables
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain.errors import InvalidArgumentError


class TableShard(torch.nn.Parameter):
    """This rank's rows of a table, and a spare row behind them that no id asks for.

    The spare row's gradient carries bad news: it is infinite on all ranks where any rank's gradients of the table are not
    finite. So a ``GradScaler``, which looks at what a rank has, finds the same on all.

    Attributes:
        process_set: the ranks that share the table.
        op: ``Average`` or ``Sum`` of its gradients.
        outline: what all ranks must have alike of the table.
        table: in an elastic job, the module; rows that are kept for others stand behind its own.
        owned: then, how many are its own.
    """

    process_set: ProcessSet = global_process_set
    op: int = 0
    outline: str = "rows of its own"
    table: torch.nn.Module | None = None
    owned: int = 0

    def __deepcopy__(self, memo: dict[int, object]) -> "TableShard":
        copied = super().__deepcopy__(memo)
        copied.process_set, copied.op, copied.outline = self.process_set, self.op, self.outline
        return copied


def is_shard(tensor: object) -> bool:
    """Whether other ranks have other rows in this tensor."""
    return isinstance(tensor, TableShard)


def replicated(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are alike on all ranks."""
    return [tensor for tensor in tensors if not is_shard(tensor)]


def check_op_of_shards(trained: Iterable[torch.Tensor], op: int) -> None:
    """Raises InvalidArgumentError where an optimizer would combine the tables' gradients otherwise than they are."""
    shards = [each for each in trained if isinstance(each, TableShard)]
    if any(shard.op != op for shard in shards):
        raise InvalidArgumentError(
            f"DistributedOptimizer: op must be that of the sharded embeddings it trains, {_named(shards[0].op)}, but is "
            f"{_named(op)}. "
            "Give both the same op."
        )


def _named(op: int) -> str:
    return tables.REDUCTION_CONSTANTS[tables.REDUCTION_BY_ID[op]]
