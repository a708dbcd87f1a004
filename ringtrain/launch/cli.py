"""The command line of ringtrainrun: reads it, makes a plan, finds the MPI, checks the hosts, runs the job.

Exit codes: 0 if every rank returned 0, else that of the first rank that failed, 128 + n if signal n ended it; 2 for a
wrong command line, 125 if nothing could be started, 130 after Ctrl-C.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ringtrain import options as ranks_options
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import mpi, settings, srun
from ringtrain.launch.commands import check_build
from ringtrain.launch.environment import job_environment
from ringtrain.launch.hosts import Host, HostsError, find_here, parse_hostfile, parse_hosts, place
from ringtrain.launch.job import Job, command_line
from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.output import Terminal, private_folder
from ringtrain.launch.plan import Plan
from ringtrain.launch.preflight import check_hosts
from ringtrain.launch.reach import Ssh
from ringtrain.version import __version__

LAUNCH_FAILED = 125
INTERRUPTED = 130
LEAST_PORTS = 8  # two for the engine's daemon, the others for the ranks of a host
EXAMPLE = "Write for example: ringtrainrun -np 2 python train.py"


def main(arguments: list[str] | None = None) -> int:
    """Runs `ringtrainrun` with these arguments (the process's own by default) and returns its exit code."""
    try:
        return ringtrainrun.main(arguments, prog_name="ringtrainrun", standalone_mode=False) or 0
    except click.UsageError as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _with_tables(command: click.Command) -> click.Command:
    """Adds the flags of `settings`."""
    for setting in settings.SETTINGS:
        is_switch = isinstance(setting.kind, click.types.BoolParamType)
        command.params.append(click.Option(
            [*setting.flags], default=None, is_flag=is_switch, type=None if is_switch else setting.kind,
            help=setting.help))  # fmt: skip
    for flag in settings.WITHOUT_MEANING:
        command.params.append(click.Option([flag], hidden=True))
    for flag in settings.SWITCHES_WITHOUT_MEANING:
        command.params.append(click.Option([flag], is_flag=True, default=None, hidden=True))
    return command


def _at_once(action):
    """A callback of a flag that does something else than running a job."""
    def callback(context: click.Context, _parameter: click.Parameter, is_set: bool) -> None:
        if is_set and not context.resilient_parsing:
            action()
            context.exit()

    return callback


@_with_tables
@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 120},
    options_metavar="-np N [-H host:slots,...] [options]", short_help="Runs a command on N ranks.")
@click.option("-np", "-n", "--num-proc", "ranks", type=click.IntRange(min=1), metavar="N",
              help="number of ranks in all; may exceed the number of cores (default in a Slurm allocation: all slots)")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each may run, filled in this "
              "order (default: all ranks on this host, or the hosts of the Slurm allocation)")
@click.option("-hostfile", "--hostfile", metavar="FILE", help="the same from a file: one 'host slots=N' a line")
@click.option("-x", "--env", "exported", multiple=True, metavar="NAME[=VALUE]",
              help="sets a variable for all ranks; the rest of the environment travels by itself")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="of sshd on the other hosts")
@click.option("-i", "--ssh-identity-file", type=click.Path(exists=True, dir_okay=False), help="private key for the other hosts")
@click.option("--network-interfaces", metavar="eth0,10.0.0.0/24", help="interfaces or networks that may carry tensors "
              "(default: found by a connection test)")
@click.option("--network-interface", "each_interface", multiple=True, metavar="eth0", help="one of them; repeatable")
@click.option("--port-range", metavar="FIRST-LAST", help="TCP ports to listen on, for firewalls")
@click.option("--start-timeout", type=click.FloatRange(min=1), default=30, show_default=True,
              help="seconds within which all hosts must be ready")
@click.option("--output-filename", metavar="FOLDER", help="writes FOLDER/rank.N/stdout and stderr instead of showing them")
@click.option("--prefix-timestamp", "-prefix-timestamp", "--prefix-output-with-timestamp", "shows_time", is_flag=True,
              help="puts date and time before each line")
