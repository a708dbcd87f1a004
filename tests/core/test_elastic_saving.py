"""Files of ``elastic.State`` with values: a training goes on from the newest one, on all ranks, with the same numbers."""

import random

import numpy as np
import pytest

import ringtrain as rt
import ringtrain.elastic
from ringtrain.elastic.saving import Folder, SavingPlan
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World


def training(folder, every, stop=None, **given):
    """What a rank has drawn and stepped with; one that stops early is as dead as a job whose hosts are gone."""
    weights = np.full(3, float(rt.rank()), np.float32)
    sampler = rt.elastic.BatchSampler(24, batch_size=2)
    state = rt.elastic.State(weights=weights, sampler=sampler, seen=[], notes={"best": (1, None, 0.5)}, **given)
    resumed = state.resume(folder)
    state.save_every(folder, keep=2, **every)
    for _ in state.epochs(2):
        for indices in sampler:
            drawn = random.random() + np.random.random()
            state.weights += state.allreduce(np.float32(indices.sum() + drawn))
            state.seen = [*state.seen, (state.epoch, indices.tolist())]
            if stop is not None and state.step == stop:
                return None
    assert state.weights is weights
    return resumed, state.notes, state.seen, weights.tolist()


@pytest.mark.parametrize(
    "every, stop", [({"steps": 2}, 3), ({"steps": 2}, 7), ({"minutes": 1e-9}, 4), ({"epochs": 1}, 14)]
)
def test_a_training_goes_on_from_its_newest_file(every, stop, tmp_path):
    """In the middle of an epoch, too, with the random numbers of one process and what is left of the samples."""

    def run(name, **stops):
        random.seed(1), np.random.seed(1)
        with World(1) as world:
            (end,) = world.run(lambda _: training(tmp_path / name, every, **stops))
        return end

    whole = run("whole")
    assert run("cut", stop=stop) is None
    again = run("cut")
    assert again[0] and not whole[0] and again[1:] == whole[1:]
    assert len(Folder(tmp_path / "cut").steps()) == 2


def test_all_ranks_have_what_rank_0_has_found(tmp_path):
    """Also one whose disk has no file."""

    def train(rank, steps):
        state = rt.elastic.State(weights=np.zeros(2, np.float16), own=[])
        found = state.resume(tmp_path / ("shared" if rank == 0 else "none"))
        state.save_every(tmp_path / "shared", steps=2)
        for _ in state.steps(steps):
            state.weights += state.allreduce(np.ones(2, np.float16))
        return found, state.step, state.weights.tolist()

    with World(2) as world:
        assert world.run(lambda rank: train(rank, 3)) == [(False, 3, [3.0, 3.0])] * 2
    assert Folder(tmp_path / "shared").steps() == [2]
    with World(2) as world:
        assert world.run(lambda rank: train(rank, 4)) == [(True, 4, [4.0, 4.0]), (False, 4, [4.0, 4.0])]


def test_what_cannot_be_saved_or_gone_on_from_is_said(tmp_path):
    def refused(function, words):
        with pytest.raises(InvalidArgumentError, match=words):
            function()

    def train(_rank):
        state = rt.elastic.State(weights=np.zeros(1))
        refused(lambda: state.save_every(tmp_path), "save_every: expected steps=, minutes= or epochs= above 0")
        refused(lambda: state.save_every(tmp_path, steps=1, keep=0), "save_every: expected keep= above 0")
        other = rt.elastic.State(log=object())
        refused(
            lambda: other.save_every(tmp_path, steps=1), r"values must be numbers, texts, arrays, .*'log'.*\(object\)"
        )
        state.save_every(tmp_path, steps=1)
        assert list(state.steps(2)) == [0, 1]
        again = rt.elastic.State(weights=np.zeros(1), other=1)
        refused(
            lambda: again.resume(tmp_path), "resume: expected a file with batch, epoch, other, step, weights but found"
        )
        begins = rt.elastic.State(weights=np.zeros(1))
        begins.save_every(tmp_path, steps=1)
        refused(lambda: next(begins.steps(2)), "save_every: expected no file behind step 0, where this training begins")
        (tmp_path / "step-000000000002.npz").write_bytes(b"PK")
        refused(
            lambda: begins.resume(tmp_path),
            "resume: expected a whole file .* Remove it to go on from step-000000000001.npz",
        )

    with World(1) as world:
        world.run(train)


def test_a_full_disk_costs_a_line_and_no_training(tmp_path, caplog):
    def train(_rank):
        state = rt.elastic.State(weights=np.zeros(1))
        (tmp_path / "file").write_text("")
        state.save_every(tmp_path / "file", steps=1)
        return list(state.steps(2))

    with World(1) as world:
        assert world.run(train) == [[0, 1]]
    assert "save_every: the state behind step 1 could not be written" in caplog.text


def test_values_keep_their_kinds(tmp_path):
    values = {
        "a": [1, 2.5, float("inf"), "x", None, True],
        3: (np.float32(2), np.arange(4, dtype=np.int8).reshape(2, 2)[:, 0], np.array(1.0)),
        "empty": {"set": {1, 2}, "frozen": frozenset("a"), "array": np.zeros((0, 3))},
    }
    Folder(tmp_path).write(7, values, 1)
    path, found = Folder(tmp_path).newest()
    assert path.name == "step-000000000007.npz" and repr(found) == repr(values)


def test_rank_0_is_asked_for_the_time_every_ten_seconds():
    """At a hundred steps a second, and more often where a file is due soon; whoever joins does so at the same steps."""
    plan, step, looks = SavingPlan(None, 1.0, 0, 0.0), 0, []
    while step < 7000:
        step += 1
        if plan.asks_at(step):
            looks.append(step)
            if plan.hear(step, step / 100, plan.answer(step, step / 100)):
                break
    assert step == 6000 and len(looks) < 25 and max(np.diff(looks)) == 1000, looks
    other = SavingPlan(None, 1.0, 0, 0.0)
    other.progress = plan.progress
    assert [other.asks_at(at) for at in (6000, 6001)] == [plan.asks_at(at) for at in (6000, 6001)] == [False, True]
