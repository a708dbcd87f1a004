"""Torch tensors as the core's buffers: address, dtype, shape, stream, and who keeps the memory alive; and results as tensors.

``gradients`` and ``functions`` submit ``buffer_of`` a contiguous tensor and ``finish`` what they submitted; importing
this teaches ``ringtrain._binding.tensor_memory`` the same, so that the operations for arrays take torch tensors of any layout.
"""

from collections.abc import Iterable, Sequence

import torch

from ringtrain._binding import tables
from ringtrain._binding.cuda_arrays import CudaArray
from ringtrain._binding.tensor_memory import Buffer, HostBuffers, register_framework
from ringtrain._runtime.pending import Operation
from ringtrain.errors import InvalidArgumentError, UnsupportedError

# Every element type of the core has the same name in torch, which in older releases lacks some of 8 bits.
DTYPE_IDS: dict[torch.dtype, int] = {
    getattr(torch, name): dtype.id for name, dtype in tables.DTYPES.items() if hasattr(torch, name)
}
DTYPE_OF_ID: dict[int, torch.dtype] = {identity: dtype for dtype, identity in DTYPE_IDS.items()}


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The memory of a contiguous dense tensor, kept alive and in its place as long as the buffer lives.

    On a GPU the core reads and writes it after what the current stream was given until now. Raises InvalidArgumentError
    for a dtype that the core lacks or memory that is gone, UnsupportedError for a sparse tensor or another device.
    """
    check_supported(tensor)
    return _buffer(tensor)


def _buffer(tensor: torch.Tensor) -> Buffer:
    if tensor.is_cuda:
        return _cuda_buffer(tensor)
    address, storage = _memory(tensor)
    return Buffer(address, DTYPE_IDS[tensor.dtype], tensor.shape, owner=_pinned(storage, tensor))


def _memory(tensor: torch.Tensor) -> tuple[int, torch.UntypedStorage | None]:
    """Where the elements of a contiguous tensor begin, and its storage, after a look that they are there.

    Reading where they are not would end the process.
    """
    try:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        bytes_left = storage.nbytes()
    except RuntimeError:  # a wrapper of torch.func, for one
        address, storage, bytes_left = 0, None, 0
    if (not address or bytes_left < tensor.nbytes) and tensor.numel():
        raise InvalidArgumentError(
            f"tensor of shape {tuple(tensor.shape)}: expected memory that holds its elements but found {bytes_left} bytes"
            f"{'' if address else ' without an address'}. Its storage may have been resized, or it is one of torch's "
            "stand-ins (fake, zero, torch.func): pass a copy of the values."
        )
    return address, storage


def _cuda_buffer(tensor: torch.Tensor) -> Buffer:
    return Buffer(
        tensor.data_ptr(), DTYPE_IDS[tensor.dtype], tensor.shape, tensor.device.index, current_stream(tensor),
        tensor.untyped_storage(),
    )  # fmt: skip


def current_stream(tensor: torch.Tensor) -> int:
    """Handle of the stream on which this thread works at the moment, on the tensor's GPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def finish(operation: Operation, tensor: torch.Tensor, timeout: float | None = None) -> None:
    """Waits for an operation; if its tensors are on a GPU, as ``tensor`` is, the current stream does, and not the CPU."""
    operation.wait(timeout)
    if tensor.is_cuda:
        operation.hold_back(current_stream(tensor))


def received(operation: Operation, like: torch.Tensor, index: int = 0) -> torch.Tensor:
    """An output that the core allocated, of an operation that was awaited; ``like`` is one of its inputs."""
    return wrap_memory(like, *operation.allocated(index))


