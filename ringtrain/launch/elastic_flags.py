"""The flags of elastic jobs: ours and Horovod's, which `cli` reads as words. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from ringtrain.launch import settings, starter
from ringtrain.launch.authority import Rules
from ringtrain.launch.hosts import HostsError

ELASTIC_SECONDS = 600.0  # below the minimum of ranks, until an elastic job ends
PAUSES = 10.0, 600.0  # seconds until a rank is started again where one has failed: the first time, and at most
NOTICE_GRACE = 30.0  # seconds from the notice to a rank until it is ended
LAUNCHER_GRACE = 60.0  # seconds that ranks go on without a launcher
NOTICES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")  # that may be one

BATCHES = ("rank", "constant", "balanced")  # what stays the same when the number of ranks changes
BESIDE_RESUME = ("resume", "verbose")


def options() -> list[click.Option]:
    """Those of our own; Horovod's stand in `settings`, since they are accepted without --elastic, too."""
    seconds = settings.NumberInRange(0, settings.LONGEST_SECONDS)
    return [
        click.Option(
            ["--elastic"],
            is_flag=True,
            help="go on without ranks that die, and start them again; -np MIN:MAX. The script must use elastic.State or elastic.run",
        ),
        click.Option(
            ["--host-discovery-script"],
            metavar="COMMAND",
            help="of --elastic, instead of -H: prints the hosts that may be used now, 'host' or 'host:slots' a line; run every "
            "second",
        ),
        click.Option(
            ["--notice-signal"],
            metavar="NAME",
            help="of --elastic: a signal beside SIGTERM by which a rank, or its host's agent, is asked to leave (USR1)",
        ),
        click.Option(
            ["--notice-grace"],
            type=seconds,
            help="of --elastic: seconds until a rank is ended that was asked to leave (30)",
        ),
        click.Option(
            ["--launcher-grace"],
            type=seconds,
            help="of --elastic: seconds that ranks go on when the launcher is lost, for one that takes them up; 0: they end "
            "(60)",
        ),
        click.Option(
            ["--batch"],
            type=click.Choice(BATCHES),
            help="of --elastic: what stays the same when the number of ranks changes: the batch of each rank, or that of a step, "
            "which is a rank's times the MAX of -np, in equal shares, or balanced: in shares by how fast the ranks are (rank)",
        ),
        click.Option(
            ["--resume"],
            metavar="JOB",
            help="take up an elastic job of this host whose launcher was lost; nothing else is given",
        ),
    ]


def refuse_beside_resume(context: click.Context) -> None:
    """Raises HostsError for what is given beside --resume: all else stands in the job's record."""
    given = click.core.ParameterSource.COMMANDLINE
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in BESIDE_RESUME and context.get_parameter_source(name) == given:
            what = "a command" if name == "command" else parameter.opts[0]
            raise HostsError(
                f"--resume: it must stand alone, as the job's record says the rest, but {what} is given, too."
            )


def seconds_below_the_minimum(given: Mapping[str, Any]) -> float:
    """Of --elastic-timeout; what is no number is refused later."""
    try:
        return float(given["elastic_timeout"] or ELASTIC_SECONDS)
    except ValueError:
        return 0.0


def range_of_ranks(given: Mapping[str, Any], slots: int) -> tuple[int, int]:
    """The least and the greatest number of ranks: of -np, in an elastic job also of Horovod's flags. Raises HostsError."""
    minimum, maximum = given["ranks"] or (slots, slots)
    if not given["elastic"]:
        return minimum, maximum
    least, most = given["min_np"] or given["min_num_proc"], given["max_np"] or given["max_num_proc"]
    minimum = whole_number("--min-np", least) if least else minimum
    maximum = whole_number("--max-np", most) if most else maximum
    if not 1 <= minimum <= maximum:
        raise HostsError(
            f"--elastic: the range of ranks must begin with 1 at least and not end below that, but is {minimum}:{maximum}."
        )
    return minimum, maximum


def whole_number(flag: str, text: str) -> int:
    """Reads a number. Raises HostsError."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise HostsError(f"{flag} '{text}': it must be a whole number, but is something else.")
    return int(text)


def rules(given: Mapping[str, Any], minimum: int, maximum: int) -> Rules | None:
    """What the flags of an elastic job say; None without --elastic. Raises HostsError."""
    for flag in ("--notice-signal", "--notice-grace", "--launcher-grace", "--batch"):
        if not given["elastic"] and given[flag.strip("-").replace("-", "_")] is not None:
            raise HostsError(f"{flag}: it needs --elastic, which is not given. Add it, or leave this out.")
    if not given["elastic"]:
        return None
    first, longest = given["blacklist_cooldown_range"] or PAUSES
    wait = _number("--elastic-timeout", given["elastic_timeout"] or ELASTIC_SECONDS, float, 1.0)
    reset_limit = _number("--reset-limit", given["reset_limit"] or 0, int, 0)
    first = _number("--blacklist-cooldown-range", first, float, 0.1)
    longest = _number("--blacklist-cooldown-range", longest, float, first)
    if given["function_folder"]:
        raise HostsError("--elastic: it must be given with a command, but a function is to be run. Write a script.")
    grace = NOTICE_GRACE if given["notice_grace"] is None else given["notice_grace"]
    notices = signals_of_a_notice(given["notice_signal"])
    launcher_grace = LAUNCHER_GRACE if given["launcher_grace"] is None else given["launcher_grace"]
    return Rules(
        minimum=minimum,
        wait=wait,
        first_pause=first,
        longest_pause=longest,
        reset_limit=reset_limit,
        notice_grace=grace,
        notices=notices,
        launcher_grace=launcher_grace,
        planned=0 if given["batch"] in (None, "rank") else maximum,
        balances=given["batch"] == "balanced",
    )


def _number(flag: str, text: Any, kind: Callable[[Any], Any], least: float) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = least - 1
    if not least <= number <= settings.LONGEST_SECONDS:
        raise HostsError(f"{flag} '{text}': it must be a number of at least {least:g}, but is another one, or none.")
    return number


def signals_of_a_notice(name: str | None) -> tuple[str, ...]:
    """SIGTERM, and the one of --notice-signal. Raises HostsError for one that does not do."""
    wanted = "SIGTERM" if name is None else "SIG" + name.upper().removeprefix("SIG")
    if wanted not in NOTICES:
        raise HostsError(
            f"--notice-signal '{name}': it must be one of {', '.join(NOTICES)}, but is something else. Others have a "
            "meaning of their own."
        )
    return tuple(dict.fromkeys(("SIGTERM", wanted)))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that an elastic job sets. Raises HostsError for those that it cannot have."""
    if environment.get(starter.VARIABLE) == "mpi":
        raise HostsError(
            "--elastic: the transport must be tcp, but is mpi, whose world ends with any of its ranks. Leave out --transport, "
            f"and {starter.VARIABLE} in the environment and the configuration file."
        )
    if environment.get("RINGTRAIN_HOST_LAYOUT"):
        raise HostsError(
            "--elastic: RINGTRAIN_HOST_LAYOUT must not be set, since the number of ranks may change, but is."
        )
    return {starter.VARIABLE: "tcp"}
