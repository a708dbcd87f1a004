"""What is checked with other libraries' arrays on the first GPU, in a world of one. These have not run: no GPU was at hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ringtrain as rt

ELEMENTS = 100003


def cupys_are_right() -> bool:
    """Values that a stream of CuPy's writes behind other work; the results are CuPy's, bfloat16 aside."""
    import cupy

    right = True
    with cupy.cuda.Stream(non_blocking=True):
        for dtype in ("float32", "float16", "int64"):
            work = cupy.ones((4096, 4096), "float32")
            for _ in range(20):
                work = work @ work / 4096
            given = cupy.full(ELEMENTS, 3, dtype) * work[0, 0].astype(dtype)
            found = rt.allreduce(given, f"cupy.{dtype}", rt.Sum)
            right = right and isinstance(found, cupy.ndarray) and bool((found == 3).all())
    return right


def jaxs_are_right() -> bool:
    """Results are JAX's, of the same device and dtype, bfloat16 too."""
    import jax
    import jax.numpy as jnp

    right = True
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        given = jnp.full(ELEMENTS, 3, dtype)
        found = rt.allreduce(given, f"jax.{jnp.dtype(dtype).name}", rt.Sum)
        right = (
            right and isinstance(found, jax.Array) and found.devices() == given.devices() and bool((found == 3).all())
        )
    return right


def numbas_are_right() -> bool:
    """A device array, in place."""
    from numba import cuda

    array = cuda.to_device(np.full(ELEMENTS, 3, "float32"))
    rt.allreduce_(array, "numba", rt.Sum)
    return bool((array.copy_to_host() == 3).all())


CHECKS: dict[str, Callable[[], bool]] = {"cupy": cupys_are_right, "jax": jaxs_are_right, "numba": numbas_are_right}
