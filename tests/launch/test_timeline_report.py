"""`ringtrain timeline report`: what it decides follows from the traces, and its page can be seen.

Traces are written here as the core writes them, with what is to be found put into them; and a real world leaves some.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import needs
import numpy as np
import pytest
from worlds import World

import ringtrain as rt
from ringtrain.launch import timeline
from ringtrain.launch.report import timelines
from ringtrain.launch.report.findings import COMPUTING, Findings, Interconnect, find
from ringtrain.launch.report.lateness import BEHIND, where_late
from ringtrain.launch.report.page import page
from ringtrain.launch.report.steps import Steps, clocks_of, numbered, steps_of, union
from ringtrain.launch.report.trace_arrays import parse, read
from ringtrain.launch.report.verdicts import verdicts

ORIGIN = 91_453_261_750_724.0  # microseconds
FORWARD, BACKWARD, TRANSFER = 10_000.0, 8_000.0, 500.0
TENSORS = 8
Late = Callable[[int, int], tuple[float, float]]  # rank, step: how much longer forward and backward take


def span(rank: int, track: int, name: str, category: str, begin: float, end: float, size_bytes: int = 0) -> str:
    """A line of the core's."""
    told = f',"args":{{"bytes":{size_bytes}}}' if size_bytes else ""
    return (f'{{"ph":"X","name":"{name}","cat":"{category}","pid":{rank},"tid":{track},"ts":{begin:.3f},'
            f'"dur":{end - begin:.3f}{told}}}')  # fmt: skip


def trace_of(rank: int, spans: list[str], names: list[str]) -> bytes:
    head = [f'{{"ph":"M","name":"process_name","pid":{rank},"tid":0,"args":{{"name":"rank {rank}"}}}}']
    tracks = [
        f'{{"ph":"M","name":"thread_name","pid":{rank},"tid":{track},"args":{{"name":"{name}"}}}}'
        for track, name in enumerate(names, 1)
    ]
    return ("[\n" + ",\n".join([*head, *tracks, *spans]) + "      \n]\n").encode()


def job(
    ranks: int, steps: int, late: Late = lambda rank, step: (0.0, 0.0), clocks: tuple[float, ...] = ()
) -> list[bytes]:
    """The traces of a job whose steps have a forward pass, TENSORS gradients, and a wait for their sums."""
    spans: list[list[str]] = [[] for _ in range(ranks)]
    names = [*(f"allreduce.layer.{tensor}" for tensor in range(TENSORS)), "(waiting)"]
    begun = ORIGIN
    for step in range(steps):
        first = [begun + FORWARD + late(rank, step)[0] for rank in range(ranks)]
        each = [(BACKWARD + late(rank, step)[1]) / (TENSORS - 1) for rank in range(ranks)]
        free = 0.0
        ended = begun
        for tensor in range(TENSORS):
            submitted = [first[rank] + tensor * each[rank] for rank in range(ranks)]
            agreed = max(submitted) + 100
            started = max(agreed + 10, free)
            ended = free = started + TRANSFER
            for rank in range(ranks):
                ahead = clocks[rank] if clocks else 0.0
                for name, category, begin, end, size_bytes in (
                    ("ALLREDUCE", "allreduce", submitted[rank], ended, 1 << 20),
                    ("NEGOTIATE_ALLREDUCE", "negotiate", submitted[rank], agreed, 0),
                    ("QUEUE", "queue", agreed, started, 0),
                    ("MEMCPY_IN_FUSION_BUFFER", "pack", started, started + 100, 1 << 20),
                    ("MPI_ALLREDUCE", "wire", started + 100, started + 400, 1 << 19),
                    ("REDUCE", "reduce", started + 200, started + 400, 1 << 20),
                    ("MEMCPY_OUT_FUSION_BUFFER", "unpack", started + 400, ended, 1 << 20),
                ):
                    spans[rank].append(span(rank, tensor + 1, name, category, begin + ahead, end + ahead, size_bytes))
        for rank in range(ranks):
            ahead = clocks[rank] if clocks else 0.0
            last = first[rank] + BACKWARD + late(rank, step)[1]
            spans[rank].append(span(rank, TENSORS + 1, "WAIT", "wait", last + ahead, ended + ahead))
        begun = ended
    return [trace_of(rank, own, names) for rank, own in enumerate(spans)]


