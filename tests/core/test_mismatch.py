"""Ranks that disagree and arguments that are wrong: a clear error everywhere, nothing hangs, the next operation works."""

import time
from pathlib import Path

import numpy as np
import pytest
from refusals import said_alike
from worlds import LAUNCHED, World, sizes

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError


def error_of(call):
    """The error that the call raises."""
    with pytest.raises(rt.RingtrainError) as raised:
        call()
    return raised.value


def assert_world_works():
    assert rt.allreduce(np.ones(3), "afterwards", rt.Sum).tolist() == [rt.size()] * 3


def run_and_compare(world, call, kind):
    """Every rank's call must raise; returns the text, which must be the same on all, and the world works afterwards."""

    def on_rank(rank):
        error = error_of(lambda: call(rank))
        texts = rt.allgather_object(str(error))
        assert said_alike(texts), texts
        assert isinstance(error, kind)
        assert_world_works()
        return texts[0]

    return world.run(on_rank)[0]


x = np.ones(6, np.float32)
DISAGREEMENTS = {
    "shape": (lambda last: rt.allreduce(np.ones(5 + last, np.float32), "t"), ["shape", "[5]", "[6]"]),
    "dimensions": (lambda last: rt.allreduce(x.reshape(2, 3) if last else x, "t"), ["shape", "[6]", "[2, 3]"]),
    "dtype": (lambda last: rt.allreduce(x.astype(np.float16) if last else x, "t"), ["dtype", "float16", "float32"]),
    "operation": (
        lambda last: rt.allgather(x, "t") if last else rt.allreduce(x, "t"),
        ["operation", "allgather", "allreduce"],
    ),
    "reduction": (lambda last: rt.allreduce(x, "t", rt.Max if last else rt.Sum), ["reduction", "max", "sum"]),
    "prescale": (lambda last: rt.allreduce(x, "t", rt.Sum, 0.5 if last else 1.0), ["prescale", "0.5", "1"]),
    "postscale": (lambda last: rt.allreduce(x, "t", rt.Sum, 1.0, 0.5 if last else 1.0), ["postscale", "0.5", "1"]),
    "weighting": (
        lambda last: rt.allreduce(x, "t", rt.Average, weight=3) if last else rt.allreduce(x, "t", rt.Average),
        ["weighting", "by weights", "none"],
    ),
    "compression": (
        lambda last: rt.allreduce(x, "t", rt.Sum, compression="float16" if last else "none"),
        ["compression", "float16", "none"],
    ),
    "root": (lambda last: rt.broadcast(x, int(last), "t"), ["root", "0", "1"]),
    "trailing dimension": (lambda last: rt.allgather(np.ones((2, 3 + last)), "t"), ["shape", "3", "4"]),
    "alltoall's trailing dimension": (
        lambda last: rt.alltoall(np.ones((rt.size(), 3 + last)), name="t"),
        ["shape", "3", "4"],
    ),
    "reducescatter's rows": (lambda last: rt.reducescatter(np.ones((5 + last, 2)), "t"), ["shape", "5", "6"]),
    "size of the group": (lambda last: rt.grouped_allreduce([x] * (2 + last), "t"), ["number of tensors", "2", "3"]),
    "dtype within a group": (
        lambda last: rt.grouped_allreduce([x, x.astype(int) if last else x], "t"),
        ["dtype", "int64"],
    ),
    "ranks of a process set": (lambda last: rt.add_process_set([0, 1] if last else [0]), ["[0, 1]", "[0]"]),
}


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_last_rank_disagrees(world, case):
    call, words = DISAGREEMENTS[case]
    text = run_and_compare(world, lambda rank: call(rank == rt.size() - 1), MismatchError)
    for word in [*words, f"rank {world.size - 1}", "'t'" if "process" not in case else "add_process_set"]:
        assert word in text, text


@pytest.mark.least_ranks(3)
def test_text_names_all_sides(world):
    def call(rank):
        return rt.allreduce(np.ones(4, [np.float32, np.float64][rank == 1]), "fc1.weight")

    others = {3: "ranks 0, 2", 4: "ranks 0, 2, 3", 7: "ranks 0, 2-6"}[world.size]
    text = run_and_compare(world, call, MismatchError)
    assert (
        f"allreduce 'fc1.weight': dtype must be the same on all ranks, but is float32 on {others} and float64 on rank 1"
        in text
    )


