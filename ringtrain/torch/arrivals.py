"""New values on their way into tensors: whoever uses such a tensor waits for its values, and for no others.

For parameters that other ranks update while this one goes on (``ahead``). A mode of torch's functions looks at what each
function is given, by storage, so that views and detached tensors count too: modules, functions, ``state_dict``, a norm
that is logged. It belongs to the thread that steps; a hook before each module covers other threads, and TorchScript,
whose functions torch does not show. Both are there only while something is under way.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_Take = Callable[[], None]

_TENSOR = torch.Tensor
# What does not look at elements. A gradient is a tensor of its own.
_HARMLESS = {
    getattr(getattr(_TENSOR, name), way)
    for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
                 "is_sparse", "is_meta", "is_mkldnn", "is_quantized", "is_nested", "ndim", "_version", "_base", "itemsize",
                 "nbytes", "names", "output_nr", "is_mps", "is_xla", "is_xpu")
    for way in ("__get__", "__set__", "__delete__")
    if hasattr(_TENSOR, name)
} | {
    getattr(_TENSOR, name)
    for name in ("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous",
                 "is_floating_point", "is_complex", "element_size", "requires_grad_", "register_hook",
                 "register_post_accumulate_grad_hook", "get_device", "__hash__", "__len__")
    if hasattr(_TENSOR, name)
}  # fmt: skip
# What may use a graph that was recorded before the values were under way.
_USES_GRAPHS = {torch.Tensor.backward, torch.autograd.grad}


class Arrivals(TorchFunctionMode):
    """The values under way of one owner."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[int, list[_Take]] = {}  # by storage
        self._takes: list[_Take] = []  # in the order of the sending
        self._lock = threading.RLock()
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    # ---- what comes ----

    def expect(self, tensors: Iterable[torch.Tensor], take: _Take) -> None:
        """From now on, whoever uses one of these tensors calls ``take`` before; it waits, and puts the values there."""
        with self._lock:
            if not self._takes:
                self._watch()
            self._takes.append(take)
            for storage in {tensor.untyped_storage()._cdata for tensor in tensors}:
                self._under_way.setdefault(storage, []).append(take)

    def wait_for_all(self) -> None:
        """Takes everything that is under way."""
        while self._takes:
            self._take(self._takes[0])

    def watch_no_more(self) -> None:
        """Takes everything; nobody looks at torch's functions then."""
        self.wait_for_all()
        self._leave()

    def give_up(self) -> None:
        """What is under way will not come, and nobody is to be told any more."""
        with self._lock:
            self._takes.clear()
            self._under_way.clear()
        self._leave()

    def _take(self, take: _Take) -> None:
        with self._lock:
            if take not in self._takes:
                return  # another thread has
            with torch._C.DisableTorchFunction():
                take()  # if it fails, so does every use from now on
            self._takes.remove(take)
            for storage in [each for each, takes in self._under_way.items() if take in takes]:
                self._under_way[storage].remove(take)
                if not self._under_way[storage]:
                    del self._under_way[storage]

    # ---- who asks ----

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._takes and func not in _HARMLESS:
            if func in _USES_GRAPHS:
                self.wait_for_all()
            else:
                self._look_at(args)
                if kwargs:
                    self._look_at(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look_at(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._wait_for(value)
            elif isinstance(value, (list, tuple)):
                self._look_at(value)
            elif isinstance(value, dict):
                self._look_at(value.values())

    def _wait_for(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return
        try:
            storage = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):  # torch.func has wrapped it
            self.wait_for_all()
            return
        for take in list(self._under_way.get(storage, ())):
            self._take(take)

    def _before_module(self, module: torch.nn.Module) -> None:
        if not self._takes:
            self._leave()
        elif _hides_its_functions(module):
            self.wait_for_all()
        else:
            self._look_at([each for each in module._parameters.values() if each is not None])

    # ---- being there ----

    def _watch(self) -> None:
        """Puts the mode below all others: those of the user come and go above it."""
        if self not in torch.overrides._get_current_function_mode_stack():
            above = [torch.overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
            if above and above[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
                # torch.set_default_device() wants its own at the very bottom.
                torch.overrides._push_mode(above.pop())
            for mode in (self, *reversed(above)):
                torch.overrides._push_mode(mode)
        if self._hook is None:
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(_calls(weakref.ref(self)))

    def _leave(self) -> None:
        """Takes the mode away, if it is not at work: then torch would put it back."""
        stack = torch.overrides._get_current_function_mode_stack()
        if self in stack:
            for _ in stack:
                torch.overrides._pop_mode()
            for mode in stack:
                if mode is not self:
                    torch.overrides._push_mode(mode)
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()


def compiles() -> bool:
    """Whether something of this process was given to ``torch.compile``: what it compiles does not ask for tensors."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(callable(backend) for backend in list(dynamo.cached_backends.values()))


def _hides_its_functions(module: torch.nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    hiding = (torch.jit.ScriptModule, torch.nn.DataParallel)
    return isinstance(module, hiding) or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def _calls(reference: "weakref.ref[Arrivals]") -> Callable[[torch.nn.Module, Any], None]:
    def hook(module: torch.nn.Module, _: Any) -> None:
        arrivals = reference()
        if arrivals is not None:
            arrivals._before_module(module)

    return hook
