"""`ringtrain authority`: who gets a seat, what the connection carries, what its record keeps, and what strangers get."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
import yaml
from eventually import eventually

from ringtrain._bootstrap import elastic_opening, leading
from ringtrain._rendezvous.by_address import Address
from ringtrain._rendezvous.handshake import OBJECTS, REFUSAL, key_of_world
from ringtrain._rendezvous.server import Server
from ringtrain.errors import InvalidArgumentError, TimeoutError, UnsupportedError
from ringtrain.launch import commands
from ringtrain.launch.authority import Rules
from ringtrain.launch.authority_command import authority as command_of_authority
from ringtrain.launch.authority_command import listening
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.job_folder import locked
from ringtrain.launch.record import Record, RecordFile
from ringtrain.launch.seats import Seats
from ringtrain.launch.service import Service, Terms

SECRET = bytes(range(32))


# ---- seats ----


def seats(minimum: int = 2, maximum: int = 3, gather: float = 10.0, has_begun: bool = False) -> Seats:
    return Seats(minimum, maximum, gather, patience=7.0, has_begun=has_begun)


def names(found: list) -> list[str]:
    return [seat.uid for seat in found]


def test_the_first_world_waits_for_the_most_or_for_some_seconds_with_enough() -> None:
    job = seats()
    job.come(0.0, "a", "host", "1")
    assert job.let_in(100.0) == [] and job.next_time() == float("inf")
    job.come(100.0, "b", "host", "1")
    assert job.let_in(100.0) == [] and job.next_time() == 110.0
    assert job.let_in(109.0) == []
    assert names(job.let_in(110.0)) == ["a", "b"]
    full = seats()
    for uid in "abc":
        full.come(0.0, uid, "host", "1")
    assert names(full.let_in(0.0)) == ["a", "b", "c"]


def test_who_goes_while_others_gather_is_not_counted() -> None:
    job = seats()
    for uid in "ab":
        job.come(0.0, uid, "host", "1")
    job.let_in(0.0)
    job.go(0.0, "b")
    assert job.let_in(20.0) == []
    job.come(21.0, "c", "host", "1")
    assert job.let_in(21.0) == [] and names(job.let_in(31.0)) == ["a", "c"]


def test_one_too_many_waits_for_a_place() -> None:
    job = seats(maximum=2)
    for uid in "abc":
        job.come(0.0, uid, "host", "1")
    assert names(job.let_in(0.0)) == ["a", "b"] and names(job.waiting()) == ["c"] and job.are_full(0.0)
    job.go(0.0, "a")
    assert not job.are_full(0.0) and names(job.let_in(0.0)) == ["c"]


def test_who_is_evicted_or_silent_has_no_place_any_more_unless_nobody_is_heard() -> None:
    job = seats(maximum=2)
    for uid in "abcd":
        job.come(0.0, uid, "host", "1")
    job.let_in(0.0)
    job.of("a").is_out = True
    assert names(job.let_in(1.0)) == ["c"]
    assert job.let_in(8.0) == []  # nobody is heard: this host is cut off
    job.of("b").heard = 8.0
    assert names(job.let_in(8.0)) == ["d"]


def test_a_slot_in_which_processes_end_soon_stays_empty_for_pauses_that_double() -> None:
    """The first one is replaced at once. Each that comes changes the world of the others twice."""
    job = Seats(1, 2, 0.0, patience=1e6, has_begun=True, pauses=(10.0, 25.0))
    job.come(0.0, "a", "other", "2")

    def next_one(now: float, uid: str) -> float:
        """When it is let in that comes now."""
        job.come(now, uid, "host", "1")
        if uid in names(job.let_in(now)):
            return now
        at = job.next_time()
        assert job.let_in(at - 0.1) == [] and uid in names(job.let_in(at)) and job.next_time() == float("inf")
        return at

    assert next_one(0.0, "b") == 0.0 and job.go(5.0, "b") == 0.0
    assert next_one(6.0, "c") == 6.0 and job.go(10.0, "c") == 10.0
    assert next_one(11.0, "d") == 20.0 and job.go(21.0, "d") == 20.0
    assert next_one(22.0, "e") == 41.0 and job.go(42.0, "e") == 25.0
    assert next_one(50.0, "f") == 67.0 and job.go(200.0, "f") == 0.0  # it has lived
    assert next_one(200.0, "g") == 200.0 and job.go(201.0, "g") == 0.0


def test_a_pause_that_is_over_is_no_time_to_look_again_where_there_is_no_place() -> None:
    job = Seats(1, 1, 0.0, patience=1e6, has_begun=True, pauses=(10.0, 25.0))
    for now, uid in (0.0, "a"), (1.0, "b"):
        job.come(now, uid, "host", "1")
        assert names(job.let_in(now)) == [uid] and job.go(now, uid) == 10.0 * now
    job.come(2.0, "c", "host", "1")
    job.come(2.0, "d", "other", "2")
    assert names(job.let_in(2.0)) == ["d"] and job.next_time() == 11.0
    assert job.let_in(11.0) == [] and job.next_time() == float("inf")
    job.go(12.0, "d")
    assert names(job.let_in(12.0)) == ["c"]


def test_hosts_have_names_and_slots_of_their_own() -> None:
    job = seats()
    places = [job.come(0.0, str(number), *where) for number, where in enumerate([("n", "1"), ("n", "1"), ("n", "2")])]
    assert [(seat.host, seat.slot) for seat in places] == [("n", 0), ("n", 1), ("n#2", 0)]
    job.go(0.0, "0")
    assert job.come(0.0, "4", "n", "1").slot == 0


def test_names_that_would_break_a_line_are_changed() -> None:
    assert seats().come(0.0, "a", "x|y\nz\t", "1").host == "x?y?z?"
    assert seats().come(0.0, "a", "", "1").host == "host"


def test_in_a_job_that_goes_on_old_seats_are_taken() -> None:
    job = seats(maximum=2, has_begun=True)
    job.keep(0.0, "a", "n", 0)
    job.keep(0.0, "b", "n", 1)
    job.knows("n", "n", "1")
    assert job.come(1.0, "c", "n", "1").slot == 2 and job.let_in(1.0) == []
    assert job.taken() == {"a": ("n", 0), "b": ("n", 1)}
    job.of("a").heard = 8.0
    assert names(job.let_in(8.0)) == ["c"]  # b has not come again


def test_a_key_of_a_world_follows_from_the_secret() -> None:
    assert key_of_world(SECRET, "00") != key_of_world(bytes(32), "00") and len(key_of_world(SECRET, "00")) == 32
    link = leading.AuthorityLink(Address("here", 1), SECRET)
    assert link.key_of(bytes(1)) == key_of_world(SECRET, "00") != bytearray(1)


# ---- the record ----


def test_a_record_is_held_read_and_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    file = RecordFile(path)
    assert file.read() is None
    with pytest.raises(LaunchError, match="one authority must have it at a time"):
        RecordFile(path)
    written = Record("job", "ff00", {"a": ("n", 1)}, finished=True)
    file.write(written)
    assert file.read() == written and os.stat(path).st_mode & 0o077 == 0
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had it has removed it between another one's open and its lock: a third one would have made a second lock."""
    path, opened = tmp_path / "lock", []

    def remove_at_first(*given: object) -> None:
        opened.append(given)
        if len(opened) == 1:
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", remove_at_first)
    lock = locked(str(path))
    assert len(opened) == 2 and os.path.samestat(os.fstat(lock), path.stat())
    os.close(lock)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "0.0.0", "job": "a"}', '{"seats": {"a": 1}}'])
