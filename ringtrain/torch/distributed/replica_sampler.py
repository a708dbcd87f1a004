"""``ReplicaSampler``: deals what an epoch has left over all processes of all replicas."""

import torch.distributed as dist

from ringtrain.errors import InvalidArgumentError, NotInitializedError
from ringtrain.torch.elastic.sampler import DrawListener, ElasticSampler


class ReplicaSampler(ElasticSampler):
    """This process's indices of what is left of an epoch, in a training whose model is dealt over the processes of a replica.

    For ``ShardedGuard``, which says how many replicas there are; until then they are dealt over the processes of this one.
    Arguments and promises are those of ``ElasticSampler``.

    Raises:
        NotInitializedError: before ``init_process_group``.
    """

    def follow(self, follower: DrawListener) -> None:
        """Counts by itself from now on. Raises InvalidArgumentError if it does so for another guard."""
        if self._follower is not None:
            raise InvalidArgumentError(
                "ShardedGuard: expected one guard but found another one with this sampler. Make one ShardedGuard, and use that."
            )
        super().follow(follower)

    def deal(self, size: int, place: int) -> None:
        """Deals the next window to so many replicas, of which this is the one at that place."""
        processes, process = self._replica()
        super().deal(size * processes, place * processes + process)

    def finish_window(self, contributors: set[int] | None) -> None:
        """What was taken since the last call is processed, but for what was drawn in replicas that are no contributors."""
        processes, _ = self._replica()
        places = (
            None if contributors is None else {each * processes + k for each in contributors for k in range(processes)}
        )
        super().finish_window(places)

    def _dealt_to(self) -> tuple[int, int]:
        return self._replica()

    @staticmethod
    def _replica() -> tuple[int, int]:
        """The processes of this replica, and the place of this one."""
        if not dist.is_initialized():
            raise NotInitializedError(
                "ReplicaSampler: torch.distributed.init_process_group must be called before, since samples are dealt to the processes "
                "of its default group, but was not. Make the sampler behind it."
            )
        return dist.get_world_size(), dist.get_rank()
