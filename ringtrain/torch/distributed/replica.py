"""A replica of a sharded model: the processes that hold one copy of it together, of which one alone is a rank of the job.

Under ``ringtrainrun ... torchrun --nproc-per-node 4 train.py`` each of ringtrain's slots is a replica of four processes, whose
default group is torchrun's. Its first process leads it: it speaks with the other replicas. What they decide, such as that
samples are dealt anew, the leader has all processes of its replica do. So a replica contributes as a whole, dies as a whole,
and joins as a whole, and the core's rules for ranks hold for replicas.
"""

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringtrain.errors import PeerLostError

Result = TypeVar("Result")
_RETURN, _RAISE = "return", "raise"
_LEADER = 0
_LENGTH, _SHORT = 8, 504  # bytes of a message's length, and of what goes with it; the rest follows


class Replica:
    """This process in its replica.

    Args:
        deeds: what the leader may have each process do, by name; the same on all.
        is_alone: whether there is no other one, so that no process needs to be told anything.

    Attributes:
        deeds, is_alone: as given.
        place: of this process among those of its replica.
        size: how many they are.
        leads: whether this process is a rank of the job.
        look: finds ``among``; for the leader.
        among: the number of this replica, and how many there are, when the leader has spoken last.
    """

    def __init__(self, deeds: Mapping[str, Callable[..., object]], is_alone: bool) -> None:
        self.place, self.size = dist.get_rank(), dist.get_world_size()
        self.leads = self.place == _LEADER
        self.deeds = dict(deeds)
        self.is_alone = is_alone
        self.look: Callable[[], tuple[int, int]] = lambda: (0, 1)
        self.among = (0, 1)
        self._device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # of messages
        self._to_tell: list[tuple[str, tuple]] = []  # the leader has done them, the others will with the next message

    def together(self, decide: Callable[[], Result]) -> Result:
        """What a function returns that the leader alone calls; all processes call this, and the others do what it tells them.

        Args:
            decide: speaks with other replicas. Its result must pickle. What it raises, all raise.
        """
        if self.is_alone:
            return decide()
        if not self.leads:
            return self._follow()
        try:
            result = decide()
        except BaseException as problem:
            with suppress(Exception):  # of the two problems, the first
                self._say(_RAISE, problem)
            raise
        self.among = self.look()
        self._say(_RETURN, result)
        return result

    def tell(self, deed: str, *given: object) -> None:
        """Has each process of the replica do something by itself, the others with the next message; for ``decide``."""
        self.deeds[deed](*given)
        if not self.is_alone:
            self._to_tell.append((deed, given))

    def have_done(self, deed: str, *given: object) -> None:
        """Has all processes do something now, in which they may wait for each other; for ``decide``."""
        self._to_tell.append((deed, given))
        self._say()
        self.deeds[deed](*given)

    def of(self, place: int, make: Callable[[], object]) -> Any:
        """For the leader what a process makes, for that one None; the two call it."""
        if place == _LEADER:
            return make()
        if not self.leads:
            dist.send_object_list([make()], _LEADER)
            return None
        found: list[Any] = [None]
        dist.recv_object_list(found, place)
        return found[0]

    def hand(self, place: int, value: object) -> Any:
        """What the leader gives to a process; the two call it."""
        if place == _LEADER:
            return value
        found = [value]
        if self.leads:
            dist.send_object_list(found, place)
        else:
            dist.recv_object_list(found, _LEADER)
        return found[0]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The flat tensors of all processes behind each other, which have one size; on others than the leader nothing."""
        whole = values.new_empty(len(values) * self.size if self.leads else 0)
        dist.gather(values, list(whole.chunk(self.size)) if self.leads else None, _LEADER)
        return whole

    def scatter(self, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """What the leader has for each process, behind each other: to each its own, which has the size of ``like``."""
        taken = torch.empty_like(like)
        dist.scatter(taken, None if whole is None else list(whole.chunk(self.size)), _LEADER)
        return taken

    def _follow(self) -> Any:
        while True:
            deeds, ending, value, self.among = self._hear()
            for deed, given in deeds:
                self.deeds[deed](*given)
            if ending == _RETURN:
                return value
            if ending == _RAISE:
                raise value

    def _say(self, ending: str = "", value: object = None) -> None:
        said = pickle.dumps((self._to_tell, ending, value, self.among))
        self._to_tell = []
        self._broadcast((len(said).to_bytes(_LENGTH, "little") + said[:_SHORT]).ljust(_LENGTH + _SHORT))
        if len(said) > _SHORT:
            self._broadcast(said)

    def _hear(self) -> Any:
        try:
            message = self._broadcast(bytes(_LENGTH + _SHORT))
            length = int.from_bytes(message[:_LENGTH], "little")
            said = message[_LENGTH:] if length <= _SHORT else self._broadcast(bytes(length))
        except RuntimeError as problem:  # the group's, in words of its backend
            raise PeerLostError(
                f"ShardedGuard: process 0 must tell process {self.place} of its replica what to do, but has ended. Look for its own last "
                "words. The whole replica ends, and may come back."
            ) from problem
        return pickle.loads(said[:length])

    def _broadcast(self, message: bytes) -> bytes:
        """What the leader has, of as many bytes as on all."""
        carrier = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        dist.broadcast(carrier, _LEADER)
        return carrier.cpu().numpy().tobytes()
