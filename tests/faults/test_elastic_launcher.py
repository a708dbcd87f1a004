"""The launcher of an elastic job is killed, and another one takes the job up, or none does; on real processes.

Training needs no launcher, so it does not pause; a death waits for the next one. What ranks write meanwhile is kept.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import needs
import pytest
from environments import PATHS, python_with, rank_environment, transport_of
from test_elastic import PROGRAM, await_line, command

from benchmarks.jobs import Job
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 60.0
# The end comes when the test says so; each step is told, with its time.
UNTIL_TOLD = PROGRAM.replace("while state.step < steps:", "while not (folder / 'stop').exists():").replace(
    "state.step += 1", "state.step += 1; print('step', state.step, time.monotonic(), flush=True)"
)


class Output:
    """What a launcher says, line by line, as it comes; its stderr among it."""

    def __init__(self, launcher: subprocess.Popen):
        self.launcher = launcher
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(launcher.stdout))
        self._reader.start()

    def after(self, words: str, first: int = 0) -> str:
        """The first line that has these words."""
        found = await_line(self.lines, first, words)
        assert found, f"no '{words}' in:\n" + self.text()
        return found

    def end(self) -> int:
        """The launcher's code, once it has ended and all is read."""
        code = self.launcher.wait(SECONDS)
        self._reader.join(SECONDS)
        return code

    def text(self) -> str:
        """All of it."""
        return "".join(self.lines)