def steps_in(traces: list[bytes]) -> Steps:
    return steps_of([trace for text in traces for trace in parse(text)])


def findings_in(traces: list[bytes], link: Interconnect | None = None) -> Findings:
    return find(steps_in(traces), link)


# ---- reading ----


def test_a_trace_is_read():
    (trace,) = parse(job(1, 3)[0])
    assert trace.rank == 0 and len(trace.tensor) == 3 * TENSORS and trace.dropped == 0
    assert trace.names[trace.tensor[1]] == "allreduce.layer.1" and set(trace.size_bytes.tolist()) == {1 << 20}
    assert trace.submitted[0] == pytest.approx(ORIGIN + FORWARD, abs=0.05)
    assert trace.agreed[0] - trace.submitted[0] == pytest.approx(100, abs=0.05)
    assert (trace.stages[0] - trace.started[0]).ravel() == pytest.approx(
        [0, 100, 100, 400, 200, 400, 400, 500], abs=0.05
    )
    assert trace.waits.shape == (3, 2)


def test_further_tracks_dropped_spans_and_lost_parts():
    """A part whose operation had no room is not another operation's; a tensor that is called "x (2)" is no track of "x"."""
    names = ["allreduce.x", "allreduce.x (2)", "allreduce.y (2)"]
    spans = [
        span(3, 1, "ALLREDUCE", "allreduce", 10, 60, 4),
        span(3, 2, "REDUCE", "reduce", 20, 30, 4),
        span(3, 3, "NEGOTIATE_ALLREDUCE", "negotiate", 11, 12),  # its operation was dropped
        '{"ph":"i","s":"g","name":"7 spans dropped","pid":3,"tid":0,"ts":99.000}',
    ]
    (trace,) = parse(trace_of(3, spans, names))
    assert trace.rank == 3 and trace.dropped == 7 and set(trace.names) == {"", "allreduce.x", "allreduce.y (2)"}
    assert len(trace.tensor) == 1 and np.isnan(trace.agreed[0]) and trace.stages[0, 2].tolist() == [20, 30]


@pytest.mark.parametrize(
    "text, words",
    [
        (b"hello", "expected one event in line 1, but found 'hello'"),
        (b'[\n{"ph":"X","name":"A","cat":"a","pid":1,"tid":2,"ts":3.000}\n]', "numbers in each span"),
        (b'[\n{"ph":"M",}\n]', "Is it a trace of ringtrain"),
    ],
)
def test_what_is_no_trace_is_refused(text, words, tmp_path):
    (tmp_path / "trace").write_bytes(text)
    with pytest.raises(ValueError, match=words) as told:
        read([tmp_path / "trace"])
    assert str(tmp_path) in str(told.value)


def test_two_traces_of_one_rank_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(job(1, 2)[0])
    with pytest.raises(ValueError, match="expected one trace of rank 0, but .*a has another"):
        read([tmp_path / "a", tmp_path / "b"])


def test_traces_without_operations_are_refused():
    with pytest.raises(ValueError, match="the traces must have operations, but have none"):
        steps_in([trace_of(0, [], [])])


# ---- steps ----


def test_steps_are_cut_where_nothing_was_pending():
    """Also if the first step has had an operation before the first gradient, and names that come seldom are in between."""
    used, a, b, metric = 0, 1, 2, 3
    order = [used, *([a, b, used] * 6), metric, *([b, a, used] * 5)]
    gaps = [50.0, *([40.0, -5, -5] * 6), -1, *([40.0, -5, -5] * 5)]
    steps = numbered(np.array(order), np.array(gaps), np.ones(len(order)))
    assert steps.tolist() == [0, *np.repeat(np.arange(1, 7), 3), 6, *np.repeat(np.arange(7, 12), 3)]