def test_a_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text(text)
    with pytest.raises(LaunchError, match="it must be readable, but"):
        RecordFile(str(path)).read()


def test_a_record_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="must be able to write there before it grants a world"):
        RecordFile(str(tmp_path / "none" / "state"))


# ---- the service ----


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """One in a thread, which waits for two ranks."""
    state = tmp_path / "state"
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    said: list[str] = []
    rules = Rules(2, wait=100.0, first_pause=1.0, longest_pause=60.0, reset_limit=0)
    server = Server([listener], SECRET)
    made = Service(Terms(rules, 2, 100.0, 0), server, RecordFile(str(state)), None, said.append)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(made.run()))
    thread.start()
    yield SimpleNamespace(port=port, said=said, codes=codes, state=state, address=Address("127.0.0.1", port))
    made.interrupt(2)
    socket.create_connection(("127.0.0.1", port)).close()  # so that it looks
    thread.join()
    server.close()
    assert codes == [130]


def test_the_job_is_on_the_disk_before_its_first_rank_comes(service: SimpleNamespace) -> None:
    """So that the next authority knows those that wait for the first world."""
    eventually(service.state.exists, "the record is there")
    record = json.loads(service.state.read_text())
    assert record["job"] and record["world"] == "" and record["seats"] == {}


