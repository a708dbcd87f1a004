"""``rt.PeriodicAverage`` with fragments that travel while training goes on, against the same algorithm in one process."""

import numpy as np
import pytest

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

SIZES = (24, 10, 7, 16, 3)
STEPS = 17
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def gradient(x, rank, step, place):
    """Of a quadratic whose optimum differs from rank to rank, step to step and array to array."""
    return x - np.random.default_rng([rank, step, place]).standard_normal(x.shape)


def start():
    return [np.random.default_rng([5, place]).standard_normal(size) for place, size in enumerate(SIZES)]


def parts_by_hand(count):
    """Each array goes into what is the smallest fragment then."""
    loads, parts = [0] * count, []
    for size in SIZES:
        parts.append(int(np.argmin(loads)))
        loads[parts[-1]] += size
    return parts


def by_hand(ranks, steps, every, count=1, overlap=0, merge="additive", outer=None, samples=lambda rank, step: 1):
    """Local steps of all ranks in one process. Returns each rank's values after each step, and X after all of them."""
    parts, common = parts_by_hand(count), start()
    momentum = [np.zeros_like(x) for x in common]
    workers = [start() for _ in range(ranks)]
    weights, on_the_way, seen = np.zeros((count, ranks)), [], []

    def arrive(places, copies, change):
        for at, place in enumerate(places):
            if outer is None:
                common[place] = common[place] - change[at]
            else:
                momentum[place] = outer.momentum * momentum[place] + change[at]
                common[place] = common[place] - outer.rate * (change[at] + outer.momentum * momentum[place])
            for worker, copy in zip(workers, copies, strict=True):
                if merge == "half":
                    worker[place] = (worker[place] + common[place]) / 2
                else:
                    worker[place] = worker[place] + (common[place] - copy[at])

    def leave(part):
        places = [place for place, own in enumerate(parts) if own == part]
        share = weights[part] / weights[part].sum()
        change = [
            sum(w * (common[place] - worker[place]) for w, worker in zip(share, workers, strict=True))
            for place in places
        ]
        weights[part] = 0
        return places, [[worker[place].copy() for place in places] for worker in workers], change

    for step in range(1, steps + 1):
        for rank, worker in enumerate(workers):
            for place, x in enumerate(worker):
                worker[place] = x - 0.1 * gradient(x, rank, step - 1, place)
            weights[:, rank] += samples(rank, step - 1)
        for _, *flight in [each for each in on_the_way if each[0] == step]:
            arrive(*flight)
        on_the_way = [each for each in on_the_way if each[0] > step]
        for part in range(count):
            if (step - (part + 1) * every // count) % every == 0 and step >= (part + 1) * every // count:
                on_the_way.append((step + overlap, *leave(part)))
        for _, *flight in [each for each in on_the_way if each[0] == step]:
            arrive(*flight)
        on_the_way = [each for each in on_the_way if each[0] > step]
        seen.append([np.concatenate(worker) for worker in workers])
    for _, *flight in on_the_way:
        arrive(*flight)
    for part in range(count):
        if not weights[part].any():  # has only just been averaged
            continue
        places, _, change = leave(part)
        arrive(places, [[worker[place].copy() for place in places] for worker in workers], change)
    return seen, np.concatenate(common)


def train(rank, steps, every, samples=None, **arguments):
    """A rank's values after each step, and after a last ``synchronize``."""
    arrays, seen = start(), []
    average = rt.PeriodicAverage(arrays, every, **arguments)
    for step in range(steps):
        for place, x in enumerate(arrays):
            x -= 0.1 * gradient(x, rank, step, place)
        average.step(None if samples is None else samples(rank, step))
        seen.append(np.concatenate(arrays))
    average.synchronize()
    return seen, np.concatenate(arrays)


METHODS = {
    "fragments": {"every": 6, "fragments": 3},
    "overlap": {"every": 4, "overlap": 2},
    "fragments, overlap": {"every": 6, "fragments": 3, "overlap": 1},
    "several on the way": {"every": 6, "fragments": 4, "overlap": 5},
    "half": {"every": 5, "fragments": 2, "overlap": 2, "merge": "half"},
    "Streaming DiLoCo": {"every": 5, "fragments": 2, "overlap": 3, "merge": "half", "outer": rt.Outer(0.4, 0.9)},
    "DiLoCo, additive": {"every": 5, "fragments": 3, "overlap": 1, "outer": rt.Outer(0.7, 0.9)},
    "a fragment without arrays": {"every": 8, "fragments": 7, "overlap": 1},
}  # fmt: skip


DEFAULT = ("fragments, overlap", "several on the way", "Streaming DiLoCo")


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each in DEFAULT else pytest.mark.long) for each in METHODS]
)
def test_ranks_are_the_oracle_after_each_step(method):
    arguments = METHODS[method]
    by_name = {"count" if name == "fragments" else name: value for name, value in arguments.items()}
    expected, common = by_hand(3, STEPS, **by_name)
    with World(3, "2+1") as world:
        found = world.run(lambda rank: train(rank, STEPS, **arguments))
    for rank, (seen, last) in enumerate(found):
        np.testing.assert_allclose(seen, [each[rank] for each in expected], **CLOSE)
        np.testing.assert_allclose(last, common, **CLOSE)
    assert len({last.tobytes() for _, last in found}) == 1
    assert len({seen[-1].tobytes() for seen, _ in found}) == 3  # in between each rank has its own


