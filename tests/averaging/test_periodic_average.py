"""``rt.PeriodicAverage`` on ranks, against the same algorithm in one process."""

import numpy as np
import pytest

import ringtrain as rt
from ringtrain._training import periodic_average
from ringtrain._training.averaging.negotiation import Agreed
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

SIZE = 40


def gradient(x: np.ndarray, rank: int, step: int) -> np.ndarray:
    """Of a quadratic whose optimum differs from rank to rank and step to step."""
    target = np.random.default_rng(1000 * rank + step).standard_normal(x.shape)
    return (x - target).astype(x.dtype)


def start(dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(SIZE).astype(dtype)


def oracle(ranks, steps, every, outer=None, samples=lambda rank, step: 1, dtype=np.float64):
    """Local steps of all ranks in one process: X and m after each synchronisation, as B1 of the papers has them."""
    common, m = start(dtype).astype(np.float64), np.zeros(SIZE)
    workers, weights, seen = [common.copy() for _ in range(ranks)], np.zeros(ranks), []
    for step in range(steps):
        for rank in range(ranks):
            workers[rank] -= 0.1 * gradient(workers[rank], rank, step)
            weights[rank] += samples(rank, step)
        if (step + 1) % every == 0:
            change = sum(w * (common - x) for w, x in zip(weights, workers, strict=True)) / weights.sum()
            if outer is None:
                common = common - change
            else:
                m = outer.momentum * m + change
                common = common - outer.rate * (change + outer.momentum * m)
            workers, weights = [common.copy() for _ in range(ranks)], np.zeros(ranks)
            seen.append(common.copy())
    return seen


def train(rank, steps, every, samples=None, dtype=np.float32, **arguments):
    x, seen = start(dtype), []
    average = rt.PeriodicAverage([x], every, **arguments)
    for step in range(steps):
        x -= dtype(0.1) * gradient(x, rank, step)
        if average.step(None if samples is None else samples(rank, step)):
            seen.append(x.copy())
    return seen


@pytest.mark.parametrize("layout", [None, "2+1"])
@pytest.mark.parametrize("outer", [None, rt.Outer(0.7, 0.9), rt.Outer(1.0, 0.0)], ids=["plain", "diloco", "identity"])
@pytest.mark.parametrize("every", [1, 4])
def test_ranks_are_the_oracle(layout, outer, every):
    with World(3, layout) as world:
        found = world.run(lambda rank: train(rank, 12, every, outer=outer, dtype=np.float64))
    for seen in found:
        assert len(seen) == 12 // every
        np.testing.assert_allclose(seen, oracle(3, 12, every, outer), rtol=1e-12, atol=1e-13)
    assert {np.array(seen).tobytes() for seen in found} == {np.array(found[0]).tobytes()}


def test_float32_ranks_have_equal_bits_and_are_near_the_oracle():
    with World(3, "1+2") as world:
        found = world.run(lambda rank: train(rank, 12, 3, outer=rt.Outer()))
    np.testing.assert_allclose(found[0], oracle(3, 12, 3, rt.Outer()), rtol=1e-4, atol=1e-5)
    assert {np.array(seen).tobytes() for seen in found} == {np.array(found[0]).tobytes()}


@pytest.mark.parametrize("outer", [None, rt.Outer(0.7, 0.9)], ids=["plain", "diloco"])
@pytest.mark.parametrize("differ", [True, False])
def test_what_is_assigned_without_a_step_is_averaged_as_it_is(outer, differ):
    """It is no change for the outer optimizer: training goes on from it, as from a start."""

    def on_rank(rank):
        x = start(np.float64)
        average = rt.PeriodicAverage([x], 2, outer=outer)
        x -= 0.1 * gradient(x, 0, 0)
        average.step()
        average.synchronize()
        x[:] = 4.0 + differ * rank
        average.synchronize()
        assigned = x.copy()
        x -= 1.0 + rank
        average.step()
        average.synchronize()
        return assigned, x.copy()

    with World(3) as world:
        found = world.run(on_rank)
    (assigned, after), expected = found[0], 4.0 + differ
    assert all(np.array_equal(each, assigned) and np.array_equal(then, after) for each, then in found)
    np.testing.assert_allclose(assigned, expected)
    first = start(np.float64) - 0.1 * gradient(start(np.float64), 0, 0)
    change, m = 2.0, 0.9 * (start(np.float64) - first)  # what the outer momentum has of the first step
    step = change if outer is None else 0.7 * (change + 0.9 * (m + change))
    np.testing.assert_allclose(after, expected - step)


def test_changes_weigh_as_much_as_their_samples():
    def samples(rank, step):
        return (3, 5, 0)[rank] + step % 2

    with World(3) as world:
        found = world.run(lambda rank: train(rank, 12, 4, samples, np.float64))
        np.testing.assert_allclose(found[0], oracle(3, 12, 4, samples=samples), rtol=1e-12, atol=1e-13)
        assert not np.allclose(found[0], oracle(3, 12, 4), rtol=1e-3)  # it makes a difference

        def weightless_nan(rank):
            x = np.zeros(4)
            average = rt.PeriodicAverage([x], 1)
            x += np.nan if rank == 0 else rank
            average.step(samples=2 * rank)
            return x.tolist()

        assert world.run(weightless_nan) == [[(2 * 1 + 4 * 2) / 6] * 4] * 3


def test_integers_take_the_maximum_and_all_dtypes_travel():
    def on_rank(rank):
        arrays = {
            "half": np.full((2, 3), 1, np.float16), "double": np.array(1.0), "count": np.array(0), "flags": np.zeros(2, bool),
        }  # fmt: skip
        average = rt.PeriodicAverage(arrays, 2)
        for _ in range(2):
            for array in arrays.values():
                array[...] = array + rank
            average.step()
        return [array.tolist() for array in arrays.values()]

    with World(2) as world:
        assert world.run(on_rank) == [[[[2.0] * 3] * 2, 2.0, 2, [True, True]]] * 2


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_bits_are_equal_whatever_is_fused(compression):
    """Tensors of many sizes, on three hosts, with and without tensor fusion."""

    def on_rank(rank):
        random = np.random.default_rng(3)
        arrays = [random.standard_normal(size).astype(np.float32) for size in (5000, 7, 9001, 128, 20_000)]
        average = rt.PeriodicAverage(arrays, 2, rt.Outer(0.7, 0.9), compression)
        own = np.random.default_rng(rank)
        for _ in range(6):
            for array in arrays:
                array += own.standard_normal(array.size).astype(np.float32)
            average.step()
        return b"".join(array.tobytes() for array in arrays)

    results = set()
    for fusion in (0, 1 << 20):
        with World(3, "1+1+1", fusion_threshold_bytes=fusion) as world:
            results |= set(world.run(on_rank))
    assert len(results) == 1


def test_the_wire_carries_one_part_in_every():
    def on_rank(rank, every):
        x = np.ones(1 << 18, np.float32)
        average = rt.PeriodicAverage([x], every)
        average.synchronize()
        before = rt.counters()
        for _ in range(8):
            x += np.float32(rank)
            average.step()
        after = rt.counters()
        return {name: after[name] - before[name] for name in after}

    with World(2, "1+1") as world:
        for every in (1, 2, 8):
            grown = world.run(on_rank, every)[0]
            assert grown["wire_bytes_sent"] == pytest.approx((1 << 20) * 8 / every, rel=0.01)
            assert (grown["local_steps"], grown["synchronisations"]) == (8, 8 // every)


def test_compression_makes_up_for_what_it_loses():
    """What is left of the rounding after many rounds is that of one round, with feedback; else it adds up."""

    def off_by(rank, compression, rounds=30):
        x = np.zeros(8192, np.float64)
        average = rt.PeriodicAverage([x], 1, compression=compression)
        own = np.random.default_rng(rank).standard_normal(x.size)
        for _ in range(rounds):
            x += own
            average.step()
        exact = rounds * rt.allreduce(own, name=f"exact.{compression}")
        return np.linalg.norm(x - exact) / np.linalg.norm(exact)

    with World(2, "1+1") as world:
        plain, feedback = (world.run(off_by, each)[0] for each in ("int4 without feedback", "int4"))
    assert feedback < plain / 10 and plain > 0.05


# ---- uneven data ----


def test_ranks_without_data_take_what_the_others_learn():
    """Batches 10, 4 and 0: each change weighs its steps, and all end with the same bits."""
    batches = (10, 4, 0)

    def on_rank(rank):
        x = start(np.float64)
        average = rt.PeriodicAverage([x], 4)
        for step in range(batches[rank]):
            x -= 0.1 * gradient(x, rank, step)
            average.step()
        average.join()
        return x

    common = start(np.float64)
    for steps in ({0: range(4), 1: range(4)}, {0: range(4, 8)}, {0: range(8, 10)}):
        changes = []
        for rank, numbers in steps.items():
            x = common.copy()
            for step in numbers:
                x -= 0.1 * gradient(x, rank, step)
            changes.append((len(numbers), common - x))
        common = common - sum(weight * change for weight, change in changes) / sum(weight for weight, _ in changes)
    with World(3, stall_abort_seconds=20) as world:
        found = world.run(on_rank)
    assert len({x.tobytes() for x in found}) == 1
    np.testing.assert_allclose(found[0], common, rtol=1e-12, atol=1e-14)


def test_training_goes_on_after_all_have_joined():
    def on_rank(rank):
        x = start()
        average = rt.PeriodicAverage([x], 3)
        for _ in range(2):
            for step in range(3 + 2 * rank):
                x -= np.float32(0.1) * gradient(x, rank, step)
                average.step()
            average.join()
        return x.tobytes()

    with World(2, stall_abort_seconds=20) as world:
        assert len(set(world.run(on_rank))) == 1


# ---- ranks that disagree ----


def texts_of(size, on_rank, kind=MismatchError):
    def caught(rank):
        with pytest.raises(kind) as told:
            on_rank(rank)
        return str(told.value)

    with World(size, stall_abort_seconds=20) as world:
        texts = world.run(caught)
    assert len(set(texts)) == 1, texts
    return texts[0]


@pytest.mark.parametrize("arguments, text", [
    (({"every": 2}, {"every": 3}), "every must be the same on all ranks, but is 2 on rank 0 and 3 on rank 1"),
    (({"every": 2}, {"every": 2, "outer": rt.Outer()}), r"outer must be the same on all ranks, but is None on rank 0 and \[0.7, 0.9\]"),
    (({"every": 2, "compression": "int8"}, {"every": 2}), "compression must be the same on all ranks, but is int8 on rank 0"),
])  # fmt: skip
def test_other_arguments_on_a_rank_are_one_error_on_all(arguments, text):
    def on_rank(rank):
        rt.PeriodicAverage([np.zeros(3)], **arguments[rank]).step()

    assert_matches(texts_of(2, on_rank), text)


def test_other_arrays_on_a_rank():
    def on_rank(rank):
        rt.PeriodicAverage([np.zeros(3), np.zeros(3 + rank)], 2).step()

    assert_matches(texts_of(2, on_rank), r"tensor '1' must be the same on all ranks, but is float64 of 3 on rank 0")


def test_other_values_at_the_beginning():
    def on_rank(rank):
        rt.PeriodicAverage([np.full(3, float(rank == 1))], 2).step()

    assert_matches(
        texts_of(3, on_rank), r"digest of parameters .* on ranks 0, 2 and .* on rank 1. Call broadcast_parameters"
    )


def test_a_step_too_many_on_a_rank():
    def on_rank(rank):
        average = rt.PeriodicAverage([np.zeros(3)], 9)
        for _ in range(2 + rank):
            average.step()
        average.synchronize()

    assert_matches(texts_of(2, on_rank), "number of steps since .* but is 2 on rank 0 and 3 on rank 1")


def test_samples_on_some_ranks_only():
    def on_rank(rank):
        rt.PeriodicAverage([np.zeros(3)], 1).step(samples=4 if rank else None)

    assert_matches(texts_of(2, on_rank), "weighed by must be the same on all ranks, but is steps on rank 0 and samples")


def test_a_rank_that_has_joined_the_world():
    def on_rank(rank):
        average = rt.PeriodicAverage([np.zeros(3)], 1)
        average.step()
        if rank == 0:
            rt.join()
            return "rank 0 has called ringtrain.join()"
        with pytest.raises(MismatchError) as told:
            average.step()
        rt.join()
        return str(told.value)

    with World(3) as world:
        first, *others = world.run(on_rank)
    assert len(set(others)) == 1 and first in others[0]


def test_after_an_error_arrays_are_what_they_were_at_the_last_synchronisation():
    """The round is lost, all ranks have equal values, and the next rounds are as if it had not been."""

    def on_rank(rank):
        x = start()
        average = rt.PeriodicAverage([x], 2)
        for step in range(2):
            x -= np.float32(0.1) * gradient(x, rank, step)
            average.step()
        before = x.copy()
        x += rank + 1
        average.step()
        if rank:
            x += 1
            average._worker.period.note_step()  # planted: a step that only this rank has taken
        with pytest.raises(MismatchError):
            average.synchronize()
        assert x.tobytes() == before.tobytes()
        for step in range(2, 6):
            x -= np.float32(0.1) * gradient(x, rank, step)
            average.step()
        return x

    with World(2, stall_abort_seconds=20) as world:
        found = world.run(on_rank)
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], oracle(2, 6, 2)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["before anything is sent", "after it has arrived"])
def test_a_failed_round_leaves_no_trace_in_what_compression_makes_up_for(place):
    def fail(rank, average):
        average._worker.period.note_step()
        if place == "before anything is sent":
            average._worker.period.steps += rank  # planted: a step that only this rank has taken
            average._worker.average()
        average._worker._common.copies["1"] = average._worker._common._copy_of(
            periodic_average._shared("1", np.zeros(1 + rank))
        )
        average._worker._meet = lambda stage, part: Agreed(
            2, 2, False
        )  # planted: ranks that have not compared their tensors
        average._worker.average()

    def on_rank(rank, fails):
        x = np.zeros(8192)
        average = rt.PeriodicAverage([x], 1, compression="int4")
        own = np.random.default_rng(rank)
        for step in range(6):
            if step == fails:
                x += 5
                with pytest.raises(MismatchError):
                    fail(rank, average)
                vars(average._worker).pop("_meet", None)
                average._worker._common.copies.pop("1", None)
            x += own.standard_normal(x.size)
            average.step()
        return x.tobytes()

    with World(2, "1+1", stall_abort_seconds=20) as world:
        assert world.run(on_rank, 3) == world.run(on_rank, None)


