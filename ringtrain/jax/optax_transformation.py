"""Optax's optimizers on all ranks: their gradients are reduced before the update."""

from typing import TYPE_CHECKING

from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.operations import Compression
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.mode import Mode, checked_mode
from ringtrain._training.needs import check_needs
from ringtrain._training.optimizer_arguments import check_passes
from ringtrain.jax.accumulation import Accumulation
from ringtrain.jax.trees import Tree, allreduce_gradients
from ringtrain.jax.use import Use
from ringtrain.jax.watching import Watching

if TYPE_CHECKING:
    import optax


def DistributedGradientTransformation(
    transformation: "optax.GradientTransformation",
    op: int | None = None,
    name: str = "gradients",
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
    mode: Mode | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> "optax.GradientTransformationExtraArgs":
    """An optax transformation whose ``update`` gets the gradients of all ranks; needs optax.

    Example:
        >>> optimizer = hvd.DistributedGradientTransformation(optax.adamw(1e-3))
        >>> updates, state = optimizer.update(gradients, state, parameters)

    Args:
        transformation: any of optax's, such as ``optax.adamw(1e-3)`` or a chain.
        op: ``Average`` (default) or ``Sum``.
        name: what the names of the gradients' operations begin with.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.
        compression: how float32 and float64 travel between hosts.
        mode: ``Synchronous()``, which is the default.
        backward_passes_per_step: calls of ``update`` whose gradients are added up on each rank; only the sums travel, and the
            updates of all calls but the last are zeros. With ``optax.MultiSteps`` around the result each call's would travel.
        average_aggregated_gradients: divides the sums by ``backward_passes_per_step``.

    Returns:
        An ``optax.GradientTransformationExtraArgs`` with the state of the given one; with ``backward_passes_per_step`` that
        is ``inner`` of the state, beside ``sums``, which are this rank's own between two steps.

    Raises:
        InvalidArgumentError: what was given is no transformation of optax's; a wrong setting.
        MismatchError: by ``update``, in a program a ``jax.errors.JaxRuntimeError`` with its text, where ranks train apart.
            Compared are, in each update, numbers that optax.inject_hyperparams keeps in the state; and parameters, if ``update``
            gets them, else the state, after the first update and then once a second, or so seldom that it takes a thousandth of
            the time. ``Synchronous(replicas="differ")`` compares nothing; nor do updates under ``jax.vmap``.
        UnsupportedError: another mode, for which a transformation has no place.
    """
    try:
        import optax
    except ImportError as problem:
        raise ImportError("DistributedGradientTransformation needs optax. Run: pip install optax") from problem
    demand = "DistributedGradientTransformation: it must be given a transformation of optax, such as optax.adamw(1e-3)"
    check_kind(demand, transformation, optax.GradientTransformation)
    inner = optax.with_extra_args_support(transformation)

    mode = checked_mode(mode, "DistributedGradientTransformation")
    check_needs(mode.columns, {"jax": True}, "DistributedGradientTransformation")
    check_passes(backward_passes_per_step, "DistributedGradientTransformation")
    given = {
        "backward_passes_per_step": float(backward_passes_per_step),
        "average_aggregated_gradients": float(average_aggregated_gradients),
    }
    watching = Watching(name, process_set, given if backward_passes_per_step > 1 else {}) if mode.compares else None
    use = Use(name, process_set, compression)

    def init(params: object) -> object:
        use.expect()
        return inner.init(params)

    def update(
        updates: Tree, state: object, params: object = None, **extra: object
    ) -> tuple[Tree, object]:  # optax's names
        begin = use.note_update()

        def reduce() -> Tree:
            return allreduce_gradients(updates, op, begin, prescale_factor, postscale_factor, process_set, compression)

        reduced = reduce() if watching is None else watching.watched(params, state, reduce)
        return inner.update(reduced, state, params, **extra)

    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(init, update)
    accumulation = Accumulation(
        inner._replace(init=init), update, backward_passes_per_step, average_aggregated_gradients
    )
    return optax.GradientTransformationExtraArgs(accumulation.init, accumulation.update)