def test_names_that_never_come_again_are_one_step():
    assert numbered(np.arange(5), np.ones(5), np.ones(5)).tolist() == [0] * 5
    spans = [span(0, track, "ALLREDUCE", "allreduce", 10 * track, 10 * track + 5, 4) for track in range(1, 4)]
    found = findings_in([trace_of(0, spans, ["allreduce.noname.1", "allreduce.noname.2", "allreduce.noname.3"])])
    assert found.steps == 1 and "stands here as one step" in verdicts(found)[0]


def test_all_steps_of_a_job_are_found():
    steps = steps_in(job(3, 12))
    assert steps.count == 12 and not steps.is_whole and np.bincount(steps.step).tolist() == [TENSORS] * 12
    assert (steps.first - steps.begun)[:, 1:] == pytest.approx(np.full((3, 11), FORWARD), abs=0.1)
    assert (steps.last - steps.first) == pytest.approx(np.full((3, 12), BACKWARD), abs=0.1)


def test_clocks_are_moved_only_as_far_as_they_must():
    submitted = np.array([[0.0, 100.0], [5000.0, 5101.0], [3.0, 104.0]])
    ended = submitted[:1] + np.array([[10.0], [5011.0], [12.0]])
    clocks = clocks_of(submitted, ended)
    assert clocks[0] == 0 and clocks[2] == 0  # they fit
    assert clocks[1] == pytest.approx(5001 - 10)  # submitted 10 before it ended on rank 0 at the latest


def test_ranks_of_other_hosts_come_on_one_clock():
    found = findings_in(job(3, 10, clocks=(0.0, 2e6, -7e5)))
    assert found.clock == pytest.approx(2e6, rel=0.01) and any(
        "clocks of the hosts differ" in each for each in verdicts(found)
    )
    assert found.step == pytest.approx(FORWARD + BACKWARD + 610, rel=0.01)


def test_union():
    begins, ends = np.array([5.0, 0, 1, 9, np.nan]), np.array([6.0, 2, 3, 9, 4])
    assert union(begins, ends).tolist() == [[0, 3], [5, 6]]


# ---- findings ----


def test_where_the_time_of_a_step_goes():
    found = findings_in(job(2, 10))
    assert found.knows_waits and sum(found.parts.values()) == pytest.approx(found.step, rel=1e-3)
    assert found.parts["before the first gradient"] == pytest.approx(FORWARD, rel=1e-3)
    assert found.parts["from the first gradient to the last"] == pytest.approx(BACKWARD, rel=1e-3)
    assert found.parts["wire"] == pytest.approx(300, rel=0.01)
    assert found.parts["negotiate"] == pytest.approx(100, rel=0.01) and found.parts["late ranks"] == pytest.approx(
        0, abs=1
    )
    assert found.under_way == pytest.approx(TENSORS * 510, rel=0.01)
    assert found.overlap == pytest.approx((TENSORS - 1) / TENSORS, rel=0.01)
    assert found.bytes_of_a_step == TENSORS << 20 and found.floor_share == pytest.approx(1)


def test_the_floor_of_a_link():
    found = findings_in(job(2, 10), Interconnect(rate=(TENSORS << 20) / 1e-3, hosts=2))
    assert found.floor == pytest.approx(1000) and found.floor_share == pytest.approx(1000 / (TENSORS * 510), rel=0.01)


def test_tensors_of_a_batch_share_its_time():
    spans = []
    for step in range(5):
        at = 1000.0 * step
        for track, size_bytes in ((1, 3000), (2, 1000)):
            spans += [span(0, track, "ALLREDUCE", "allreduce", at, at + 500, size_bytes),
                      span(0, track, "NEGOTIATE_ALLREDUCE", "negotiate", at, at + 100)]  # fmt: skip
    found = findings_in([trace_of(0, spans, ["allreduce.large", "allreduce.small"])])
    assert [(each.name, round(each.under_way)) for each in found.tensors] == [
        ("allreduce.large", 300),
        ("allreduce.small", 100),
    ]