def test_in_another_world_ranks_compare_what_they_have():
    kept = [np.zeros(3), np.zeros(3)]

    def begin(rank):
        average = rt.PeriodicAverage([kept[rank]], 2)
        average.step()
        return average

    def go_on(rank, averages):
        if rank:
            averages[rank]._worker._common.copies["0"].common += 1  # planted: another common copy
        with pytest.raises(MismatchError, match="digest of parameters and outer momentum at the beginning"):
            averages[rank].step()

    with World(2) as world:
        averages = world.run(begin)
    with World(2, stall_abort_seconds=20) as world:
        world.run(go_on, averages)


def assert_matches(text, pattern):
    with pytest.raises(MismatchError, match=pattern):
        raise MismatchError(text)


# ---- checkpoints ----


def interrupted(rank, stops, dtype=np.float64, every=4, steps=12, own=True):
    """Training that is saved and goes on from the checkpoint, of this rank or of rank 0, after some steps."""
    x = start(dtype)
    average = rt.PeriodicAverage([x], every, rt.Outer())
    for step in range(steps):
        if step in stops:
            saved = (x.copy(), average.state_dict())
            saved = saved if own else rt.broadcast_object(saved, 0)
            x = np.full_like(saved[0], np.nan)
            average = rt.PeriodicAverage([x], every, rt.Outer())
            average.load_state_dict(saved[1])
            x[...] = saved[0]
        x -= 0.1 * gradient(x, rank, step)
        average.step()
    average.synchronize()
    return x


