"""Compares the flight records of all ranks: what ended the world, and who waited for whom. Pure. Used by `flight`.

Two numbers put ranks beside each other. Data operations of a process set run in one order on all members, so their places in
that order, ``agreed``, say who has come how far. What is not agreed on has no place yet: it is compared by its name.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ringtrain._runtime.flight_recorder import OK, PENDING, REFUSED, FlightRecord, Flown, placed
from ringtrain._runtime.rank_lists import ranks_text

MOST_FINDINGS = 20  # of one kind that are told; the others are counted


def newest_world(records: Sequence[FlightRecord]) -> tuple[list[FlightRecord], list[FlightRecord]]:
    """The records of the world that has written last, and the others; pure.

    Which of two was later is told by a host that has left records of both: clocks of different hosts may be hours apart.
    """
    worlds_of: dict[str, list[int]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.written):
        worlds_of[record.host].append(record.world)
    earlier = {world for worlds in worlds_of.values() for world in worlds if world != worlds[-1]}
    last = [record for record in records if record.world not in earlier] or records  # a clock was set back
    world = max(last, key=lambda record: record.written).world
    return [each for each in records if each.world == world], [each for each in records if each.world != world]


def compare(records: Sequence[FlightRecord]) -> list[str]:
    """What the records of one world say: who is missing, who is behind, and what ranks do otherwise than others; pure.

    Returns:
        Lines, the most telling first.
    """
    records = on_one_clock(records)
    silent = sorted(set(range(records[0].size)) - {record.rank for record in records})
    lines = _causes(records) + _silent(records, silent)
    findings = [line for number in sorted(_sets(records)) for line in _of_set(records, number, silent)]
    return lines + (findings or ["No rank waits for another, as far as the records go: all have done the same."])


def on_one_clock(records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """The records by the clock of the first: no operation starts anywhere before all members have submitted it; pure."""
    return [_moved(record, _ahead(record, records[0])) for record in records]


def _ahead(record: FlightRecord, first: FlightRecord) -> float:
    """The least by which a record's clock must be ahead of the first one's; negative if it is behind."""
    theirs = {(each.process_set, each.agreed): each for each in first.operations if each.agreed}
    both = [
        (each, other)
        for each in record.operations
        if each.agreed and (other := theirs.get((each.process_set, each.agreed))) is not None
    ]
    least = max((own.submitted - other.started for own, other in both if other.started), default=-math.inf)
    most = min((own.started - other.submitted for own, other in both if own.started), default=math.inf)
    return min(max(0.0, least), most) if least <= most else 0.0


def _moved(record: FlightRecord, ahead: float) -> FlightRecord:
    def back(time: float | None) -> float | None:
        return None if time is None else time - ahead

    operations = tuple(
        each._replace(
            submitted=each.submitted - ahead,
            announced=back(each.announced),
            started=back(each.started),
            finished=back(each.finished),
        )
        for each in record.operations
    )
    return record._replace(written=record.written - ahead, operations=operations)


def _causes(records: Sequence[FlightRecord]) -> list[str]:
    """Why the records were written, the first cause first."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.written):
        ranks_of[record.because or "The program asked for it."].append(record.rank)
    head = f"World of {_count(records[0].size, 'rank')}; records of {ranks_text(each.rank for each in records)}."
    return [head, *(f"{_capital(ranks_text(ranks))}: {cause}" for cause, ranks in ranks_of.items())]


def _silent(records: Sequence[FlightRecord], silent: Sequence[int]) -> list[str]:
    if not silent:
        return []
    return [
        f"{_capital(placed(silent, records[0].hosts))} left no record: killed, stopped, or cut off before it could write one, or "
        "on a host whose files are not here. Look there first."
    ]


def _sets(records: Sequence[FlightRecord]) -> dict[int, tuple[int, ...]]:
    return {number: members for record in records for number, members in record.process_sets.items()}


def _of_set(records: Sequence[FlightRecord], number: int, silent: Sequence[int]) -> list[str]:
    """The findings in one process set."""
    members = _sets(records)[number]
    here = {record.rank: record for record in records if record.rank in members}
    own = {rank: [each for each in record.operations if each.process_set == number] for rank, record in here.items()}
    lines = [*_different(own), *_awaited(here, own, members, silent), *_behind(here, own), *_under_way(here, own)]
    return lines if number == 0 else [f"Process set {number} ({ranks_text(members)}): {line}" for line in lines]


def _open(own: Mapping[int, Sequence[Flown]]) -> dict[str, dict[int, Flown]]:
    """By name, on which ranks an operation is that not all members have come to; the oldest first.

    Without those that have been agreed on, as another rank knows, and this one has only not heard.
    """
    last = {rank: {each.name: each for each in operations} for rank, operations in own.items()}
    reached = {rank: max((each.agreed for each in operations), default=0) for rank, operations in own.items()}
    by_name: dict[str, dict[int, Flown]] = defaultdict(dict)
    for rank, names in last.items():
        for name, each in names.items():
            elsewhere = [last[other][name] for other in own if name in last[other]]
            is_known = any(
                other.agreed > reached[rank] or (not other.tensors and other.status == OK) for other in elsewhere
            )
            if each.is_open and not is_known:
                by_name[name][rank] = each
    return dict(sorted(by_name.items(), key=lambda entry: min(each.submitted for each in entry[1].values())))