@pytest.mark.parametrize(
    "late, where",
    [
        ((3000.0, 0.0), "before its first gradient"),
        ((0.0, 3000.0), "in its backward pass"),
        ((0.2 * FORWARD, 0.2 * BACKWARD), "evenly"),
    ],
)
def test_who_is_late_and_where(late, where):
    found = findings_in(job(4, 20, lambda rank, step: late if rank == 2 else (0.0, 0.0)))
    assert found.late[0].rank == 2 and found.late[0].where == where and found.late[0].last_in == 19
    assert found.late[0].late == pytest.approx(sum(late), rel=0.01)
    (told,) = [each for each in verdicts(found) if "Rank 2 is late" in each]
    assert where in told
    assert max(found.parts, key=lambda part: (part not in COMPUTING, found.parts[part])) == "late ranks"


def test_a_rank_that_is_late_in_a_few_steps():
    found = findings_in(
        job(4, 40, lambda rank, step: (20_000.0, 0.0) if rank == 1 and step in (11, 31) else (0.0, 0.0))
    )
    assert (
        found.late[0].rank == 1
        and found.late[0].rare_steps == 2
        and found.late[0].late == pytest.approx(20_000, rel=0.01)
    )
    assert "late in 2 of 40 steps, by 20 ms: before its first gradient" in " ".join(verdicts(found))


def test_a_rank_whose_others_wait_for_it_within_a_step_takes_no_negative_time():
    """Rank 1 loads slowly, and each tenth step ends with a loss: there rank 0 waits between its first submission and its last."""
    spans: list[list[str]] = [[], []]
    begun = ORIGIN
    for step in range(40):
        gradient = [begun + 3_000, begun + 30_000]
        loss = [gradient[1] + 700, gradient[1] + 600]
        for rank in range(2):
            for track, at, end in ((1, gradient[rank], gradient[1] + 500), (2, gradient[rank] + 50, gradient[1] + 550)):
                spans[rank].append(span(rank, track, "ALLREDUCE", "allreduce", at, end, 1 << 20))
            if step % 10 == 9:
                spans[rank].append(span(rank, 3, "ALLREDUCE", "allreduce", loss[rank], gradient[1] + 900, 4))
        begun = gradient[1] + 1_000
    names = ["allreduce.optimizer.used", "allreduce.optimizer.0.weight and 5 more", "allreduce.loss"]
    found = findings_in([trace_of(rank, own, names) for rank, own in enumerate(spans)])
    latest = found.late[0]
    assert latest.rank == 1 and latest.where == "before its first gradient"
    assert latest.before_first + latest.in_backward == pytest.approx(latest.late, abs=1)
    assert all(each.before_ratio >= 0 and each.backward_ratio >= 0 for each in found.late)
    assert "-" not in next(each for each in verdicts(found) if "Rank 1 is late" in each)


def test_a_rank_that_has_its_sums_later_is_not_said_to_compute_longer():
    """Its own steps take as long as those of others, or less."""
    traces = job(2, 20)
    late = re.sub(rb'"ts":([0-9.]+)', lambda found: b'"ts":%.3f' % (float(found[1]) + 1_500), traces[1])
    (trace,) = parse(late)
    latest = find(steps_of([*parse(traces[0]), trace])).late[0]
    assert (latest.rank, latest.where) == (1, "with the sums of the step before")
    assert latest.late > 0 >= max(latest.before_first, latest.in_backward)


def test_a_late_rank_is_named_with_its_host():
    def on(hosts: list[str]) -> str:
        traces = job(3, 20, lambda rank, step: (3000.0, 0.0) if rank == 2 else (0.0, 0.0))
        labels = [
            f',\n{{"ph":"M","name":"process_labels","pid":{rank},"tid":0,"args":{{"labels":"host {host}"}}}}'.encode()
            for rank, host in enumerate(hosts)
        ]
        labelled = [trace.replace(b"      \n]", label + b"\n]") for trace, label in zip(traces, labels, strict=True)]
        return " ".join(verdicts(findings_in(labelled)))

    assert "Rank 2 (host node-b) is late by 3 ms" in on(["node-a", "node-a", "node-b"])
    assert "Rank 2 is late by 3 ms" in on(["node-a"] * 3)