@pytest.mark.parametrize("stops", [{4}, {6}, {1, 2, 11}])
def test_a_run_that_each_rank_continues_has_the_bits_of_one_that_was_never_interrupted(stops):
    with World(2) as world:
        whole = world.run(interrupted, ())
        assert [x.tobytes() for x in world.run(interrupted, stops)] == [x.tobytes() for x in whole]


@pytest.mark.parametrize("stop", [4, 6])
def test_all_ranks_can_continue_from_one_file(stop):
    """At a synchronisation it is the same run; within a period all go on from that rank's values, and stay equal."""
    with World(2) as world:
        whole, found = world.run(interrupted, ()), world.run(lambda rank: interrupted(rank, {stop}, own=False))
    assert found[0].tobytes() == found[1].tobytes()
    assert (found[0].tobytes() == whole[0].tobytes()) == (stop == 4)
    np.testing.assert_allclose(found[0], whole[0], atol=0.5)


def test_a_world_of_another_size_continues():
    def begin(rank):
        x = start(np.float64)
        average = rt.PeriodicAverage([x], 4, rt.Outer())
        for step in range(8):
            x -= 0.1 * gradient(x, rank, step)
            average.step()
        return x, average.state_dict()

    def go_on(rank, saved):
        x, state = saved[0].copy(), saved[1]
        average = rt.PeriodicAverage([x], 4, rt.Outer())
        average.load_state_dict(state)
        for step in range(4):
            x -= 0.1 * gradient(x, rank, step)
            average.step()
        return x, state

    with World(2) as world:
        saved = world.run(begin)[0]
    with World(3) as world:
        found = world.run(go_on, saved)
    common, m = saved[0], saved[1]["momentum"]["0"]
    workers = [common.copy() for _ in range(3)]
    for step in range(4):
        for rank, x in enumerate(workers):
            x -= 0.1 * gradient(x, rank, step)
    change = common - sum(workers) / 3
    expected = common - 0.7 * (change + 0.9 * (0.9 * m + change))
    assert len({x.tobytes() for x, _ in found}) == 1
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-12)


