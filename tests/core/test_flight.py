"""The flight record: what each rank remembers, and what the records of all ranks say together."""

import contextlib
import json
import os
import threading
import time

import numpy as np
import pytest
from worlds import World, sizes

import ringtrain as rt
from ringtrain._binding import log
from ringtrain._runtime import context, flight_recorder, rank_lists
from ringtrain.launch import commands, flight_comparison

NEEDS_THE_FILES_OF_ALL = pytest.mark.on_threads("needs the files of all ranks")


def test_what_is_remembered(world):
    def on_rank(rank):
        rt.allreduce(np.ones((2, 3), np.float32), "sum", rt.Sum)
        rt.broadcast(np.ones(5, np.int64), rt.size() - 1, "from the last")
        rt.grouped_allreduce([np.ones(2), np.ones(3)], "two")
        rt.barrier()
        record = rt.flight_record()
        first, second, third, fourth = record.operations
        assert (record.rank, record.size, record.because) == (rank, rt.size(), "")
        assert record.process_sets == {0: tuple(range(rt.size()))}
        assert rank in record.hosts[record.host] and sorted(sum(record.hosts.values(), ())) == list(range(rt.size()))
        assert first[1:11] == (0, 1, "allreduce", "sum", "float32", (2, 3), 1, 24, "sum", None)
        assert (second.agreed, second.root, second.reduction, second.shape) == (2, rt.size() - 1, None, (5,))
        assert (third.tensors, third.bytes, third.dtype) == (2, 40, "float64")
        assert (fourth.operation, fourth.dtype, fourth.agreed) == ("barrier", None, 0)
        assert [each.number for each in record.operations] == [1, 2, 3, 4]
        for each in record.operations:
            assert each.status == "ok" and each.submitted <= each.announced <= each.finished <= record.written
        assert first.announced <= first.started <= first.finished
        assert "allreduce 'sum'  allreduce, float32[2, 3], sum" in str(record)

    world.run(on_rank)


@NEEDS_THE_FILES_OF_ALL
def test_what_is_pending_outlives_what_has_ended():
    """However many have ended since: those that wait are the ones that somebody asks for."""

    def on_rank(rank):
        waiting = None if rank == 0 else rt.allreduce_async(np.ones(3), "waiting")
        for number in range(40):
            rt.allreduce(np.ones(1), f"{number % 3}")
        record = rt.flight_record()
        rt.barrier()  # all have looked
        ended = [each for each in record.operations if each.status == "ok"]
        assert len(ended) == 16 and [each.number for each in ended] == list(
            range(ended[0].number, record.operations[-1].number + 1)
        )
        assert [each.name for each in record.operations if each.status == "pending"] == (
            [] if rank == 0 else ["waiting"]
        )
        assert ended[-1].agreed == 40
        rt.synchronize(waiting or rt.allreduce_async(np.ones(3), "waiting"))

    with World(3, flight_operations=16) as world:
        world.run(on_rank)


def test_how_many_are_remembered_is_an_option():
    def on_rank(rank):
        for _ in range(5):
            rt.allreduce(np.ones(3), "x")
        return len(rt.flight_record().operations)

    for wanted in (0, 3):
        with World(sizes()[-1], flight_operations=wanted) as world:
            assert set(world.run(on_rank)) == {wanted}


def test_names_of_every_kind(world):
    def on_rank(rank):
        for name in ('a "quoted"\nname', "é" * 100, "n" * 500):
            rt.allreduce(np.ones(1), name)
        short, cut, long = (each.name for each in rt.flight_record().operations)
        assert short == 'a "quoted"\nname'
        assert cut.startswith("...") and cut.endswith("é" * 60) and long == "..." + "n" * 124

    world.run(on_rank)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"flight record '.*': it must be written there, but"):
        World(sizes()[-1], flight_record=str(tmp_path / "file" / "folder"))


def end_of(folder, size, on_rank, **chosen):
    """Runs the ranks until the world ends by the abort of rank 0; the lines of the comparison."""

    def run(rank):
        with contextlib.suppress(rt.RingtrainError):
            on_rank(rank)
        all_are_through.wait(60)
        context.current().abort("the test has ended the world.")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not written(rank):
            time.sleep(0.01)

    def written(rank):
        file = folder / f"flight.{rank}.json"
        return file.exists() and "the test has ended the world" in file.read_text()

    all_are_through = threading.Barrier(size)
    with World(size, flight_record=str(folder), **chosen) as world:
        world.run(run)
    records, others = flight_comparison.newest_world(flight_recorder.read(folder))
    assert others == [] and len(records) == size
    return flight_comparison.compare(records)


