"""The optimizer's state with ``ShardedStep`` as ``torch.distributed.checkpoint`` saves and loads it: shard by shard.

Names, shapes and places are those of the whole state, as torch names it. So a checkpoint is loaded by any number of ranks,
and by an optimizer that has all of its state.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import torch

from ringtrain._training.shares import Box, Piece, boxes
from ringtrain.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class StateShard(torch.Tensor):
    """What this rank has of a value with an element for each of a parameter's: a tensor of the whole's shape, without the rest.

    ``torch.distributed.checkpoint`` asks it for boxes, and writes to these when it loads. Nothing else can be done with it.

    Attributes:
        own: this rank's elements, flat.
    """

    own: torch.Tensor
    _boxes: list[Box]
    _name: str

    @staticmethod
    def of(name: str, shape: Sequence[int], own: torch.Tensor, piece: Piece) -> "StateShard":
        """The one of a parameter of that name and shape, of which this rank has a piece."""
        made: StateShard = torch.Tensor._make_wrapper_subclass(StateShard, shape, dtype=own.dtype, device=own.device)
        made.own, made._boxes, made._name = own, boxes(shape, piece.first, piece.last), name
        return made

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        """Without elements."""
        return f"StateShard('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype}, elements={len(self.own)})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(_refusal(self._name, "a copy or a pickle"))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict[str, object] | None = None
    ) -> NoReturn:
        given = [each for value in args for each in (value if isinstance(value, (list, tuple)) else [value])]
        name = next((each._name for each in given if isinstance(each, StateShard)), "")
        raise UnsupportedError(_refusal(name, str(func)))

    # ---- what torch.distributed.checkpoint asks tensors for that are shared out ----

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes]

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.own)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        at = 0
        for box in self._boxes:
            if box.offsets == tuple(index.offset):
                return self.own[at : at + box.elements].view(box.sizes)
            at += box.elements
        raise KeyError(index)


def _refusal(name: str, found: str) -> str:
    return (
        f"sharded_state_dict '{name}': expected torch.distributed.checkpoint.save or load, since this rank has a share of "
        f"the state alone (ShardedStep), but found {found}. Use these on all ranks, or consolidate_state_dict() and state_dict()."
    )