def test_a_checkpoint_on_some_ranks_only():
    def on_rank(rank):
        average = rt.PeriodicAverage([np.zeros(3)], 4)
        average.step()
        if rank:
            average.load_state_dict(average.state_dict())
        for _ in range(3):
            average.step()

    assert_matches(
        texts_of(2, on_rank), "what ranks wait for must be the same on all ranks, but is to average on rank 0 and"
    )


def test_a_checkpoint_of_another_model():
    def on_rank(rank):
        state = rt.PeriodicAverage([np.zeros(4)], 4).state_dict()
        with pytest.raises(InvalidArgumentError, match="common copy of '0' must have 3 elements, but has 4"):
            rt.PeriodicAverage([np.zeros(3)], 4).load_state_dict(state)

    with World(2) as world:
        world.run(on_rank)


# ---- arguments, and worlds of one ----


@pytest.mark.parametrize("arguments, text", [
    (([np.zeros((4, 4)).T[:2]], 2), "arrays must be contiguous NumPy arrays"),
    (([[1.0]], 2), "number 0 is a list"),
    (([np.zeros(3)], 0), "every must be at least 1"),
    (([np.zeros(3)], 2, 0.7), "outer must be None or an Outer, but is 0.7"),
    (([np.zeros(3)], 2, None, "int3"), "compression must be one of none, .*, but is 'int3'"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, text):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match=text):
            rt.PeriodicAverage(*arguments)

    with World(1) as world:
        world.run(on_rank)


def test_a_world_of_one():
    def on_rank(rank):
        x = start()
        plain, moved = rt.PeriodicAverage([x], 1), start(np.float64)
        outer = rt.PeriodicAverage([moved], 1, (0.5, 0.0))
        x += 1
        moved += 1
        assert not plain.step() and outer.step()
        plain.synchronize()
        plain.join()
        np.testing.assert_array_equal(x, start() + 1)
        np.testing.assert_allclose(moved, start(np.float64) + 0.5)  # half of the way
        assert plain.state_dict() == {}
        plain.load_state_dict({})

    with World(1) as world:
        world.run(on_rank)


def test_ranks_outside_of_the_process_set_do_nothing():
    def on_rank(rank):
        pair = rt.add_process_set([0, 2])
        x = np.zeros(2)
        average = rt.PeriodicAverage([x], 1, process_set=pair)
        x += rank
        average.step()
        return x.tolist()

    with World(3) as world:
        assert world.run(on_rank) == [[1.0, 1.0]] * 3  # the mean of 0 and 2; rank 1 has added 1
