"""New values on their way into a model's parameters while its next forward pass runs: who reads one waits for it.

While any is under way, the ``_parameters`` of the model's modules are dicts that wait, so that ``module.weight``,
``parameters()``, ``state_dict()`` and copies have the new values, whichever module asks; and a hook before each module's
forward pass waits for those that it has, as an LSTM, which keeps references. A parameter that a module of the model keeps
elsewhere, and one that is in none, are not left under way: ``step()`` waits for them.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import torch

from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.gradients import OptimizedParameter

_Parameter: TypeAlias = torch.nn.Parameter | None  # as a module may register one
_Found = TypeVar("_Found")


class Arrivals:
    """The values under way of one optimizer.

    Args:
        model: whose modules wait; None for none.
    """

    def __init__(self, model: torch.nn.Module | None):
        self.model = model
        self._takes: dict[torch.Tensor, Callable[[], None]] = {}  # by parameter, in the order of the sending
        self._versions: dict[torch.Tensor, tuple[int, str]] = {}  # of each when its values were sent, and its name
        self._plain: list[tuple[torch.nn.Module, dict[str, _Parameter]]] = []
        self._lock = threading.RLock()
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def let_wait(self) -> set[torch.Tensor]:
        """Has modules wait for what is expected from now on; returns the parameters that they wait for."""
        if self.model is None or compiles():
            return set()
        awaited: set[torch.Tensor] = set()
        kept: set[torch.Tensor] = set()
        for module in self.model.modules():
            own = module.__dict__.get("_parameters")
            parameters = set(module.parameters(recurse=False))
            kept.update(set(_parameters_in(module.__dict__.values())) - parameters)
            if type(own) is not dict or isinstance(module, torch.jit.ScriptModule):
                kept.update(parameters)
            elif parameters:
                self._plain.append((module, own))
                module.__dict__["_parameters"] = AwaitedParameters(own, self)
                awaited.update(parameters)
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before_module)
        return awaited - kept

    def expect(self, members: Iterable[OptimizedParameter], take: Callable[[], None]) -> None:
        """From now on, who reads one of these calls ``take`` before, which waits and puts the values there."""
        for member in members:
            parameter = member.parameter
            torch.autograd.graph.increment_version(parameter)  # a graph that has saved it is of the values before
            self._takes[parameter] = take
            self._versions[parameter] = parameter._version, member.name

    def wait_for(self, parameter: object) -> None:
        """Takes the values of a parameter, if they are under way."""
        if not self._takes or not isinstance(parameter, torch.Tensor):
            return
        with self._lock:
            take = self._takes.get(parameter)
            if take is not None:
                arriving = [each for each, of in self._takes.items() if of is take]
                self._require_unwritten(arriving)
                take()  # if it fails, so does every use from now on
                for each in arriving:
                    del self._takes[each], self._versions[each]
                if not self._takes:
                    self._leave()

    def _require_unwritten(self, arriving: Iterable[torch.Tensor]) -> None:
        for parameter in arriving:
            version, name = self._versions[parameter]
            if parameter._version != version:
                # Told once: who catches it goes on with the new values.
                self._versions[parameter] = parameter._version, name
                raise InvalidArgumentError(
                    f"parameter '{name}': expected the values of the last step, which were still on their way, but found it written "
                    "meanwhile by a reference that was kept. Call optimizer.flush() before, or take it from the model."
                )

    def wait_for_all(self) -> None:
        """Takes everything that is under way."""
        while self._takes:
            self.wait_for(next(iter(self._takes)))
        self._leave()

    def give_up(self) -> None:
        """What is under way will not come, and nobody is to be told any more."""
        self._takes.clear()
        self._versions.clear()
        self._leave()

    def _before_module(self, module: torch.nn.Module, _: tuple) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # whose code does not ask
            self.wait_for_all()
        for each in module.parameters(recurse=False):
            self.wait_for(each)

    def _leave(self) -> None:
        with self._lock:
            for module, own in self._plain:
                awaited = module.__dict__.get("_parameters")
                if type(awaited) is AwaitedParameters:
                    own.clear()
                    own.update(dict.items(awaited))  # what was put there meanwhile
                    module.__dict__["_parameters"] = own
            self._plain = []
            if self._hook is not None:
                self._hook.remove()
                self._hook = None


class AwaitedParameters(dict[str, _Parameter]):
    """A module's parameters, by name: who fetches one waits for its values; who goes through them, for all."""

    def __init__(self, plain: dict[str, _Parameter], arrivals: Arrivals):
        super().__init__(plain)
        self.arrivals = arrivals

    def __getitem__(self, name: str) -> _Parameter:
        found = super().__getitem__(name)
        self.arrivals.wait_for(found)
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return dict, (self.copy(),)


def _waiting(of_dict: Callable[..., _Found]) -> Callable[..., _Found]:
    def method(awaited: AwaitedParameters, *args: object) -> _Found:
        for each in dict.values(awaited):
            awaited.arrivals.wait_for(each)
        return of_dict(awaited, *args)

    return method


for _name in ("__iter__", "__or__", "copy", "get", "items", "pop", "popitem", "setdefault", "values"):
    setattr(AwaitedParameters, _name, _waiting(getattr(dict, _name)))


def compiles() -> bool:
    """Whether something of this process was given to ``torch.compile``: what it compiles does not ask for tensors."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(callable(backend) for backend in list(dynamo.cached_backends.values()))


def _parameters_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those that a module keeps itself, or in a list or a dict."""
    for value in values:
        if type(value) in (list, tuple, dict):
            value = value.values() if type(value) is dict else value
            yield from (each for each in value if isinstance(each, torch.nn.Parameter))
        elif isinstance(value, torch.nn.Parameter):
            yield value
