"""The collective operations as primitives of JAX, and their rules: shapes, gradients, batches, and how they are compiled.

A program calls our library's handler (``library``), which submits to the core and completes a future of XLA's: no thread
waits, so operations that do not depend on each other are under way together, in any order on each rank. Outside of
programs a primitive performs the operation at once. There is one for an array, and one for several that are reduced
together, all or nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringtrain._binding import tables
from ringtrain._runtime import operations
from ringtrain._runtime.operations import Average
from ringtrain._training.adapter.adjoints import Takes, adjoint_of, factor, require_linear
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.jax import names
from ringtrain.jax.library import TARGET

_Tangent: TypeAlias = jax.Array | ad.Zero


class RequestAttributes(NamedTuple):
    """What a program says of an operation, beside the array.

    XLA runs small programs one instruction after the other, in an order that follows from the program. So programs must
    be alike on all ranks: what differs between these stands in attributes of the call, and not in instructions beside it.

    Attributes:
        operation: name of a row of ``tables.OPERATIONS``.
        name: identity among the ranks; None outside of programs, where the core numbers operations.
        slot: of the context.
        process_set_id: the ranks that take part.
        members: how many these are.
        place: of this rank among them; -1 for another rank, whose submission the core refuses.
        is_root: whether this rank is the root, where the operation has one.
        reduction: row of ``tables.REDUCTIONS``.
        prescale: factor on each contribution.
        postscale: factor on the result.
        compression: name of a row of ``tables.COMPRESSIONS``.
        root: global rank.
        rows: of an allgather, those of all members together; None where all give as many.
        keeps: False where the result is zeros on this rank.
    """

    operation: str
    name: str | None
    slot: int
    process_set_id: int
    members: int
    place: int
    is_root: bool = False
    reduction: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = operations.Compression.none
    root: int = -1
    rows: int | None = None
    keeps: bool = True

    def __str__(self) -> str:
        return f"{self.operation} '{self.name or 'unnamed'}'"

    def named(self, suffix: str) -> "RequestAttributes":
        """The same under a name that follows from this one."""
        return self._replace(name=self.name and self.name + suffix)

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result for an array of this shape. Raises InvalidArgumentError where there is none."""
        layout = tables.OPERATIONS[self.operation].layout
        if layout == "kWhole":
            return shape
        _require_rows(len(shape), self)
        rows, *rest = shape
        if layout == "kGather":
            return (rows * self.members if self.rows is None else self.rows, *rest)
        if layout != "kExchange":  # a share of the rows
            return (self._end_of_share(rows, self.place) - self._end_of_share(rows, self.place - 1), *rest)
        if rows % self.members:
            raise InvalidArgumentError(
                f"{self}: in a program the rows must be as many for each of the {self.members} ranks, but there are {rows}. "
                "Pad them."
            )
        return shape

    def arguments(self) -> dict[str, object]:
        """What the function of ``ringtrain._runtime.operations`` takes beside the array; the process set is this call itself."""
        taken: dict[str, object] = {"name": self.name, "process_set": self}
        row = tables.OPERATIONS[self.operation]
        if row.reduces:
            taken |= {"op": self.reduction, "prescale_factor": self.prescale, "postscale_factor": self.postscale}
            taken |= {"compression": self.compression}
        return taken | ({"root_rank": self.root} if row.rooted else {})

    def attributes(self) -> dict[str, str | np.generic | None]:
        """What the handler reads, by name and type (native/jax/collective.cc)."""
        return {
            "name": self.name,
            "slot": np.int64(self.slot),
            "operation": np.int32(tables.OPERATIONS[self.operation].id),
            "process_set": np.int32(self.process_set_id),
            "reduction": np.int32(self.reduction),
            "prescale": np.float64(self.prescale),
            "postscale": np.float64(self.postscale),
            "compression": np.int32(tables.COMPRESSIONS[self.compression]),
            "root": np.int32(self.root),
            "keeps": np.int32(self.keeps),
        }

    def _end_of_share(self, rows: int, place: int) -> int:
        """The row behind a member's share of an operation that scatters: the first members have one more."""
        return (place + 1) * (rows // self.members) + min(place + 1, rows % self.members)


def collective(array: jax.Array, call: RequestAttributes) -> jax.Array:
    """The result of an operation: part of a program while one is traced, and at once otherwise."""
    return _primitive.bind(array, call=call)


def together(arrays: Sequence[jax.Array], call: RequestAttributes) -> list[jax.Array]:
    """The results of an allreduce of several arrays, as one operation; likewise."""
    return _group.bind(*arrays, call=call)


def in_reach(array: jax.Array) -> jax.Array | np.ndarray:
    """The array as ``ringtrain._runtime.operations`` takes it: from the host's memory as NumPy's, whose results JAX takes silently."""
    is_on_host = not hasattr(array, "devices") or all(device.platform == "cpu" for device in array.devices())
    return np.asarray(array) if is_on_host else array


def _perform(array: jax.Array, *, call: RequestAttributes) -> jax.Array:
    result = jnp.asarray(getattr(operations, call.operation)(in_reach(array), **call.arguments()))
    return result if call.keeps else jnp.zeros_like(result)


def _shape(array: ShapedArray, *, call: RequestAttributes) -> ShapedArray:
    if str(array.dtype) not in tables.DTYPES:
        raise UnsupportedError(
            f"{call}: expected a dtype of {', '.join(tables.DTYPES)} but found {array.dtype}. Cast it first."
        )
    return array.update(shape=call.result_shape(array.shape), weak_type=False)


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[_Tangent], *, call: RequestAttributes
) -> tuple[jax.Array, _Tangent]:
    (array,), (tangent,) = primals, tangents
    result = collective(array, call)
    return result, _tangent(result, tangent, call)


