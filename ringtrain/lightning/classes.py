"""Classes for one of the two packages that Lightning comes in, whose base classes are not the same objects."""

from types import ModuleType
from typing import NamedTuple

from ringtrain.lightning import cluster_environment, fabric, trainer


class Classes(NamedTuple):
    """What a program uses.

    Attributes:
        strategy: for ``Trainer``.
        fabric_strategy: for ``Fabric``.
        environment: of ranks that ringtrainrun or an MPI has started; both strategies find it by themselves.
    """

    strategy: type
    fabric_strategy: type
    environment: type


def made(pytorch: ModuleType, parts: ModuleType) -> Classes:
    """Makes them, and registers the strategies under the name "ringtrain".

    Args:
        pytorch: ``lightning.pytorch`` or ``pytorch_lightning``.
        parts: ``lightning.fabric`` or ``lightning_fabric``.
    """
    place = type(
        "RingtrainEnvironment", (cluster_environment.ClusterPlace, parts.plugins.environments.ClusterEnvironment), {}
    )
    strategy = type(
        "RingtrainStrategy", (trainer.TrainerOptimizers, pytorch.strategies.DDPStrategy), {"environment": place}
    )
    of_fabric = type("FabricStrategy", (fabric.FabricOptimizers, parts.strategies.DDPStrategy), {"environment": place})
    for each, registry in (
        (strategy, pytorch.strategies.StrategyRegistry),
        (of_fabric, parts.strategies.STRATEGY_REGISTRY),
    ):
        registry.register("ringtrain", each, description="ringtrain's optimizers", override=True)
    return Classes(strategy, of_fabric, place)
