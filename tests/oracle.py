"""What each operation must give, in NumPy: a list with one input a rank goes in, a list with one output a rank comes out.

Sums are taken in rank order. 16-bit floats are added in float32 and rounded once, as ``native/kernels/reduce.h``
promises.
"""

import numpy as np

OF_BITS = {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor}


def allreduce(inputs, reduction="sum", prescale=1.0, postscale=1.0):
    """Every rank gets the same."""
    return [_reduce(inputs, reduction, prescale, postscale)] * len(inputs)


def reducescatter(inputs, reduction="sum", prescale=1.0, postscale=1.0):
    """Rank r gets its rows of the reduced tensor; the first ranks one more where they do not come out even."""
    reduced = _reduce(inputs, reduction, prescale, postscale)
    each, more = divmod(len(reduced), len(inputs))
    ends = np.cumsum([each + (rank < more) for rank in range(len(inputs))])
    return np.split(reduced, ends[:-1])


def allgather(inputs):
    """Every rank gets all rows in rank order."""
    return [np.concatenate(inputs)] * len(inputs)


def broadcast(inputs, root):
    """Every rank gets the root's tensor."""
    return [inputs[root]] * len(inputs)


def alltoall(inputs, splits):
    """Rank r gets piece r of every rank, in rank order; ``splits[from][to]`` counts rows."""
    pieces = [np.split(tensor, np.cumsum(rows)[:-1]) for tensor, rows in zip(inputs, splits, strict=True)]
    return [np.concatenate([sent[rank] for sent in pieces]) for rank in range(len(inputs))]


def barrier(inputs):
    """No data."""
    return [None] * len(inputs)


def _reduce(inputs, reduction, prescale, postscale):
    dtype = inputs[0].dtype
    if dtype == bool:
        combine = {"sum": np.logical_or, "max": np.logical_or, "product": np.logical_and, "min": np.logical_and}
        return _fold((combine | OF_BITS)[reduction], inputs)
    if reduction in OF_BITS:
        return _fold(OF_BITS[reduction], inputs)
    if dtype.kind == "c":  # by the parts: NumPy divides by a complex number
        parts = [np.ascontiguousarray(tensor).reshape(-1).view(f"f{dtype.itemsize // 2}") for tensor in inputs]
        return _reduce(parts, reduction, prescale, postscale).view(dtype).reshape(inputs[0].shape)
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    combine = {"product": np.multiply, "min": np.minimum, "max": np.maximum}.get(reduction, np.add)
    scaled = [_scale(tensor.astype(wide), prescale) for tensor in inputs]
    result = _fold(combine, [tensor * tensor for tensor in scaled] if reduction == "l2norm" else scaled)
    if reduction == "l2norm":
        result = np.sqrt(result)
    if reduction == "average":
        result = _truncated_average(result, len(inputs)) if wide.kind in "iu" else result / wide.type(len(inputs))
    return _scale(result, postscale).astype(dtype)


def _fold(combine, arrays):
    result = arrays[0]
    for array in arrays[1:]:
        result = combine(result, array)
    return result.copy()


def _scale(array, factor):
    if factor == 1.0:
        return array
    if array.dtype.kind in "iu":  # in double, toward zero, then wrapped to the dtype
        return np.trunc(array.astype(np.float64) * factor).astype(np.int64).astype(array.dtype)
    return array * array.dtype.type(factor)


def _truncated_average(total, count):
    quotient = np.abs(total.astype(object)) // count
    return (quotient * np.sign(total.astype(object))).astype(total.dtype)
