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

pytestmark = pytest.mark.timeout(60)


def events_of(path):
    trace = json.loads(pathlib.Path(path).read_text())
    return trace["traceEvents"] if isinstance(trace, dict) else trace


def stages_of(events):
    return {event["name"].lower().split("_")[0].split(" ")[0] for event in events if event.get("ph") in ("X", "B", "b")}


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
        first = json.dumps(events_of(f"{tmp_path}/first.{rank}"))
        second = json.dumps(events_of(f"{tmp_path}/{rank}.second.json"))
        assert "in the first" in first and "in none" not in first and "in the second" not in first
        assert "in the second" in second and "in none" not in second

    world.run(on_rank)


def test_size_is_bounded(tmp_path):

    def on_rank(rank):
        for turn in range(300):
            rt.allreduce(np.ones(10), f"t.{turn}")
        rt.stop_timeline()
        assert len(events_of(f"{tmp_path}/bounded.{rank}")) < 250

    with World(sizes()[-1], timeline=f"{tmp_path}/bounded", timeline_events=100) as world:
        world.run(on_rank)


def test_names_are_escaped(world, tmp_path):

    def on_rank(rank):
        rt.start_timeline(f"{tmp_path}/escaped")
        rt.allreduce(np.ones(10), 'quote " backslash \\ tab \t Grüße')
        rt.stop_timeline()
        assert any(
            "Grüße" in json.dumps(event, ensure_ascii=False) for event in events_of(f"{tmp_path}/escaped.{rank}")
        )

    world.run(on_rank)


def test_folder_that_does_not_exist(world):
    def on_rank(rank):
        with pytest.raises(rt.RingtrainError, match="/nowhere/at/all"):
            rt.start_timeline("/nowhere/at/all/trace")
        assert rt.allreduce(np.ones(1), "goes on", rt.Sum)[0] == rt.size()

    world.run(on_rank)


@pytest.mark.skipif(LAUNCHED, reason="kills a process of its own")
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
    assert "turn.9" in json.dumps(events_of(f"{tmp_path}/killed.0"))