def _tangent(result: jax.Array, tangent: _Tangent, call: RequestAttributes) -> _Tangent:
    if type(tangent) is ad.Zero:
        return ad.Zero.from_primal_value(result)
    if tables.OPERATIONS[call.operation].reduces:
        require_linear(str(call), call.reduction, "Use jax.lax.stop_gradient")
    return collective(tangent, call.named(".tangent"))


def _transpose(gradient: _Tangent, array: ad.UndefinedPrimal, *, call: RequestAttributes) -> list[_Tangent]:
    """The gradient on its way back; ``ringtrain._training.adapter.adjoints`` says which, for every adapter."""
    if type(gradient) is ad.Zero:
        return [ad.Zero(array.aval)]
    adjoint = adjoint_of(call.operation)
    carrier = call.named(".gradient")._replace(operation=adjoint.carrier)
    if adjoint.averages:
        carrier = carrier._replace(reduction=Average, prescale=1.0, postscale=1.0)
    if adjoint.scales:
        carrier = carrier._replace(rows=array.aval.shape[0])
        gradient = gradient * factor(call.reduction, call.prescale, call.postscale, call.members)
    if adjoint.takes is Takes.OWN_ROWS:  # these alone are sent back
        carrier = carrier._replace(operation=_scattering_to(call.operation))
    if adjoint.takes is Takes.ROOTS:
        carrier = carrier._replace(keeps=call.is_root)
    return [collective(gradient, carrier)]


def _scattering_to(operation: str) -> str:
    """The operation that reduces and leaves each rank the rows that it gave to this one."""
    return next(row.name for row in tables.OPERATIONS.values() if row.reduces and row.adjoint == operation)


def _require_rows(dimensions: int, call: RequestAttributes) -> None:
    if not dimensions:
        raise InvalidArgumentError(f"{call}: expected an array with at least one dimension but found a scalar.")


def _batch(arrays: Sequence[jax.Array], dimensions: Sequence[int], *, call: RequestAttributes) -> tuple[jax.Array, int]:
    """The whole batch as one operation; where rows are exchanged, these stay the first dimension."""
    (array,), (dimension,) = arrays, dimensions
    if tables.OPERATIONS[call.operation].layout == "kWhole":
        return collective(array, call), dimension
    _require_rows(array.ndim - 1, call)
    return collective(jnp.moveaxis(array, dimension, 1), call), 1


# ---- of several arrays ----


def _perform_together(*arrays: jax.Array, call: RequestAttributes) -> list[jax.Array]:
    results = getattr(operations, f"grouped_{call.operation}")([in_reach(each) for each in arrays], **call.arguments())
    return [jnp.asarray(each) for each in results]


def _shapes(*arrays: ShapedArray, call: RequestAttributes) -> list[ShapedArray]:
    return [_shape(each, call=call) for each in arrays]


def _differentiate_each(
    primals: Sequence[jax.Array], tangents: Sequence[_Tangent], *, call: RequestAttributes
) -> tuple[list[jax.Array], list[_Tangent]]:
    """Tangents travel one by one: of many there are none."""
    results = together(primals, call)
    each = [call.named(f".{place}") for place in range(len(results))]
    return results, list(map(_tangent, results, tangents, each))


def _batch_each(
    arrays: Sequence[jax.Array], dimensions: Sequence[int], *, call: RequestAttributes
) -> tuple[list[jax.Array], Sequence[int]]:
    return together(arrays, call), dimensions


# ---- how they are compiled ----


def _compile(
    context: mlir.LoweringRuleContext, *arrays: mlir.ir.Value, call: RequestAttributes
) -> Sequence[mlir.ir.Value]:
    if call.name is not None:
        call = call._replace(name=names.claim_in_program(context.module_context.keepalives, call.name))
    return jax.ffi.ffi_lowering(TARGET, has_side_effect=True)(context, *arrays, **call.attributes())


def _refuse(context: mlir.LoweringRuleContext, *_arrays: mlir.ir.Value, call: RequestAttributes) -> NoReturn:
    platforms = ", ".join(context.module_context.platforms)
    raise UnsupportedError(
        f"{call}: programs of JAX must be compiled for cpu, but this one is for {platforms}. Set JAX_PLATFORMS=cpu, or "
        "call the operation outside of jax.jit."
    )


_primitive = Primitive("ringtrain")
_primitive.def_impl(_perform)
_primitive.def_abstract_eval(_shape)
ad.primitive_jvps[_primitive] = _differentiate
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
_group = Primitive("ringtrain_group")
_group.multiple_results = True
_group.def_impl(_perform_together)
_group.def_abstract_eval(_shapes)
ad.primitive_jvps[_group] = _differentiate_each
batching.primitive_batchers[_group] = _batch_each
for _each in (_primitive, _group):
    mlir.register_lowering(_each, _refuse)
    mlir.register_lowering(_each, _compile, platform="cpu", cacheable=False)  # each time under a name of its own
