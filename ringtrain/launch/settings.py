"""Flags that stand for something else: environment variables of the ranks, or nothing any more. Tables, read by `cli`.

They are Horovod's, so that its job scripts keep working, as is the YAML of --config-file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

TRANSPORTS = ("auto", "mpi", "tcp")
LONGEST_SECONDS = 1e9  # of any wait: 30 years


class ConfigError(ValueError):
    """A configuration file that cannot be used."""


@dataclass(frozen=True)
class Setting:
    """A flag that sets environment variables for the ranks.

    `place` is where the configuration file has it: section and key.
    """

    flags: tuple[str, ...]
    kind: click.ParamType
    help: str
    variables: Callable[[Any], dict[str, str]]
    place: tuple[str, str]

    @property
    def name(self) -> str:
        """The parameter's name, from its first flag."""
        return self.flags[0].split("/")[0].lstrip("-").replace("-", "_")


class NumberInRange(click.FloatRange):
    """A number within a range; neither "nan" nor "inf", which Python reads as numbers too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads it. Raises click.BadParameter."""
        refuse_no_number(self, float, "number", value, param, ctx)
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class NumberOfRanks(click.ParamType):
    """N, or MIN:MAX of an elastic job: the pair of both."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Reads it. Raises click.BadParameter."""
        if isinstance(value, tuple):
            return value
        least, colon, most = str(value).partition(":")
        minimum = WholeNumber(min=1).convert(least, param, ctx)
        maximum = WholeNumber(min=1).convert(most, param, ctx) if colon else minimum
        if maximum < minimum:
            self.fail(f"{value!r} is not MIN:MAX: MAX must be {minimum} at least.", param, ctx)
        return minimum, maximum


class WholeNumber(click.IntRange):
    """A whole number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads it. Raises click.BadParameter."""
        refuse_no_number(self, int, "integer", value, param, ctx)
        return super().convert(value, param, ctx)


