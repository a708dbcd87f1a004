"""Operations on TensorFlow's GPU tensors, two ranks that are threads, on devices that gpu_device.cc makes.

test_tensorflow_gpu.py runs this in the fakes' environment: python tensorflow_on_gpus.py LIBRARY PLANE; prints the release
when all is right. What a rank reads is written late, on TensorFlow's stream: who does not wait for it reads 0xA5.
"""

import sys

import numpy as np
import tensorflow as tf
from fakes import driver

LIBRARY, PLANE = sys.argv[1:]
ELEMENTS = 50021
tf.load_library(LIBRARY)

import ringtrain.tensorflow as hvd
from ringtrain.testing import World


def copies() -> int:
    """Between host and GPU so far, by anybody."""
    return driver.calls("cuMemcpyDtoHAsync") + driver.calls("cuMemcpyHtoDAsync")


def copies_of_both() -> int:
    """``copies``, while no rank makes any."""
    hvd.barrier()
    count = copies()
    hvd.barrier()
    return count


def written_late(value: float, dtype: str = "float32", elements: int = ELEMENTS) -> tf.Tensor:
    """A tensor of this rank's device, whose values its stream has yet to write."""
    return tf.identity(tf.constant(np.full(elements, value, dtype)))


def eager_results_are_those_of_the_late_values(rank: int) -> None:
    for name, dtype in (("one", "float32"), ("half", "float16"), ("whole", "int64")):
        result = hvd.allreduce(written_late(rank + 1, dtype), op=hvd.Sum, name=name)
        assert result.device.endswith(f"GPU:{rank}"), result.device
        assert np.all(result.numpy() == 3), result
    assert np.all(hvd.allreduce(written_late(rank), name="mean").numpy() == 0.5)
    assert np.all(hvd.broadcast(written_late(rank + 5), 1, name="root").numpy() == 6)
    some = [written_late(rank + index, elements=index * 1000) for index in range(4)]  # the first has no elements
    for index, result in enumerate(hvd.grouped_allreduce(some, op=hvd.Sum, name="group")):
        assert result.shape == (index * 1000,) and np.all(result.numpy() == 1 + 2 * index)
    assert hvd.allreduce(written_late(0, elements=0), name="nothing").shape == (0,)


def graphs_are_too(rank: int) -> None:
    @tf.function
    def step(first, second):
        ours = [
            hvd.allreduce(tf.identity(value), op=hvd.Sum, name=f"gradient.{at}")
            for at, value in enumerate((first, second))
        ]
        return hvd.allreduce(ours[0], op=hvd.Average, name="again"), ours[1]

    for _ in range(3):  # memory is handed out again
        first, second = step(written_late(rank + 1), written_late(10 * rank))
        assert np.all(first.numpy() == 3) and np.all(second.numpy() == 10)


def tensors_stay_on_the_gpu(rank: int) -> None:
    """NCCL takes them where they are: only the test itself copies."""
    before = copies_of_both()
    values = written_late(rank)  # one copy on each rank
    for turn in range(5):
        hvd.allreduce(values, name=f"stays.{turn}")
    grown = copies_of_both() - before
    assert PLANE != "nccl" or grown <= 2, grown


def what_else_there_is_goes_by_the_host(rank: int) -> None:
    assert np.all(hvd.allreduce(written_late(rank + 1, "int32"), op=hvd.Sum, name="int32").numpy() == 3)
    gathered = hvd.allgather(written_late(rank, elements=rank + 1), name="rows")
    assert np.array_equal(gathered, [0, 1, 1])


def failures_come_as_ever(rank: int) -> None:
    try:
        hvd.allreduce(written_late(0, elements=rank + 1), name="wrong")
    except tf.errors.FailedPreconditionError as error:
        assert "allreduce 'wrong': shape must be the same on all ranks" in error.message
    else:
        raise AssertionError("a mismatch passed unseen")


def on_rank(rank: int) -> None:
    with tf.device(f"/GPU:{rank}"):
        for check in (
            eager_results_are_those_of_the_late_values,
            graphs_are_too,
            tensors_stay_on_the_gpu,
            what_else_there_is_goes_by_the_host,
            failures_come_as_ever,
        ):
            check(rank)


with World(2, gpu_plane=PLANE) as world:
    world.run(on_rank)
print(tf.__version__)
