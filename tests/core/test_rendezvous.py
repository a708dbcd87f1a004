"""Ranks that meet without ringtrainrun: under torchrun, and in programs that know rank, size and a place to meet."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
from environments import rank_environment

from ringtrain._rendezvous import (
    at_rank_zero,
    by_address,
    by_files,
    by_note,
    introducing,
    launcher,
    rendezvous,
    server,
    stores,
)
from ringtrain._rendezvous.handshake import HandshakeError
from ringtrain.errors import InvalidArgumentError, TimeoutError, UnsupportedError

PATIENCE = 100.0
pytestmark = pytest.mark.tcp


def torchrun(tmp_path: Path, ranks: int, program: str, **variables: str) -> subprocess.CompletedProcess:
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*line, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(**variables),
    )


def test_ranks_of_torchrun_form_worlds(tmp_path: Path) -> None:
    """One after the other, and beside torch's own process group; a child of a rank is refused by name."""
    done = torchrun(tmp_path, 2, """
        import subprocess, sys, numpy as np, ringtrain as rt, torch, torch.distributed as dist
        for turn in range(3):
            rt.init()
            assert rt.allreduce(np.array([rt.rank() + 1]), op=rt.Sum)[0] == 3
            rt.shutdown()
        dist.init_process_group("gloo")
        rt.init()
        total = torch.ones(1) * rt.rank()
        dist.all_reduce(total)
        child = subprocess.run([sys.executable, "-c", "import ringtrain as rt; rt.init()"], capture_output=True, text=True)
        assert f"but is a child of rank {rt.rank()} (process" in child.stderr, child.stderr
        rt.barrier()
        dist.destroy_process_group()
        print(f"rank {rt.rank()} of {rt.size()}, {rt.local_size()} here: {total.item()}\\n", end="", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, 2 here: 1.0", "rank 1 of 2, 2 here: 1.0"]


def test_a_rank_of_torchrun_that_never_comes_is_named(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, """
        import os, time, ringtrain as rt
        if os.environ["RANK"] == "1":
            time.sleep(90)  # torchrun ends it
        rt.init(start_timeout_seconds=1)
    """)  # fmt: skip
    words = "init: expected all 2 ranks to call init() within 1 s, but rank 1 did not. Call init() on every rank"
    assert done.returncode == 1 and words in done.stderr, done.stderr


def test_an_agent_of_torchrun_that_is_gone_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that it has left behind ends, and soon: torch alone would look for the store for half an hour."""
    monkeypatch.setattr(rendezvous, "_LEAST_STORE_SECONDS", 0.5)
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        TimeoutError, match=r"init: the store of torchrun's agent at 127\.0\.0\.1:\d+ must answer within 0\.5 s"
    ):
        rendezvous.of_torchrun(environ, 0.1)


MEMBER = """
import sys, numpy as np, ringtrain as rt
rank, size, place, secret = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4])
if place.startswith("/"):
    import torch.distributed as dist
    place = dist.FileStore(place, size)
else:
    assert "torch" not in sys.modules
for turn in range(2):
    rt.init(rank=rank, size=size, rendezvous=place, secret=secret or None)
    print(rt.rank(), rt.size(), rt.allreduce(np.array([rank]), op=rt.Sum)[0], flush=True)
    rt.shutdown()
"""