def strangers_get(port: int, data: bytes) -> bytes:
    """All that comes back."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(data)
        try:
            while more := stranger.recv(4096):
                got += more
        except ConnectionResetError:
            pass
    return got


def test_a_stranger_gets_a_nonce_and_that_it_is_one(service: SimpleNamespace) -> None:
    assert strangers_get(service.port, b"GET / HTTP/1.1\r\n\r\n") == b""
    got = strangers_get(service.port, OBJECTS + bytes(32 + 32))
    assert len(got) == 16 + len(REFUSAL) and got.endswith(REFUSAL)
    assert service.said == [] and not service.codes


def test_another_secret_or_release_is_told(service: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="RINGTRAIN_SECRET: it must be that of the authority"):
        leading.AuthorityLink(service.address, bytes(32)).enter(30.0, "")
    monkeypatch.setattr(leading, "__version__", "0.0.1")
    with pytest.raises(UnsupportedError, match="its ringtrain must be that of the authority"):
        leading.AuthorityLink(service.address, SECRET).enter(30.0, "")


def test_a_rank_that_waits_and_is_told_to_leave_is_let_go(service: SimpleNamespace) -> None:
    link = leading.AuthorityLink(service.address, SECRET)
    link.enter(30.0, "")
    assert link.ask_for_leave(15)
    assert link.receive() == [{"over": 0, "because": "it is told to leave before it could join the job."}]


def test_an_authority_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(TimeoutError, match=f"to answer at '127.0.0.1:{port}' within 0.1 s, but: Connection refused"):
        leading.AuthorityLink(Address("127.0.0.1", port), SECRET).enter(0.1, "")


@pytest.mark.parametrize(
    "variables, text",
    [
        ({"RINGTRAIN_AUTHORITY": "nowhere"}, "it must be host:port, where `ringtrain authority` listens"),
        ({"RINGTRAIN_AUTHORITY": "127.0.0.1:9"}, "RINGTRAIN_SECRET: it must have the secret of the job"),
        (
            {"RINGTRAIN_AUTHORITY": "127.0.0.1:9", "RINGTRAIN_SECRET": "abc"},
            "it must have 16 bytes at least, but has 3",
        ),
    ],
)
def test_wrong_variables_are_named(variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGTRAIN_SECRET", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=text):
        elastic_opening._led_by_an_authority(variables["RINGTRAIN_AUTHORITY"], {})


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["-np", "2", "--listen", "here"], "--listen 'here': it must be host:port"),
        (["-np", "2", "--listen", "192.0.2.1:4711"], "must be an address of this host with a free port"),
        (["-np", "3:2", "--listen", "127.0.0.1:0"], "is not MIN:MAX"),
        (
            ["-np", "2", "--listen", "127.0.0.1:0", "--notice-signal", "KILL"],
            "--notice-signal 'KILL': it must be one of",
        ),
        (["--listen", "127.0.0.1:0"], "Missing option '-np'"),
    ],
)
def test_wrong_flags_are_named(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGTRAIN_SECRET", SECRET.hex())
    assert commands.main(["authority", *arguments]) in (1, 2)
    assert text in capsys.readouterr().err


@needs.machine("" if socket.has_dualstack_ipv6() else "needs IPv6: sysctl net.ipv6.conf.all.disable_ipv6=0")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with listening("[::]:0") as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as caller:
        assert caller.getpeername()[0] == "127.0.0.1"


def test_without_a_secret_nothing_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RINGTRAIN_SECRET", raising=False)
    assert commands.main(["authority", "-np", "2", "--listen", "127.0.0.1:0"]) == 1
    assert "it must have the secret of the job, the same for the authority and all ranks" in capsys.readouterr().err


def test_a_job_is_one_of_a_launcher_or_of_an_authority() -> None:
    from ringtrain._rendezvous import launcher

    led = {"RINGTRAIN_AUTHORITY": "a:1"}
    assert launcher.find_authority(led) == "a:1"
    assert launcher.find_authority({**led, "RINGTRAIN_LAUNCHER": "x"}) == launcher.find_authority({}) == ""
    assert launcher.find_authority({**led, "RINGTRAIN_ALONE": "1"}) == ""
    marked = {launcher.RANK_PROCESS: "1 0 " + launcher._job(led), **led}
    with pytest.raises(UnsupportedError, match="but is a child of rank 0"):
        launcher.refuse_child(marked, 2)
    assert json.dumps(launcher._job(led)) != json.dumps(launcher._job({}))


# ---- the recipes ----

PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic-engines.md"


def recipe(language: str) -> str:
    """The block in this language of the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def test_the_recipe_for_kubernetes_has_what_it_needs() -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in yaml.safe_load_all(recipe("yaml"))}
    authority, ranks = objects["Job", "train-authority"]["template"], objects["Job", "train"]["template"]
    (one,), (rank,) = authority["spec"]["containers"], ranks["spec"]["containers"]
    assert objects["Service", "train-authority"]["selector"] == authority["metadata"]["labels"]
    assert "completions" not in objects["Job", "train"] and objects["Job", "train"]["parallelism"] == 8
    variables = {each["name"]: each for each in rank["env"]}
    host, _, port = variables["RINGTRAIN_AUTHORITY"]["value"].partition(":")
    assert ("Service", host) in objects and objects["Service", host]["ports"] == [{"port": int(port)}]
    (secret,) = one["env"]
    assert variables["RINGTRAIN_SECRET"] == secret
    volumes = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in authority["spec"]["volumes"]}
    (mount,) = one["volumeMounts"]
    assert ("PersistentVolumeClaim", volumes[mount["name"]]) in objects
    assert one["command"][:2] == ["ringtrain", "authority"]
    given = command_of_authority.make_context("authority", one["command"][2:]).params  # click reads the flags
    assert given["listen"].endswith(f":{port}") and given["state"].startswith(mount["mountPath"])
    assert given["ranks"][1] == objects["Job", "train"]["parallelism"] and given["leave_code"] == 75


