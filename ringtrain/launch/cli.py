"""The command line of ringtrainrun: reads it, makes a plan, finds the MPI, checks the hosts, runs the job.

Exit codes: 0 if every rank returned 0, else that of the first rank that failed, 128 + n if signal n ended it; 2 for a
wrong command line, 125 if nothing could be started, or for a fault of the launcher's own, 130 after Ctrl-C, 128 + n after
another signal n to the launcher.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click

from ringtrain import descriptors
from ringtrain import options as ranks_options
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import elastic_flags, openmpi, operators, resume, settings, signals, srun, transport
from ringtrain.launch.agent.facts import login_shell
from ringtrain.launch.commands import check_build
from ringtrain.launch.discovery import HostScript, ScriptError
from ringtrain.launch.elastic import ElasticJob
from ringtrain.launch.environment import given_environment, job_environment
from ringtrain.launch.hosts import Host, HostsError, find_here, parse_hostfile, parse_hosts, place
from ringtrain.launch.job import PATIENCE, Job, LeftJobError, command_line
from ringtrain.launch.job_folder import JobFolder
from ringtrain.launch.mpi import Installation, LaunchError
from ringtrain.launch.output import Terminal, keep_earlier, private_folder
from ringtrain.launch.plan import Plan
from ringtrain.launch.preflight import check_hosts
from ringtrain.launch.reach import hang_up_on
from ringtrain.launch.shells import Ssh
from ringtrain.launch.streams import is_of_stdout, with_its_output
from ringtrain.version import __version__

LAUNCH_FAILED = 125
INTERRUPTED = 130
MOST_TEXT = 4 << 20  # characters of a host file or a configuration file
DESCRIPTORS, DESCRIPTORS_OF_A_HOST = 12, 4  # of the launcher
LEAST_PORTS = 8  # two for the engine's daemon, the others for the ranks of a host
PORTS_OF_AN_ELASTIC_RANK = 4  # which listens for the next world while the last one is left: more than were ever taken
TORCHRUN_OPTIONS = {  # and what stands for them here
    "--nproc-per-node": "-np N for all ranks, or -H HOST:N,HOST:N",
    "--nnodes": "-H HOST:N,HOST:N, with N ranks on each; one command starts them all",
    "--node-rank": "nothing; one command starts the ranks of all hosts",
    "--standalone": "nothing; without -H all ranks are on this host",
    "--master-addr": "nothing; the ranks find each other",
    "--master-port": "--port-range, if the ports matter",
    "--rdzv-backend": "nothing; the ranks find each other",
    "--rdzv-endpoint": "nothing; the ranks find each other",
    "-m": "python -m MODULE as the command",
}
EXAMPLE = "Write for example: ringtrainrun -np 2 python train.py"


def main(arguments: list[str] | None = None) -> int:
    """Runs `ringtrainrun` with these arguments (the process's own by default) and returns its exit code."""
    signals.end_by_them()
    return with_its_output("ringtrainrun", lambda: _main(arguments), LAUNCH_FAILED)


def _main(arguments: list[str] | None) -> int:
    try:
        return ringtrainrun.main(arguments, prog_name="ringtrainrun", standalone_mode=False) or 0
    except click.UsageError as error:
        error.show()
        unknown = error.option_name if isinstance(error, click.NoSuchOption) else ""
        if here := TORCHRUN_OPTIONS.get(unknown.replace("_", "-")):
            print(f"{unknown} is an option of torchrun. Here: {here}.", file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as fault:
        if is_of_stdout(fault):
            raise
        with speaking() as terminal:
            terminal.say(account_of_fault(fault))
        return LAUNCH_FAILED


@contextmanager
def speaking() -> Iterator[Terminal]:
    """The launcher's stdout and stderr; what has been said is written at the end."""
    terminal = Terminal(sys.stdout.buffer, sys.stderr.buffer)
    try:
        yield terminal
    finally:
        terminal.finish(lambda: PATIENCE["failed"])


def account_of_fault(fault: Exception) -> str:
    """One line for an exception that nobody expected; its traceback goes to a file."""
    what_now = str(fault) if isinstance(fault, LeftJobError) else "The job has been ended."
    if isinstance(fault, LeftJobError) and isinstance(fault.__cause__, Exception):
        fault = fault.__cause__
    text = "".join(traceback.format_exception(fault))
    summary = " ".join(traceback.format_exception_only(fault)[-1].split())
    try:
        descriptor, path = tempfile.mkstemp(prefix="ringtrainrun-fault-", suffix=".txt")
        with os.fdopen(descriptor, "w", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return f"{text}This is a fault of ringtrainrun itself, and not of the command. {what_now} Please report it."
    return f"a fault of ringtrainrun itself, and not of the command: {summary}. Please report it, with the file '{path}'. {what_now}"


def _with_tables(command: click.Command) -> click.Command:
    """Adds the flags of `elastic_flags` and `settings`."""
    command.params += elastic_flags.options()
    for setting in settings.SETTINGS:
        is_switch = isinstance(setting.kind, click.types.BoolParamType)
        command.params.append(click.Option(
            [*setting.flags], default=None, is_flag=is_switch, type=None if is_switch else setting.kind,
            help=setting.help))  # fmt: skip
    for flag, values in settings.WITHOUT_EFFECT.items():
        kinds: tuple[dict[str, Any], ...] = ({"is_flag": True}, {}, {"type": (float, float)})
        said = settings.OF_ELASTIC_JOBS.get(flag, "")
        command.params.append(click.Option([flag], default=None, help=said, hidden=not said, **kinds[values]))
    return command


def _at_once(action: Callable[[], object]) -> Callable[[click.Context, click.Parameter, bool], None]:
    """A callback of a flag that does something else than running a job."""

    def callback(context: click.Context, _parameter: click.Parameter, is_set: bool) -> None:
        if is_set and not context.resilient_parsing:
            action()
            context.exit()

    return callback


@_with_tables
@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
    },
    options_metavar="-np N [-H host:slots,...] [options]",
    short_help="Runs a command on N ranks.",
)
@click.option(
    "-np",
    "-n",
    "--num-proc",
    "ranks",
    type=settings.NumberOfRanks(),
    metavar="N",
    help="number of ranks in all; may exceed the number of cores (default in a Slurm allocation: all slots)",
)
@click.option(
    "-H",
    "--hosts",
    multiple=True,
    callback=settings.once,
    metavar="HOST:SLOTS,...",
    help="hosts and how many ranks each may run, filled in this "
    "order (default: all ranks on this host, or the hosts of the Slurm allocation)",
)
@click.option(
    "-hostfile",
    "--hostfile",
    multiple=True,
    callback=settings.once,
    metavar="FILE",
    help="the same from a file: one 'host slots=N' a line",
)
@click.option(
    "--slots-per-host",
    "slots",
    type=settings.WholeNumber(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="slots of the hosts that are named without a number",
)
@click.option(
    "-x",
    "--env",
    "exported",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="sets a variable for all ranks; the rest of the environment travels by itself",
)
@click.option("-p", "--ssh-port", type=settings.WholeNumber(1, 65535), help="of sshd on the other hosts")
@click.option(
    "-i", "--ssh-identity-file", type=click.Path(exists=True, dir_okay=False), help="private key for the other hosts"
)
@click.option(
    "--network-interfaces",
    envvar="RINGTRAIN_NETWORK_INTERFACES",
    metavar="eth0,10.0.0.0/24",
    help="interfaces or networks that may carry tensors (default: found by a connection test)",
)
@click.option("--network-interface", "each_interface", multiple=True, metavar="eth0", help="one of them; repeatable")
@click.option(
    "--port-range",
    envvar="RINGTRAIN_PORT_RANGE",
    metavar="FIRST-LAST",
    help="TCP ports to listen on, for firewalls",
)
@click.option(
    "--start-timeout",
    type=settings.Number(1, settings.LONGEST_SECONDS),
    default=30,
    show_default=True,
    help="seconds within which all hosts must be ready",
)
@click.option(
    "--output-filename", metavar="FOLDER", help="writes FOLDER/rank.N/stdout and stderr instead of showing them"
)
@click.option(
    "--prefix-timestamp",
    "-prefix-timestamp",
    "--prefix-output-with-timestamp",
    "shows_time",
    is_flag=True,
    help="puts date and time before each line",
)
@click.option("--config-file", metavar="FILE", help="settings from YAML; flags win")
@click.option("--mpi-args", metavar="'ARGUMENTS'", help="further arguments for mpirun or srun")
@click.option("--binding-args", metavar="'ARGUMENTS'", help="how mpirun or srun binds ranks (default: not)")
@click.option("--share-gpus", "shares_gpus", is_flag=True, help="let a host have more ranks than GPUs")
@click.option("--mpi", "by_mpirun", is_flag=True, help="use mpirun in a Slurm allocation too")
@click.option("--function-folder", default="", hidden=True)  # of ringtrain.run
@click.option(
    "--verbose",
    is_flag=True,
    help="say which MPI and which command line are used, and pass on everything that the engine says",
)
@click.option("--dry-run", is_flag=True, help="say it and start nothing")
@click.option(
    "-cb",
    "--check-build",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_at_once(lambda: click.echo("\n".join(check_build()))),
    help="say what this installation consists of",
)
@click.version_option(__version__, "-v", "--version", message="ringtrainrun %(version)s")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ringtrainrun(**given: Any) -> int:
    """Runs a command on N ranks, for example: ringtrainrun -np 2 python train.py

    Shell completion: eval "$(_RINGTRAINRUN_COMPLETE=bash_source ringtrainrun)", or zsh_source, or fish_source.
    """
    with speaking() as terminal:
        try:
            check_surroundings(os.environ)
            if given["resume"] is not None:
                elastic_flags.refuse_beside_resume(click.get_current_context())
                return take_up(given["resume"], terminal)
            terminal.shows_time = given["shows_time"]
            plan = make_plan(given, os.environ, terminal.say)
            remarks = ranks_options.remarks({**os.environ, **plan.exported})
            for line in [*idle_flags(given), *warnings(given), *remarks]:
                terminal.say(line)
            check_command(plan)
            return launch(plan, terminal, is_dry=given["dry_run"])
        except (HostsError, settings.ConfigError, InvalidArgumentError) as error:
            raise click.UsageError(str(error)) from None
        except (LaunchError, ScriptError) as error:
            terminal.say(str(error))
            return LAUNCH_FAILED


def launch(plan: Plan, terminal: Terminal, is_dry: bool = False) -> int:
    """Carries a plan out and returns the exit code. Raises LaunchError."""
    signals.prepare()
    make_room_for(len(plan.hosts), 2 * plan.ranks if plan.folder else 0)
    if not os.environ.get("HOME"):  # without it MPI does not start
        home = os.path.expanduser("~")
        os.environ["HOME"] = home if os.path.isabs(home) else "/"  # a container may not know its user
    given = given_environment(plan)
    choice = transport.choose(plan, given)
    asked, (plan, installation) = plan, prepare(plan, choice.installation, given)
    environment = job_environment(given, plan, installation)
    if is_dry or plan.verbose:
        for line in [*filter(None, [choice.line]), *account(plan, installation, environment)]:
            terminal.say(line)
    if is_dry:
        return 0
    if plan.folder:
        make_folder(plan.folder)
    least = plan.elastic.minimum if plan.elastic and not plan.by_srun else None  # in an allocation no host comes later
    agents, networks, absent = check_hosts(plan, installation, environment, terminal.say, least)
    confirmed = choice.confirmed(networks)
    if confirmed is not choice:
        plan, installation = prepare(asked, confirmed.installation, given)
    if confirmed.line and not (plan.verbose and confirmed is choice):
        terminal.say(confirmed.line)
    for line in networks.left_out if networks else ():
        terminal.say(line)
    if networks and plan.verbose:
        terminal.say(f"networks: {', '.join(networks.networks)}")
    if plan.folder and (kept := earlier_output(plan.folder)):
        terminal.say(kept)
    settings_of_shells = openmpi.for_login_shells([login_shell(), *(agent.login_shell for agent in agents)])
    environment = settings_of_shells | job_environment(given, plan, installation, networks, terminal.live)
    if plan.elastic is None:
        return Job(plan, installation, terminal, agents, environment, networks).run()
    try:
        folder = JobFolder.make()
    except LaunchError:
        hang_up_on(agents)
        raise
    return ElasticJob(
        plan, installation, terminal, agents, environment, networks, plan.elastic, folder, absent=absent
    ).run()


def take_up(name: str, terminal: Terminal) -> int:
    """Goes on with an elastic job whose launcher was lost, and returns the exit code. Raises LaunchError."""
    folder = JobFolder.find(name)
    outline = folder.read()
    plan, rules = outline.plan, outline.plan.elastic
    terminal.shows_time = plan.shows_time
    assert rules is not None  # no other job has a record
    resume.enter(outline)
    signals.prepare()
    make_room_for(len(outline.hosts), 2 * plan.ranks if plan.folder else 0)
    given = given_environment(plan)
    plan, installation = prepare(plan, transport.choose(plan, given).installation, given)
    environment = job_environment(given, plan, installation, outline.networks, terminal.live)
    taken = resume.take_over(folder, outline)
    agents = list(taken.found)
    return ElasticJob(plan, installation, terminal, agents, environment, outline.networks, rules, folder, taken).run()


def prepare(plan: Plan, installation: Installation, given: dict[str, str]) -> tuple[Plan, Installation]:
    """The plan and the engine for a transport, which `given` tells the ranks if it is TCP. Raises HostsError, LaunchError."""
    if not installation.has_mpi:
        transport.refuse_arguments_of_an_engine(plan)
        given[transport.VARIABLE] = "tcp"
    elif plan.by_srun:
        program = srun.find_program(os.environ)
        further = srun.plugin_arguments(program, installation, plan, os.environ)
        plan = replace(plan, engine_arguments=(*further, *plan.engine_arguments))
        installation = replace(installation, engine=srun, program=program)
    return plan, installation


def check_surroundings(environment: Mapping[str, str]) -> None:
    """Refuses what nothing could be started in. Raises LaunchError."""
    make_room_for(hosts=1, files=0)
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"working directory: it must exist, but: {error.strerror}. It has been removed, perhaps made anew; "
            "change to another one, or into it once more."
        ) from None
    job = environment.get("RINGTRAIN_LAUNCHER", "")
    if is_running(job):
        raise LaunchError(
            f"RINGTRAIN_LAUNCHER: ringtrainrun must be started outside of a job, but rank "
            f"{environment.get('RINGTRAIN_RANK', '?')} of one has started it. Call it once, and let all ranks "
            "run the script."
        )


def make_room_for(hosts: int, files: int) -> None:
    """For the descriptors of a launcher. Raises LaunchError if it may not open as many."""
    if lack := descriptors.lack(DESCRIPTORS + DESCRIPTORS_OF_A_HOST * hosts + files):
        raise LaunchError(lack)


def is_running(job: str) -> bool:
    """Whether a launcher's agent listens under this name; an environment may have it from a job that has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + job)
            return bool(job)
        except (OSError, ValueError):  # nobody; no name
            return False


def unusable_folder(path: str, error: OSError) -> str:
    """Why a folder cannot be used for output."""
    return (
        f"output folder '{path}': it must be a folder that can be made and written, but: {error.strerror}. "
        "Name another one with --output-filename."
    )


def make_folder(path: str) -> None:
    """Makes the folder of --output-filename. Raises LaunchError."""
    try:
        private_folder(path)
    except OSError as error:
        raise LaunchError(unusable_folder(path, error) if error.strerror else str(error)) from None


def earlier_output(path: str) -> str:
    """Keeps what an earlier job has left in the folder of --output-filename; says where, or "" if there is nothing."""
    try:
        number = keep_earlier(path)
    except OSError:  # what cannot be renamed gets the new lines behind the old ones
        return ""
    if not number:
        return ""
    return f"output folder '{path}': what an earlier job has written is kept as stdout.{number} and stderr.{number}."


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
        folder=os.path.abspath(given["output_filename"]) if given["output_filename"] else "",
        shows_time=given["shows_time"], function_folder=given["function_folder"],
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
        [int(part) for part in layout.split("+")]
        if re.fullmatch(r"[1-9][0-9]{0,8}(\+[1-9][0-9]{0,8})*", layout)
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


def check_command(plan: Plan) -> None:
    """Refuses a command that this host cannot run; other hosts say so themselves. Raises LaunchError."""
    program = plan.command[0]
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path):
        return
    if program.endswith(".py") and os.path.isfile(program):
        raise LaunchError(
            f"command '{program}': it must be executable, but is a file without that permission. "
            f"Put python before it: ringtrainrun -np {plan.ranks} python {shlex.join(plan.command)}"
        )
    if not plan.has_remote_hosts:
        raise LaunchError(
            f"command '{program}': it must be a program on PATH or the path of one, but there is none. "
            "Check its spelling."
        )


def account(plan: Plan, installation: Installation, environment: Mapping[str, str]) -> list[str]:
    """What --verbose and --dry-run say."""
    added = [
        f"{name}={shlex.quote(value)}"
        for name, value in environment.items()
        if os.environ.get(name) != value and name not in plan.exported
    ]
    added += [f"{name}=..." for name in plan.exported]  # its value may be a secret
    return [
        f"MPI library {installation.library} ({installation.version})"
        if installation.has_mpi
        else "no MPI: TCP connects the ranks, and the agent on each host starts them",
        f"added to the environment: {' '.join(added) or 'nothing'}",
        f"command line: {shlex.join(command_line(plan, installation, 'SOCKET'))}",
    ]


if __name__ == "__main__":
    sys.exit(main())
