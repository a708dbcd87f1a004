"""The timeline: valid JSON whatever happens, with every stage of a tensor's way, of bounded size."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from worlds import LAUNCHED, World, sizes

import ringtrain as rt
from ringtrain.launch.report import timelines

NEEDS_THE_FILES_OF_ALL = pytest.mark.on_threads("needs the files of all ranks")


def events_of(path):
    trace = json.loads(pathlib.Path(path).read_text())
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def stages_of(events):
    return {event.get("cat") for event in events if event.get("ph") == "X"}


def own_file(path, rank):
    """Rank 0's has the name that was given."""
    return f"{path}.{rank}" if rank else str(path)


def some_steps():
    for _ in range(3):
        for handle in [rt.allreduce_async(np.ones(50_000, np.float32), f"layer.{i}") for i in range(4)]:
            rt.synchronize(handle)


@pytest.mark.parametrize("size", [size for size in sizes(least=2) if size % 2 == 0])
def test_stages(size, tmp_path):
    """Across two hosts every stage occurs; times are ordered and belong to the tensors by name."""

    def on_rank(rank):
        some_steps()
        rt.barrier()

    with World(size, f"{size // 2}+{size // 2}", timeline=f"{tmp_path}/trace.{{rank}}.json", chunk_bytes=4096) as world:
        world.run(on_rank)
        ranks = [rt.rank()] if LAUNCHED else range(size)
    seen = set()
    for rank in ranks:
        events = events_of(f"{tmp_path}/trace.{rank}.json")
        assert {"negotiate", "queue", "pack", "wire", "unpack"} - stages_of(events) == set(), rank
        seen |= stages_of(events)
        assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if "ts" in event)
        assert "layer.3" in json.dumps(events)
    assert "reduce" in seen


def test_start_and_stop_at_run_time(world, tmp_path):

    def on_rank(rank):
        rt.stop_timeline()  # without one: nothing
        rt.start_timeline(f"{tmp_path}/first", mark_cycles=True)
        rt.allreduce(np.ones(100), "in the first")
        rt.barrier()
        rt.stop_timeline()
        rt.allreduce(np.ones(100), "in none")
        rt.start_timeline(f"{tmp_path}/{{rank}}.second.json")
        rt.allreduce(np.ones(100), "in the second")
        rt.stop_timeline()
        rt.stop_timeline()
        first = json.dumps(events_of(own_file(f"{tmp_path}/first", rank)))
        second = json.dumps(events_of(f"{tmp_path}/{rank}.second.json"))
        assert "in the first" in first and "in none" not in first and "in the second" not in first
        assert "in the second" in second and "in none" not in second

    world.run(on_rank)


def names_of(events):
    return {event["name"] for event in events}


@NEEDS_THE_FILES_OF_ALL
def test_horovods_readers_find_its_names(tmp_path):
    """In the file of the name that was given; tracks are called as there, by operation and name."""

    def on_rank(rank):
        rt.allreduce(np.ones(50_000), "layer")
        rt.allgather(np.ones(1000))
        rt.barrier()

    with World(sizes()[-1], timeline=f"{tmp_path}/trace.json", timeline_mark_cycles=1) as world:
        world.run(on_rank)
    events = events_of(f"{tmp_path}/trace.json")
    assert names_of(events) >= {
        "NEGOTIATE_ALLREDUCE",
        "ALLREDUCE",
        "QUEUE",
        "NEGOTIATE_ALLGATHER",
        "ALLGATHER",
        "CYCLE_START",
    }
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks >= {"allreduce.layer", "allgather.noname.1"}
    assert sizes()[-1] == 1 or names_of(events) >= {"MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"}


def test_cycles_are_marked_on_request_and_within_the_bound(world, tmp_path):
    def on_rank(rank):
        for marks in (False, True):
            rt.start_timeline(f"{tmp_path}/{marks}", mark_cycles=marks)
            rt.allreduce(np.ones(10), "x")
            rt.stop_timeline()
            rt.barrier()
            assert ("CYCLE_START" in names_of(events_of(own_file(f"{tmp_path}/{marks}", rank)))) == marks

    world.run(on_rank)


