"""The two packages that Lightning comes in: classes for each, as their base classes are not the same objects."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import NamedTuple

from ringtrain.errors import UnsupportedError
from ringtrain.lightning import cluster_environment, fabric, trainer

_PARTS = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}


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


_made: dict[str, Classes] = {}


def classes_for(package: str) -> Classes:
    """The strategies and the environment for Lightning's package of this name, registered there as "ringtrain".

    Example:
        >>> strategy, strategy_of_fabric, environment = classes_for("lightning")

    Args:
        package: ``"lightning"`` or ``"pytorch_lightning"``.
    """
    if package not in _made:
        _made[package] = _made_of(*(importlib.import_module(part) for part in _PARTS[package]))
    return _made[package]


def package_of_the_program() -> str:
    """The one that it has imported, or else one that is installed."""
    for package, parts in _PARTS.items():
        if any(part in sys.modules for part in parts):
            return package
    for package in _PARTS:
        if importlib.util.find_spec(package) is not None:
            return package
    raise UnsupportedError(
        "ringtrain.lightning: expected lightning or pytorch-lightning but found neither. Install one of them: pip install lightning"
    )


def _made_of(pytorch: ModuleType, parts: ModuleType) -> Classes:
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