@pytest.mark.least_ranks(3)
def test_text_names_three_sides(world):
    dtypes = [np.float32, np.float16, np.float64]
    text = run_and_compare(world, lambda rank: rt.allreduce(np.ones(4, dtypes[min(rank, 2)]), "t"), MismatchError)
    others = {3: "rank 2", 4: "ranks 2, 3", 7: "ranks 2-6"}[world.size]
    assert f"float32 on rank 0, float16 on rank 1 and float64 on {others}." in text


def send_all_to_the_last():
    return rt.alltoall(x, [0] * (rt.size() - 1) + [6], "t")


# A wrong call, the right one of the others, a word of the text.
ONE_RANK_SEES = {
    "root too high": (lambda: rt.broadcast(x, rt.size(), "t"), lambda: rt.broadcast(x, 0, "t"), "root"),
    "root negative": (lambda: rt.broadcast(x, -1, "t"), lambda: rt.broadcast(x, 0, "t"), "root"),
    "root no number": (lambda: rt.broadcast(x, "zero", "t"), lambda: rt.broadcast(x, 0, "t"), "root_rank must be an integer"),
    "splits too short": (lambda: rt.alltoall(x, [6] * (rt.size() + 1), "t"), send_all_to_the_last, "splits"),
    "splits do not add up": (lambda: rt.alltoall(x, [5] * rt.size(), "t"), send_all_to_the_last, "add up"),
    "splits negative": (
        lambda: rt.alltoall(x, [-1] * rt.size(), "t"),
        send_all_to_the_last,
        "negative",
    ),
    "splits of floats": (
        lambda: rt.alltoall(x, [1.5] * rt.size(), "t"),
        send_all_to_the_last,
        "list of integers",
    ),
    "scalar to allgather": (lambda: rt.allgather(np.float32(1), "t"), lambda: rt.allgather(x, "t"), "scalar"),
    "scalar to reducescatter": (lambda: rt.reducescatter(np.float32(1), "t"), lambda: rt.reducescatter(x, "t"), "scalar"),
    "long double": (lambda: rt.allreduce(x.astype("g"), "t"), lambda: rt.allreduce(x, "t"), "float128"),
    "objects": (lambda: rt.allreduce(np.array([None]), "t"), lambda: rt.allreduce(x, "t"), "object"),
    "text": (lambda: rt.allgather("words", "t"), lambda: rt.allgather(x, "t"), "dtype"),
    "average of bool": (lambda: rt.allreduce(x > 0, "t"), lambda: rt.allreduce(x, "t"), "bool"),
    "unknown op": (lambda: rt.allreduce(x, "t", 17), lambda: rt.allreduce(x, "t"), "op must be one of"),
    "list in place": (lambda: rt.allreduce_([1.0], "t"), lambda: rt.allreduce(x, "t"), "list"),
    "one bad member of a group": (
        lambda: rt.grouped_allreduce([x, x.astype("g")], "t"),
        lambda: rt.grouped_allreduce([x, x], "t"),
        "float128",
    ),
}  # fmt: skip


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("case", ONE_RANK_SEES)
def test_one_rank_sees_it_and_all_fail_alike(world, case):
    wrong, right, word = ONE_RANK_SEES[case]
    text = run_and_compare(world, lambda rank: wrong() if rank == 1 else right(), InvalidArgumentError)
    assert word in text and "'t'" in text, text


@pytest.mark.parametrize("case", ONE_RANK_SEES)
def test_all_ranks_see_it(world, case):
    wrong, _, word = ONE_RANK_SEES[case]
    text = run_and_compare(world, lambda rank: wrong(), InvalidArgumentError)
    assert word in text, text