def test_changes_weigh_as_much_as_their_samples():
    def samples(rank, step):
        return (3, 5, 0)[rank] + step % 2

    expected, common = by_hand(3, STEPS, 6, 3, 2, samples=samples)
    with World(3) as world:
        found = world.run(lambda rank: train(rank, STEPS, 6, samples, fragments=3, overlap=2))
    np.testing.assert_allclose(found[1][0], [each[1] for each in expected], **CLOSE)
    np.testing.assert_allclose(found[2][1], common, **CLOSE)
    assert not np.allclose(by_hand(3, STEPS, 6, 3, 2)[1], common, rtol=1e-3)  # it makes a difference


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_bits_are_equal_whatever_is_fused(compression):
    """Right after a synchronisation of all; tensors of many sizes, on three hosts, with and without tensor fusion."""

    def on_rank(rank):
        random = np.random.default_rng(3)
        arrays = [random.standard_normal(size).astype(np.float32) for size in (5000, 7, 9001, 128, 20_000)]
        average = rt.PeriodicAverage(arrays, 4, rt.Outer(0.4, 0.9), compression, fragments=2, overlap=3, merge="half")
        own = np.random.default_rng(rank)
        for _ in range(11):
            for array in arrays:
                array += own.standard_normal(array.size).astype(np.float32)
            average.step()
        average.synchronize()
        return b"".join(array.tobytes() for array in arrays)

    results = set()
    for fusion in (0, 1 << 20):
        with World(3, "1+1+1", fusion_threshold_bytes=fusion) as world:
            results |= set(world.run(on_rank))
    assert len(results) == 1


def test_compression_makes_up_for_what_it_loses_of_each_fragment():
    def off_by(rank, compression, rounds=30):
        arrays = [np.zeros(8192), np.zeros(8192)]
        average = rt.PeriodicAverage(arrays, 2, compression=compression, fragments=2, overlap=1)
        own = np.random.default_rng(rank).standard_normal(8192)
        for _ in range(2 * rounds):
            for array in arrays:
                array += own
            average.step()
        average.synchronize()
        exact = 2 * rounds * rt.allreduce(own, name=f"exact.{compression}")
        return max(np.linalg.norm(array - exact) / np.linalg.norm(exact) for array in arrays)

    with World(2, "1+1") as world:
        plain, feedback = (world.run(off_by, each)[0] for each in ("int4 without feedback", "int4"))
    assert feedback < plain / 5 and plain > 0.02


def test_the_wire_carries_a_fragment_at_a_time():
    def on_rank(rank):
        arrays = [np.ones(1 << 17, np.float32) for _ in range(4)]
        average = rt.PeriodicAverage(arrays, 8, fragments=4)
        grown = []
        for _ in range(16):
            before = rt.counters()["wire_bytes_sent"]
            arrays[0] += np.float32(rank)
            average.step()
            grown.append(rt.counters()["wire_bytes_sent"] - before)
        return grown, rt.counters()["synchronisations"]

    with World(2, "1+1") as world:
        grown, synchronisations = world.run(on_rank)[0]
    assert synchronisations == 8
    for step, count in enumerate(grown, 1):
        assert count == pytest.approx((step % 2 == 0) * (1 << 19), rel=0.01, abs=2000)


# ---- uneven data ----


