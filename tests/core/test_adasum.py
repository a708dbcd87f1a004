"""Adasum against the recursion of arXiv:2006.02924 in NumPy, in worlds of many shapes; what it refuses; equal bits everywhere."""

import numpy as np
import pytest
from adasum_reference import reference
from worlds import LAUNCHED, World, configurations, sizes

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError

COUNT = 5003  # elements; several blocks and slices, and no power of two


def gradients(size, count=COUNT, seed=0, dtype=np.float32):
    """One a rank, with a part in common and a part of its own, so that no coefficient is 1 or 1/2."""
    random = np.random.default_rng(seed)
    common = random.standard_normal(count)
    return [((rank + 1) * 0.5 * common + random.standard_normal(count)).astype(dtype) for rank in range(size)]


def run(size, function, layout=None, algorithm="auto", **options):
    with World(size, layout, algorithm=algorithm, **options) as world:
        return world.run(function)


def require_equal_bits(results):
    for result in results:
        assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("size, layout, algorithm", configurations())
@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float64, 1e-13), (np.float16, 1e-3)])
def test_equals_the_recursion(size, layout, algorithm, dtype, tolerance):
    given = gradients(size, dtype=dtype)

    def body(rank):
        found = rt.allreduce(given[rank], "x", op=rt.Adasum)
        rt.check_replicas([("x", found)], every=1)  # ranks that are processes, too
        return found

    results = run(size, body, layout, algorithm)
    require_equal_bits(results)
    expected = reference(given)
    np.testing.assert_allclose(results[0].astype(np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.on_threads("another size than the launcher's")
@pytest.mark.parametrize(
    "size, layout", [(5, None), (6, None), (8, None), (5, "3+2"), (6, "2+2+2"), (8, "4+4"), (8, "3+4+1")]
)
def test_larger_worlds(size, layout):
    given = gradients(size)
    results = run(size, lambda rank: rt.allreduce(given[rank], "x", op=rt.Adasum), layout)
    require_equal_bits(results)
    np.testing.assert_allclose(results[0], reference(given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size, layout, algorithm", configurations(2))
def test_bits_depend_on_tensor_and_members_alone(size, layout, algorithm):
    """Neither on what travels together, nor on chunks, nor on hosts."""
    tensors = [gradients(size, count, seed) for seed, count in enumerate([1, 3, 40, COUNT, 70001, 0, 513])]

    def one_by_one(rank):
        return [rt.allreduce(tensor[rank], f"alone.{i}", op=rt.Adasum) for i, tensor in enumerate(tensors)]

    def grouped(rank):
        return rt.grouped_allreduce([tensor[rank] for tensor in tensors], "group", op=rt.Adasum)

    def fused(rank):
        started = [rt.allreduce_async(tensor[rank], f"fused.{i}", op=rt.Adasum) for i, tensor in enumerate(tensors)]
        return [rt.synchronize(handle) for handle in started]

    def all_three(rank):
        return one_by_one(rank), grouped(rank), fused(rank), rt.stats().counters["fused_operations"]

    found = run(size, all_three, layout, algorithm)
    found += run(size, all_three, layout, algorithm, chunk_bytes=4096, fusion_threshold_bytes=1 << 16)
    if not LAUNCHED:
        found += run(size, all_three)
        assert any(fused_operations > 0 for *_, fused_operations in found)
    expected = [tensor.tobytes() for tensor in found[0][0]]
    for *ways, _ in found:
        for results in ways:
            assert [tensor.tobytes() for tensor in results] == expected


@pytest.mark.parametrize("size, layout, algorithm", [each for each in configurations(2) if each[0] in (2, 3, 4)])
def test_many_chunks(size, layout, algorithm):
    """In place, too, next to sums that share the window, and in several dtypes at once."""
    given = gradients(size, 1_500_001)

    def body(rank):
        tensor = given[rank].copy()
        before = rt.allreduce_async(given[rank], "before", op=rt.Sum)
        handle = rt.allreduce_async_(tensor, "x", op=rt.Adasum)
        after = rt.allreduce_async(given[rank], "after", op=rt.Sum)
        double, single = rt.grouped_allreduce([given[rank].astype(np.float64), given[rank]], "mixed", op=rt.Adasum)
        sums = [rt.synchronize(before), rt.synchronize(after)]
        assert rt.synchronize(handle) is tensor
        return tensor, single, double, *sums

    found = run(size, body, layout, algorithm)
    expected = reference(given)
    for tensor, single, double, before, after in found:
        assert tensor.tobytes() == single.tobytes() == found[0][0].tobytes()
        np.testing.assert_allclose(tensor, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(double, expected, rtol=0, atol=1e-12)
        assert before.tobytes() == after.tobytes()
        np.testing.assert_allclose(before, np.sum(given, axis=0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", sizes(2))
def test_orthogonal_gradients_add(size):
    given = np.diag(np.arange(1.0, size + 1)).astype(np.float32)
    for result in run(size, lambda rank: rt.allreduce(given[rank], "x", op=rt.Adasum)):
        np.testing.assert_array_equal(result, np.arange(1.0, size + 1))


@pytest.mark.parametrize("size", sizes(2))
def test_parallel_gradients_average(size):
    given = np.outer(np.arange(1.0, size + 1), np.array([3.0, -4.0, 12.0])).astype(np.float32)
    for result in run(size, lambda rank: rt.allreduce(given[rank], "x", op=rt.Adasum)):
        np.testing.assert_allclose(result, given.mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("size", sizes(2))
def test_zeros(size):
    """A rank of zeros changes nothing, all of zeros give zeros, and opposite gradients cancel."""
    vector = gradients(1)[0]

    def body(rank):
        one = rt.allreduce(vector * (rank == 1), "one", op=rt.Adasum)
        none = rt.allreduce(vector * 0, "none", op=rt.Adasum)
        opposite = rt.allreduce(vector * (1 if rank == 0 else -1 if rank == 1 else 0), "opposite", op=rt.Adasum)
        scalar = rt.allreduce(np.float32(rank == 1), "scalar", op=rt.Adasum)
        empty = rt.allreduce(np.zeros((0, 3), np.float32), "empty", op=rt.Adasum)
        return one, none, opposite, scalar, empty

    for one, none, opposite, scalar, empty in run(size, body):
        np.testing.assert_array_equal(one, vector)
        assert not none.any() and not opposite.any()
        assert scalar == 1 and empty.shape == (0, 3)


@pytest.mark.parametrize("size, layout, algorithm", configurations(2))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_spoils_its_tensor_alone(size, layout, algorithm, bad):
    def body(rank):
        tensor = gradients(size)[rank]
        if rank == size - 1:
            tensor[7] = bad
        return rt.grouped_allreduce([tensor, gradients(size)[rank]], "x", op=rt.Adasum)

    found = run(size, body, layout, algorithm)
    for index in range(2):
        require_equal_bits([results[index] for results in found])
    assert np.isnan(found[0][0]).all() and np.isfinite(found[0][1]).all()


def test_lengths_far_apart():
    """Where one gradient is far longer, squares of float32 neither overflow nor vanish."""
    size = sizes(2)[0]
    scale = [1e30, 1e-30] + [1.0] * (size - 2)
    given = [vector * np.float32(scale[rank]) for rank, vector in enumerate(gradients(size))]
    results = run(size, lambda rank: rt.allreduce(given[rank], "x", op=rt.Adasum))
    expected = reference(given)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-7 * np.abs(expected).max())  # of what cancels


@pytest.mark.parametrize("size", sizes(2))
def test_factors_multiply_the_result(size):
    given = gradients(size)

    def body(rank):
        plain = rt.allreduce(given[rank], "plain", op=rt.Adasum)
        scaled = rt.allreduce(given[rank], "scaled", op=rt.Adasum, prescale_factor=0.25, postscale_factor=8.0)
        return plain, scaled

    for plain, scaled in run(size, body):
        np.testing.assert_allclose(scaled, 2 * plain, rtol=1e-6)


@pytest.mark.parametrize("size, layout, algorithm", configurations(2))
@pytest.mark.parametrize("compression, tolerance", [(rt.Compression.fp16, 1e-3), (rt.Compression.bf16, 1e-2)])
def test_compression_rounds_between_hosts_alone(size, layout, algorithm, compression, tolerance):
    given = gradients(size)

    def body(rank):
        plain = rt.allreduce(given[rank], "plain", op=rt.Adasum)
        before = rt.stats().counters["wire_bytes_sent"]
        narrow = rt.allreduce(given[rank], "narrow", op=rt.Adasum, compression=compression)
        return plain, narrow, before, rt.stats().counters["wire_bytes_sent"] - before

    found = run(size, body, layout, algorithm)
    require_equal_bits([narrow for _, narrow, _, _ in found])
    for plain, narrow, wide_bytes, narrow_bytes in found:
        one_host = layout is None and algorithm != "ring"
        assert (plain.tobytes() == narrow.tobytes()) == one_host
        np.testing.assert_allclose(narrow, plain, rtol=0, atol=tolerance * np.abs(plain).max())
        assert narrow_bytes <= 0.55 * wide_bytes


def test_bfloat16_is_rounded_once():
    import ml_dtypes

    size = sizes(2)[-1]
    given = gradients(size, dtype=ml_dtypes.bfloat16)
    results = run(size, lambda rank: rt.allreduce(given[rank], "x", op=rt.Adasum))
    exact = reference(given)
    assert np.all(np.abs(results[0].astype(np.float64) - exact) <= np.abs(exact) * 2**-8 + 1e-6)


@pytest.mark.parametrize("size", sizes(3))
def test_a_rank_that_has_joined_contributes_zeros(size):
    given = gradients(size)

    def body(rank):
        found = None
        if rank != 1:
            found = rt.allreduce(given[rank], "x", op=rt.Adasum)
        rt.join()
        return found

    expected = reference([vector * (rank != 1) for rank, vector in enumerate(given)])
    for result in run(size, body):
        if result is not None:
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", sizes(3))
def test_process_sets_have_trees_of_their_own(size):
    given = gradients(size)

    def body(rank):
        members = list(range(1, size))
        part = rt.add_process_set(members)
        found = rt.allreduce(given[rank], "x", op=rt.Adasum, process_set=part) if rank in members else None
        rt.barrier()
        return found

    for result in run(size, body):
        if result is not None:
            np.testing.assert_allclose(result, reference(given[1:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", sizes())
def test_what_is_refused(size):
    def body(rank):
        with pytest.raises(InvalidArgumentError, match=r"adasum needs floating-point tensors, but found int32\[2\]"):
            rt.allreduce(np.ones(2, np.int32), "a", op=rt.Adasum)
        with pytest.raises(UnsupportedError, match=r"reducescatter 'b': reduction adasum must be an allreduce's"):
            rt.reducescatter(np.ones(2, np.float32), "b", op=rt.Adasum)
        with pytest.raises(InvalidArgumentError, match="only an average may be weighted"):
            rt.allreduce(np.ones(2, np.float32), "c", op=rt.Adasum, weight=1)
        return rt.allreduce(np.ones(2, np.float32), "d", op=rt.Adasum)

    for result in run(size, body):
        np.testing.assert_allclose(result, [1, 1], rtol=1e-6)


@pytest.mark.parametrize("size", sizes(2))
def test_one_rank_with_another_reduction(size):
    def body(rank):
        with pytest.raises(
            MismatchError, match="reduction must be the same on all ranks, but is sum on rank 0 and adasum"
        ):
            rt.allreduce(np.ones(2, np.float32), "x", op=rt.Adasum if rank else rt.Sum)

    run(size, body)


@pytest.mark.on_threads("a world of four")
def test_trains_without_a_larger_learning_rate():
    """Least squares with noise: with 4 ranks and the step of one process Adasum gets further than the average does."""
    truth = np.random.default_rng(1).standard_normal(20)

    def train(op):
        def body(rank):
            random = np.random.default_rng(100 + rank)
            weights = np.zeros(20)
            for step in range(60):
                inputs = random.standard_normal((8, 20))
                residual = inputs @ (weights - truth) + 0.01 * random.standard_normal(8)
                weights -= 0.02 * rt.allreduce(2 * inputs.T @ residual / 8, f"g.{step}", op=op)
            return weights

        found = run(4, body)
        require_equal_bits(found)
        return float(np.linalg.norm(found[0] - truth))

    assert train(rt.Adasum) < 0.5 * train(rt.Average)
