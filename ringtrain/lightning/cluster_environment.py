"""Where a rank is, for Lightning: what ringtrain's launcher, an MPI's or Slurm's have told, and nobody else."""

from typing import TYPE_CHECKING, Any

import torch

from ringtrain._binding import options
from ringtrain._bootstrap.start import init
from ringtrain._rendezvous import launcher
from ringtrain._runtime import context as contexts
from ringtrain._training.adapter.basics import cross_rank, is_initialized, local_rank, local_size, rank, size
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.distributed.init_method import find_address, told_address

_BY_DEFAULT = 1  # what Trainer makes of devices="auto" on a CPU


class ClusterPlace:
    """Of ranks that were started from outside. The first question opens the world.

    Example:
        >>> strategy = RingtrainStrategy(cluster_environment=RingtrainEnvironment())  # as it is without the argument
    """

    creates_processes_externally = True
    _address: tuple[str, int] | None = None

    @staticmethod
    def detect() -> bool:
        """Whether ringtrainrun, an MPI's launcher or srun has started this process."""
        return launcher.has_started_this(options.environment())

    @property
    def main_address(self) -> str:
        """Where torch's store is: the host of rank 0."""
        return self._store()[0]

    @property
    def main_port(self) -> int:
        """A port that was free there."""
        return self._store()[1]

    def world_size(self) -> int:
        """The number of ranks."""
        _open()
        return size()

    def global_rank(self) -> int:
        """This one's."""
        _open()
        return rank()

    def local_rank(self) -> int:
        """On its host."""
        _open()
        return local_rank()

    def node_rank(self) -> int:
        """Its host's."""
        _open()
        return cross_rank()

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing, as above."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises InvalidArgumentError for another number of devices than the launcher has started ranks on this host."""
        _open()
        if num_devices not in (_BY_DEFAULT, local_size()) or num_nodes not in (1, size() // local_size()):
            raise InvalidArgumentError(
                f"Trainer: devices and num_nodes must be those that the launcher has started, {local_size()} on each of "
                f"{size() // local_size()} hosts, but are {num_devices} and {num_nodes}. Leave both out."
            )

    def teardown(self) -> None:
        """Nothing: the world lives as long as the process."""

    def _store(self) -> tuple[str, int]:
        if self._address is None:
            self._address = told_address() or self._found_address()
        return self._address

    @staticmethod
    def _found_address() -> tuple[str, int]:
        _open()
        return find_address(contexts.current())


def _open() -> None:
    if launcher.is_elastic(options.environment()):
        raise UnsupportedError(
            "ringtrain.lightning: expected a job of a fixed size but found an elastic one, which Trainer and Fabric cannot "
            "go on with. Leave --elastic (or RINGTRAIN_AUTHORITY) out, or write the loop with hvd.elastic.State."
        )
    if not is_initialized():
        init()


if TYPE_CHECKING:  # a strategy of Lightning's comes behind it
    _Strategy: Any
else:
    _Strategy = object


class Placed(_Strategy):
    """A strategy whose ranks are where ringtrain finds them, if a launcher has started them, and else where Lightning does.

    Attributes:
        environment: a ``ClusterPlace`` for Lightning.
    """

    environment: Any

    @property
    def cluster_environment(self) -> Any:
        """Where this rank is."""
        return self._place

    @cluster_environment.setter
    def cluster_environment(self, given: Any) -> None:
        is_launched = self.environment.detect() and not isinstance(given, self.environment)
        self._place = self.environment() if is_launched else given

    @property
    def root_device(self) -> torch.device:
        """Of this rank; with one device for all, as on a CPU, that."""
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """For the sampler that Lightning puts in."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}