def uneven(rank, batches, **arguments):
    arrays = start()
    average = rt.PeriodicAverage(arrays, **arguments)
    for step in range(batches[rank]):
        for place, x in enumerate(arrays):
            x -= 0.1 * gradient(x, rank, step, place)
        average.step()
    average.join()
    return np.concatenate(arrays), average.state_dict()["counters"]["steps"]


@pytest.mark.parametrize(
    "arguments", [{"fragments": 3, "overlap": 2}, {"fragments": 2, "overlap": 3, "merge": "half"}, {"overlap": 1}]
)
def test_ranks_without_data_take_what_the_others_learn(arguments):
    with World(3, stall_abort_seconds=20) as world:
        found = world.run(lambda rank: uneven(rank, (13, 6, 0), every=6, **arguments))
    assert len({values.tobytes() for values, _ in found}) == 1
    assert [steps for _, steps in found] == [0, 0, 0]


def test_what_ranks_without_data_have_changed_counts_once():
    """All batches of a rank are of one gradient, so that the sum of what all learn can be told."""

    def on_rank(rank):
        x = np.zeros(6)
        arrays = [x[:3].copy(), x[3:].copy()]
        average = rt.PeriodicAverage(arrays, 4, fragments=2, overlap=1)
        for _ in range((8, 2)[rank]):
            for array in arrays:
                array += 1.0
            average.step(samples=1)
        average.join()
        return np.concatenate(arrays).tolist()

    # Fragment 0 leaves after steps 2 and 6: (2 + 2) / 2, 4 of rank 0 alone, and 2 of it at the end.
    # Fragment 1 leaves after steps 4 and 8: (4 * 4 + 2 * 2) / 6, and 4.
    with World(2, stall_abort_seconds=20) as world:
        for values in world.run(on_rank):
            np.testing.assert_allclose(values, [8.0] * 3 + [20 / 6 + 4.0] * 3, rtol=1e-14)


def test_training_goes_on_after_all_have_joined():
    def on_rank(rank):
        arrays = start()
        average = rt.PeriodicAverage(arrays, 4, fragments=2, overlap=1)
        for _ in range(2):
            for step in range(3 + 4 * rank):
                for place, x in enumerate(arrays):
                    x -= 0.1 * gradient(x, rank, step, place)
                average.step()
            average.join()
        return np.concatenate(arrays).tobytes()

    with World(2, stall_abort_seconds=20) as world:
        assert len(set(world.run(on_rank))) == 1


# ---- checkpoints ----


def interrupted(rank, stops, own=True, **arguments):
    """Training that is saved and goes on from the checkpoint, of this rank or of rank 0, after some steps."""
    arrays = start()
    average = rt.PeriodicAverage(arrays, **arguments)
    for step in range(STEPS):
        if step in stops:
            saved = ([x.copy() for x in arrays], average.state_dict())
            saved = saved if own else rt.broadcast_object(saved, 0)
            arrays = [np.full_like(x, np.nan) for x in saved[0]]
            average = rt.PeriodicAverage(arrays, **arguments)
            average.load_state_dict(saved[1])
            for x, values in zip(arrays, saved[0], strict=True):
                x[...] = values
        for place, x in enumerate(arrays):
            x -= 0.1 * gradient(x, rank, step, place)
        average.step()
    values = np.concatenate(arrays)
    average.synchronize()
    return values.tobytes(), np.concatenate(arrays).tobytes()


@pytest.mark.parametrize(
    "arguments", [METHODS["several on the way"], METHODS["Streaming DiLoCo"], METHODS["fragments"]]
)
def test_a_run_that_each_rank_continues_has_the_bits_of_one_that_was_never_interrupted(arguments):
    with World(2) as world:
        whole = world.run(lambda rank: interrupted(rank, (), **arguments))
        assert world.run(lambda rank: interrupted(rank, {2, 7, 8, 12}, **arguments)) == whole


def test_all_ranks_can_continue_from_one_file_within_a_period():
    with World(2) as world:
        found = world.run(lambda rank: interrupted(rank, {7}, own=False, **METHODS["several on the way"]))
    assert found[0][1] == found[1][1] and found[0][0] != found[1][0]


