"""``ringtrain bench step``: the gradients of a model, submitted as backward passes make them, against one operation.

All parameter-shaped tensors are submitted asynchronously in reverse order and then waited for; the floor is one
allreduce of as many bytes. Each fusion threshold gets a world of its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import ranks, report
from ringtrain.bench.models import MODELS
from ringtrain.bench.sizes import bytes_text

WARM_UP = 3


def run(model: str, fusion_bytes: Sequence[int | None], repetitions: int | None, json: str | None) -> bool:
    """Runs the benchmark on this rank; returns whether every sum was right. None stands for the default threshold."""
    shapes = MODELS[model]()
    results = [_measure(model, shapes, threshold, repetitions or 15) for threshold in fusion_bytes]
    total = bytes_text(results[0]["bytes"])
    report.say(f"{model}: {len(shapes)} tensors of together {total}, float32, sum, {ranks.size()} ranks")
    rows = [
        [
            result["fusion_text"],
            report.seconds_text(result["seconds_median"]),
            report.seconds_text(result["one_operation_seconds_median"]),
            f"{result['ratio_to_one_operation']:.2f}",
            "right" if result["verified"] else "WRONG",
        ]
        for result in results
    ]
    report.print_table(["fusion threshold", "all tensors", "one operation", "ratio", "result"], rows)
    report.write_json(json, results, model=model)
    return all(result["verified"] for result in results)


def _measure(model: str, shapes: Sequence[tuple[int, ...]], threshold: int | None, repetitions: int) -> dict[str, Any]:
    rt.init(**({} if threshold is None else {"fusion_threshold_bytes": threshold}))
    sources = [_values(shape, index) for index, shape in enumerate(shapes)]
    gradients = [source.copy() for source in sources]
    whole_source = np.concatenate([source.ravel() for source in sources])
    whole = whole_source.copy()

    def refill() -> None:
        for gradient, source in zip(gradients, sources, strict=True):
            np.copyto(gradient, source)
        np.copyto(whole, whole_source)

    variants = (lambda: _reduce_all(gradients), lambda: rt.allreduce_(whole, name="bench.whole", op=rt.Sum))
    seconds = _time_in_turn(variants, refill, repetitions)
    verified = ranks.all_true(_is_sum(whole, whole_source) and all(map(_is_sum, gradients, sources)))
    rt.shutdown()
    step, one = (float(np.median(times)) for times in seconds)
    return {
        "system": "ringtrain",
        "op": "step",
        "model": model,
        "bytes": whole.nbytes,
        "np": ranks.size(),
        "fusion_threshold_bytes": threshold,
        "fusion_text": "default" if threshold is None else bytes_text(threshold),
        "seconds_median": step,
        "seconds_min": float(seconds[0].min()),
        "one_operation_seconds_median": one,
        "ratio_to_one_operation": step / one,
        "repetitions": repetitions,
        "verified": verified,
    }


def _values(shape: tuple[int, ...], index: int) -> np.ndarray:
    """Small integers that differ between tensors and ranks; float32 holds their sums exactly."""
    count = int(np.prod(shape))
    return ((np.arange(count, dtype=np.int32) + index) % 61 + ranks.rank()).astype(np.float32).reshape(shape)


def _is_sum(result: np.ndarray, source: np.ndarray) -> bool:
    others = sum(range(ranks.size())) - ranks.size() * ranks.rank()  # each rank's values are shifted by its rank
    return bool(np.array_equal(result, source * ranks.size() + others))


def _reduce_all(gradients: Sequence[np.ndarray]) -> None:
    last = len(gradients) - 1
    handles = [
        rt.allreduce_async_(gradient, name=f"bench.{last - index}", op=rt.Sum)
        for index, gradient in enumerate(reversed(gradients))
    ]
    for handle in handles:
        rt.synchronize(handle)


def _time_in_turn(
    variants: Sequence[Callable[[], object]], refill: Callable[[], None], repetitions: int
) -> list[np.ndarray]:
    """Times of each variant, of the slowest rank, repetition by repetition."""
    seconds: list[list[float]] = [[] for _ in variants]
    for repetition in range(WARM_UP + repetitions):
        refill()
        for variant, times in zip(variants, seconds, strict=True):
            ranks.wait_for_all()
            start = time.perf_counter()
            variant()
            taken = time.perf_counter() - start
            if repetition >= WARM_UP:
                times.append(taken)
    return [ranks.slowest(times) for times in seconds]