def find(lines, *parts):
    """The one line that has all of these."""
    found = [line for line in lines if all(part in line for part in parts)]
    assert len(found) == 1, (parts, lines)
    return found[0]


@NEEDS_THE_FILES_OF_ALL
def test_a_rank_that_leaves_an_operation_out_is_named(tmp_path):
    def on_rank(rank):
        rt.allreduce(np.ones(3), "before")
        if rank == 1:
            rt.allreduce(np.ones(3), "instead")
        else:
            rt.allreduce(np.ones(3), "skipped")

    lines = end_of(tmp_path, 3, on_rank, stall_abort_seconds=0.5, stall_warning_seconds=0.2)
    skipped = find(lines, "allreduce 'skipped': ranks 0, 2 submitted it", "but rank 1 has not")
    assert "Rank 1" in skipped and "'instead'" in skipped
    find(lines, "allreduce 'instead': rank 1 submitted it", "but ranks 0, 2 have not")
    assert not any("differs" in line for line in lines)


@NEEDS_THE_FILES_OF_ALL
@pytest.mark.parametrize(("other", "text"), [
    (lambda: rt.allreduce(np.ones(4), "x", rt.Sum), "[allreduce, float64[4], sum] on rank 2"),
    (lambda: rt.allreduce(np.ones(3, np.float32), "x", rt.Sum), "[allreduce, float32[3], sum] on rank 2"),
    (lambda: rt.allreduce(np.ones(3), "x", rt.Max), "[allreduce, float64[3], max] on rank 2"),
    (lambda: rt.broadcast(np.ones(3), 1, "x"), "[broadcast, float64[3], root 1] on rank 2"),
], ids=["shape", "dtype", "reduction", "operation"])  # fmt: skip
def test_other_tensors_are_named(tmp_path, other, text):
    lines = end_of(tmp_path, 3, lambda rank: other() if rank == 2 else rt.allreduce(np.ones(3), "x", rt.Sum))
    assert find(lines, "'x' differs") == f"'x' differs: [allreduce, float64[3], sum] on ranks 0, 1 but {text}."
    assert not any("'x': " in line for line in lines)


@NEEDS_THE_FILES_OF_ALL
def test_a_refusal_is_told(tmp_path):
    """Rank 1 could see alone that it is wrong, so it was never submitted there."""
    lines = end_of(tmp_path, 2, lambda rank: rt.allreduce(np.array(["text"]) if rank == 1 else np.ones(3), "x"))
    line = find(lines, "allreduce 'x': rank 0 submitted it", "but rank 1 has not")
    assert "It was refused there, before it could be submitted." in line


@NEEDS_THE_FILES_OF_ALL
def test_a_process_set_is_told_apart(tmp_path):
    def on_rank(rank):
        pair = rt.add_process_set([1, 2])
        if rank == 1:
            rt.allreduce(np.ones(3), "x", process_set=pair)

    lines = end_of(tmp_path, 3, on_rank, stall_abort_seconds=0.5, stall_warning_seconds=0.2)
    line = find(lines, "Process set 1 (ranks 1, 2): allreduce 'x': rank 1 submitted it", "rank 2 has not")
    assert "Rank 2 has submitted nothing" in line


@NEEDS_THE_FILES_OF_ALL
def test_ranks_that_did_the_same_have_nothing_to_say(tmp_path):
    lines = end_of(tmp_path, 2, lambda rank: rt.allgather(np.ones((rank + 1, 2)), "rows"))
    assert lines[-1].startswith("No rank waits for another")
    assert any("the test has ended the world." in line for line in lines)


@NEEDS_THE_FILES_OF_ALL
def test_a_world_that_ends_well_leaves_nothing(tmp_path):
    folder = tmp_path / "made" / "at the start"
    with World(2, flight_record=str(folder)) as world:
        world.run(lambda rank: rt.allreduce(np.ones(3), "x"))
    assert os.listdir(folder) == []


