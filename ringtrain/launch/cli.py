"""The command line of ringtrainrun: reads it, makes a plan, finds the MPI, checks the hosts, runs the job.

Exit codes: 0 if every rank returned 0, else that of the first rank that failed, 128 + n if signal n ended it; 2 for a
wrong command line, 125 if nothing could be started, or for a fault of the launcher's own, 130 after Ctrl-C, 128 + n after
another signal n to the launcher.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from ringtrain._binding import options as ranks_options
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import elastic_flags, log_lines, openmpi, resume, settings, signals
from ringtrain.launch.agent.facts import login_shell
from ringtrain.launch.commands import check_build
from ringtrain.launch.discovery import ScriptError
from ringtrain.launch.elastic_job import ElasticJob
from ringtrain.launch.hang_up import hang_up_on
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.host_setup import Allocation
from ringtrain.launch.hosts import HostsError
from ringtrain.launch.job import PATIENCE, Job, LeftJobError
from ringtrain.launch.job_folder import JobFolder
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.planning import idle_flags, make_plan, warnings
from ringtrain.launch.preflight import check_hosts
from ringtrain.launch.rank_files import earlier_output, make_folder
from ringtrain.launch.starter import Starter, starter_of
from ringtrain.launch.streams import StdoutError, with_its_output
from ringtrain.launch.surroundings import check_command, check_surroundings, make_ready
from ringtrain.launch.terminal import Terminal
from ringtrain.version import __version__

LAUNCH_FAILED = 125
INTERRUPTED = 130
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
    type=settings.NumberInRange(1, settings.LONGEST_SECONDS),
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
@click.option(
    "--log-json",
    is_flag=True,
    help="writes each line of ranks and launcher as a JSON object, and what happens to ranks and hosts, too",
)
@click.option("--config-file", metavar="FILE", help="settings from YAML; flags win")
@click.option("--mpi-args", metavar="'ARGUMENTS'", help="further arguments for mpirun or srun")
@click.option("--binding-args", metavar="'ARGUMENTS'", help="how mpirun or srun binds ranks (default: not)")
@click.option("--share-gpus", "shares_gpus", is_flag=True, help="let a host have more ranks than GPUs")
@click.option("--mpi", "by_mpirun", is_flag=True, help="use an MPI and its mpirun, in a Slurm allocation too")
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
            code = _plan_and_launch(given, terminal)
        except (HostsError, settings.ConfigError, InvalidArgumentError) as error:
            raise click.UsageError(str(error)) from None
        except (LaunchError, ScriptError) as error:
            terminal.say(str(error), "not-started")
            code = LAUNCH_FAILED
        except (StdoutError, click.ClickException, click.Abort):
            raise
        except Exception as fault:
            terminal.say(account_of_fault(fault), "launcher-failed")
            code = LAUNCH_FAILED
        terminal.note("launcher-ended", code=code)
        return code


def _plan_and_launch(given: Mapping[str, Any], terminal: Terminal) -> int:
    check_surroundings(os.environ)
    if given["resume"] is not None:
        elastic_flags.refuse_beside_resume(click.get_current_context())
        return take_up(given["resume"], terminal)
    terminal.take_form(log_lines.Json() if given["log_json"] else log_lines.Text(), given["shows_time"])
    plan = make_plan(given, os.environ, terminal.say_waiting)
    remarks = ranks_options.remarks({**os.environ, **plan.exported})
    for line in [*idle_flags(given), *warnings(given), *remarks]:
        terminal.say(line)
    check_command(plan)
    return launch(plan, terminal, is_dry=given["dry_run"])


def launch(plan: Plan, terminal: Terminal, is_dry: bool = False) -> int:
    """Carries a plan out and returns the exit code. Raises LaunchError."""
    make_ready(len(plan.hosts), 2 * plan.ranks if plan.folder else 0)
    starter = starter_of(plan)
    if is_dry or plan.verbose:
        for line in starter.account():
            terminal.say(line)
    if is_dry:
        return 0
    if plan.folder:
        make_folder(plan.folder)
    least = plan.elastic.minimum if plan.elastic and not plan.by_srun else None  # in an allocation no host comes later
    checked = check_hosts(starter.plan, starter.installation, starter.environment(), terminal.say_waiting, least)
    confirmed = starter.confirmed(checked.networks)
    for line in _remarks(confirmed, confirmed is not starter, checked.networks):
        terminal.say(line)
    settings_of_shells = openmpi.for_login_shells([login_shell(), *(agent.login_shell for agent in checked.agents)])
    environment = settings_of_shells | confirmed.environment(checked.networks, terminal.live)
    allocation = Allocation(confirmed.installation, checked.agents, environment, checked.networks, checked.absent)
    if plan.elastic is None:
        return Job(confirmed.plan, allocation, terminal).run()
    try:
        folder = JobFolder.make()
    except LaunchError:
        hang_up_on(checked.agents)
        raise
    return ElasticJob(confirmed.plan, allocation, terminal, plan.elastic, folder).run()


def _remarks(starter: Starter, is_another: bool, networks: Chosen | None) -> Iterator[str]:
    """What is said before ranks start. is_another: whether it is not the starter that --verbose has told of."""
    plan = starter.plan
    if starter.line and (is_another or not plan.verbose):
        yield starter.line
    yield from networks.left_out if networks else ()
    if networks and plan.verbose:
        yield f"networks: {', '.join(networks.networks)}"
    if plan.folder and (kept := earlier_output(plan.folder)):
        yield kept


def take_up(name: str, terminal: Terminal) -> int:
    """Goes on with an elastic job whose launcher was lost, and returns the exit code. Raises LaunchError."""
    folder = JobFolder.find(name)
    outline = folder.read()
    plan, rules = outline.plan, outline.plan.elastic
    terminal.take_form(log_lines.Json() if plan.log_json else log_lines.Text(), plan.shows_time)
    assert rules is not None  # no other job has a record
    resume.enter(outline)
    make_ready(len(outline.hosts), 2 * plan.ranks if plan.folder else 0)
    starter = starter_of(plan)
    environment = starter.environment(outline.networks, terminal.live)
    taken = resume.take_over(folder, outline)
    allocation = Allocation(starter.installation, list(taken.found), environment, outline.networks)
    return ElasticJob(starter.plan, allocation, terminal, rules, folder, taken).run()


if __name__ == "__main__":
    sys.exit(main())