def test_a_state_of_other_fragments():
    def on_rank(rank):
        arrays = [np.zeros(4), np.zeros(4)]
        average = rt.PeriodicAverage(arrays, 4, fragments=2)
        average.step()
        within = average.state_dict()
        average.synchronize()
        whole = average.state_dict()
        for arguments, words in (({"fragments": 3}, "every=4, fragments=3, overlap=0"), ({}, "all parameters at once")):
            other = rt.PeriodicAverage(arrays, 4, **arguments)
            with pytest.raises(
                InvalidArgumentError, match=f"every=4, fragments=2, overlap=0, but are {words}. Save after"
            ):
                other.load_state_dict(within)
            other.load_state_dict(whole)  # nothing is under way
            for _ in range(4):
                arrays[0] += rank
                other.step()
            other.synchronize()
        return arrays[0].tolist()

    with World(2) as world:
        assert world.run(on_rank) == [[4.0] * 4] * 2


# ---- what goes wrong ----


def test_after_an_error_arrays_are_the_common_copy_and_what_has_arrived_is_in_it():
    """A part on its way is taken in on all ranks; the next rounds are as if the failed one had not been."""

    def on_rank(rank):
        arrays = [np.zeros(2), np.zeros(2)]
        average = rt.PeriodicAverage(arrays, 4, fragments=2, overlap=3)
        for step in range(4):
            for x in arrays:
                x += rank + 1
            if step < 3:  # the second one sends fragment 0
                average.step(samples=1 if (rank, step) == (1, 2) else None)
        with pytest.raises(MismatchError, match="what workers are weighed by"):
            average.step()  # it was to send fragment 1
        after = [x.tolist() for x in arrays]
        for _ in range(3):
            for x in arrays:
                x += rank
            average.step()
        average.synchronize()
        return after, [x.tolist() for x in arrays]

    with World(2, stall_abort_seconds=20) as world:
        assert world.run(on_rank) == [([[3.0] * 2, [0.0] * 2], [[4.5] * 2, [1.5] * 2])] * 2


@pytest.mark.parametrize("place", ["before anything is sent", "before it is reduced"])
def test_a_failed_round_leaves_no_trace_in_what_compression_makes_up_for(place):
    def fail(rank, average):
        worker = average._worker
        worker.period.note_step()
        if place == "before anything is sent":
            worker.period.steps += rank  # planted: a step that only this rank has taken
        else:
            worker._changes._sent = lambda copy, factor: (
                np.zeros(8192 + rank),
                worker._changes._how(copy),
            )  # planted: other sizes
        with pytest.raises(MismatchError):
            average.synchronize()
        vars(worker._changes).pop("_sent", None)

    def on_rank(rank, fails):
        arrays = [np.zeros(8192), np.zeros(8192)]
        average = rt.PeriodicAverage(arrays, 2, compression="int4", fragments=2, overlap=1)
        own = np.random.default_rng(rank)
        for step in range(6):
            if step == fails:
                for x in arrays:
                    x += 5
                fail(rank, average)
            for x in arrays:
                x += own.standard_normal(x.size)
            average.step()
            average.synchronize()
        return b"".join(x.tobytes() for x in arrays)

    with World(2, "1+1", stall_abort_seconds=20) as world:
        assert world.run(on_rank, 3) == world.run(on_rank, None)


@pytest.mark.parametrize("name, others", [("fragments", (2, 3)), ("overlap", (1, 2)), ("merge", ("additive", "half"))])
def test_other_arguments_on_a_rank_are_one_error_on_all(name, others):
    def on_rank(rank):
        arguments = {"fragments": 2, "overlap": 1, name: others[rank]}
        with pytest.raises(MismatchError) as told:
            rt.PeriodicAverage([np.zeros(3)], 4, **arguments).step()
        return str(told.value)

    with World(2, stall_abort_seconds=20) as world:
        first, other = world.run(on_rank)
    assert first == other and f"{name} must be the same on all ranks, but is {others[0]} on rank 0" in first


def test_what_was_on_its_way_when_a_world_ended_is_sent_in_the_next_one():
    """Nothing of what was learnt is lost."""
    kept = [[np.zeros(2)] for _ in range(2)]

    def begin(rank):
        average = rt.PeriodicAverage(kept[rank], 4, overlap=2)
        for _ in range(5):
            kept[rank][0] += rank + 1
            average.step()  # sends after the fourth
        return average

    def go_on(rank, averages):
        averages[rank].synchronize()
        return kept[rank][0].tolist()

    with World(2) as world:
        averages = world.run(begin)
    with World(2) as world:
        assert world.run(go_on, averages) == [[7.5] * 2] * 2