@NEEDS_THE_FILES_OF_ALL
def test_the_command(tmp_path, capfd):
    """Files of an earlier world are left out; a silent rank comes first; what is no record is refused."""

    def command(*arguments):
        code = commands.main(["flight", *map(str, arguments)])
        return code, capfd.readouterr()

    code, said = command(tmp_path)
    assert code == 1 and "there must be files flight.RANK.json" in said.err
    end_of(tmp_path, 3, lambda rank: rt.allreduce(np.ones(3), "old"))
    earlier = json.loads((tmp_path / "flight.2.json").read_text())
    end_of(tmp_path, 3, lambda rank: rt.allreduce(np.ones(3), "new"))
    (tmp_path / "flight.2.json").write_text(json.dumps(earlier))
    code, said = command(tmp_path)
    assert code == 0 and "Rank 2 left no record" in said.out
    assert "Left out, since of an earlier world: the records of rank 2." in said.out
    code, said = command(tmp_path, "--rank", "1")
    assert code == 0 and "allreduce 'new'" in said.out
    code, said = command(tmp_path, "--rank", "2")
    assert code == 1 and "rank 2 must have left a record" in said.err
    (tmp_path / "flight.0.json").write_text("{}")
    code, said = command(tmp_path)
    assert code == 1 and "flight.0.json: it must be a flight record of format 2" in said.err
    assert command("--help")[0] == 0


# ---- the comparison alone ----


def flown(number, name, **changes):
    plain = flight_recorder.Flown(number, 0, number, "allreduce", name, "float32", (3,), 1, 12, "sum", None, 100.0 + number,
                          100.0 + number, 100.0 + number, 100.5 + number, "ok")  # fmt: skip
    return plain._replace(**changes)


def record(rank, operations, size=2, **changes):
    plain = flight_recorder.FlightRecord(
        7, rank, size, f"host-{rank}", {"host": tuple(range(size))}, 1, 200.0 + rank, "rank 1 died.",
        {0: tuple(range(size))}, tuple(operations),
    )  # fmt: skip
    return plain._replace(**changes)


PENDING = {"agreed": 0, "started": None, "finished": None, "status": "pending"}


def test_a_rank_behind_is_named():
    lines = flight_comparison.compare(
        [record(0, [flown(1, "a"), flown(2, "b"), flown(3, "c")]), record(1, [flown(1, "a")])]
    )
    assert (
        "Rank 1 is behind: its last operation of those that all had agreed on is #1, allreduce 'a'; others have come to #3, allreduce 'c'."
        in lines
    )


def test_a_rank_that_has_not_heard_of_an_agreement_accuses_nobody():
    """Rank 1 still waits for what rank 0 has done: the last words of the coordinator have not come."""
    barrier = flown(
        3, "barrier.noname.1", operation="barrier", agreed=0, tensors=0, dtype=None, shape=(), reduction=None
    )
    own = [flown(1, "x"), flown(2, "x"), barrier]
    unheard = [flown(1, "x"), flown(2, "x", **PENDING), barrier._replace(**PENDING)]
    lines = flight_comparison.compare([record(0, own), record(1, unheard)])
    assert len(lines) == 3 and lines[2].startswith(
        "Rank 1 is behind: its last operation of those that all had agreed on is #1"
    )


def test_what_had_begun_is_told():
    stuck = flown(2, "b", finished=None, status="pending")
    lines = flight_comparison.compare([record(0, [flown(1, "a"), stuck]), record(1, [flown(1, "a"), flown(2, "b")])])
    assert "#2, allreduce 'b', had begun and was not finished on rank 0; it was on rank 1." in lines


def test_a_silent_rank_is_named_and_nothing_is_said_for_it():
    lines = flight_comparison.compare([record(0, [flown(1, "a", **PENDING)])])
    assert lines[2].startswith("Rank 1 left no record")
    assert "but of rank 1 nothing is known." in find(lines, "allreduce 'a': rank 0 submitted it")


def test_ranks_are_named_with_their_hosts_if_there_are_several():
    """Of a rank without a record, too: there one has to look."""
    hosts = {"node-a": (0, 2), "node-b": (1,)}
    own = [flown(1, "a"), flown(2, "b", **PENDING)]
    lines = flight_comparison.compare([record(0, own, 3, hosts=hosts), record(2, [], 3, hosts=hosts)])
    find(lines, "Rank 1 (host node-b) left no record")
    find(lines, "rank 2 (host node-a) has not, and of rank 1 (host node-b) nothing is known")
    find(lines, "Rank 2 (host node-a) is behind")
    assert flight_recorder.placed([0, 1], hosts) == "ranks 0, 1 (hosts node-a, node-b)"
    many = {f"node-{each}": (each,) for each in range(9)}
    assert flight_recorder.placed(range(9), many) == "ranks 0-8" and rank_lists.ranks_of("ranks 0-2, 5") == [0, 1, 2, 5]


