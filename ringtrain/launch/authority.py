"""The authority of an elastic job, as the launcher drives it: events in, actions out. The core decides (`authority.h`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ringtrain._binding._native import as_text, bytes_at, counted, ffi, lib, made, require, text_at
from ringtrain.launch.hosts import Host

SILENCE = 5.0  # seconds, of an agent that is another host's
NOBODY = "0" * 32  # the uid of no process


class Rules(NamedTuple):
    """What the user has asked for.

    Attributes:
        minimum: ranks that a world must have.
        wait: seconds below the minimum until the job ends.
        first_pause: seconds until a rank is started again in a slot where one has failed; doubles from failure to failure.
        longest_pause: seconds, which it does not exceed.
        reset_limit: worlds after the first; 0 for any number.
        notice_grace: seconds from the notice to a rank until it is ended, if it has not left.
        notices: names of the signals by which a rank, or a host, is asked to leave.
        launcher_grace: seconds that agents keep their ranks when the launcher is lost, for one that takes the job up.
        planned: ranks whose batches make up that of a step, however many there are; 0: each rank's batch stays the same.
        balances: whether shares of such a batch follow how fast the ranks are.
    """

    minimum: int
    wait: float
    first_pause: float
    longest_pause: float
    reset_limit: int
    notice_grace: float = 30.0
    notices: tuple[str, ...] = ("SIGTERM",)
    launcher_grace: float = 60.0
    planned: int = 0
    balances: bool = False


class Action(NamedTuple):
    """What is to be done: ``rt_authority_action`` of ``ringtrain.h``, whose ``kind`` says which of the rest it has.

    Attributes:
        kind: of ``RT_DO_``.
    """

    kind: int
    host: str = ""
    slot: int = 0
    uid: str = ""
    frame: bytes = b""
    well: bool = False
    text: str = ""


def said_in(actions: Iterable[Action]) -> str:
    """What is said with these actions: why they are done."""
    return " ".join(action.text for action in actions if action.kind == lib.RT_DO_SAY)


class Authority:
    """Numbers the worlds of a job on these hosts; on none where an engine of the user's starts processes. Times are
    time.monotonic().

    record: the last one that was written, if the job is taken up; None if it begins.
    """

    def __init__(self, hosts: Iterable[Host], rules: Rules, grace: float, now: float, record: bytes | None = None):
        options = ffi.new("rt_authority_options *")
        options.minimum, options.reset_limit = rules.minimum, rules.reset_limit
        options.silence, options.grace, options.wait = SILENCE, grace, rules.wait
        options.first_pause, options.longest_pause = rules.first_pause, rules.longest_pause
        lines = "\n".join(f"{host.name}|{host.slots}" for host in hosts)
        if record is None:
            native = lib.rt_authority_begin(as_text(lines), options, now)
        else:
            native = lib.rt_authority_resume(as_text(lines), options, record, len(record), now)
        self._native = made(native, lib.rt_authority_free)
        self._given = ffi.new("rt_authority_action *")

    def host_came(self, now: float, host: str) -> list[Action]:
        """Its agent serves."""
        return self._taken(lib.rt_authority_host_came(self._native, now, as_text(host)))

    def host_present(
        self, now: float, host: str, uids: Iterable[str], record: bytes = b"", finished: bool = False
    ) -> list[Action]:
        """What is there, as `RT_DO_ASK` wants to know: its processes, the newest Form that has passed its agent, and whether some
        program has come to its end."""
        texts = [as_text(uid) for uid in uids]
        present = lib.rt_authority_host_present(
            self._native, now, as_text(host), texts, len(texts), record, len(record), finished
        )
        return self._taken(present)

    def host_lost(self, now: float, host: str, cause: str) -> list[Action]:
        """The connection to its agent has ended."""
        return self._taken(
            lib.rt_authority_host_lost(self._native, now, as_text(host), as_text(" ".join(cause.split())))
        )

    def host_heard(self, now: float, host: str) -> list[Action]:
        """Its agent has said something."""
        return self._taken(lib.rt_authority_host_heard(self._native, now, as_text(host)))

    def host_added(self, host: Host) -> None:
        """A host may have ranks from now on, once it has come; also one that has left, when all of it is gone."""
        require(lib.rt_authority_host_added(self._native, as_text(host.name), host.slots))

    def host_leaves(self, now: float, host: str, cause: str) -> list[Action]:
        """All its ranks are to leave, between two steps."""
        return self._taken(lib.rt_authority_host_leaves(self._native, now, as_text(host), as_text(cause)))

    def process_leaves(self, now: float, host: str, slot: int, uid: str) -> list[Action]:
        """The process in a slot is to leave, between two steps; nobody comes there again."""
        return self._taken(lib.rt_authority_process_leaves(self._native, now, as_text(host), slot, as_text(uid)))

    def arrived(self, now: float, host: str, frame: bytes) -> list[Action]:
        """A rank there has said this."""
        return self._taken(lib.rt_authority_arrived(self._native, now, as_text(host), frame, len(frame)))

    def process_ended(self, now: float, host: str, slot: int, uid: str, code: int) -> list[Action]:
        """The process in a slot has ended: exit code, -n for signal n."""
        ended = lib.rt_authority_process_ended(self._native, now, as_text(host), slot, as_text(uid), code)
        return self._taken(ended)

    def process_came(self, now: float, host: str, slot: int, uid: str) -> list[Action]:
        """A process that an engine has started is connected, for the first time or again; its host need not be known."""
        return self._taken(lib.rt_authority_process_came(self._native, now, as_text(host), slot, as_text(uid)))

    def process_gone(self, now: float, host: str, slot: int, uid: str, cause: str) -> list[Action]:
        """The end of its connection tells of its end."""
        gone = lib.rt_authority_process_gone(self._native, now, as_text(host), slot, as_text(uid), as_text(cause))
        return self._taken(gone)

    def tick(self, now: float) -> list[Action]:
        """To be called at `next_timer`."""
        return self._taken(lib.rt_authority_tick(self._native, now))

    @property
    def next_timer(self) -> float:
        """When `tick` must be called; infinite once the job has ended."""
        return float(lib.rt_authority_next_timer(self._native))

    def _taken(self, count: int) -> list[Action]:
        return [self._take() for _ in range(counted(count))]

    def _take(self) -> Action:
        action = self._given
        require(lib.rt_authority_next(self._native, action))
        return Action(
            kind=action.kind,
            host=text_at(action.host),
            slot=action.slot,
            uid=text_at(action.uid),
            frame=bytes_at(action.frame, action.frame_bytes),
            well=bool(action.well),
            text=text_at(action.text),
        )