def test_nobody_is_called_late_without_reason():
    found = findings_in(job(4, 20, lambda rank, step: (10.0 * (rank == step % 4), 0.0)))
    assert any(each.startswith("No rank stands out") for each in verdicts(found))


@pytest.mark.parametrize(
    "before, backward, where",
    [
        (5, 0, "before its first gradient"),
        (0, 5, "in its backward pass"),
        (5, 10, "evenly"),
        (5, 1, "before its first gradient"),
        (-1, -2, "with the sums of the step before"),
        (-1, 3, "in its backward pass"),
    ],
)
def test_where_a_rank_loses_its_time(before, backward, where):
    assert where_late(before, backward, usual_before=10, usual_backward=20) == where


def test_a_file_that_a_rank_saves_is_not_in_its_backward_pass():
    """There buckets come one behind the other, so that a moment of noise is several times the others' time."""
    for usual_before, usual_backward in (7.0, 0.15), (15.0, 0.9), (15.0, 2.0), (4.0, 3.5):
        assert where_late(20.0, 1.0, usual_before, usual_backward) == "before its first gradient"
    assert where_late(1.0, 3.0, usual_before=10.0, usual_backward=1.5) == "in its backward pass"


def test_a_file_that_is_saved_before_a_metric_is_behind_the_gradients():
    """The metric is an operation of the step, and was taken for a gradient of its backward pass."""
    spans: list[list[str]] = [[], []]
    for step in range(40):
        at = ORIGIN + 100_000 * step
        for rank in range(2):
            spans[rank].append(span(rank, 1, "ALLREDUCE", "allreduce", at, at + 500, 1 << 20))
            spans[rank].append(span(rank, 2, "ALLREDUCE", "allreduce", at + 9_000, at + 9_500, 1 << 20))
            if step % 20 == 19:
                submitted = at + (50_000 if rank == 0 else 10_000)
                spans[rank].append(span(rank, 3, "ALLREDUCE", "allreduce", submitted, at + 51_000, 4))
    names = ["allreduce.b", "allreduce.a", "allreduce.loss"]
    found = findings_in([trace_of(rank, own, names) for rank, own in enumerate(spans)])
    assert (found.late[0].rank, found.late[0].where, found.late[0].rare_steps) == (0, BEHIND, 2)
    assert "Rank 0 is late in 2 of 40 steps, by 40 ms: behind its last gradient" in " ".join(verdicts(found))


def test_steps_are_those_of_most_bytes_and_remnants_are_none():
    """As PyTorch's: each gradient alone in three steps, then one bucket; an agreement before the first, and behind the last."""
    gradients, names = [f"allreduce.{letter}" for letter in "abcdefghijklmn"], ["allreduce.bucket", "allreduce.used"]
    named = [*names, *gradients]
    order = [["allreduce.used"], *[[*gradients, "allreduce.used"]] * 3, *[names] * 17, ["allreduce.used"]]
    spans = []
    for step, submitted in enumerate(order):
        for place, name in enumerate(submitted):
            at = ORIGIN + 10_000 * step + 10 * place
            size_bytes = {"allreduce.used": 24, "allreduce.bucket": 6 << 20}.get(name, 1 << 20)
            spans.append(span(0, 1 + named.index(name), "ALLREDUCE", "allreduce", at, at + 500, size_bytes))
    steps = steps_in([trace_of(0, spans, named)])
    assert steps.count == 20 and np.bincount(steps.step).tolist() == [16, 15, 15, *[2] * 17]


# ---- the command and the page ----