def test_unnamed_operations_stay_in_step_after_a_refusal(world):
    def on_rank(rank):
        assert "allreduce" in str(error_of(lambda: rt.allreduce(np.ones(2) if rank else np.ones(2, "g"))))
        assert rt.allreduce(np.ones(2), op=rt.Sum).tolist() == [rt.size()] * 2

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_duplicate_name_raises_here_alone(world):
    """The first submission goes on unharmed."""

    def on_rank(rank):
        if rank == 0:
            first = rt.allreduce_async(np.ones(4), "twice", rt.Sum)
            error = error_of(lambda: rt.allreduce_async(np.ones(4), "twice", rt.Sum))
            assert isinstance(error, InvalidArgumentError) and "twice" in str(error)
            rt.barrier()
        else:
            rt.barrier()
            first = rt.allreduce_async(np.ones(4), "twice", rt.Sum)
        assert rt.synchronize(first).tolist() == [rt.size()] * 4
        assert_world_works()

    world.run(on_rank)


def test_name_may_come_again_once_done(world):
    def on_rank(rank):
        for turn in range(20):
            assert rt.allreduce(np.array([turn + rank]), "again", rt.Max)[0] == turn + rt.size() - 1

    world.run(on_rank)


def test_shape_may_change_from_step_to_step(world):
    """What the response cache holds for the name no longer fits, on some ranks first."""

    def on_rank(rank):
        for turn in range(12):
            length = 5 + turn // 3
            assert rt.allreduce(np.ones(length), "changing", rt.Sum).tolist() == [rt.size()] * length

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_mismatch_of_a_cached_name(world):
    def on_rank(rank):
        for _ in range(3):
            rt.allreduce(np.ones(4), "cached")
        assert isinstance(error_of(lambda: rt.allreduce(np.ones(4 + (rank == 1)), "cached")), MismatchError)
        assert rt.allreduce(np.ones(4), "cached", rt.Sum).tolist() == [rt.size()] * 4

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_other_pending_operations_go_on(world):
    def on_rank(rank):
        good = [rt.allreduce_async(np.full(100, i), f"good.{i}", rt.Sum) for i in range(10)]
        bad = rt.allreduce_async(np.ones(3 + (rank == 0)), "bad")
        more = [rt.allreduce_async(np.full(100, i), f"more.{i}", rt.Sum) for i in range(10)]
        error_of(lambda: rt.synchronize(bad))
        error_of(lambda: rt.synchronize(bad))  # a failed operation fails again, with the same text
        for i, handle in enumerate(good):
            assert rt.synchronize(handle).tolist() == [i * rt.size()] * 100
        for i, handle in enumerate(more):
            assert rt.synchronize(handle).tolist() == [i * rt.size()] * 100

    world.run(on_rank)


@pytest.mark.parametrize("size", sizes(least=2))
def test_missing_rank_is_named_and_the_operation_ends(size, caplog, tmp_path):
    """The late rank hears of it when it comes; those that waited heard at the deadline."""

    def on_rank(rank):
        heard = Path(rt.broadcast_object(str(tmp_path)))  # the same folder for the ranks of a launcher, too
        rt.barrier()
        deadline = time.monotonic() + 50
        while rank == size - 1 and len(list(heard.iterdir())) < size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        text = str(error_of(lambda: rt.allreduce(np.ones(2), "lonely")))
        assert "allreduce 'lonely'" in text and f"missing rank {size - 1}" in text
        (heard / str(rank)).touch()
        assert_world_works()

    with World(size, stall_warning_seconds=0.2, stall_abort_seconds=1.5) as world:
        world.run(on_rank)
    if not LAUNCHED:
        assert any(f"missing rank {size - 1}" in record.getMessage() for record in caplog.records)


@pytest.mark.least_ranks(2)
def test_control_characters_of_a_name_are_escaped_in_messages(world):
    """Raw, they would move the cursor of the terminal, or make a line that looks like another message."""
    name = "a\x1b[2J\r\nb\x7f ünï"

    def call(rank):
        rt.allreduce(np.ones(10 + (rank == rt.size() - 1)), name, rt.Sum)

    text = run_and_compare(world, call, MismatchError)
    assert "allreduce 'a\\x1b[2J\\x0d\\x0ab\\x7f ünï'" in text and text.isprintable()
