"""Option autotune: all ranks change settings behind the same operation, sums keep their bits, and what was found is remembered."""

import time

import numpy as np
import pytest
from worlds import LAUNCHED, World, configurations

import ringtrain as rt
from ringtrain import options, tunings

pytestmark = pytest.mark.timeout(180)

QUICK = {"autotune": 1, "autotune_warmup_samples": 1, "autotune_steps_per_sample": 2, "gather_microseconds": 0}
GRADIENTS = {"first": 40_000, "second": 300, "third": 7}  # elements by name


def step(rank, number):
    """Sums of all gradients of one step, as bytes."""
    random = np.random.default_rng([rank, number])
    gradients = {
        name: random.standard_normal(elements).astype(np.float32) * 1e3 for name, elements in GRADIENTS.items()
    }
    handles = [rt.allreduce_async(gradient, name, op=rt.Sum) for name, gradient in gradients.items()]
    return b"".join(rt.synchronize(handle).tobytes() for handle in handles)


def train(rank, steps):
    """Sums of some steps, and what was tuned in them."""
    return [step(rank, number) for number in range(steps)], rt.tuning()


def trained(size, layout, steps=60, **chosen):
    """What all ranks return of a world that trains."""
    with World(size, layout, **chosen) as world:
        return world.run(train, steps)


@pytest.mark.parametrize(("size", "layout", "algorithm"), configurations(least=2))
def test_sums_keep_their_bits(size, layout, algorithm, tmp_path):
    """With tuning and without, on all ranks; and all of them have the same changes behind the same operations."""
    plain = trained(size, layout, algorithm=algorithm)
    tuned = trained(size, layout, algorithm=algorithm, autotune_cache=tmp_path / "cache", **QUICK)
    assert [sums for sums, _ in tuned] == [sums for sums, _ in plain]
    changes = tuned[0][1].changes
    assert len(changes) >= 2, "nothing was tried"
    assert all(found.changes == changes for _, found in tuned)
    assert all(found.settings == tuned[0][1].settings for _, found in tuned)
    assert [found.state for _, found in tuned[1:]] == ["off"] * (len(tuned) - 1)
    assert changes == sorted(changes, key=lambda change: change.operations)
    assert all(change.settings["gather_microseconds"] == 0 for change in changes), "the user has chosen that"
    assert all(not found.changes and found.state == "off" for _, found in plain)


@pytest.mark.skipif(LAUNCHED, reason="asks rank 0 alone")
def test_the_best_settings_are_found_and_remembered(tmp_path):
    """Steps are shorter with the smallest threshold; a second job begins with what the first has found, another model does not."""
    cache, log = tmp_path / "folder" / "cache", tmp_path / "log.csv"
    chosen = {**QUICK, "autotune_steps_per_sample": 4, "autotune_cache": cache, "autotune_log": log}

    def on_rank(rank, names, steps):
        for _ in range(steps):
            for name in names:
                rt.allreduce(np.ones(1000, np.float32), name)
            fast = rt.tuning().settings["fusion_threshold_bytes"] <= 1 << 24
            time.sleep(0.015 if fast else 0.15)  # far more than a busy machine adds
        return rt.tuning()

    with World(2, **chosen) as world:
        found = world.run(on_rank, ["a", "b"], 120)[0]
    assert found.state == "tuned"
    assert found.settings["fusion_threshold_bytes"] <= 1 << 24
    head, *lines = log.read_text().splitlines()
    assert head == "fusion_threshold_bytes,tcp_streams,burst_bytes,gather_microseconds,step_ms,verdict"
    assert lines[0].endswith(",start") and any(line.endswith(",taken") for line in lines)
    with World(2, **chosen) as world:
        again = world.run(on_rank, ["a", "b"], 20)
    assert [each.changes for each in again] == [again[0].changes] * 2
    assert (again[0].state, again[0].settings, len(again[0].changes)) == ("remembered", found.settings, 1)
    with World(2, **chosen) as world:
        other = world.run(on_rank, ["a", "c"], 20)[0]
    assert other.state == "searching"


