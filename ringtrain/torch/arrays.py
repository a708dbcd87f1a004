"""PyTorch's tensors, on the CPU and on GPUs, as ``ringtrain._training.arrays`` asks for them."""

import numpy as np
import torch

from ringtrain._binding.tensor_memory import Buffer
from ringtrain._runtime.pending import Operation
from ringtrain.torch.tensors import buffer_of, finish

_HALVES = (torch.float16, torch.bfloat16)


class TorchArrays:
    """Those of PyTorch."""

    def matrix(self, array: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        dtype = torch.promote_types(array.dtype, torch.float32)
        made = torch.empty(rows, columns, dtype=dtype, device=array.device)
        return made.copy_(array.reshape(rows, columns))

    def empty_like(self, array: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(array)

    def like(self, array: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return array.to(other).contiguous()

    def wide(self, array: torch.Tensor) -> torch.Tensor:
        return array.double().contiguous()

    def is_contiguous(self, array: torch.Tensor) -> bool:
        return array.is_contiguous()

    def is_on_host(self, array: torch.Tensor) -> bool:
        return not array.is_cuda

    def saved(self, array: torch.Tensor) -> torch.Tensor:
        return array.cpu().clone()

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        return array.cpu().numpy()

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def flat(self, array: torch.Tensor) -> np.ndarray:
        values = array.float() if array.dtype in _HALVES else array
        return values.cpu().contiguous().reshape(-1).numpy()

    def rounded(self, values: np.ndarray, array: torch.Tensor) -> np.ndarray:
        return torch.from_numpy(values).to(array.dtype).float().numpy() if array.dtype in _HALVES else values

    def drawn(self, seed: int, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))

    def lengths(self, matrix: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float64)

    def sqrt(self, array: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(array)

    def where(self, condition: torch.Tensor, one: torch.Tensor | float, other: torch.Tensor | float) -> torch.Tensor:
        return torch.where(condition, one, other)

    def subtract_product(self, matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        matrix.addmm_(left, right.t(), alpha=-1)

    def is_finite(self, array: torch.Tensor) -> bool:
        return bool(array.isfinite().all())

    def buffer(self, array: torch.Tensor) -> Buffer:
        return buffer_of(array)

    def finish(self, operation: Operation, array: torch.Tensor) -> None:
        finish(operation, array)


TORCH = TorchArrays()
