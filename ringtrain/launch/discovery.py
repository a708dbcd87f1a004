"""Hosts that an elastic job finds while it runs: those that a script of the user's names, or that come back.

A thread runs the script again and again (`HostScript`); `Supply` decides which hosts are to be tried, and which are to
leave; `elastic_job` carries that out.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.hosts import Host, HostsError, find_here, parse_hostfile

SECONDS_BETWEEN_RUNS = 1.0
SECONDS_OF_A_RUN = 10.0
SECONDS_BETWEEN_LOOKS = 0.05
MOST_BYTES = 1 << 20
CANNOT_RUN = (126, 127)  # by which a shell says that a program is not executable, or is not there


class ScriptError(RuntimeError):
    """A script that has not said which hosts there are; a job that runs goes on with those that it has.

    cannot_run: no shell will run it, as one that is misspelt.
    """

    cannot_run = False


@dataclass(frozen=True)
class HostScript:
    """A command of the user's that prints the hosts that may be used now: `host` or `host:slots`, one a line.

    slots: of a host without a number.
    """

    command: str
    slots: int

    def hosts(self) -> list[Host]:
        """Runs it once. Raises ScriptError."""
        process = subprocess.Popen(
            self.command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, complaints = self._read(process)
        finally:
            kill_group(process.pid)
            process.wait()
        if process.returncode:
            last = " ".join(complaints.strip().splitlines()[-1:])
            raise self._failed(
                f"end with code 0, but has ended with {process.returncode}" + (last and f" ({last})"),
                cannot_run=process.returncode in CANNOT_RUN,
            )
        try:
            return find_here(parse_hostfile(said, "its output", self.slots))
        except HostsError as error:
            raise self._failed(f"print hosts, but: {str(error).removesuffix('.')}") from None

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[str, str]:
        """What it prints until it ends, whoever of those that it has started still holds its pipes."""
        assert process.stdout and process.stderr
        said = {process.stdout: bytearray(), process.stderr: bytearray()}
        deadline = time.monotonic() + SECONDS_OF_A_RUN
        with selectors.DefaultSelector() as selector:
            for pipe in said:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                has_ended = process.poll() is not None
                for key, _ in selector.select(0.0 if has_ended else SECONDS_BETWEEN_LOOKS):
                    data = os.read(key.fd, 1 << 16)
                    said[key.fileobj] += data  # type: ignore[index]
                    if not data:
                        selector.unregister(key.fileobj)
                    has_ended = has_ended and not data
                if any(len(each) > MOST_BYTES for each in said.values()):
                    raise self._failed(f"print {MOST_BYTES >> 20} MB at most, but prints more")
                if has_ended:
                    out, err = (bytes(each).decode(errors="replace") for each in said.values())
                    return out, err
                if time.monotonic() >= deadline:
                    raise self._failed(f"end within {SECONDS_OF_A_RUN:g} s, but has not")

    def wait_for(self, slots: int, seconds: float, say: Callable[[str], None]) -> list[Host]:
        """Runs it until it names hosts with so many slots; says once why it must wait. Raises ScriptError with the last reason."""
        deadline, has_said = time.monotonic() + seconds, False
        while True:
            try:
                hosts = self.hosts()
                found = sum(host.slots for host in hosts)
                why = (
                    f"--host-discovery-script '{self.command}': it must name {slots} slots at least, but names {found}."
                )
            except ScriptError as error:
                if error.cannot_run:
                    raise ScriptError(f"{error} Check its spelling and its permissions.") from None
                hosts, found, why = [], 0, str(error)
            if found >= slots:
                return hosts
            if not has_said:
                say(f"{why} That is waited for, {seconds:g} s at most (--elastic-timeout).")
                has_said = True
            if time.monotonic() >= deadline:
                raise ScriptError(f"{why} That was waited for during {seconds:g} s (--elastic-timeout).")
            time.sleep(SECONDS_BETWEEN_RUNS)

    def watch(self, tell: Callable[[list[Host] | ScriptError], None]) -> Callable[[], None]:
        """Runs it every second, in a thread, and has this called with what comes of it. Returns what ends that."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(SECONDS_BETWEEN_RUNS):
                try:
                    tell(self.hosts())
                except ScriptError as error:
                    tell(error)
                except OSError as error:  # this process may start no other at the moment
                    tell(self._failed(f"be started, but: {error.strerror}"))

        threading.Thread(target=run, name="ringtrainrun-hosts", daemon=True).start()
        return stopped.set

    def _failed(self, what: str, cannot_run: bool = False) -> ScriptError:
        error = ScriptError(f"--host-discovery-script '{self.command}': it must {what}.")
        error.cannot_run = cannot_run
        return error


class Supply:
    """Which hosts a job may use, and when one that it has not got is tried next; pure.

    first_pause: seconds, after a host was lost or could not be used; doubles each time.
    longest_pause: which it does not exceed.
    """

    def __init__(self, hosts: Iterable[Host], first_pause: float, longest_pause: float):
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._named = {host.name: host for host in hosts}
        self._pauses: dict[str, tuple[float, float]] = {}  # length, end

    def named(self, hosts: Iterable[Host]) -> None:
        """These may be used from now on, and no others. One that is named anew begins anew, but is not tried again at once."""
        self._named = {host.name: host for host in hosts}
        for name, (length, end) in list(self._pauses.items()):
            if name in self._named:
                continue
            if end == float("inf"):  # it was to leave
                del self._pauses[name]
            elif length:  # a script that names it now and then would have all hosts checked each second
                self._pauses[name] = 0.0, end - length + self._first_pause

    def failed(self, now: float, name: str) -> None:
        """A host was lost, or cannot be used."""
        length, end = self._pauses.get(name, (0.0, 0.0))
        if end == float("inf"):
            return
        length = min(2 * length, self._longest_pause) or self._first_pause
        self._pauses[name] = length, now + length

    def leaves(self, name: str) -> None:
        """A host is to be taken away: it is not tried again, unless it is named anew."""
        self._pauses[name] = 0.0, float("inf")

    def to_try(self, now: float, present: Mapping[str, Host], room: int) -> Host | None:
        """The next host that is to have ranks, with at most `room` slots; None if there is none at this time."""
        for name, host in self._named.items():
            if room > 0 and name not in present and now >= self._pauses.get(name, (0.0, 0.0))[1]:
                return replace(host, slots=min(host.slots, room))
        return None

    def to_leave(self, present: Collection[str]) -> list[str]:
        """Hosts of the job that are named no longer."""
        return [name for name in present if name not in self._named]

    def next_try(self, present: Collection[str], room: int) -> float:
        """When `to_try` may say something that it does not say now; infinite if only news can change that."""
        waiting = [
            end for name, (_, end) in self._pauses.items() if name in self._named and name not in present and room > 0
        ]
        return min(waiting, default=float("inf"))
