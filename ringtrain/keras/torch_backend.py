"""Gradients of Keras on PyTorch; see ``backends`` for who asks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringtrain.torch as hvd


class _Eager:
    """PyTorch knows one scope only."""


_EAGER = _Eager()


def unconverted(method: Callable) -> Callable:
    """The method: PyTorch does not convert control flow."""
    return method


def is_sparse(gradient: torch.Tensor) -> bool:
    """Whether a gradient holds some rows only."""
    return gradient.is_sparse


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with all its rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient times a number."""
    return gradient * factor


def in_graph() -> bool:
    """Whether operations are being traced into a graph: never."""
    return False


def scopes() -> list[Any]:
    """What is being run now, as ``tensorflow_backend`` has it."""
    return [_EAGER]


def perform(operations: Sequence[Any], settings: Any) -> list[list[torch.Tensor]]:
    """The results of reductions (``reduction.Operation``), in their order; all are under way before the first wait."""
    compression = settings.compression or hvd.Compression.none
    pending = []
    with torch.no_grad():
        for operation in operations:
            sent = [compression.compress(tensor) for tensor in operation.tensors]
            handle = hvd.grouped_allreduce_async(
                [tensor for tensor, _ in sent], name=operation.name, op=operation.op,
                prescale_factor=1.0 / operation.scale, postscale_factor=operation.scale,
                process_set=settings.process_set,
            )  # fmt: skip
            pending.append((handle, [undo for _, undo in sent]))
        return [
            [compression.decompress(tensor, undo) for tensor, undo in zip(hvd.synchronize(handle), undos, strict=True)]
            for handle, undos in pending
        ]
