"""The authority and the membership of an elastic job through the library: no process, no clock, frames handed over here."""

import uuid

import pytest

from ringtrain._binding._native import as_text, bytes_at, ffi, lib, text_at
from ringtrain.launch.agent.succession import FORM, LEAVE
from ringtrain.launch.authority import Authority, Rules
from ringtrain.launch.hosts import Host

KINDS = {getattr(lib, name): name[len("RT_DO_") :].lower() for name in dir(lib) if name.startswith("RT_DO_")}


def spelled(action) -> tuple[str, list[str]]:
    """What an authority has decided, in words: its kind, and what it has."""
    kind = KINDS[action.kind]
    columns = {
        "write": [action.frame.hex()],
        "send": [action.host, action.uid, action.frame.hex()],
        "evict": [action.host, action.uid, action.frame.hex()],
        "ask": [action.host, action.frame.hex()],
        "beat": [action.host],
        "start": [action.host, str(action.slot)],
        "say": [action.text],
        "end": [str(int(action.well)), action.text],
    }
    return kind, columns[kind]


def decided(native, count: int) -> list[list[str]]:
    """What a membership has decided, in words; the members of a world each behind it."""
    action, actions = ffi.new("rt_membership_action *"), []
    for _ in range(count):
        assert lib.rt_membership_next(native, action) == 1
        kind, frame = KINDS[action.kind], bytes_at(action.frame, action.frame_bytes).hex()
        columns = {
            "send": [frame],
            "connect": [str(action.world), str(action.rank), frame],
            "fence": [text_at(action.text)],
        }
        actions.append([kind, *columns.get(kind, [])])
        for each in action.members[0 : action.member_count]:
            texts = text_at(each.uid), text_at(each.host), str(each.slot), str(each.joins), text_at(each.address)
            actions.append(["member", *texts])
    assert lib.rt_membership_next(native, action) == 0
    return actions


def arrived(native, frame: str) -> int:
    """A membership hears of the authority."""
    told = bytes.fromhex(frame)
    return lib.rt_membership_arrived(native, told, len(told))


class Rank:
    """A membership, with what it has been told to do and not done yet."""

    def __init__(self, slot: int, address: str):
        self.uid, self.slot = uuid.uuid4().hex, slot
        self.native = ffi.gc(
            lib.rt_membership_open(as_text(self.uid), as_text("a"), slot, as_text(address), as_text("one")),
            lib.rt_membership_free,
        )
        self.did: list[list[str]] = []
        self.joins = False
        self.gives = True  # the state of a first world is there at once

    def take(self, count: int) -> list[str]:
        """Notes actions; returns the frames that it sends."""
        actions = decided(self.native, count)
        self.did += [action for action in actions if action[0] != "send"]
        for action in actions:
            if action[0] == "member" and action[1] == self.uid:
                self.joins = action[4] == "1"
            if action[0] == "run" and not self.joins and self.gives:
                lib.rt_membership_got_state(self.native)
        return [action[1] for action in actions if action[0] == "send"]

    def kinds(self) -> list[str]:
        """What it did since the last call."""
        done, self.did = [action[0] for action in self.did], []
        return done