def refuse_no_number(
    kind: click.FloatRange | click.IntRange,
    read: Callable[[Any], object],
    sort: str,
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> None:
    """Raises click.BadParameter with the range in words, which click knows for numbers alone."""
    try:
        read(value)
    except (TypeError, ValueError):
        least = "" if kind.min is None else f" of at least {kind.min:g}"
        most = "" if kind.max is None else f", and at most {kind.max:g}"
        kind.fail(f"{value!r} is not a valid {sort}: it must be one{least}{most}.", param, ctx)


def _to(variable: str, convert: Callable[[Any], object] = lambda value: value) -> Callable[[Any], dict[str, str]]:
    return lambda value: {variable: str(convert(value))}


LEVELS = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error", "FATAL": "error"}
SETTINGS = (
    Setting(("--fusion-threshold-mb",), NumberInRange(0, 1 << 20), "most MB of tensors that are fused; 0 turns it off",
            _to("RINGTRAIN_FUSION_THRESHOLD_BYTES", lambda mb: int(mb * (1 << 20))), ("params", "fusion_threshold_mb")),
    Setting(("--cache-capacity",), WholeNumber(min=0), "names in the response cache; 0 turns it off",
            _to("RINGTRAIN_CACHE_CAPACITY"), ("params", "cache_capacity")),
    Setting(("--hierarchical-allreduce/--no-hierarchical-allreduce",), click.BOOL,
            "shared memory in each host and a ring across them, whatever the layout",
            lambda on: {"RINGTRAIN_ALGORITHM": "hierarchical" if on else "auto"}, ("params", "hierarchical_allreduce")),
    Setting(("--timeline-filename",), click.Path(dir_okay=False), "a Chrome/Perfetto trace of rank 0, and one of each other rank beside it",
            _to("RINGTRAIN_TIMELINE"), ("timeline", "filename")),
    Setting(("--timeline-mark-cycles/--no-timeline-mark-cycles",), click.BOOL, "mark the beginning of each batch in the trace",
            lambda on: {"RINGTRAIN_TIMELINE_MARK_CYCLES": "1"} if on else {}, ("timeline", "mark_cycles")),
    Setting(("--flight-record",), click.Path(file_okay=False), "where each rank leaves its last operations when its world fails",
            _to("RINGTRAIN_FLIGHT_RECORD"), ("timeline", "flight_record")),
    Setting(("--stall-check/--no-stall-check",), click.BOOL, "report operations that some ranks do not submit (on)",
            lambda on: {} if on else {"RINGTRAIN_STALL_WARNING_SECONDS": "86400", "RINGTRAIN_STALL_ABORT_SECONDS": "0"},
            ("stall_check", "enabled")),
    Setting(("--stall-check-warning-time-seconds",), NumberInRange(0.01, LONGEST_SECONDS), "after how long",
            _to("RINGTRAIN_STALL_WARNING_SECONDS"), ("stall_check", "warning_time_seconds")),
    Setting(("--stall-check-shutdown-time-seconds",), NumberInRange(0, LONGEST_SECONDS), "after how long they fail; 0: never",
            _to("RINGTRAIN_STALL_ABORT_SECONDS"), ("stall_check", "shutdown_time_seconds")),
    Setting(("--log-level",), click.Choice(list(LEVELS), case_sensitive=False), "of the ranks' logger",
            _to("RINGTRAIN_LOG_LEVEL", lambda level: LEVELS[level.upper()]), ("logging", "level")),
    Setting(("--num-nccl-streams",), WholeNumber(1, 8), "communicators of NCCL, which batches use in turn (1)",
            _to("RINGTRAIN_NCCL_COMMUNICATORS"), ("library_options", "num_nccl_streams")),
    Setting(("--transport",), click.Choice(TRANSPORTS),
            "MPI or TCP between the ranks; auto: MPI if several hosts all have RDMA, and one is installed",
            _to("RINGTRAIN_TRANSPORT"), ("library_options", "transport")),
    Setting(("--tcp",), click.BOOL, "let NCCL leave InfiniBand alone",
            lambda on: {"NCCL_IB_DISABLE": "1"} if on else {}, ("library_options", "tcp")),
)  # fmt: skip

# Horovod's flags that have no effect here, and how many values each takes.
WITHOUT_EFFECT = {
    **dict.fromkeys((
        "--autotune/--no-autotune", "--disable-cache", "--gloo", "--jsrun", "--hierarchical-allgather/--no-hierarchical-allgather",
        "--torus-allreduce/--no-torus-allreduce", "--mpi-threads-disable/--no-mpi-threads-disable", "--log-with-timestamp",
        "--log-without-timestamp", "--log-hide-timestamp/--no-log-hide-timestamp"), 0),
    **dict.fromkeys((
        "--cycle-time-ms", "--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise", "--thread-affinity", "--gloo-timeout-seconds",
        "--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--elastic-timeout", "--reset-limit"), 1),
    "--blacklist-cooldown-range": 2,
}  # fmt: skip
OF_ELASTIC_JOBS = {  # of these: they have one with --elastic; and what --help says, where it is not that of another spelling
    "--min-np": "of --elastic: ranks below which the job waits, as MIN of -np", "--min-num-proc": "",
    "--max-np": "of --elastic: ranks that the job has at most, as MAX of -np", "--max-num-proc": "",
    "--elastic-timeout": "of --elastic: seconds that the job waits for MIN ranks, at its start and later (600)",
    "--reset-limit": "of --elastic: worlds after the first, behind which the next change ends the job (0: any number)",
    "--blacklist-cooldown-range": "of --elastic: seconds until a rank is started again where one has failed, the first time and at "
    "most (10 600)",
}  # fmt: skip
HAVE_NO_EFFECT = "accepted, but without effect here."
# Keys of the configuration file that are Horovod's and have no effect here: section, key.
KEYS_WITHOUT_EFFECT = {
    ("params", "cycle_time_ms"), ("params", "hierarchical_allgather"), ("params", "torus_allreduce"),
    ("autotune", "enabled"), ("autotune", "log_file"), ("autotune", "warmup_samples"), ("autotune", "steps_per_sample"),
    ("autotune", "bayes_opt_max_samples"), ("autotune", "gaussian_process_noise"),
    ("library_options", "mpi_threads_disable"),
    ("library_options", "thread_affinity"), ("library_options", "ccl_bgt_affinity"),
    ("library_options", "gloo_timeout_seconds"), ("logging", "with_timestamp"),
}  # fmt: skip


class Config(NamedTuple):
    """What a configuration file says.

    Attributes:
        values: of settings, by name.
        idle: keys of Horovod's that have no effect here.
        unknown: keys that neither Horovod nor ringtrain knows, which Horovod passes over.
        controller: "mpi", "gloo", or "" if it names none.
    """

    values: dict[str, Any]
    idle: list[str]
    unknown: list[str]
    controller: str


def read_config(text: str, path: str) -> Config:
    """Reads a configuration file.

    Raises ConfigError for what is not YAML, a section without keys, a controller that nobody knows, and a value outside of its
    range.
    """
    sections = _sections(text, path)
    by_place = {setting.place: setting for setting in SETTINGS}
    known_sections = {section for section, _ in (*by_place, *KEYS_WITHOUT_EFFECT)}
    config = Config({}, [], [], _controller(sections, path))
    for section, keys in sections.items():
        if section == "controller" or not keys:
            continue
        if section not in known_sections:
            config.unknown.append(str(section))
            continue
        if not isinstance(keys, Mapping):
            raise ConfigError(
                f"config file '{path}': {section}: expected keys and values below it, but found {keys!r}."
            )
        for key, value in keys.items():
            if (section, key) in KEYS_WITHOUT_EFFECT:
                config.idle.append(f"{section}.{key}")
            elif (section, key) not in by_place:
                config.unknown.append(f"{section}.{key}")
            elif value is not None:
                setting = by_place[section, key]
                config.values[setting.name] = _converted(setting, value, path)
    return config


def lines_of(config: Config, path: str) -> list[str]:
    """What is said of the keys of a configuration file that do nothing; pure."""
    lines = []
    idle = [*config.idle, *(["controller gloo"] if config.controller == "gloo" else [])]
    if idle:
        lines.append(f"{', '.join(idle)} in {path}: {HAVE_NO_EFFECT}")
    if config.unknown:
        known = [".".join(setting.place) for setting in SETTINGS]
        near = [like for key in config.unknown for like in difflib.get_close_matches(key, known, 1, 0.85)]
        meant = f" Nearest to them: {', '.join(near)}." if near else ""
        lines.append(f"{', '.join(config.unknown)} in {path}: ignored, because no setting has such a name.{meant}")
    return lines


def _sections(text: str, path: str) -> dict[Any, Any]:
    import yaml  # takes 15 ms, and few jobs have such a file

    try:
        sections = yaml.safe_load(text) or {}
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # the others from numbers, dates and depths that YAML lets pass
        raise ConfigError(f"config file '{path}': it must be YAML, but {' '.join(str(error).split())}.") from None
    if not isinstance(sections, dict):
        raise ConfigError(f"config file '{path}': expected sections such as 'params:', but found {sections!r}.")
    return sections


def _controller(sections: Mapping[Any, Any], path: str) -> str:
    named = sections.get("controller") or ""
    controller = named.lower() if isinstance(named, str) else named
    if controller not in ("", "mpi", "gloo"):
        raise ConfigError(f"config file '{path}': controller: expected mpi or gloo, but found {named!r}.")
    return controller


def _converted(setting: Setting, value: object, path: str) -> object:
    try:
        return setting.kind.convert(value, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"config file '{path}': {'.'.join(setting.place)}: {error.message}") from None


def once(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """A callback of a flag that names hosts: with two of them nobody could tell whether they are to be joined."""
    if len(values) > 1:
        given = " and ".join(f"'{value}'" for value in values)
        raise click.UsageError(
            f"{parameter.opts[0]}: it must be given once, but is given {len(values)} times: {given}. Name all hosts in one of "
            "them."
        )
    return values[0] if values else None