@click.option("--config-file", metavar="FILE", help="settings from YAML; flags win")
@click.option("--mpi-args", metavar="'ARGUMENTS'", help="further arguments for mpirun or srun")
@click.option("--binding-args", metavar="'ARGUMENTS'", help="how mpirun or srun binds ranks (default: not)")
@click.option("--share-gpus", "shares_gpus", is_flag=True, help="let a host have more ranks than GPUs")
@click.option("--mpi", "by_mpirun", is_flag=True, help="use mpirun in a Slurm allocation too")
@click.option("--function-folder", default="", hidden=True)  # of ringtrain.run
@click.option("--host-discovery-script", hidden=True)
@click.option("--blacklist-cooldown-range", type=(float, float), default=None, hidden=True)
@click.option("--verbose", is_flag=True, help="say which MPI and which command line are used, and pass on everything "
              "that the engine says")
@click.option("--dry-run", is_flag=True, help="say it and start nothing")
@click.option("-cb", "--check-build", is_flag=True, is_eager=True, expose_value=False,
              callback=_at_once(lambda: click.echo("\n".join(check_build()))), help="say what this installation consists of")
@click.version_option(__version__, "-v", "--version", message="ringtrainrun %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ringtrainrun(**given: Any) -> int:
    """Runs a command on N ranks, for example: ringtrainrun -np 2 python train.py

    Shell completion: eval "$(_RINGTRAINRUN_COMPLETE=bash_source ringtrainrun)", or zsh_source, or fish_source.
    """
    terminal = Terminal(sys.stdout.buffer, sys.stderr.buffer)
    try:
        plan = make_plan(given, os.environ)
    except (HostsError, settings.ConfigError, InvalidArgumentError) as error:
        raise click.UsageError(str(error)) from None
    for line in idle_flags(given):
        terminal.say(line)
    try:
        check_command(plan)
        return launch(plan, terminal, is_dry=given["dry_run"])
    except (LaunchError, PermissionError) as error:
        terminal.say(str(error))
        return LAUNCH_FAILED


def launch(plan: Plan, terminal: Terminal, is_dry: bool = False) -> int:
    """Carries a plan out and returns the exit code. Raises LaunchError, PermissionError for the output folder."""
    installation = mpi.find_installation()
    if plan.by_srun:
        program = srun.find_program(os.environ)
        further = srun.plugin_arguments(program, installation, plan, os.environ)
        plan = replace(plan, engine_arguments=(*further, *plan.engine_arguments))
        installation = replace(installation, engine=srun, program=program)
    environment = job_environment(plan, installation)
    if is_dry or plan.verbose:
        for line in account(plan, installation, environment):
            terminal.say(line)
    if is_dry:
        return 0
    if plan.folder:
        private_folder(plan.folder)
    agents, networks = check_hosts(plan, installation, environment)
    if networks and plan.verbose:
        terminal.say(f"networks: {', '.join(networks.networks)}")
    environment = job_environment(plan, installation, networks, terminal.live)
    return Job(plan, installation, terminal, agents, environment, networks).run()


def make_plan(given: Mapping[str, Any], environment: Mapping[str, str]) -> Plan:
    """Decides what runs where. Raises HostsError, ConfigError, InvalidArgumentError."""
    if not given["command"]:
        raise HostsError(f"command: expected what each rank has to run, but found nothing. {EXAMPLE}")
    if given["host_discovery_script"]:
        raise HostsError("--host-discovery-script: the hosts must be known at the start. "
                         "Name them with -H or -hostfile.")
    uses_allocation = not given["hosts"] and not given["hostfile"] and bool(srun.find_program(environment))
    by_srun = uses_allocation and not given["by_mpirun"]
    hosts = find_here(find_hosts(given, environment, uses_allocation))
    ranks = given["ranks"] or sum(host.slots for host in hosts)
    chosen, exported = chosen_settings(given), exported_variables(given["exported"], environment)
    ranks_options.resolve({}, {**environment, **chosen, **exported})  # better one sentence now than one from each rank
    return Plan(
        list(given["command"]), ranks, place(hosts, ranks), verbose=given["verbose"], settings=chosen, exported=exported,
        ssh=Ssh(given["ssh_port"], given["ssh_identity_file"]), start_seconds=given["start_timeout"],
        interfaces=parse_interfaces(given["network_interfaces"], given["each_interface"]), ports=parse_ports(given["port_range"]),
        folder=os.path.abspath(given["output_filename"]) if given["output_filename"] else "",
        shows_time=given["shows_time"], function_folder=given["function_folder"],
        engine_arguments=tuple(shlex.split(given["mpi_args"] or "")),
        binding_arguments=tuple(shlex.split(given["binding_args"] or "")), by_srun=by_srun,
        shares_gpus=given["shares_gpus"])  # fmt: skip


def find_hosts(given: Mapping[str, Any], environment: Mapping[str, str], uses_allocation: bool) -> list[Host]:
    """The hosts that were named, by the user or by Slurm; else this one."""
    if given["hosts"] and given["hostfile"]:
        raise HostsError("-H and -hostfile: only one of them may name the hosts, but both do. Leave one out.")
    if given["hosts"] is not None:
        return parse_hosts(given["hosts"])
    if given["hostfile"] is not None:
        return parse_hostfile(_read("-hostfile", given["hostfile"]), given["hostfile"])
    if uses_allocation:
        return srun.find_hosts(environment)
    if given["ranks"] is None:
        raise HostsError(f"-np: expected the number of ranks, but found nothing. {EXAMPLE}")
    return [Host("localhost", given["ranks"])]


def chosen_settings(given: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that the configuration file and flags stand for; flags win. Raises ConfigError, HostsError."""
    values: dict[str, Any] = {}
    if given["config_file"]:
        values, _ = settings.read_config(_read("--config-file", given["config_file"]), given["config_file"])
    values |= {setting.name: given[setting.name] for setting in settings.SETTINGS if given[setting.name] is not None}
    return {name: text for setting in settings.SETTINGS if setting.name in values
            for name, text in setting.variables(values[setting.name]).items()}


def _read(flag: str, path: str) -> str:
    """The text of a file that a flag names. Raises HostsError if it cannot be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise HostsError(f"{flag} '{path}': it must be a text file that can be read, but: {why}.") from None


def exported_variables(entries: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of -x NAME=VALUE, or NAME for the value that it has here. Raises HostsError if it has none."""
    variables = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals and name not in environment:
            raise HostsError(f"-x '{name}': it must be a variable of the environment, or NAME=VALUE, but it is not set.")
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
            raise HostsError(f"--network-interfaces '{name}': expected an interface or a network such as 10.0.0.0/24, but {error}. "
                             "`ip address` lists both.") from None
    return interfaces


def parse_ports(text: str | None) -> tuple[int, int]:
    """Reads --port-range; (0, 0) without one. Raises HostsError."""
    if text is None:
        return 0, 0
    matched = re.fullmatch(r"(\d+)[-:](\d+)", text)
    first, last = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 1024 <= first < last <= 65535 or last - first < LEAST_PORTS - 1:
        raise HostsError(f"--port-range '{text}': expected FIRST-LAST within 1024-65535, at least {LEAST_PORTS} ports. "
                         "Write for example 20000-20999.")
    return first, last


def idle_flags(given: Mapping[str, Any]) -> list[str]:
    """A line for each flag, and each key of the configuration file, that has no meaning here."""
    known = {**settings.WITHOUT_MEANING, **settings.SWITCHES_WITHOUT_MEANING}
    lines = [f"{flag} is accepted, but has no effect: {why}." for flag, why in known.items()
             if given[flag.split("/")[0].lstrip("-").replace("-", "_")] is not None]
    if given["config_file"]:
        _, keys = settings.read_config(Path(given["config_file"]).read_text(), given["config_file"])
        lines += [f"{key} in {given['config_file']} is accepted, but has no effect." for key in keys]
    return lines


def check_command(plan: Plan) -> None:
    """Refuses a command that this host cannot run; other hosts say so themselves. Raises LaunchError."""
    program = plan.command[0]
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path):
        return
    if program.endswith(".py") and os.path.isfile(program):
        raise LaunchError(f"command '{program}': it must be executable, but is a file without that permission. "
                          f"Put python before it: ringtrainrun -np {plan.ranks} python {shlex.join(plan.command)}")
    if not plan.has_remote_hosts:
        raise LaunchError(f"command '{program}': it must be a program on PATH or the path of one, but there is none. "
                          "Check its spelling.")


def account(plan: Plan, installation: Installation, environment: Mapping[str, str]) -> list[str]:
    """What --verbose and --dry-run say."""
    added = [f"{name}={shlex.quote(value)}" for name, value in environment.items()
             if os.environ.get(name) != value and name not in plan.exported]
    added += [f"{name}=..." for name in plan.exported]  # its value may be a secret
    return [f"MPI library {installation.library} ({installation.version})",
            f"added to the environment: {' '.join(added) or 'nothing'}",
            f"command line: {shlex.join(command_line(plan, installation, 'SOCKET'))}"]


if __name__ == "__main__":
    sys.exit(main())