@pytest.mark.skipif(LAUNCHED, reason="asks rank 0 alone")
def test_schedules_begin_when_the_settings_are_found(tmp_path):
    """While they change there are none: a change has its place in the order of verdicts."""
    states = []

    def on_rank(rank):
        for number in range(400):
            step(rank, number)
            if rank == 0:
                states.append(rt.tuning().state)
            rt.barrier()
            if states[number] == "tuned":
                break
            assert rt.counters()["scheduled_batches"] == 0
        for number in range(50):
            step(rank, number)
        return rt.counters()["scheduled_batches"]

    with World(2, autotune_cache=tmp_path / "cache", **QUICK) as world:
        scheduled = world.run(on_rank)
    assert "searching" in states and states[-1] == "tuned"
    assert all(scheduled)


@pytest.mark.skipif(LAUNCHED, reason="asks rank 0 alone")
@pytest.mark.parametrize("content", [b"no such thing", b"\0\xff" * 100, b"ringtrain autotune 1\nbroken\n"])
def test_a_broken_cache_is_written_anew(content, tmp_path, caplog):
    cache = tmp_path / "cache"
    cache.write_bytes(content)
    found = trained(2, None, 120, autotune_cache=cache, **QUICK)[0][1]
    assert found.state == "tuned"
    assert cache.read_bytes().startswith(b"ringtrain autotune 1\n") and cache.read_bytes() != content
    assert any("autotune_cache" in record.message and str(cache) in record.message for record in caplog.records)


@pytest.mark.skipif(LAUNCHED, reason="asks rank 0 alone")
def test_files_that_cannot_be_written_stop_nobody(tmp_path, caplog):
    """Folders stand where files should be, which root may not write over either."""
    chosen = {"autotune_cache": tmp_path, "autotune_log": tmp_path, **QUICK}
    found = trained(2, None, 120, **chosen)[0][1]
    assert found.state == "tuned"
    for option in ("autotune_cache", "autotune_log"):
        said = [record.message for record in caplog.records if f" of {option} must be " in record.message]
        assert said and "Training goes on without it." in said[0]


@pytest.mark.skipif(LAUNCHED, reason="needs three ranks")
def test_process_sets_and_joins_go_on(tmp_path):
    """Another set's sums, and ranks without data, while settings change."""

    def on_rank(rank):
        pair = rt.add_process_set([0, 1])
        sums = []
        for number in range(40):
            step(rank, number)
            if rank < 2:
                sums.append(rt.allreduce(np.full(3, rank + number), "pair", op=rt.Sum, process_set=pair))
        for _ in range(rank * 5):
            rt.allreduce(np.ones(40_000, np.float32), "first")
        rt.join()
        return sums, rt.tuning()

    with World(3, autotune_cache=tmp_path / "cache", **QUICK) as world:
        results = world.run(on_rank)
    assert all((sums == np.full(3, 2 * number + 1)).all() for number, sums in enumerate(results[0][0]))
    assert len(results[0][1].changes) >= 2
    assert all(found.changes == results[0][1].changes for _, found in results)


def test_a_world_that_fails_while_it_searches(tmp_path):
    """The error is that of the world, and the cache is not written."""

    def on_rank(rank):
        for number in range(8):
            step(rank, number)
        if rank == 1:
            raise ValueError("of rank 1")
        step(rank, 8)

    with pytest.raises(Exception, match="of rank 1"), World(2, autotune_cache=tmp_path / "cache", **QUICK) as world:
        world.run(on_rank)
    assert not (tmp_path / "cache").exists()


def test_the_usual_cache():
    assert options.resolve({}, {"HOME": "/home/a"}) == {}
    where = options.resolve({"autotune": 1}, {"HOME": "/home/a"})["autotune_cache"]
    assert where == "/home/a/.cache/ringtrain/autotune"
    environ = {"HOME": "/home/a", "XDG_CACHE_HOME": "/var/b", "HOROVOD_AUTOTUNE": "1"}
    assert options.resolve({}, environ)["autotune_cache"] == "/var/b/ringtrain/autotune"
    assert options.resolve({"autotune": 1, "autotune_cache": "here"}, environ)["autotune_cache"] == "here"
    assert options.resolve({"autotune": 1}, {})["autotune_cache"] == ""


def test_lines_of_the_core():
    found = tunings.from_lines(["searching|tcp_streams=1,burst_bytes=5", "24|tcp_streams=2,burst_bytes=5"])
    assert found == ("searching", {"tcp_streams": 1, "burst_bytes": 5}, [(24, {"tcp_streams": 2, "burst_bytes": 5})])