def _different(own: Mapping[int, Sequence[Flown]]) -> list[str]:
    """Operations of one name that are not the same on all ranks."""
    lines = []
    for name, by_rank in _open(own).items():
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, each in by_rank.items():
            ranks_of[each.form].append(rank)
        if len(ranks_of) > 1:
            forms = sorted(ranks_of.items(), key=lambda entry: (-len(entry[1]), entry[1]))
            told = " but ".join(f"[{form}] on {ranks_text(ranks)}" for form, ranks in forms)
            lines.append(f"'{name}' differs: {told}.")
    return _first(lines)


def _awaited(
    here: Mapping[int, FlightRecord], own: Mapping[int, Sequence[Flown]], members: Sequence[int], silent: Sequence[int]
) -> list[str]:
    """Operations that some ranks have submitted and others not."""
    open_by_name = _open(own)
    lines = []
    for by_rank in open_by_name.values():
        one = next(iter(by_rank.values()))
        joined = {rank for rank in own if any(each.operation == "join" and each.is_open for each in own[rank])}
        missing = [rank for rank in own if rank not in by_rank and (one.operation == "join" or rank not in joined)]
        unknown = [rank for rank in members if rank in silent]
        if not missing and not unknown:
            continue
        waited = max(here[rank].written - each.submitted for rank, each in by_rank.items())
        hosts = next(iter(here.values())).hosts
        who = [f"{placed(missing, hosts)} {_have(missing)} not"] if missing else []
        who += [f"of {placed(unknown, hosts)} nothing is known"] if unknown else []
        line = f"{one.subject}: {ranks_text(by_rank)} submitted it, {waited:.1f} s before the record, but {', and '.join(who)}."
        if any(each.status == REFUSED for each in by_rank.values()):
            line += " It was refused there, before it could be submitted."
        lines.append(" ".join([line, *(_instead(rank, here[rank], own[rank]) for rank in missing)]))
    return _first(lines)


def _instead(rank: int, record: FlightRecord, operations: Sequence[Flown]) -> str:
    """What a rank does that has not come to an operation."""
    if not operations:
        return f"Rank {rank} has submitted nothing."
    last = operations[-1]
    how = {OK: "which is done", PENDING: "which is pending"}.get(last.status, f"which ended by {last.status}")
    if last.is_open:
        return f"Rank {rank} was in {last.subject} instead, {how}."
    return (
        f"Rank {rank} submitted {last.subject} last, {how}, {record.written - last.submitted:.1f} s before its record."
    )


def _behind(here: Mapping[int, FlightRecord], own: Mapping[int, Sequence[Flown]]) -> list[str]:
    """Ranks that have heard of fewer agreed operations than others."""
    newest = {rank: max((each for each in each_of if each.agreed), key=lambda each: each.agreed, default=None)
              for rank, each_of in own.items()}  # fmt: skip
    reached = {rank: 0 if last is None else last.agreed for rank, last in newest.items()}
    most = max(reached.values(), default=0)
    front = next((last for last in newest.values() if last is not None and last.agreed == most), None)
    joined = {rank for rank in own if any(each.operation == "join" for each in own[rank][-1:])}
    lines = []
    for rank, place in reached.items():
        if front is None or place == most or rank in joined:
            continue
        last = newest[rank]
        at = "none" if last is None else f"#{place}, {last.subject}"
        who = _capital(placed([rank], here[rank].hosts))
        lines.append(
            f"{who} is behind: its last operation of those that all had agreed on is {at}; others have come to #{most}, "
            f"{front.subject}."
        )
    return _first(lines)


def _under_way(here: Mapping[int, FlightRecord], own: Mapping[int, Sequence[Flown]]) -> list[str]:
    """Operations that began and did not end well everywhere: who has them done, and who not."""
    ends: dict[int, dict[int, Flown]] = defaultdict(dict)
    for rank, operations in own.items():
        for each in operations:
            if each.agreed:
                ends[each.agreed][rank] = each
    lines = []
    for place, by_rank in sorted(ends.items()):
        stuck = [rank for rank, each in by_rank.items() if each.status != OK]
        if not stuck:
            continue
        done = [rank for rank in by_rank if rank not in stuck]
        one = by_rank[stuck[0]]
        line = f"#{place}, {one.subject}, had begun and was not finished on {ranks_text(stuck)}"
        lines.append(line + (f"; it was on {ranks_text(done)}." if done else "."))
    return _first(lines)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_FINDINGS
    return lines if more <= 0 else [*lines[:MOST_FINDINGS], f"... and {more} more like this."]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