class Job:
    """An authority over one host of so many slots, and the ranks that it has started."""

    gives = True

    def __init__(self, slots: int, minimum: int = 1, **rules):
        self.now = 100.0
        rules = {"wait": 60.0, "first_pause": 10.0, "longest_pause": 600.0, "reset_limit": 0, **rules}
        self.slots, self.rules = slots, Rules(minimum, **rules)
        self.authority = Authority([Host("a", slots)], self.rules, grace=30.0, now=self.now)
        self.ranks: dict[str, Rank] = {}
        self.did: list[tuple[str, list[str]]] = []
        self.deaf: set[str] = set()
        self.do(self.authority.host_came(self.now, "a"))

    def do(self, actions) -> None:
        for kind, columns in map(spelled, actions):
            self.did.append((kind, columns))
            rank = self.ranks.get(columns[1]) if kind in ("send", "evict") else None
            if kind == "ask":
                self.answer(columns[1])
            if kind == "start":
                slot = int(columns[1])
                rank = Rank(slot, f"address-{len(self.ranks)}")
                rank.gives = self.gives
                self.ranks[rank.uid] = rank
                self.hear(rank.take(lib.rt_membership_begin(rank.native)))
            elif rank is not None and rank.uid not in self.deaf:
                self.hear(rank.take(arrived(rank.native, columns[2])))
                for place, action in [each for each in enumerate(rank.did) if each[1][0] == "connect"]:
                    rank.did[place] = ["connected", *action[1:]]
                    well = not self.deaf & {each[1] for each in rank.did[place:] if each[0] == "member"}
                    self.hear(rank.take(lib.rt_membership_connected(rank.native, int(action[1]), well)))

    def answer(self, frame: str) -> None:
        """As the launcher's driver: all ranks are asked, and the authority hears which there are."""
        there = [rank for rank in self.ranks.values() if rank.uid not in self.deaf]
        frames = [each for rank in there for each in rank.take(arrived(rank.native, frame))]
        self.do(
            self.authority.host_present(self.now, "a", [rank.uid for rank in there], bytes.fromhex(self.passed_on()))
        )
        self.hear(frames)

    def passed_on(self) -> str:
        """The newest world that the agent has heard of; it knows such frames by their first byte."""
        return next((columns[2] for columns in reversed(self.said("send")) if columns[2].startswith(FORM)), "")

    def resume(self, record: str) -> None:
        """Another launcher takes the job up with this record."""
        self.now += 20.0
        kept = bytes.fromhex(record)
        self.authority = Authority([Host("a", self.slots)], self.rules, grace=30.0, now=self.now, record=kept)
        self.did = [each for each in self.did if each[0] == "send"]
        self.do(self.authority.host_came(self.now, "a"))

    def hear(self, frames: list[str]) -> None:
        for frame in frames:
            self.do(self.authority.arrived(self.now, "a", bytes.fromhex(frame)))

    def kill(self, rank: Rank, code: int = -9) -> None:
        self.deaf.add(rank.uid)
        self.do(self.authority.process_ended(self.now, "a", rank.slot, rank.uid, code))

    def pass_seconds(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.do(self.authority.host_heard(self.now, "a"))
            self.do(self.authority.tick(self.now))

    def said(self, kind: str) -> list[list[str]]:
        return [columns for each, columns in self.did if each == kind]


class Stateless(Job):
    """One whose ranks have got no state yet."""

    gives = False


def in_slots(job: Job) -> list[Rank]:
    return sorted((rank for rank in job.ranks.values() if rank.uid not in job.deaf), key=lambda rank: rank.slot)


def test_all_slots_make_the_first_world():
    job = Job(3)
    assert [rank.slot for rank in in_slots(job)] == [0, 1, 2]
    for place, rank in enumerate(in_slots(job)):
        connected = next(action for action in rank.did if action[0] == "connected")
        assert connected[1:3] == ["1", str(place)] and len(bytes.fromhex(connected[3])) == 32
        assert [action[5] for action in rank.did if action[0] == "member"] == ["address-0", "address-1", "address-2"]
        assert rank.kinds()[-1] == "run"


def test_a_death_makes_a_world_of_the_others_with_another_key():
    job = Job(3)
    keys = {action[3] for rank in in_slots(job) for action in rank.did if action[0] == "connected"}
    victim = in_slots(job)[0]
    for rank in in_slots(job):
        rank.kinds()
        lib.rt_membership_listens_at(rank.native, as_text(f"again-{rank.slot}"))
    job.kill(victim)
    assert job.said("say") == [["The rank in slot 0 of host 'a' was killed by signal 9."]]
    for place, rank in enumerate(in_slots(job)):
        connected = next(action for action in rank.did if action[0] == "connected")
        assert connected[1:3] == ["2", str(place)] and connected[3] not in keys
        assert [action[5] for action in rank.did if action[0] == "member"] == ["again-1", "again-2"]
        assert rank.kinds() == ["abandon", "connected", "member", "member", "run"]


def test_a_slot_gets_a_rank_again_after_its_pause_and_it_is_asked_in_at_a_pause():
    job = Job(2)
    job.kill(in_slots(job)[1])
    assert len(in_slots(job)) == 1
    old = in_slots(job)[0]
    old.kinds()
    job.pass_seconds(11)
    assert [rank.slot for rank in in_slots(job)] == [0, 1]
    assert old.kinds() == ["pause"]  # and no word to the world that runs
    new = in_slots(job)[1]
    assert new.kinds() == []
    job.hear(old.take(lib.rt_membership_world_ended(old.native)))
    assert new.kinds()[-1] == "run" and old.kinds()[-1] == "run"


def joined(job: Job) -> Rank:
    """A rank that has joined another one, which had the state."""
    job.kill(in_slots(job)[1])
    job.pass_seconds(11)
    old, new = in_slots(job)
    job.hear(old.take(lib.rt_membership_world_ended(old.native)))
    assert new.kinds()[-1] == "run"
    return new


def test_a_rank_that_has_not_got_the_state_yet_never_gives_its_own():
    """It would have the others go on from what a program begins with."""
    job = Job(2)
    joined(job)
    job.kill(in_slots(job)[0])
    assert job.said("end") == [["0", "All ranks that held the state of the training are gone."]]


def test_a_first_world_that_is_lost_before_its_state_was_given_is_followed_by_another_first_one():
    job = Stateless(3)
    job.kill(in_slots(job)[0])
    assert job.said("end") == []
    assert [rank.kinds()[-1] for rank in in_slots(job)] == ["run", "run"] and not any(
        rank.joins for rank in in_slots(job)
    )


def test_who_has_got_no_state_in_the_first_world_joins_the_others_behind_their_step():
    job = Stateless(3)
    killed, begun, late = in_slots(job)
    lib.rt_membership_got_state(begun.native)
    lib.rt_membership_admits(begun.native, 0)
    late.kinds()
    job.kill(killed)
    assert begun.kinds()[-2:] == ["run", "pause"] and late.kinds() == ["abandon"]
    lib.rt_membership_admits(begun.native, 1)
    job.hear(begun.take(lib.rt_membership_world_ended(begun.native)))
    assert [rank.kinds()[-1] for rank in (begun, late)] == ["run", "run"] and late.joins and not begun.joins


def test_a_rank_that_has_got_the_state_goes_on_alone():
    job = Job(2)
    new = joined(job)
    lib.rt_membership_got_state(new.native)
    job.kill(in_slots(job)[0])
    assert job.said("end") == [] and new.kinds()[-1] == "run"


def test_within_a_step_nobody_new_is_admitted():
    """Who waits comes in once a rank that has been within a step says that it is between two."""
    job = Job(3)
    old = in_slots(job)[:2]
    for rank in in_slots(job):
        lib.rt_membership_admits(rank.native, 0)
    job.kill(in_slots(job)[2])
    job.pass_seconds(11)
    new = in_slots(job)[2]
    for rank in old:
        rank.kinds()
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    assert [rank.kinds()[-1] for rank in old] == ["pause", "pause"] and new.kinds() == []  # it waits behind their world
    for rank in old:
        lib.rt_membership_admits(rank.native, 1)
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    assert [rank.kinds()[-1] for rank in (*old, new)] == ["run"] * 3


def test_a_world_that_cannot_be_connected_is_formed_again_without_the_silent_one():
    """It has reported, and is silent from then on. Of those who say that they cannot connect none is taken for the reason."""
    job = Job(4)
    killed, silent, *others = in_slots(job)
    for rank in in_slots(job):
        rank.kinds()
    hear = job.hear

    def falls_silent(frames):
        hear(frames)
        if any(frame.startswith("05") for frame in frames):  # a report
            job.deaf.add(silent.uid)

    job.hear = falls_silent
    job.kill(killed)
    job.pass_seconds(9)
    assert [columns[1] for columns in job.said("evict")] == [silent.uid]
    assert all(rank.kinds()[-1] == "run" for rank in others)


def test_a_world_that_has_ended_by_itself_is_followed_by_another_one():
    """As when its ranks have found a silent one; who does not report is given up."""
    job = Job(3)
    silent, *others = in_slots(job)
    job.deaf.add(silent.uid)
    for rank in others:
        rank.kinds()
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    job.pass_seconds(9)
    assert [columns[1] for columns in job.said("evict")] == [silent.uid]
    assert all(rank.kinds()[-1] == "run" for rank in others)


def test_below_the_minimum_ranks_wait_and_then_the_job_ends():
    job = Job(2, minimum=2, wait=20.0, first_pause=100.0)
    rank = in_slots(job)[0]
    job.kill(in_slots(job)[1])
    rank.kinds()
    job.pass_seconds(10)
    assert rank.kinds() == [] and job.said("end") == []
    job.pass_seconds(11)
    (reason,) = job.said("end")
    assert reason[0] == "0" and reason[1].startswith("A world must have 2 ranks, but has fewer.")


def test_the_reset_limit_ends_the_job():
    job = Job(3, reset_limit=1)
    job.kill(in_slots(job)[0])
    assert job.said("end") == []
    job.kill(in_slots(job)[0])
    assert job.said("end") == [["0", "The reset limit of 1 worlds is reached."]]


def test_all_that_end_well_end_the_job_well():
    job = Job(2)
    for rank in in_slots(job):
        job.kill(rank, code=0)
    assert job.said("end") == [["1", "All ranks have come to their end."]] and job.said("say") == []


@pytest.mark.parametrize("frame", ["", "ff", "01", "06" + "ff" * 40])
def test_what_is_no_frame_has_no_effect(frame):
    job = Job(1)
    (rank,) = in_slots(job)
    rank.kinds()
    assert job.authority.arrived(job.now, "a", bytes.fromhex(frame)) == []
    assert rank.take(arrived(rank.native, frame)) == [] and rank.kinds() == []


def test_what_is_no_uid_and_no_host_is_refused():
    texts = as_text("a"), 0, as_text("here"), as_text("one")
    assert lib.rt_membership_open(as_text("not a uid"), *texts) == ffi.NULL
    assert lib.rt_authority_begin(as_text("a"), ffi.new("rt_authority_options *"), 0.0) == ffi.NULL


def test_who_leaves_on_notice_is_dismissed_at_the_pause_and_nobody_comes_there_again():
    job = Job(slots=3)
    first, second, third = job.ranks.values()
    job.do(job.authority.process_leaves(job.now, "a", second.slot, second.uid))
    job.do(job.authority.process_leaves(job.now, "a", second.slot, second.uid))  # told by its agent, too
    assert [each[0] for each in job.said("say")] == ["The rank in slot 1 of host 'a' leaves on notice."]
    assert all("pause" in rank.kinds() for rank in (first, second, third))
    for rank in (first, second, third):  # as their programs come to a commit
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    assert "depart" in second.kinds() and "run" in first.kinds() and "run" in third.kinds()
    job.deaf.add(second.uid)
    job.do(job.authority.process_ended(job.now, "a", second.slot, second.uid, 0))
    job.pass_seconds(100)
    assert len(job.ranks) == 3 and not job.said("end") and not job.said("evict")


def test_a_host_that_leaves_takes_all_its_ranks_and_the_job_does_not_end_well():
    job = Job(slots=2)
    job.do(job.authority.host_leaves(job.now, "a", "why."))
    for rank in list(job.ranks.values()):
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    assert job.said("say") == [["Host 'a' leaves on notice: why."]]
    assert job.said("end") == [["0", "All ranks have left on notice, before the training came to its end."]]


def test_a_rank_of_whose_silence_another_tells_is_evicted_after_a_second():
    job = Job(slots=3)
    first, stopped, _ = job.ranks.values()
    job.deaf.add(stopped.uid)
    job.hear(first.take(lib.rt_membership_suspects(first.native, lib.RT_SILENT, [1], 1)))
    assert not job.said("evict")
    job.pass_seconds(2)
    assert [each[1] for each in job.said("evict")] == [stopped.uid]


def counts(job: Job) -> list[int]:
    """Of the worlds that ranks were to connect."""
    return sorted({int(action[1]) for rank in job.ranks.values() for action in rank.did if action[0] == "connected"})


@pytest.mark.parametrize("kept", ["the launcher's record", "what the agent has passed on"])
def test_a_launcher_that_takes_a_job_up_changes_nothing(kept):
    """The world goes on, and the next one has the next count, though one of both records is lost."""
    job = Job(3)
    record = job.said("write")[-1][0] if kept.startswith("the launcher") else ""
    if record:
        job.passed_on = lambda: ""
    job.resume(record)
    job.pass_seconds(3)
    assert not job.said("say") and not job.said("write") and not job.said("start")
    assert counts(job) == [1]
    job.kill(in_slots(job)[1])
    assert job.said("say") == [["The rank in slot 1 of host 'a' was killed by signal 9."]]
    assert counts(job) == [1, 2] and [rank.kinds()[-1] for rank in in_slots(job)] == ["run"] * 2


def test_a_death_without_a_launcher_is_found_by_the_next_one():
    job = Job(3)
    job.deaf.add(in_slots(job)[0].uid)
    job.resume(job.said("write")[-1][0])
    job.pass_seconds(1)
    assert counts(job)[:2] == [1, 2]
    assert sorted(columns[1] for columns in job.said("start")) == ["0"]  # whose agent tells of no process there


def test_a_host_that_is_heard_again_gets_ranks_again():
    """Those that it had are of no use any more: the launcher has given them up."""
    authority = Authority([Host("a", 1), Host("b", 1)], Rules(1, 60.0, 10.0, 600.0, 0), grace=30.0, now=0.0)
    ranks = {host: membership_on(host) for host in "ab"}
    said: list[tuple[str, list[str]]] = []

    def do(now: float, actions) -> None:
        for kind, columns in map(spelled, actions):
            said.append((kind, columns))
            host = columns[0] if columns else ""
            if kind == "ask":
                uid, native = ranks[host]
                do(now, authority.host_present(now, host, [uid] if now else []))
                frames = frames_of(native, arrived(native, columns[1])) if now else []
            elif kind == "start" and now == 0.0:
                frames = frames_of(ranks[host][1], lib.rt_membership_begin(ranks[host][1]))
            elif kind == "send" and columns[1] == ranks[host][0] and host not in cut:
                frames = frames_of(ranks[host][1], arrived(ranks[host][1], columns[2]))
                for count in (1, 2):  # whichever has been formed
                    frames += frames_of(ranks[host][1], lib.rt_membership_connected(ranks[host][1], count, True))
            else:
                continue
            for frame in frames:
                do(now, authority.arrived(now, host, bytes.fromhex(frame)))

    cut: set[str] = set()
    for host in "ab":
        do(0.0, authority.host_came(0.0, host))
    assert any(kind == "send" and columns[2].startswith("08") for kind, columns in said)  # the world of both goes
    cut.add("b")
    for now in range(1, 9):
        do(now, authority.host_heard(now, "a"))
        do(now, authority.tick(now))
    assert ["Host 'b' is lost: nothing is heard of its agent."] in [columns for kind, columns in said if kind == "say"]
    said.clear()
    cut.clear()
    do(9.0, authority.host_heard(9.0, "b"))
    assert [columns[:2] for kind, columns in said if kind == "evict"] == [["b", ranks["b"][0]]]
    said.clear()
    do(9.5, authority.process_ended(9.5, "b", 0, ranks["b"][0], -9))
    for now in range(10, 22):
        for host in "ab":
            do(now, authority.host_heard(now, host))
        do(now, authority.tick(now))
    assert ["b", "0"] in [columns for kind, columns in said if kind == "start"]


def membership_on(host: str) -> tuple[str, object]:
    """A uid, and the membership of that process in the first slot of a host."""
    uid = uuid.uuid4().hex
    opened = lib.rt_membership_open(as_text(uid), as_text(host), 0, as_text("address"), as_text("one"))
    return uid, ffi.gc(opened, lib.rt_membership_free)


def frames_of(native, count: int) -> list[str]:
    """What a membership sends."""
    return [action[1] for action in decided(native, count) if action[0] == "send"]


def test_the_agent_knows_a_dismissal_by_its_first_byte():
    job = Job(2)
    leaver = in_slots(job)[1]
    job.do(job.authority.process_leaves(job.now, "a", leaver.slot, leaver.uid))
    for rank in in_slots(job):
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    to_it = [columns[2] for columns in job.said("send") if columns[1] == leaver.uid]
    assert to_it[-1].startswith(LEAVE) and [each for each in to_it if each.startswith(FORM)] == [to_it[0]]


class Called(Job):
    """An authority that starts nothing: processes come to it, and go."""

    def __init__(self, slots: int, **rules):
        super().__init__(0, minimum=slots, **rules)
        self.authority = Authority([], self.rules, grace=30.0, now=self.now)
        self.did = []
        for slot in range(slots):
            self.come(slot)

    def come(self, slot: int) -> Rank:
        rank = Rank(slot, f"address-{len(self.ranks)}")
        self.ranks[rank.uid] = rank
        rank.take(lib.rt_membership_begin(rank.native))  # what it says before it is let in is not heard
        self.come_again(rank)
        return rank

    def come_again(self, rank: Rank) -> None:
        self.do(self.authority.process_came(self.now, "a", rank.slot, rank.uid))

    def go(self, rank: Rank) -> None:
        self.deaf.add(rank.uid)
        self.do(self.authority.process_gone(self.now, "a", rank.slot, rank.uid, "why."))

    def resume(self, record: str) -> None:
        """Another authority goes on; nobody has come yet."""
        self.now += 20.0
        self.authority = Authority([], self.rules, grace=30.0, now=self.now, record=bytes.fromhex(record))
        self.did = []


def test_processes_that_come_are_ranks_until_they_go():
    job = Called(3, wait=1000.0)
    first, second, third = job.ranks.values()
    assert [rank.kinds()[-1] for rank in (first, second, third)] == ["run"] * 3
    job.go(second)
    assert job.said("say")[0] == ["The rank in slot 1 of host 'a' is gone: why."]
    new = job.come(1)
    assert [rank.kinds()[-1] for rank in (first, third, new)] == ["run"] * 3
    assert job.said("start") == [] and job.said("end") == []


def test_one_that_joins_is_let_in_at_a_pause_and_takes_the_state():
    job = Called(2)
    old = list(job.ranks.values())
    for rank in old:
        rank.kinds()
    new = job.come(2)
    assert [rank.kinds() for rank in old] == [["pause"], ["pause"]]
    for rank in old:
        job.hear(rank.take(lib.rt_membership_world_ended(rank.native)))
    (joined,) = [action for action in new.did if action[0] == "member" and action[1] == new.uid]
    assert joined[4] == "1" and new.kinds()[-1] == "run"


def test_a_host_that_has_no_process_is_none():
    """Nothing is heard of it, and nothing is said of that."""
    job = Called(2)
    other = uuid.uuid4().hex
    job.do(job.authority.process_came(job.now, "b", 0, other))
    job.do(job.authority.process_gone(job.now, "b", 0, other, "why."))
    job.pass_seconds(20)
    assert job.said("say") == [] and job.authority.host_heard(job.now, "b") == []


def test_all_processes_that_finish_end_the_job_when_they_are_gone():
    job = Called(2)
    for rank in list(job.ranks.values()):
        job.hear(rank.take(lib.rt_membership_finished(rank.native)))
        assert job.said("end") == []
    for rank in list(job.ranks.values()):
        job.go(rank)
    assert job.said("say") == [] and job.said("end") == [["1", "All ranks have come to their end."]]


def test_an_authority_that_goes_on_leaves_a_whole_world_alone():
    """All come again, one late; no rank is told anything but to say who it is."""
    job = Called(3)
    for rank in job.ranks.values():
        rank.kinds()
    job.resume(job.said("write")[-1][0])
    first, second, third = job.ranks.values()
    job.come_again(first)
    job.come_again(second)
    job.pass_seconds(6)
    job.come_again(third)
    job.pass_seconds(20)
    assert [rank.kinds() for rank in job.ranks.values()] == [[]] * 3 and job.said("say") == []
    job.go(third)
    assert job.said("say")[0] == ["The rank in slot 2 of host 'a' is gone: why."]


def test_who_does_not_come_again_is_given_up_and_evicted_when_it_does():
    job = Called(3, wait=1000.0)
    for rank in job.ranks.values():
        rank.kinds()
    record = job.said("write")[-1][0]
    job.rules = job.rules._replace(minimum=1)
    job.resume(record)
    first, second, third = job.ranks.values()
    job.deaf.add(third.uid)
    job.come_again(first)
    job.come_again(second)
    assert first.kinds() == []
    job.pass_seconds(8)
    assert first.kinds()[-1] == second.kinds()[-1] == "run"
    job.deaf.clear()
    job.come_again(third)
    assert third.kinds() == ["fence"]


def test_a_process_that_has_gone_meanwhile_is_not_waited_for():
    job = Called(3, wait=1000.0)
    record = job.said("write")[-1][0]
    job.rules = job.rules._replace(minimum=1)
    job.resume(record)
    first, second, third = job.ranks.values()
    job.come_again(first)
    job.come_again(second)
    for rank in (first, second):
        rank.kinds()
    job.go(third)  # it has called, and died before it said who it is
    assert first.kinds()[-1] == second.kinds()[-1] == "run"