def listed(tensors: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of a group, which may come from a generator, as something that can be gone through again."""
    return tensors if isinstance(tensors, Sequence) else list(tensors)


def lent_buffer(tensor: torch.Tensor) -> Buffer:
    """``buffer_of`` for a tensor that nobody resizes before the result has come: a gradient during a backward pass.

    Makes a gradient's hook a fifth shorter, as every step brings new storages to pin.
    """
    check_supported(tensor)
    if tensor.is_cuda:
        return _cuda_buffer(tensor)
    address, storage = _memory(tensor)
    return Buffer(address, DTYPE_IDS[tensor.dtype], tensor.shape, owner=storage)


def check_tensors(tensors: Iterable[object]) -> None:
    """Raises InvalidArgumentError if one is no tensor."""
    for tensor in tensors:
        _check_tensor(tensor)


def _check_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"tensor: expected a torch.Tensor but found {type(tensor).__name__}.")


def check_supported(tensor: torch.Tensor) -> None:
    """Raises the error that names what about this tensor the core cannot take."""
    _check_tensor(tensor)
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"tensor of shape {tuple(tensor.shape)}: expected a dense tensor but found {tensor.layout}. "
            "Convert it with to_dense()."
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedError(
            f"tensor of shape {tuple(tensor.shape)}: expected memory of the CPU or a CUDA device but found device "
            f"{tensor.device}. Move it with cpu()."
        )
    if tensor.dtype not in DTYPE_IDS:
        raise InvalidArgumentError(
            f"tensor of shape {tuple(tensor.shape)}: expected a dtype among {', '.join(tables.DTYPES)} "
            f"but found {str(tensor.dtype).removeprefix('torch.')}. Convert it first."
        )


def pinned_storage(tensor: torch.Tensor) -> object:
    """An object that keeps the tensor's memory alive, after making sure that torch will not move it.

    A reference to the tensor alone does not protect it: ``resize_`` would free the old memory under the core's
    hands. Torch refuses to resize a storage that NumPy has seen, for as long as the storage lives; the view is made
    over the storage, because a 0-dimensional or bfloat16 tensor has no NumPy view of its own. 2 us the first time.
    """
    return _pinned(tensor.untyped_storage(), tensor)


def _pinned(storage: torch.UntypedStorage | None, tensor: torch.Tensor) -> object:
    """``pinned_storage`` of a tensor whose storage is at hand; None where it has none, and needs none, being empty."""
    if storage is not None and tensor.is_cpu and storage.resizable():
        return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return storage


def readable(tensor: torch.Tensor) -> Buffer:
    """The memory of any dense tensor for reading: its own, or a contiguous copy."""
    if (
        tensor.layout is torch.strided and tensor.is_cpu and torch._is_zerotensor(tensor)
    ):  # autograd's zeros, which have no memory
        tensor = tensor.clone()
    return own_memory(tensor) or _buffer(values_of(tensor))


def own_memory(tensor: torch.Tensor) -> Buffer | None:
    """The memory of a dense tensor itself, if it is contiguous; None if it is strided, or differs lazily from its memory."""
    check_supported(tensor)
    return _buffer(tensor) if holds_its_values(tensor) else None


def holds_its_values(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor's elements lie in memory row by row, as they are: not negated or conjugated when they are read."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor, contiguous and without history: its own memory, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient's history, for an operation in place; its memory will not move from now on."""
    check_supported(tensor)
    detached = tensor.detach()
    if detached.is_contiguous() and detached.is_cpu:
        _memory(detached)
    pinned_storage(detached)
    return detached


def writable_memory(tensor: torch.Tensor) -> Buffer | torch.Tensor:
    """``writable``; of a plain tensor on the host, as most are, its memory, which an operation takes as well."""
    if not _is_plain(tensor):
        return writable(tensor)
    address, storage = _memory(tensor)
    return Buffer(address, DTYPE_IDS[tensor.dtype], tensor.shape, owner=_pinned(storage, tensor))


def writable_memories(tensors: Sequence[torch.Tensor]) -> HostBuffers | list[torch.Tensor]:
    """The same of a group, where all are plain."""
    if not (tensors and all(map(_is_plain, tensors))):
        return [writable(tensor) for tensor in tensors]
    found = [_memory(tensor) for tensor in tensors]
    owners = [_pinned(storage, tensor) for (_, storage), tensor in zip(found, tensors, strict=True)]
    dtypes = [DTYPE_IDS[tensor.dtype] for tensor in tensors]
    return HostBuffers([address for address, _ in found], dtypes, [tensor.shape for tensor in tensors], owners)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_IDS
        and holds_its_values(tensor)
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def wrap_memory(like: torch.Tensor, memory: object, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory that speaks the buffer protocol or is a GPU's; ``tensor_memory.register_framework`` says more."""
    if isinstance(memory, CudaArray):
        return torch.from_dlpack(memory)
    if 0 in shape:  # torch takes no empty memory
        return torch.empty(shape, dtype=DTYPE_OF_ID[dtype])
    return torch.frombuffer(memory, dtype=DTYPE_OF_ID[dtype]).reshape(shape)


def _empty_on_device(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


register_framework(
    torch.Tensor, readable, wrap_memory, own_memory, current_stream, _empty_on_device, torch.Tensor.is_neg
)