def begin(job: Job, *flags: str, program: str = UNTIL_TOLD, **variables: str) -> Output:
    line = command("--elastic", *flags, program=program)
    environment = rank_environment(STEPS="0", **variables)
    launcher = job.start(*line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    return Output(launcher)


def resume(job: Job, name: str, **variables: str) -> Output:
    """From another folder and environment: the job has its own."""
    line = [python_with("tcp"), "-m", "ringtrain.launch", "--resume", name]
    environment = {**os.environ, "PYTHONPATH": PATHS, **variables}
    launcher = job.start(
        *line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=job.temporary
    )
    return Output(launcher)


def kill_launcher(job: Job, output: Output) -> float:
    """When it was."""
    at = time.monotonic()
    (leader,) = job.find("-m ringtrain.launch")
    os.kill(leader, signal.SIGKILL)
    output.end()
    return at


def name_of(output: Output) -> str:
    """The job's name, as the launcher has said."""
    return output.after("ringtrainrun --resume").split()[-1]


def test_another_launcher_takes_a_job_up(job: Job) -> None:
    """The steps go on; the new launcher sees a death at once, starts a rank in its slot, and takes the job to its end."""
    first = begin(job, "-np", "2:3")
    name = name_of(first)
    first.after("world of 3: rank 2")
    first.after("step 3")
    killed = kill_launcher(job, first)
    second = resume(job, name)
    second.after(f"job {name}: taken up, with 3 ranks on 'localhost'.")
    second.after("[2] step")
    seen = len(second.lines)
    victim = rank_in(job, 1)
    os.kill(victim, signal.SIGKILL)
    second.after("The rank in slot 1 of host 'localhost' was killed by signal 9.", seen)
    second.after("world of 2: rank 1", seen)
    second.after("world of 3: rank 2", seen)
    Path(job.temporary, "stop").touch()
    assert second.end() == 0, second.text()
    steps = [float(at) for at in re.findall(r"^\[0\] step \d+ ([\d.]+)$", first.text() + second.text(), re.MULTILINE)]
    numbers = [int(step) for step in re.findall(r"^\[0\] step (\d+)", second.text(), re.MULTILINE)]
    # A rank may hear of the victim that "the connection to it … was lost", which is no word of the launcher's.
    assert numbers == sorted(numbers) and not re.search("evicted|is lost|launcher lost", second.text()), second.text()
    longest = max(after - before for before, after in itertools.pairwise(steps) if before < victim_at(second))
    print(f"{time.monotonic() - killed:.1f} s; the longest pause between steps was {longest:.2f} s")
    assert not Path(job.temporary, f"ringtrainrun-{os.getuid()}").exists()  # its record
    assert len(set(re.findall(r"returned (\d+) [\d.]+ [\d.]+", second.text()))) == 1


@pytest.mark.long
def test_without_another_launcher_all_end_after_the_grace(job: Job) -> None:
    """That nothing is left is what the fixture asserts; and who comes too late is told so."""
    first = begin(job, "-np", "2:3", "--launcher-grace", "4")
    name = name_of(first)
    first.after("world of 3: rank 2")
    killed = kill_launcher(job, first)
    time.sleep(2.0)
    assert rank_in(job, 0) and rank_in(job, 2)  # within the grace all are there
    left = job.await_end(34.0)
    print(f"all gone after {time.monotonic() - killed:.1f} s")
    assert not left
    late = resume(job, name)
    assert late.end() == 125
    assert f"--resume {name}: some agent of the job must be left, but none is." in late.text()
    assert "host 'localhost': its agent must serve this job, but there is none any more." in late.text()
    assert not Path(job.temporary, f"ringtrainrun-{os.getuid()}").exists()  # its record


@pytest.mark.long
def test_launchers_come_and_go(job: Job) -> None:
    """Three in a row; a rank dies while there is none, and the next one has the others go on; a fourth is refused."""
    first = begin(job, "-np", "2:3")
    name = name_of(first)
    first.after("world of 3: rank 2")
    output = first
    for _ in range(2):
        kill_launcher(job, output)
        output = resume(job, name)
        output.after("taken up, with 3 ranks")
        output.after("[1] step")
    kill_launcher(job, output)
    os.kill(rank_in(job, 2), signal.SIGKILL)
    time.sleep(1.0)  # the others stand still, and no launcher tells them to go on
    output = resume(job, name)
    output.after("The rank in slot 2 of host 'localhost' has ended with exit code 137 while there was no launcher.")
    output.after("world of 3: rank 2")
    refused = resume(job, name)
    assert refused.end() == 125 and "is led by one that runs" in refused.text()
    Path(job.temporary, "stop").touch()
    assert output.end() == 0, output.text()


@pytest.mark.long
def test_a_job_that_ends_without_a_launcher_has_ended_well(job: Job) -> None:
    """The next launcher finds no rank, and knows that the training has come to its end."""
    first = begin(job, "-np", "2:2")
    name = name_of(first)
    first.after("world of 2: rank 1")
    kill_launcher(job, first)
    Path(job.temporary, "stop").touch()
    deadline = time.monotonic() + SECONDS
    while job.find(" -c ") and time.monotonic() < deadline:
        time.sleep(0.05)
    last = resume(job, name)
    assert last.end() == 0, last.text()
    assert len(re.findall("returned", last.text())) == 2 and "taken up, with 0 ranks" in last.text()


@pytest.mark.long
def test_what_has_no_room_is_counted_and_nobody_waits(job: Job) -> None:
    """A rank that writes 8 MB while nobody reads goes on; the last MB is there."""
    program = UNTIL_TOLD.replace(
        "time.sleep(pause)",
        "(folder / 'write').exists() and state.step % 3 == 0 and print('x' * 99_999, flush=True); time.sleep(pause)",
    )
    first = begin(job, "-np", "1:1", program=program)
    name = name_of(first)
    first.after("step 3")
    kill_launcher(job, first)
    begun = time.monotonic()
    Path(job.temporary, "write").touch()
    time.sleep(8.0)
    Path(job.temporary, "write").unlink()
    second = resume(job, name)
    said = second.after("bytes that its ranks wrote while there was no launcher are lost")
    assert int(re.search(r"(\d+) bytes", said)[1]) > 1 << 20, said
    Path(job.temporary, "stop").touch()
    assert second.end() == 0, second.text()[-2000:]
    times = [float(at) for at in re.findall(r"step \d+ ([\d.]+)", second.text())]
    assert times[0] > begun and 900_000 < second.text().count("x") < 1 << 22


FAILS_WHEN_TOLD = """
import os, pathlib
from ringtrain.launch import elastic_job
step, told = elastic_job.ElasticJob._step, pathlib.Path(os.environ["TMPDIR"], "fail")

def failing(self):
    step(self)
    if told.exists():
        raise RuntimeError("planted")

elastic_job.ElasticJob._step = failing
from ringtrain.launch import __main__
"""


@pytest.mark.long
def test_a_launcher_that_fails_leaves_the_job_to_the_next_one(job: Job) -> None:
    """As if it had been killed: no rank is ended by what is wrong in the launcher."""
    line = command("--elastic", "-np", "2:2", program=UNTIL_TOLD)
    line[1:3] = ["-c", FAILS_WHEN_TOLD]
    variables = rank_environment(STEPS="0")
    first = Output(job.start(*line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables))
    name = name_of(first)
    first.after("step 3")
    told = Path(job.temporary, "fail")
    told.touch()
    assert first.end() == 125, first.text()
    told.unlink()
    assert re.search(rf"RuntimeError: planted\. .* The ranks go on\. .* ringtrainrun --resume {name}$", first.text()), (
        first.text()
    )
    second = resume(job, name)
    second.after("taken up, with 2 ranks")
    Path(job.temporary, "stop").touch()
    assert second.end() == 0, second.text()
    assert second.text().count("returned") == 2


@pytest.mark.long
def test_a_record_that_cannot_be_written_costs_the_next_launcher_and_no_rank(job: Job) -> None:
    output = begin(job, "-np", "1:2", SLOTS="1", AT="20", FAULT="import signal; os.kill(os.getpid(), signal.SIGKILL)")
    name = name_of(output)
    output.after("step 3")
    (folder,) = Path(job.temporary).glob(f"ringtrainrun-*/{name}")
    shutil.rmtree(folder)
    folder.write_text("in its place")
    output.after("world of 2: rank 1", first=len(output.lines))
    Path(job.temporary, "stop").touch()
    assert output.end() == 0, output.text()
    assert output.text().count(f"record '{folder}': it must be written anew") == 1, output.text()
    assert output.text().count("returned") == 2
    folder.unlink()


def begin_on_hosts(network: HostNetwork, folder: Path, *flags: str) -> Output:
    """Two ranks on each of three hosts, until a file of the folder says stop; one of three may be missing."""
    python = python_with("tcp")
    program = folder / "train.py"
    program.write_text(textwrap.dedent(UNTIL_TOLD).replace("folder / 'stop'", f"Path({str(folder / 'stop')!r})"))
    variables = {"STEPS": "0", "PAUSE": "0.1", "TMPDIR": str(folder), "PYTHONPATH": PATHS}
    line = [
        *(python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "2:6", *flags),
        *("--blacklist-cooldown-range", "1", "1", "-H", "node-a:2,node-b:2,node-c:2", python, str(program)),
    ]
    launcher = network["node-a"].start(
        *line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=rank_environment(**variables)
    )
    output = Output(launcher)
    output.after("world of 6: rank 5")
    return output


@pytest.mark.long
@needs.hosts
def test_a_launcher_reaches_the_agents_of_other_hosts(network: HostNetwork, tmp_path: Path) -> None:
    """By ssh, as ever; a host that cannot be reached any more is lost, and the others go on."""
    first = begin_on_hosts(network, tmp_path)
    name = name_of(first)
    node = network["node-a"]
    (leader,) = (
        process
        for process, line in node.processes().items()
        if "-m ringtrain.launch" in line and "/env" not in line and "nsenter" not in line
    )
    node.run("kill", "-9", str(leader))
    first.end()
    line = [python_with("tcp"), "-m", "ringtrain.launch", "--resume", name]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    second = Output(node.start(*line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    second.after("taken up, with 6 ranks on 'node-a', 'node-b', 'node-c'.")
    for slot in range(6):
        second.after(f"[{slot}] step")
    seen = len(second.lines)
    victim = min(process for process, line in network["node-c"].processes().items() if "agent/__main__.py" in line)
    network["node-c"].run("kill", "-9", str(victim))  # the agent that has kept the ranks
    second.after("world of 4: rank 3", seen)
    second.after("world of 6: rank 5", seen)  # which has another one, and new ranks
    (tmp_path / "stop").touch()
    assert second.end() == 0, second.text()


@pytest.mark.long
@pytest.mark.parametrize("seconds", [9.0, 25.0], ids=["its connection outlives that", "ssh gives up"])
@needs.hosts
def test_a_host_that_was_cut_off_gets_ranks_again(seconds: float, network: HostNetwork, tmp_path: Path) -> None:
    """Its agent lives, and has ranks that nobody goes on with; another agent would find its place taken."""
    output = begin_on_hosts(network, tmp_path)
    seen = len(output.lines)
    network.unplug("node-c")
    cut = time.monotonic()
    output.after("world of 4: rank 3", seen)
    time.sleep(max(0.0, cut + seconds - time.monotonic()))
    seen = len(output.lines)
    network.plug_in("node-c")
    healed = time.monotonic()
    output.after("world of 6: rank 5", seen)
    print(f"{time.monotonic() - healed:.1f} s after its network it had ranks again")
    (tmp_path / "stop").touch()
    assert output.end() == 0, output.text()


@pytest.mark.long
@needs.hosts
def test_a_host_without_its_data_network_gets_ranks_once_a_check_passes(tmp_path: Path) -> None:
    """Its ssh lives, so that ranks could be started there; each world that they join would fail."""
    interfaces = {"node-a": "eth0", "node-b": "ens5", "node-c": "enp3s0"}
    with HostNetwork(interfaces, login_path="/nonexistent", links=2) as network:
        output = begin_on_hosts(network, tmp_path, "--network-interfaces", "10.78.2.0/24")
        network.unplug("node-c", link=2)
        output.after("host 'node-c': the networks of the job must reach it")
        output.after("tries it again later")
        output.after("tries it again later", len(output.lines))
        seen = len(output.lines)
        network.plug_in("node-c", link=2)
        output.after("world of 6: rank 5", seen)
        (tmp_path / "stop").touch()
        assert output.end() == 0, output.text()
        cut = output.text().split("the networks of the job must reach it")[1]
        assert "could not be connected" not in cut and cut.count("world of 4: rank 3") <= 1, output.text()


def rank_in(job: Job, slot: int) -> int:
    """The process of the program in a slot."""
    for process in job.find("-c"):
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if f"RINGTRAIN_RANK={slot}".encode() in environment:
            return process
    raise AssertionError(f"nobody runs in slot {slot}")


def victim_at(output: Output) -> float:
    """When the world that a death has made began, or the end of time."""
    found = re.search(r"world of 2: rank \d at \d+ \d+ ([\d.]+)", output.text())
    return float(found[1]) if found else float("inf")