def members(place: str, secret: str = "", size: int = 3, **variables: str) -> list[tuple[str, str]]:
    """What ranks say on stdout and stderr that meet there twice."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(size), place, secret],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=rank_environment(**variables),
        )
        for rank in range(size)
    ]
    return [member.communicate(timeout=PATIENCE) for member in started]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


MET = [f"{rank} 3 3\n" * 2 for rank in range(3)]


@pytest.mark.parametrize("secret", [pytest.param("", marks=pytest.mark.long), "07" * 32])
def test_ranks_that_know_each_other_by_a_store(secret: str, tmp_path: Path) -> None:
    """Of a job in a job scheduler, say. Two, as each imports torch for it; more meet by a store as threads below."""
    said = members(str(tmp_path / "store"), secret, size=2)
    assert [out for out, _ in said] == ["0 2 1\n" * 2, "1 2 1\n" * 2], said


@pytest.mark.parametrize("secret", ["", "07" * 32, "variable"])
def test_ranks_that_know_an_address(secret: str) -> None:
    """One world after the other at the same port, without torch; without a secret on the loopback alone."""
    variables = {"RINGTRAIN_SECRET": "0a" * 32} if secret == "variable" else {}
    said = members(f"127.0.0.1:{free_port()}", "" if variables else secret, **variables)
    assert [out for out, _ in said] == MET, said


@pytest.mark.parametrize("secret", ["", "07" * 32])
def test_ranks_that_know_a_folder(secret: str, tmp_path: Path) -> None:
    """Nothing is left of it, though files of a job that was killed there were in the way."""
    folder = tmp_path / "a" / "folder"
    folder.mkdir(0o700, parents=True)
    stale = {"id": "00", "addresses": [f"127.0.0.1:{free_port()}"], "host": platform.node(), "secret": "07" * 32}
    (folder / "rank-0").write_text(json.dumps(stale))
    said = members(f"file://{folder}", secret)
    assert [out for out, _ in said] == MET, said
    assert not folder.exists()


# ---- what ranks that meet are told ----


class Store(dict):
    """What is asked of torch's."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def meet_all(
    meets: Callable[..., object], size: int, seconds: float = 20.0, ranks: range | None = None
) -> list[object]:
    """What `meets(call)` gives each rank, or the error that it raises."""
    told: list[object] = [None] * size

    def come(rank: int) -> None:
        try:
            told[rank] = meets(introducing.call_of(rank, size, f"127.0.0.1:{rank}", seconds))
        except Exception as error:
            told[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks or range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


HERE = "127.0.0.1:0"
PLACES = ["address", "loopback", "folder", "store"]


def place(kind: str, folder: Path) -> Callable[..., object]:
    if kind == "folder":
        return lambda call, secret=b"": by_files.meet(folder / "meet", call, HERE, secret)
    if kind == "store":
        store = Store()
        return lambda call, secret=b"": stores.meet(store, call, HERE, secret)
    where, known = by_address.Address("127.0.0.1", free_port()), b"s" * 32 if kind == "address" else b""
    return lambda call, secret=known: by_address.meet(where, call, secret)


@pytest.mark.parametrize("kind", PLACES)
def test_all_are_told_the_same_secret_epoch_and_peers(kind: str, tmp_path: Path) -> None:
    told = meet_all(place(kind, tmp_path), 5)
    assert [each.rank for each in told] == list(range(5)), told
    assert len({(tuple(each.peers), bytes(each.secret), each.epoch) for each in told}) == 1
    assert told[0].peers == [f"127.0.0.1:{rank}" for rank in range(5)] and len(told[0].secret) == 32
    again = meet_all(place(kind, tmp_path / "again"), 5)
    assert again[0].secret != told[0].secret and again[0].epoch != told[0].epoch


@pytest.mark.parametrize("kind", PLACES)
def test_ranks_that_do_not_come_are_named(kind: str, tmp_path: Path) -> None:
    told = meet_all(place(kind, tmp_path), 4, seconds=0.5, ranks=range(2))
    late = "init: expected all 4 ranks to call init() within 0.5 s, but ranks 2, 3 did not. Call init()"
    assert [str(each).startswith(late) for each in told[:2]] == [True, True], told


@pytest.mark.parametrize("kind", PLACES)
def test_a_rank_0_that_does_not_come_is_named(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(at_rank_zero, "SECONDS_FOR_THE_ANSWER", 0.1)
    told = meet_all(place(kind, tmp_path), 2, seconds=0.3, ranks=range(1, 2))
    assert isinstance(told[1], TimeoutError) and "but rank 0 " in str(told[1]), told


def test_another_secret_is_refused_and_told() -> None:
    where = by_address.Address("127.0.0.1", free_port())
    keys = {0: b"a" * 32, 1: b"b" * 32}
    told = meet_all(lambda call: by_address.meet(where, call, keys[call["rank"]]), 2, seconds=1.0)
    assert "but rank 1 did not; connections with another secret: 1. Give all ranks the same one." in str(told[0]), told
    assert "secret must be the same on all ranks, but rank 0 at" in str(told[1])


@pytest.mark.parametrize("with_one", [0, 1])
def test_a_secret_on_some_ranks_alone_is_told_at_once(with_one: int) -> None:
    """On one host those with a secret and those without look for each other in different places."""
    where, begin = by_address.Address("127.0.0.1", free_port()), time.monotonic()
    keys = {with_one: b"a" * 32, 1 - with_one: b""}

    def meets(call: introducing.Call) -> object:
        try:
            return by_address.meet(where, {**call, "seconds": 3.0 if call["rank"] == 0 else 30.0}, keys[call["rank"]])
        except InvalidArgumentError as problem:
            told_after.append(time.monotonic() - begin)
            return str(problem)

    told_after: list[float] = []
    told = meet_all(meets, 2)
    assert f"on all ranks that meet at '{where}' or on none, but rank {1 - with_one} seems to have none" in str(
        told[1]
    ), told
    assert told_after[0] < 2.5 and isinstance(told[0], TimeoutError)


NOBODY = 65534
# Takes names until its stdin ends, and answers whoever calls there as a rank 0 would.
SQUATTER = f"""
import os, socket, sys, threading
from ringtrain._rendezvous.handshake import Answerer
os.setuid({NOBODY})
def answer(connection):
    end = Answerer(b"")
    while data := connection.recv(4096):
        end.hear(data)
        connection.sendall(end.take())
def serve(listener):
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
for name in sys.argv[1:]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(chr(0) + name)
    listener.listen(64)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("taken", flush=True)
sys.stdin.read()
"""


@needs.root
def test_another_user_that_takes_rank_0s_name_does_no_harm() -> None:
    """The name is known to all. Ranks with a secret are not told that others have none; two that are rank 0 hear it as ever."""
    where = by_address.Address("127.0.0.1", free_port())
    name = f"ringtrain-rendezvous-{os.getuid()}-{where.port}"
    taken = [name, f"{name}-{'0' * 32}"]
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, *taken], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout.readline() == "taken\n"
        told = meet_all(lambda call: by_address.meet(where, call, b""), 3)
        assert [each.rank for each in told] == [0, 1, 2], told
        (listener,), _ = by_address.AtAddress(where, b"").listen()
        with (
            listener,
            pytest.raises(InvalidArgumentError, match="Address already in use. Name rank 0's host and another"),
        ):
            by_address.AtAddress(where, b"").listen()
        told = meet_all(lambda call: by_address.meet(where, call, b"s" * 32), 2, seconds=0.5, ranks=range(1, 2))
        assert isinstance(told[1], TimeoutError), told
        squatter.stdin.close()


@pytest.mark.parametrize("kind", PLACES)
def test_two_processes_of_one_rank_are_told_in_the_same_words(kind: str, tmp_path: Path) -> None:
    """And so is whoever waits with them, at once; nothing of it is in the way of the next attempt."""
    meets = place(kind, tmp_path)
    present = {0: 0, 1: 1, 2: 1}
    told = meet_all(lambda call: meets({**call, "rank": present[call["rank"]], "size": 3}), 3)
    words = "init: one process of rank 1 must call init() at a time, but two have. Give each process a rank of its own."
    assert [str(each) for each in told] == [words] * 3, told
    assert all(isinstance(each, InvalidArgumentError) for each in told)
    again = meet_all(meets, 2)
    assert [each.rank for each in again] == [0, 1], again


@pytest.mark.parametrize("kind", ["folder", "store"])
@pytest.mark.parametrize("others", [[], [1]], ids=["alone", "with another"])
def test_two_processes_that_are_rank_0_are_told_in_the_same_words(
    kind: str, others: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever of them has left the note that others read; by address the second one cannot listen."""
    meets = place(kind, tmp_path)
    is_there = threading.Event()
    write = {"folder": by_files.FolderBoard, "store": stores.Store}[kind].write

    def note(board: object, name: str, value: object) -> None:
        write(board, name, value)
        is_there.set()

    monkeypatch.setattr({"folder": by_files.FolderBoard, "store": stores.Store}[kind], "write", note)
    present = [0, 0, *others]

    def come(call: introducing.Call) -> object:
        if call["rank"] == 1:
            is_there.wait()
        return meets({**call, "rank": present[call["rank"]], "size": 3})

    told = meet_all(come, len(present))
    words = "init: one process of rank 0 must call init() at a time, but two have. Give each process a rank of its own."
    assert [str(each) for each in told] == [words] * len(present), told
    monkeypatch.undo()
    again = meet_all(meets, 2)
    assert [each.rank for each in again] == [0, 1], again


def test_a_rank_that_calls_again_is_not_another_one() -> None:
    """Its former connection may be there, as rank 0 sees it."""
    calls = [introducing.call_of(rank, 3, "127.0.0.1:1", 10.0) for rank in range(3)]
    ranks = introducing.Gathering(calls[0], 0.0)
    ranks.come("first", {**calls[1], "left": 9.0}, 1.0)
    ranks.come("again", {**calls[1], "left": 8.0}, 2.0)
    assert not ranks.answer(2.0) and ranks.deadline == 10.0
    ranks.go("first")
    ranks.come("other", {**calls[2], "left": 5.0}, 3.0)
    assert len(ranks.answer(3.0)["peers"]) == 3 and ranks.deadline == 8.0
    ranks.go("other")
    assert not ranks.answer(7.9) and "but rank 2 did not. Call" in ranks.answer(8.0)["late"]
    assert "but rank 2 did not; connections with another secret: 4. Give" in ranks.answer(8.0, 4)["late"]
    for nothing in ({}, {"rank": 2}, {**calls[2], "rank": 3}, {**calls[2], "left": "x"}, {**calls[2], "uid": 1}):
        ranks.come("stranger", nothing, 7.0)
    assert not ranks.answer(7.0)
    ranks.come("twin", introducing.call_of(1, 3, "127.0.0.1:1", 10.0), 7.0)
    assert "one process of rank 1" in ranks.answer(7.0)["refusal"]


def test_a_rank_whose_secret_is_another_than_that_of_the_note() -> None:
    """With none where rank 0 has one, the other way round, and with two."""
    for known, words in [
        ((b"a" * 32, b""), "but rank 0 has one, and this rank has none"),
        ((b"", b"a" * 32), "but this rank has one, and rank 0 has none"),
        ((b"a" * 32, b"b" * 32), "secret must be the same on all ranks, but rank 0 at '127.0.0.1"),
    ]:
        store, found = Store(), known
        told = meet_all(lambda call: stores.meet(store, call, HERE, found[call["rank"]]), 2, seconds=0.5)
        assert words in str(told[1]) and "but rank 1 did not" in str(told[0]), told


def test_a_rank_0_that_others_cannot_call_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on the loopback, and they are on other hosts."""
    store = Store()
    name = threading.local()
    monkeypatch.setattr(platform, "node", lambda: getattr(name, "host", "node-a"))

    def meets(call: introducing.Call) -> object:
        name.host = "node-b" if call["rank"] else "node-a"
        return stores.meet(store, call, HERE, b"")

    words = (
        "init: ranks must listen where other hosts reach them, but rank 0 can be reached on its own host alone. Name"
    )
    assert [str(each).startswith(words) for each in meet_all(meets, 3)] == [True] * 3
    assert not store["ringtrain/rank-0"]
    with pytest.raises(TimeoutError, match="but rank 0 listens on its host 'node-a' alone, at '127.0.0.1"):
        store.set("ringtrain/rank-0", json.dumps({"id": "1", "addresses": [HERE], "host": "node-a", "secret": ""}))
        name.host = "node-b"
        stores.meet(store, introducing.call_of(1, 2, "10.0.0.1:1", 0.2), HERE, b"s" * 32)
    gone = {"id": "1", "addresses": [f"127.0.0.1:{free_port()}"], "host": "node-b", "secret": "07" * 32}
    store.set("ringtrain/rank-0", json.dumps(gone))
    with pytest.raises(TimeoutError, match="but rank 0 left no word in 'Store'"):  # whether it had a secret or not
        stores.meet(store, introducing.call_of(1, 2, "10.0.0.1:1", 0.2), HERE, b"s" * 32)


def test_rank_0_leaves_the_notes_of_others_alone(tmp_path: Path) -> None:
    """Its process ends while another rank 0 waits in the same folder."""
    former, later = (by_note.Noted(by_files.FolderBoard(tmp_path / "meet"), HERE, b"") for _ in range(2))
    for each in (former, later):
        listeners, _ = each.listen()
        for listener in listeners:
            listener.close()
    former.leave()
    assert later.find() is not None
    later.leave()
    assert not (tmp_path / "meet").exists()


def test_a_folder_may_go_while_a_rank_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank 0 that has met others takes it away, at any moment for those who come next."""
    path = tmp_path / "meet"
    mkdir, taken = Path.mkdir, []

    def goes(self: Path, *given: object, **named: object) -> None:
        mkdir(self, *given, **named)
        if len(taken) < 3:
            self.rmdir()
            taken.append(self)
            if len(taken) == 2:
                raise FileExistsError(17, "File exists")

    monkeypatch.setattr(Path, "mkdir", goes)
    folder = by_files.FolderBoard(path)
    assert len(taken) == 3 and path.is_dir()
    path.rmdir()
    folder.write("rank-0", {"a": 1})
    assert folder.read("rank-0") == {"a": 1}


def test_rank_0_needs_a_port_of_the_range() -> None:
    """The first that is free: others may have taken any of them, and one is all that it takes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"must find a free port at '127.0.0.1:{port}-{port}'"):
            by_note.Noted(stores.Store(Store()), f"127.0.0.1:{port}-{port}", b"").listen()
        ((listener,), _) = by_note.Noted(stores.Store(Store()), f"127.0.0.1:{port}-65535", b"").listen()
        assert listener.getsockname()[1] > port
        listener.close()


@pytest.mark.parametrize("left", ['"text"', "[]", "7", "{", '{"nonces": 3}'])
def test_files_of_something_else_do_no_harm(left: str, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir(0o700)
    for name in ("rank-0", "unreached", "refusal"):
        (tmp_path / "meet" / name).write_text(left)
    told = meet_all(place("folder", tmp_path), 2)
    assert [each.rank for each in told] == [0, 1], told


def test_a_false_rank_0_is_not_believed() -> None:
    """Who listens in its place, without the secret, is not told where this rank listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = by_address.Address(*listener.getsockname())

        def pretend() -> None:
            connection, _ = listener.accept()
            heard.append(connection.recv(1 << 16))
            connection.sendall(bytes(16))
            heard.append(connection.recv(1 << 16))
            connection.sendall(bytes(32 + 1000))
            heard.append(connection.recv(1 << 16))
            connection.close()
            listener.close()

        heard: list[bytes] = []
        threading.Thread(target=pretend, daemon=True).start()
        call = introducing.call_of(1, 2, "127.0.0.1:1", 1.0)
        with pytest.raises(TimeoutError, match="rank 0 could not be reached"):
            by_address.meet(where, call, b"s" * 32)
        assert b"127.0.0.1" not in b"".join(heard)


def test_strangers_do_not_keep_ranks_out(monkeypatch) -> None:
    """More of them than are kept, silent ones and such as talk, before the ranks come and among them."""
    monkeypatch.setattr(server, "SECONDS_TO_PROVE", 1000.0)
    monkeypatch.setattr(server, "MOST_STRANGERS", 64)
    where = by_address.Address("127.0.0.1", free_port())
    strangers: list[socket.socket] = []

    def meets(call: introducing.Call) -> object:
        if call["rank"]:
            for number in range(server.MOST_STRANGERS + 10):
                strangers.append(reach(where))
                if number < 10:
                    strangers[-1].sendall(secrets.token_bytes(1 + number * 2000))
        return by_address.meet(where, call, b"s" * 32)

    told = meet_all(meets, 3)
    assert [each.rank for each in told] == [0, 1, 2], told
    for stranger in strangers:
        stranger.close()


def reach(where: by_address.Address) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(tuple(where))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("kind", PLACES)
def test_sizes_that_differ_are_told_to_all(kind: str, tmp_path: Path) -> None:
    meets = place(kind, tmp_path)
    told = meet_all(lambda call: meets({**call, "size": 2 + (call["rank"] == 1) * 2}), 2, seconds=2.0)
    assert ["size must be the same on all ranks, but is 2 on rank 0 and 4 on rank 1" in str(each) for each in told] \
        == [True, True], told  # fmt: skip


def test_hosts_that_listen_on_the_loopback_are_refused() -> None:
    calls = [{**introducing.call_of(rank, 3, "127.0.0.1:1" if rank else "10.0.0.1:1", 1), "host": f"node-{rank}"}
             for rank in range(3)]  # fmt: skip
    assert "but ranks 1, 2 can be reached on their own host alone." in introducing.refusal_of(calls)
    assert introducing.refusal_of([{**call, "host": "node-0"} for call in calls]) == ""


def test_no_network_is_open_without_a_secret() -> None:
    where = by_address.Address("192.0.2.1", 4711)
    with pytest.raises(InvalidArgumentError, match="secret must be given where ranks meet at '192.0.2.1:4711'"):
        by_address.meet(where, introducing.call_of(0, 2, "192.0.2.1:1", 1), b"")


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "mine").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("open", "link"):
        with pytest.raises(InvalidArgumentError, match="must be a folder that this user alone can read"):
            by_files.meet(tmp_path / name, introducing.call_of(0, 2, "127.0.0.1:1", 1), HERE, b"")
    os.chmod(tmp_path / "mine", 0o500)


def test_a_secret_that_all_know_is_on_no_board() -> None:
    store, notes = Store(), []
    told = meet_all(lambda call: stores.meet(store, call, HERE, b"s" * 32), 2)
    assert told[0].secret == told[1].secret != b"s" * 32
    store, written = Store(), notes
    store.set = lambda key, value: (written.append(value), Store.set(store, key, value))[0]  # type: ignore[method-assign]
    told = meet_all(lambda call: stores.meet(store, call, HERE, b"s" * 32), 2)
    assert written and not any(told[0].secret.hex() in each or "s" * 32 in each for each in written)


@pytest.mark.parametrize("is_there", [False, True], ids=["nobody listens", "another listens"])
def test_a_note_of_an_earlier_attempt_does_no_harm(is_there: bool) -> None:
    """torchrun starts ranks anew with the same store and the same keys."""
    store = Store()
    former = by_note.Noted(stores.Store(store), HERE, b"")
    listeners, _ = former.listen()
    stranger = server.Server(listeners, b"another job's")
    if not is_there:
        stranger.close()
    stop = threading.Event()

    def serve() -> None:
        while is_there and not stop.is_set():
            stranger.wait(0.01)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    begun = threading.Event()
    tried = at_rank_zero.tell

    def tell(*given: object) -> object:
        try:
            return tried(*given)
        except (OSError, HandshakeError):
            begun.set()  # the note that was there has led nowhere
            raise

    def meets(call: introducing.Call) -> object:
        assert call["rank"] or begun.wait(PATIENCE)
        return stores.meet(store, call, HERE, b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_rank_zero, "tell", tell)
        told = meet_all(meets, 3)
    assert [each.rank for each in told] == [0, 1, 2], told
    stop.set()
    thread.join()
    if is_there:
        stranger.close()


@pytest.mark.parametrize(
    "rank, size, store, secret, error, text",
    [
        (0, None, Store(), None, InvalidArgumentError, "must be given together, but size is missing"),
        (None, None, None, bytes(32), InvalidArgumentError, "but rank, size, rendezvous is missing"),
        (2, 2, Store(), None, InvalidArgumentError, "0 <= rank < size, but are 2 and 2"),
        (True, 2, Store(), None, InvalidArgumentError, "but are True and 2"),
        (0, 2, "node-a", None, InvalidArgumentError, "must be 'host:port' of rank 0, .* but is 'node-a'"),
        (0, 2, "node-a:0", None, InvalidArgumentError, "but is 'node-a:0'"),
        (0, 2, "file://folder", None, InvalidArgumentError, "but is 'file://folder'"),
        (0, 2, Store(), b"short", InvalidArgumentError, "secret must be 32 bytes"),
    ],
)
def test_what_names_no_place_is_refused(rank, size, store, secret, error, text) -> None:
    with pytest.raises(error, match=text):
        rendezvous.checked(rank, size, store, secret)


def test_places_are_read() -> None:
    for text, place in [
        ("node-a:4711", by_address.Address("node-a", 4711)),
        ("[fd00::1]:4711", by_address.Address("fd00::1", 4711)),
        ("file:///shared/job-7", Path("/shared/job-7")),
        (Path("/shared/job-7"), Path("/shared/job-7")),
    ]:
        assert rendezvous.checked(0, 2, text, None).store == place
    assert rendezvous.checked(0, 2, "a:1", None, {"RINGTRAIN_SECRET": "0a" * 32}).secret == b"\n" * 32
    texts = ["a text that is long enough", "a text that is long enough.", "0a" * 31, "schlüssel-des-teams", "0a" * 33]
    secrets = {rendezvous.checked(0, 2, "a:1", None, {"RINGTRAIN_SECRET": text}).secret for text in texts}
    assert len(secrets) == len(texts) and {len(each) for each in secrets} == {32}
    with pytest.raises(
        InvalidArgumentError, match="RINGTRAIN_SECRET: it must have 16 bytes at least, but has 5, .*openssl rand"
    ):
        rendezvous.checked(0, 2, "a:1", None, {"RINGTRAIN_SECRET": "guess"})


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_STEP_NODELIST": "node-[03-04]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "HOME": "/home/a"}  # fmt: skip


def test_where_tasks_of_slurm_meet() -> None:
    def place(**variables: str) -> rendezvous.Place | None:
        environ = {**SLURM, **variables}
        return rendezvous.of_slurm(launcher.find(environ), environ)

    folder = Path("/home/a/.cache/ringtrain/slurm-17.0")
    assert place() == (1, 4, folder, b"", "10.0.0.9", 2)
    assert place(SLURM_STEP_NUM_NODES="1").towards == ""
    assert place(SLURM_RESTART_COUNT="2").store == Path("/home/a/.cache/ringtrain/slurm-17.0.2")
    known = place(RINGTRAIN_SECRET="0a" * 32)
    assert known == (1, 4, known.store, b"\n" * 32, "node-03", 2) and known.store.host == "node-03"
    assert 20000 <= known.store.port < 32000
    assert place(RINGTRAIN_SECRET="0a" * 32, RINGTRAIN_PORT_RANGE="21000-21999").store.port == 21999
    assert place(PMIX_RANK="1") is None and place(PMI_RANK="1", PMI_SIZE="4") is None, "an MPI's plug-in connects them"


VARIABLES = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "6105",
    "RINGTRAIN_SECRET": "0a" * 32,
}


def test_where_ranks_meet_that_a_platform_has_numbered() -> None:
    """AzureML, Kubeflow: with the variables of torch's env://, and no torchrun."""
    place = rendezvous.of_variables(VARIABLES)
    assert place == (1, 4, place.store, b"\n" * 32, "10.0.0.9", 2) and place.store.host == "10.0.0.9"
    assert 20000 <= place.store.port < 32000 and place.store.port != 6105
    assert rendezvous.of_variables({**VARIABLES, "RANK": "0"}).store == place.store, "the same for all"
    assert rendezvous.of_variables({**VARIABLES, "RINGTRAIN_PORT_RANGE": "21000-21999"}).store.port == 21999
    assert rendezvous.of_variables({**VARIABLES, "MASTER_ADDR": "127.0.0.1"}).hosts == 0
    for here in ("127.0.0.1", "localhost", "::1"):  # no other user can join there
        assert rendezvous.of_variables({**VARIABLES, "MASTER_ADDR": here, "RINGTRAIN_SECRET": ""}).secret == b""
    for missing in VARIABLES.keys() - {"MASTER_PORT"}:
        assert rendezvous.of_variables({**VARIABLES, missing: ""}) is None, missing
    for other in ({"WORLD_SIZE": "1", "RANK": "0"}, {"RINGTRAIN_LAUNCHER": "ringtrainrun-1"}):
        assert rendezvous.of_variables({**VARIABLES, **other}) is None


@pytest.mark.parametrize("secret", [VARIABLES["RINGTRAIN_SECRET"], ""], ids=["secret", "one user"])
def test_ranks_that_a_platform_has_numbered_meet(secret: str) -> None:
    program = "import numpy as np, ringtrain as rt; rt.init(); print(rt.rank(), rt.allreduce(np.ones(1), op=rt.Sum)[0])"
    here = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RINGTRAIN_SECRET": secret}
    shared = VARIABLES | here
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=rank_environment(**shared | {"RANK": str(rank)}),
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert [out for out, _ in said] == ["0 2.0\n", "1 2.0\n"], said


def test_in_a_pod_the_name_of_the_first_host_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def late(host: str, *_: object, **__: object) -> list:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(rendezvous, "_SECONDS_TO_ASK_AGAIN", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", late)
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert rendezvous.listening_addresses(pod, "train-0.train", seconds=10.0) == "127.0.0.1:0"
    assert asked == ["train-0.train"] * 3
    for environ, seconds in [({}, 10.0), (pod, 0.0)]:  # a misspelt name elsewhere is told at once
        asked.clear()
        with pytest.raises(InvalidArgumentError, match="'train-0.train', where the ranks meet"):
            rendezvous.listening_addresses(environ, "train-0.train", seconds=seconds)
        assert len(asked) == 1


@pytest.mark.parametrize(
    "listed, first",
    [("node-a", "node-a"), ("node-a,node-b", "node-a"), ("n[3-5,8],m", "n3"), ("n[03,7]-ib,m", "n03-ib"), ("", "")],
)
def test_the_first_host_of_slurms_list(listed: str, first: str) -> None:
    assert rendezvous.first_host(listed) == first


def test_where_a_rank_listens() -> None:
    listens = rendezvous.listening_addresses
    assert listens({}) == "127.0.0.1:0" == listens({}, "127.0.0.1")
    assert listens({"RINGTRAIN_LISTEN": "10.0.0.2:0"}, "127.0.0.1") == "10.0.0.2:0"
    assert listens({"RINGTRAIN_PORT_RANGE": "20000-20999"}, "::1") == "[::1]:20000-20999"
    assert listens({"RINGTRAIN_NETWORK_INTERFACES": "lo"}, "192.0.2.1") == "127.0.0.1:0"
    assert listens({"RINGTRAIN_NETWORK_INTERFACES": "127.0.0.0/8,none0"}) == "127.0.0.1:0"
    with pytest.raises(
        InvalidArgumentError, match="'no.such.name.invalid', where the ranks meet, must be an address or a name"
    ):
        listens({}, "no.such.name.invalid")
    with pytest.raises(UnsupportedError, match="RINGTRAIN_NETWORK_INTERFACES 'none0,198.51.100.0/24': this host must"):
        listens({"RINGTRAIN_NETWORK_INTERFACES": "none0,198.51.100.0/24"})
    with pytest.raises(InvalidArgumentError, match="RINGTRAIN_PORT_RANGE '7': it must be FIRST-LAST"):
        listens({"RINGTRAIN_PORT_RANGE": "7"})
