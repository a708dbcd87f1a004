"""``python -m benchmarks step``: the gradients of a model, submitted as backward passes make them, against one operation.

All parameter-shaped tensors are submitted asynchronously in reverse order and then waited for; and they are sent as one
group. The floor is one allreduce of as many bytes. All lie on pages of one size: NumPy asks for huge ones where an array
has 4 MB or more, by which a sum of one array of 100 MB is a fifth faster than that of the tensors of a model, whatever
adds them up. Each fusion threshold gets a world of its own.
"""

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from benchmarks.models import MODELS
from ringtrain.bench import ranks, report
from ringtrain.bench.command import bytes_text
from ringtrain.bench.turns import time_in_turn, time_of


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
            f"{result['ratio_to_one_operation']:.2f}",
            report.seconds_text(result["group_seconds_median"]),
            f"{result['group_ratio_to_one_operation']:.2f}",
            report.seconds_text(result["one_operation_seconds_median"]),
            report.verdict(result),
        ]
        for result in results
    ]
    report.print_table(
        ["fusion threshold", "one by one", "ratio", "one group", "ratio", "one operation", "result"], rows
    )
    report.write_json(json, results, model=model)
    return all(result["verified"] for result in results)


def _measure(model: str, shapes: Sequence[tuple[int, ...]], threshold: int | None, repetitions: int) -> dict[str, Any]:
    rt.init(fusion_threshold_bytes=threshold)  # None: the default
    sources = [_values(shape, index) for index, shape in enumerate(shapes)]
    gradients = _on_ordinary_pages(sources)
    whole_source = np.concatenate([source.ravel() for source in sources])
    (whole,) = _on_ordinary_pages([whole_source])

    def turn(arrays: Sequence[np.ndarray], values: Sequence[np.ndarray], reduce: Callable[[], object]) -> list[float]:
        for array, value in zip(arrays, values, strict=True):
            np.copyto(array, value)
        return [time_of(reduce)]

    def reduced_well(way: str, arrays: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> bool:
        timed[way]()
        return all(map(_is_sum, arrays, values))

    timed = {
        "step": partial(turn, gradients, sources, lambda: _reduce_all(gradients)),
        "group": partial(turn, gradients, sources, lambda: _reduce_as_group(gradients)),
        "one": partial(turn, [whole], [whole_source], lambda: rt.allreduce_(whole, name="bench.whole", op=rt.Sum)),
    }
    seconds = time_in_turn(timed, repetitions)
    right = [reduced_well("one", [whole], [whole_source])]
    right += [reduced_well(way, gradients, sources) for way in ("step", "group")]
    verified = ranks.all_true(all(right))
    rt.shutdown()
    medians = {way: float(np.median(taken)) for way, taken in seconds.items()}
    return report.result(
        "ringtrain", "step", seconds["step"], verified,
        model=model, bytes=whole.nbytes, fusion_threshold_bytes=threshold,
        fusion_text="default" if threshold is None else bytes_text(threshold),
        one_operation_seconds_median=medians["one"], ratio_to_one_operation=medians["step"] / medians["one"],
        group_seconds_median=medians["group"], group_ratio_to_one_operation=medians["group"] / medians["one"],
    )  # fmt: skip


def _values(shape: tuple[int, ...], index: int) -> np.ndarray:
    """Small integers that differ between tensors and ranks; float32 holds their sums exactly."""
    count = int(np.prod(shape))
    return ((np.arange(count, dtype=np.int32) + index) % 61 + ranks.rank()).astype(np.float32).reshape(shape)


def _on_ordinary_pages(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copies in one piece of memory, each at a multiple of 64 bytes, as allocators place them."""
    ends = np.cumsum([-(-array.nbytes // 64) * 64 for array in arrays])
    memory = mmap.mmap(-1, int(ends[-1]))
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    copies = []
    for array, begin in zip(arrays, [0, *ends[:-1]], strict=True):
        copy = np.frombuffer(memory, array.dtype, array.size, int(begin)).reshape(array.shape)
        np.copyto(copy, array)
        copies.append(copy)
    return copies


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


def _reduce_as_group(gradients: Sequence[np.ndarray]) -> None:
    rt.grouped_allreduce_(gradients, name="bench.group", op=rt.Sum)
