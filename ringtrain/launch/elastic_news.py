"""What the launcher says of an elastic job, beside the words of its authority. Used by `elastic_job`."""

from __future__ import annotations

from ringtrain.launch.known_ranks import Rank
from ringtrain.launch.terminal import Terminal

TOO_FEW = "A world must have"  # as the authority's reason begins, if there are too few ranks


class ElasticNews:
    """Events for people and programs, as `log_lines` lists them.

    job: its name. launcher_grace: seconds that the ranks go on without a launcher; 0 if they do not.
    """

    def __init__(self, terminal: Terminal, job: str, launcher_grace: float):
        self._terminal = terminal
        self._job = job
        self._grace = launcher_grace

    def say_name(self) -> None:
        """How the job is taken up, should this launcher be lost."""
        if self._grace:
            self._terminal.say(
                f"job {self._job}: should this launcher be lost, type within {self._grace:g} s, on this host: "
                f"ringtrainrun --resume {self._job}",
                "job-named",
                job=self._job,
                seconds=self._grace,
            )

    def how_to_resume(self) -> str:
        """For whoever reads why this launcher has failed."""
        return (
            f"The ranks go on. To have the job led again, type within {self._grace:g} s, on this host: "
            f"ringtrainrun --resume {self._job}"
        )

    def say_taken_up(self, ranks: int, where: str) -> None:
        """Another launcher's job goes on, with so many ranks."""
        text = f"job {self._job}: taken up, with {ranks} ranks on {where}."
        self._terminal.say(text, "job-resumed", job=self._job, ranks=ranks)

    def say_ended_meanwhile(self, number: int, slot: int, host: str, code: int) -> None:
        """A rank has ended before this launcher came."""
        self._terminal.say(
            f"The rank in slot {slot} of host '{host}' has ended with exit code {code} while there was no launcher.",
            "rank-ended",
            rank=number,
            host=host,
            code=code,
        )

    def say_output_lost(self, host: str, size_bytes: int) -> None:
        """More was written without a launcher than its agent keeps."""
        self._terminal.say(
            f"host '{host}': {size_bytes} bytes that its ranks wrote while there was no launcher are lost; only the last ones were "
            "kept.",
            "output-lost",
            host=host,
            bytes=size_bytes,
        )

    def say_absent_at_start(self, host: str, why: str) -> None:
        """A host cannot be used at the start."""
        text = f"{why} The job starts without this host, and tries it again later."
        self._terminal.say(text, "host-absent", host=host)

    def say_absent(self, host: str, why: str) -> None:
        """A host cannot be used now."""
        text = f"{why} The job goes on without this host, and tries it again later."
        self._terminal.say(text, "host-absent", host=host)

    def say_came(self, host: str, slots: int) -> None:
        """Another host is used."""
        self._terminal.say(f"host '{host}' has come, with {slots} slots.", "host-came", host=host, slots=slots)

    def say_unreachable(self, host: str) -> None:
        """The others do not hear the ranks of a host."""
        self._terminal.say(
            f"host '{host}': the networks of the job must reach it, but its ranks were not heard over them. It gets ranks again "
            "once a check of the network passes.",
            "host-unreachable",
            host=host,
        )

    def say_stays(self, rank: Rank, grace: float) -> None:
        """A rank has not left after a notice."""
        self._say_killed(rank, f"{rank.describe_place()} has not left within {grace:g} s of its notice, and is ended.")

    def say_does_not_end(self, rank: Rank, grace: float) -> None:
        """A rank has not ended after its program's failure."""
        self._say_killed(
            rank, f"{rank.describe_place()} has not ended within {grace:g} s of its failure, and is killed."
        )

    def _say_killed(self, rank: Rank, text: str) -> None:
        self._terminal.say(text, "rank-killed", rank=rank.number, host=rank.host)

    def say_lost(self, rank: Rank, on_notice: bool) -> None:
        """A rank has failed that the job goes on without: before it had joined, at its program's end, or after a notice."""
        failure = rank.describe_failure()
        text = f"{failure} before it had joined the others. Another one is started there after a pause."
        if rank.left_at < float("inf"):  # by `raise SystemExit(code)`, which no program of Python's can see
            text = f"{failure} when its program had come to its end. The others go on, and no rank is started in its place."
        text = f"{failure} when it had left on notice. Its slot stays empty." if on_notice else text
        self._terminal.say(text, "rank-failed", **rank.facts())

    def say_starts_again(self, host: str, slot: int, seconds: float) -> None:
        """A slot gets another rank, so long after the end of its last one."""
        self._terminal.say(
            f"slot {slot} of host '{host}' starts again, {seconds:.1f} s after the end of its last rank.",
            "slot-started",
            host=host,
            slot=slot,
            seconds=round(seconds, 3),
        )


def who_was_on_the_way(reason: str, running: int, starting: int, wait: float) -> str:
    """Behind the authority's reason, if it is that there are too few ranks: those that were still to come to init()."""
    if not reason.startswith(TOO_FEW) or not starting:
        return ""
    return (
        f" It has waited for {wait:g} s (--elastic-timeout) for ranks to call init(), and {starting} of the {running} that run had "
        "not come to it. If their imports take longer, give --elastic-timeout more seconds."
    )