def test_the_batch_script_is_one_and_has_known_flags() -> None:
    script = recipe("bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    line = re.search(r"ringtrain authority (.*)", script)[1]
    environment = {**os.environ, "HOME": "/h", "SLURM_JOB_ID": "5", "port": "20005"}
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], env=environment, text=True, stdout=subprocess.PIPE)
    given = command_of_authority.make_context("authority", words.stdout.splitlines()).params
    assert given["ranks"] == (8, 32) and given["listen"] == "0.0.0.0:20005" and given["state"] == "/h/authority-5"


def test_the_batch_script_starts_what_has_failed_again_and_ends_with_the_job(tmp_path: Path) -> None:
    """Its commands are stand-ins that fail at first: the authority by a signal, a rank by itself."""
    for name, text in {
        "srun": 'shift 3; exec "$@"',
        "ringtrain": f'echo "$1 $RINGTRAIN_AUTHORITY" >> {tmp_path}/authority; [ $(wc -l < {tmp_path}/authority) -gt 1 ] || exit 137; '
        f"while ! grep -q trained {tmp_path}/rank; do sleep 0.02; done; exit 7",
        "python": f'[ -e {tmp_path}/rank ] && echo trained >> {tmp_path}/rank && exit 0; echo "$*" > {tmp_path}/rank; exit 1',
        "sleep": 'exec /bin/sleep "$([ $1 = 10 ] && echo 0 || echo $1)"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", recipe("bash")], env=environment, timeout=600)
    assert done.returncode == 7
    assert (tmp_path / "rank").read_text().splitlines() == ["train.py", "trained"]
    assert [line.split()[0] for line in (tmp_path / "authority").read_text().splitlines()] == ["authority"] * 2
