"""The adapter for PyTorch on CUDA tensors where there is none: tensors that say so, with their memory on the fake device.

Run in the fakes' environment, python -m gpu.torch_stand_in; the exit code is 0 if all is right. A PyTorch without CUDA
makes no such tensor, so these override what the adapter asks of one: where it is, its address, its storage. Arithmetic
on them is not possible.
"""

from __future__ import annotations

import types

import numpy as np
import torch
from fakes import driver
from fakes.array import FakeDeviceArray

import ringtrain as rt
from gpu import machine
from ringtrain._runtime.context import current
from ringtrain.testing import World
from ringtrain.torch import functions, tensors

ELEMENTS = 50021
streams: dict[int, int] = {}  # handle of the current one, by rank


class OnGpu(torch.Tensor):
    """A float32 tensor of one dimension whose memory is a ``FakeDeviceArray``."""

    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, array: FakeDeviceArray):
        tensor = torch.empty(array.shape, device="meta").as_subclass(cls)
        tensor.array = array
        return tensor

    @property
    def device(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(index=self.array.device, type="cuda")

    def data_ptr(self) -> int:
        return self.array.ptr

    def untyped_storage(self) -> FakeDeviceArray:
        return self.array

    def detach(self) -> OnGpu:
        return self

    def contiguous(self) -> OnGpu:
        return self


def on_rank(rank: int) -> None:
    """What is written late is awaited, and what is read at once on the current stream is the result."""
    driver.use_device(0)
    stream = driver.Stream()
    streams[rank] = stream.ptr
    for name, buffer_of in (("lent", tensors.lent_buffer), ("own", tensors.buffer_of), ("any", tensors.readable)):
        tensor, copy = (
            OnGpu(FakeDeviceArray(np.zeros(ELEMENTS, "float32"))),
            FakeDeviceArray(np.zeros(ELEMENTS, "float32")),
        )
        written = FakeDeviceArray(np.full(ELEMENTS, rank + 1, "float32"))
        machine.keep_busy(stream, 20)
        machine.copy(tensor.array.ptr, written.ptr, written.nbytes, stream)
        buffer = buffer_of(tensor)
        assert (buffer.device, buffer.stream, buffer.shape) == (0, stream.ptr, (ELEMENTS,))
        operation = current().submit("allreduce", name, [buffer], [buffer])
        tensors.finish(operation, tensor)
        assert operation.done()
        machine.copy(copy.ptr, tensor.array.ptr, copy.nbytes, stream)
        stream.synchronize()
        assert operation.finished()
        assert np.array_equal(copy.numpy(), np.full(ELEMENTS, 3, "float32"))
    named = {
        f"weights.{index}": OnGpu(FakeDeviceArray(np.full(99, 10 * index + rank, "float32"))) for index in range(3)
    }
    functions.broadcast_in_place(named, 1, rt.global_process_set)
    stream.synchronize()
    assert [tensor.array.numpy()[0] for tensor in named.values()] == [1, 11, 21]


if __name__ == "__main__":
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=streams[rt.rank()])
    for plane in ("staged", "nccl"):
        with World(2, gpu_plane=plane, nccl_multi_rank=1) as world:
            world.run(on_rank)
