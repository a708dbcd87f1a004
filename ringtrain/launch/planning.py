"""Makes a plan of what the command line, the configuration file, the environment and Slurm say. Used by `cli`."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtrain._binding import options as ranks_options
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import elastic_flags, operators, settings, srun
from ringtrain.launch.discovery import HostScript
from ringtrain.launch.hosts import Host, HostsError, find_here, parse_hostfile, parse_hosts, place
from ringtrain.launch.plan import Plan
from ringtrain.launch.shells import Ssh

MOST_TEXT = 4 << 20  # characters of a host file or a configuration file
LEAST_PORTS = 8  # two for the engine's daemon, the others for the ranks of a host
PORTS_OF_AN_ELASTIC_RANK = 4  # which listens for the next world while the last one is left: more than were ever taken
EXAMPLE = "Write for example: ringtrainrun -np 2 python train.py"


def make_plan(given: Mapping[str, Any], environment: Mapping[str, str], say: Callable[[str], None] = print) -> Plan:
    """Decides what runs where; says what it waits for. Raises HostsError, ConfigError, InvalidArgumentError, and ScriptError."""
    if not given["command"]:
        raise HostsError(f"command: expected what each rank has to run, but found nothing. {EXAMPLE}")
    script = script_of(given)
    named = given["hosts"] or given["hostfile"] or script
    uses_allocation = not named and bool(srun.find_program(environment))
    by_mpirun = wants_mpirun(given)
    by_srun = uses_allocation and not by_mpirun
    operator = None if named or uses_allocation else operators.named_hosts(environment, given["slots"], _read)
    if operator is not None:
        hosts = find_here(operator.hosts)
    elif script is None:
        hosts = find_here(find_hosts(given, environment, uses_allocation))
    else:
        hosts = script.wait_for(
            elastic_flags.range_of_ranks(given, 1)[0],
            elastic_flags.seconds_below_the_minimum(given),
            say,
        )
    slots = sum(host.slots for host in hosts)
    minimum, ranks = elastic_flags.range_of_ranks(given, slots)
    rules = elastic_flags.rules(given, minimum, ranks)
    if rules is None and minimum != ranks:
        raise HostsError(
            f"-np {minimum}:{ranks}: a range of ranks needs --elastic, which is not given. Add it, or give one number."
        )
    chosen, exported = chosen_settings(given), exported_variables(given["exported"], environment)
    if rules is not None:
        chosen |= elastic_flags.variables({**environment, **chosen, **exported})
    check_options({**environment, **chosen, **exported}, ranks)
    placed = place(hosts, min(ranks, slots) if script else ranks)  # others may come
    spare = tuple(hosts[len(placed) :]) if rules is not None and script is None else ()
    least = LEAST_PORTS + PORTS_OF_AN_ELASTIC_RANK * max(host.slots for host in placed) if rules else LEAST_PORTS
    come_late = operator is not None or operators.comes_late(environment)
    return Plan(
        list(given["command"]), ranks, placed, verbose=given["verbose"], settings=chosen, exported=exported,
        ssh=Ssh(given["ssh_port"], given["ssh_identity_file"]), start_seconds=given["start_timeout"],
        interfaces=parse_interfaces(given["network_interfaces"], given["each_interface"]), ports=parse_ports(given["port_range"], least),
        folder=_folder_of_output(given["output_filename"]),
        shows_time=given["shows_time"], log_json=given["log_json"], function_folder=given["function_folder"],
        engine_arguments=words_of("--mpi-args", given["mpi_args"]),
        binding_arguments=words_of("--binding-args", given["binding_args"]), by_srun=by_srun, by_mpirun=by_mpirun,
        shares_gpus=given["shares_gpus"], hosts_come_late=come_late, elastic=rules, script=script, spare=spare)  # fmt: skip


def script_of(given: Mapping[str, Any]) -> HostScript | None:
    """What --host-discovery-script names. Raises HostsError."""
    if not given["host_discovery_script"]:
        return None
    why = ""
    if not given["elastic"]:
        why = "without --elastic the hosts must be known at the start. Add it, or name them with -H or -hostfile."
    elif given["hosts"] or given["hostfile"]:
        why = "it must name the hosts alone, but -H or -hostfile does so, too. Leave one out."
    elif given["ranks"] is None and not (given["min_np"] or given["min_num_proc"]):
        why = "-np MIN:MAX must say how many ranks the job may have, but is missing."
    if why:
        raise HostsError(f"--host-discovery-script: {why}")
    return HostScript(given["host_discovery_script"], given["slots"])


def check_options(environment: Mapping[str, str], ranks: int) -> None:
    """Raises InvalidArgumentError for what each rank would refuse: better one sentence now than one from each of them."""
    ranks_options.log_level(environment)
    layout = ranks_options.resolve({}, environment).get("host_layout", "")
    numbers = (
        [int(part) for part in re.split(r"[+|]", layout)]
        if re.fullmatch(r"[1-9][0-9]{0,8}([+|][1-9][0-9]{0,8})*", layout)
        else []
    )
    if layout and sum(numbers) != ranks:
        raise InvalidArgumentError(
            f"RINGTRAIN_HOST_LAYOUT: expected ranks per host that sum to {ranks} but found '{layout}'. Write for example {ranks}."
        )


def find_hosts(given: Mapping[str, Any], environment: Mapping[str, str], uses_allocation: bool) -> list[Host]:
    """The hosts that were named, by the user or by Slurm; else this one."""
    if given["hosts"] and given["hostfile"]:
        raise HostsError("-H and -hostfile: only one of them may name the hosts, but both do. Leave one out.")
    if given["hosts"] is not None:
        return parse_hosts(given["hosts"], given["slots"])
    if given["hostfile"] is not None:
        return parse_hostfile(_read("-hostfile", given["hostfile"]), given["hostfile"], given["slots"])
    if uses_allocation:
        return srun.find_hosts(environment)
    srun.refuse_other_hosts(environment)
    if given["ranks"] is None:
        raise HostsError(f"-np: expected the number of ranks, but found nothing. {EXAMPLE}")
    return [Host("localhost", elastic_flags.range_of_ranks(given, given["ranks"][1])[1])]


def chosen_settings(given: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that the configuration file and flags stand for; flags win. Raises ConfigError, HostsError."""
    values = read_config(given["config_file"]).values | {
        setting.name: given[setting.name] for setting in settings.SETTINGS if given[setting.name] is not None
    }
    return {
        name: text
        for setting in settings.SETTINGS
        if setting.name in values
        for name, text in setting.variables(values[setting.name]).items()
    }