@NEEDS_THE_FILES_OF_ALL
def test_the_ranks_traces_become_one(tmp_path):
    whole, file = tmp_path / "whole.json", tmp_path / "trace.json"
    with World(12, timeline=file) as world:
        world.run(lambda rank: some_steps())
    (tmp_path / "trace.json.bak").write_text("not a trace")
    done = subprocess.run([sys.executable, "-m", "ringtrain.launch.commands", "merge-timelines", whole, file],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("trace.json") == 12, done
    events = events_of(whole)
    assert {event["pid"] for event in events} == set(range(12))
    assert len(events) == sum(len(events_of(own_file(file, rank))) for rank in range(12))
    assert timelines.merge([file, f"{file}.3"], file)[-1].name == "trace.json.11"  # each once, also into one of them
    assert events_of(file) == events
    timelines.merge([file], file)  # now a merged trace beside the ranks' own
    assert sorted(map(str, events_of(file))) == sorted(map(str, events))
    timelines.merge([whole, file], whole)
    assert len(events_of(whole)) == len(events)
    with pytest.raises(OSError, match="absent/merged'"):
        timelines.merge([file], tmp_path / "absent" / "merged")
    timelines.merge([file], whole)
    events = events_of(whole)
    for arguments in ([whole], [whole, tmp_path / "absent"], [whole, tmp_path / "trace.json.bak"]):
        done = subprocess.run([sys.executable, "-m", "ringtrain.launch.commands", "merge-timelines", *arguments],
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr and done.stderr, done
    assert events_of(whole) == events


def test_a_path_is_not_cut_at_a_nul(world, tmp_path):
    def on_rank(rank):
        with pytest.raises(ValueError, match="must not contain a NUL"):
            rt.start_timeline(f"{tmp_path}/one\0two")
        rt.barrier()
        assert not os.listdir(tmp_path)
        rt.barrier()

    world.run(on_rank)


@pytest.mark.on_threads("opens a world of one, which the launcher's ranks are not")
def test_the_path_of_an_option_is_not_cut_at_a_nul(tmp_path):
    with pytest.raises(ValueError, match="one line without NUL"):
        rt.init(timeline=f"{tmp_path}/one\0two")


def test_size_is_bounded(tmp_path):

    def on_rank(rank):
        for turn in range(300):
            rt.allreduce(np.ones(10), f"t.{turn}")
        rt.stop_timeline()
        assert len(events_of(own_file(f"{tmp_path}/bounded", rank))) < 250

    with World(sizes()[-1], timeline=f"{tmp_path}/bounded", timeline_events=100) as world:
        world.run(on_rank)


def test_names_are_escaped(world, tmp_path):

    def on_rank(rank):
        rt.start_timeline(f"{tmp_path}/escaped")
        rt.allreduce(np.ones(10), 'quote " backslash \\ tab \t Grüße')
        rt.stop_timeline()
        assert any(
            "Grüße" in json.dumps(event, ensure_ascii=False)
            for event in events_of(own_file(f"{tmp_path}/escaped", rank))
        )

    world.run(on_rank)


def test_folder_that_does_not_exist(world):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match="/nowhere/at/all"):
            rt.start_timeline("/nowhere/at/all/trace")
        assert rt.allreduce(np.ones(1), "goes on", rt.Sum)[0] == rt.size()

    world.run(on_rank)


@pytest.mark.on_threads("kills a process of its own")
def test_valid_after_a_kill(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import numpy as np, ringtrain as rt
            rt.init(timeline="{tmp_path}/killed")
            for turn in range(10**9):
                rt.allreduce(np.ones(1000), f"turn.{{turn % 10}}")
                if turn == 500:
                    print("under way", flush=True)
        """)], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "under way\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "turn.9" in json.dumps(events_of(f"{tmp_path}/killed"))