def test_a_rank_that_has_joined_is_missing_nowhere():
    joined = flown(
        2, "join.noname.1", operation="join", dtype=None, shape=(), tensors=0, bytes=0, reduction=None, **PENDING
    )
    waits = flown(2, "b", **PENDING)
    lines = flight_comparison.compare(
        [record(0, [flown(1, "a"), waits], 3), record(1, [flown(1, "a"), joined], 3), record(2, [flown(1, "a")], 3)]
    )
    assert "but rank 2 has not" in find(lines, "allreduce 'b': rank 0 submitted it")
    find(lines, "join 'join.noname.1': rank 1 submitted it", "ranks 0, 2 have not")


def test_lists_are_bounded():
    many = [flown(number, f"t{number}", **PENDING) for number in range(1, 101)]
    lines = flight_comparison.compare([record(0, many), record(1, [])])
    assert len(lines) < 30 and "... and 80 more like this." in lines
    assert "'t1'" in lines[2]  # the oldest first


@NEEDS_THE_FILES_OF_ALL
def test_a_stall_leaves_records_while_the_job_goes_on(tmp_path):
    """Of who waits and of who is waited for, without an end of the world."""

    def on_rank(rank):
        files, lines = [tmp_path / f"flight.{each}.json" for each in range(2)], []
        if rank == 1:
            while not all(file.exists() for file in files):
                time.sleep(0.01)
            lines = flight_comparison.compare(flight_recorder.read(tmp_path))
        rt.allreduce(np.ones(3), "late")
        return lines

    with World(2, flight_record=str(tmp_path), stall_warning_seconds=0.1) as world:
        lines = world.run(on_rank)[1]
    find(lines, "allreduce 'late': rank 0 submitted it", "rank 1 has not")
    find(lines, "Rank 0: allreduce 'late' has waited for stall_warning_seconds.")
    find(lines, "Rank 1: the other ranks wait for allreduce 'late'.")
    assert log.newest_stall()[:3] == ("allreduce 'late'", "rank 0", "rank 1")


# ---- hosts whose clocks differ: pure ----

HOUR = 3600.0


def by_its_clock(rank, written, ahead=0.0, operations=3, **changes):
    """Of a host whose clock is ahead; rank 0 submits operations at 101 s, 102 s, ..., each next rank 0.1 s after it."""
    times = {"announced": None, "finished": None}
    own = [
        flown(each, "x", submitted=100.0 + each + 0.1 * rank + ahead, started=100.3 + each + ahead, **times)
        for each in range(1, 1 + operations)
    ]
    return record(rank, own, 3, written=written + ahead, **changes)


@pytest.mark.parametrize("ahead", [(0.0, HOUR, -HOUR), (HOUR, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_the_first_cause_is_first_however_the_clocks_stand(ahead):
    causes = {1: "it saw the fault", 0: "it was told", 2: "it was told last"}
    records = [
        by_its_clock(rank, 110.0 + 2 * list(causes).index(rank), ahead[rank], because=causes[rank]) for rank in range(3)
    ]
    assert flight_comparison.compare(records)[1:4] == [f"Rank {rank}: {cause}" for rank, cause in causes.items()]


def test_clocks_that_agree_well_enough_are_left_alone():
    """And those of ranks that have nothing in common."""
    records = [by_its_clock(0, 110.0), by_its_clock(1, 110.0, 0.1), by_its_clock(2, 110.0, HOUR, operations=0)]
    assert flight_comparison.on_one_clock(records) == records


def test_the_newest_world_is_told_by_a_host_that_has_seen_both():
    """There is a record of the world before, of a rank whose host is an hour ahead."""
    left = by_its_clock(2, 105.0, HOUR, world=1)
    now = [by_its_clock(rank, 109.0, world=2) for rank in range(2)]
    seen = by_its_clock(2, 109.0, HOUR, world=2)._replace(rank=3)
    assert flight_comparison.newest_world([*now, left, seen]) == ([*now, seen], [left])
    contradicting = [each._replace(host="node-x") for each in (now[0], left)]  # a clock was set back
    assert flight_comparison.newest_world([*contradicting, left, seen])[0][0].world == 2, "by the time of writing"