def wants_mpirun(given: Mapping[str, Any]) -> bool:
    """Whether --mpi is given, or the configuration file has the controller of that name and no flag says otherwise."""
    if given["by_mpirun"] or given["gloo"] or given["transport"] or given["elastic"]:
        return bool(given["by_mpirun"])
    return read_config(given["config_file"]).controller == "mpi"


@functools.cache
def read_config(path: str | None) -> settings.Config:
    """What the configuration file says; nothing without one. Raises ConfigError, HostsError."""
    return settings.read_config(_read("--config-file", path) if path else "", path or "")


@functools.cache  # it may be a pipe, as a shell's <(...) is
def _read(flag: str, path: str) -> str:
    """The text of a file that a flag names. Raises HostsError if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_TEXT + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise HostsError(f"{flag} '{path}': it must be a text file that can be read, but: {why}.") from None
    if len(text) > MOST_TEXT:
        raise HostsError(
            f"{flag} '{path}': it must be a text file that can be read, but: it is longer than {MOST_TEXT} characters."
        )
    return text


def _folder_of_output(name: str | None) -> str:
    """The whole path of what --output-filename names; "" if it is not given. Raises HostsError."""
    if name == "":  # as a variable of a shell that is not set
        raise HostsError("--output-filename: it must name a folder, but is empty. Give one, or leave the flag out.")
    return os.path.abspath(name) if name else ""


def words_of(flag: str, text: str | None) -> tuple[str, ...]:
    """The arguments in a flag's value, as a shell would split it. Raises HostsError."""
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise HostsError(
            f"{flag} '{text}': it must be arguments as a shell takes them, but: {str(error).lower()}. "
            "Close the quotation, or put a backslash before the quote."
        ) from None