def report(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ringtrain.launch.commands", "timeline", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def some_steps(rank: int) -> None:
    for _ in range(6):
        time.sleep(0.01 if rank else 0.002)
        handles = [rt.allreduce_async(np.ones(50_000, np.float32), f"layer.{i}") for i in range(4)]
        for handle in handles:
            rt.synchronize(handle)


@pytest.fixture(scope="module")
def real_page(tmp_path_factory) -> Path:
    """Of two ranks on two hosts, one of which is late."""
    folder = tmp_path_factory.mktemp("real")
    with World(2, "1+1", timeline=f"{folder}/trace.json") as world:
        world.run(some_steps)
    done = report(folder / "trace.json", "-o", folder / "report.html", "--link-gbit", 10)
    assert done.returncode == 0 and "report.html: 6 steps of 2 ranks" in done.stdout, done
    assert "Rank 1 is late" in done.stdout and "2 hosts at 10 Gbit/s" in done.stdout
    return folder / "report.html"


def test_a_real_trace_says_when_the_program_waited_and_opens_in_viewers(real_page):
    """As Perfetto and chrome://tracing want it: an array of events whose spans have their four numbers."""
    events = json.loads((real_page.parent / "trace.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert "wait" in {event["cat"] for event in spans}
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys() and event["dur"] >= 0 for event in spans)
    assert {event["ph"] for event in events} <= {"X", "M", "i"}
    waited = sum(event["dur"] for event in spans if event["cat"] == "wait")
    assert 10_000 < waited < max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans)


def test_a_merged_trace_gives_the_same_page(real_page, tmp_path):
    timelines.merge([real_page.parent / "trace.json"], tmp_path / "merged.json")
    done = report(tmp_path / "merged.json", "-o", tmp_path / "report.html", "--link-gbit", 10)
    assert done.returncode == 0, done
    title = re.compile("Timeline of [a-z.]*json")
    assert title.sub("", (tmp_path / "report.html").read_text()) == title.sub("", real_page.read_text())


def test_the_page_needs_no_network_and_escapes_names(real_page):
    assert not re.search(r"(src|href)=|@import|url\(|fetch\(", real_page.read_text())
    spans = [span(0, 1, "ALLREDUCE", "allreduce", at, at + 5, 4) for at in (0, 10, 20)]
    steps = steps_in([trace_of(0, spans, ["allreduce.</script><script>alert(1)//"])])
    text = page(steps, find(steps), "</title><script>")
    assert text.count("<script") == 2 and "alert(1)" in text


def test_wrong_command_lines(tmp_path):
    for arguments, words in (
        ((tmp_path / "absent", "-o", tmp_path / "page"), "absent"),
        ((tmp_path, "-o", tmp_path / "page"), "directory"),
        ((tmp_path / "absent", "-o", tmp_path / "page", "--hosts", 2), "--link-gbit, which is missing"),
    ):
        done = report(*arguments)
        assert done.returncode in (1, 2) and words in done.stderr and "Traceback" not in done.stderr, done
        assert not (tmp_path / "page").exists()


def test_a_page_without_room_is_named(tmp_path, monkeypatch):
    """Under its own name, and nothing is left of it."""

    def refuse(path, _text, encoding):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(OSError, match="No space left on device: '.*/page.html'"):
        timeline._write(tmp_path / "page.html", "text")
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_a_thousand_steps_of_64_ranks_take_seconds(tmp_path):
    late = (3000.0, 0.0)
    for rank, text in enumerate(job(64, 1000, lambda rank, step: late if rank == 40 else (0.0, 0.0))):
        (tmp_path / f"trace{f'.{rank}' if rank else ''}").write_bytes(text)
    begun = time.monotonic()
    done = report(tmp_path / "trace", "-o", tmp_path / "report.html")
    assert done.returncode == 0 and "Rank 40 is late" in done.stdout, done
    assert time.monotonic() - begun < 60 and (tmp_path / "report.html").stat().st_size < 2 << 20


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@needs.packages("" if CHROMIUM else "needs a browser: apt-get install chromium")
def test_a_browser_draws_it(real_page, tmp_path):
    """What is in the document after its script has run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, real_page.as_uri()], capture_output=True, text=True, timeout=600)
    assert 'data-drawn="yes"' in done.stdout, done.stderr[-2000:]
    bars = re.findall(r'data-kind="([^"]+)" data-rank="(\d+)"', done.stdout)
    for rank in "01":
        assert {kind for kind, of in bars if of == rank} >= {COMPUTING[0], "waiting", "wire", "negotiate"}
    assert ("late ranks", "0") in bars and ("late ranks", "1") not in bars
    assert len(re.findall("<option", done.stdout)) >= 3