def exported_variables(entries: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of -x NAME=VALUE, or NAME for the value that it has here. Raises HostsError if it has none."""
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if name.split() != [name] and name:
            raise HostsError(
                f"-x '{entry}': the variable's name must be without spaces, but is '{name}'. Write -x NAME=VALUE for each."
            )
        if not name:
            raise HostsError(
                f"-x '{entry}': it must begin with a variable's name, but there is none. Write -x NAME=VALUE."
            )
        if not equals and name not in environment:
            raise HostsError(
                f"-x '{name}': it must be a variable of the environment, or NAME=VALUE, but it is not set."
            )
        variables[name] = value if equals else environment[name]
    return variables


def parse_interfaces(listed: str | None, each: Sequence[str]) -> tuple[str, ...]:
    """Reads --network-interfaces, and adds those of --network-interface. Raises HostsError for a network that is none."""
    interfaces = (*(listed.split(",") if listed else ()), *each)
    for name in interfaces:
        try:
            if "/" in name:
                ipaddress.ip_network(name, strict=False)
        except ValueError as error:
            raise HostsError(
                f"--network-interfaces '{name}': expected an interface or a network such as 10.0.0.0/24, but {error}. "
                "`ip address` lists both."
            ) from None
    return interfaces


def parse_ports(text: str | None, least: int) -> tuple[int, int]:
    """Reads --port-range, which must have so many ports; (0, 0) without one. Raises HostsError."""
    if text is None:
        return 0, 0
    matched = re.fullmatch(r"([0-9]{1,5})[-:]([0-9]{1,5})", text)
    first, last = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 1024 <= first < last <= 65535 or last - first < least - 1:
        raise HostsError(
            f"--port-range '{text}': expected FIRST-LAST within 1024-65535, at least {least} ports for the ranks that a host "
            "has here. Write for example 20000-20999."
        )
    return first, last


def idle_flags(given: Mapping[str, Any]) -> list[str]:
    """A line for the flags, and one for the keys of the configuration file, that have no effect here."""
    idle = [
        flag.split("/")[0]
        for flag in settings.WITHOUT_EFFECT
        if given[flag.split("/")[0].lstrip("-").replace("-", "_")] is not None
        and not (given["elastic"] and flag in settings.OF_ELASTIC_JOBS)
    ]
    of_elastic = " without --elastic" if settings.OF_ELASTIC_JOBS.keys() >= set(idle) else ""
    lines = [f"{', '.join(idle)}{of_elastic}: {settings.HAVE_NO_EFFECT}"] if idle else []
    return lines + settings.lines_of(read_config(given["config_file"]), given["config_file"] or "")


def warnings(given: Mapping[str, Any]) -> list[str]:
    """A line for each file that others could have written."""
    return [
        f"{flag} '{path}': only you must be able to write it, but {who} can, and decide what runs with your rights. "
        f"Type: chmod go-w {shlex.quote(path)}"
        for flag, path in (("-hostfile", given["hostfile"]), ("--config-file", given["config_file"]))
        if path and (who := writers_of(path))
    ]


def writers_of(path: str) -> str:
    """Who besides this user can write a file, for people; "" if nobody, or if it is no file but a pipe."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    if not stat.S_ISREG(found.st_mode):
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    # A group of the user's own is no danger: many systems make one for each user, and new files writable by it.
    return f"group {found.st_gid}" if found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid() else ""
