"""The command line of ringtrainrun: reads it, makes a plan, finds the MPI, runs the job, returns the exit code.

Exit codes: 0 if every rank returned 0, else that of the first rank that failed, 128 + n if signal n ended it; 2 for a
wrong command line, 125 if nothing could be started, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from ringtrain.launch.hosts import HostsError, parse_hostfile, parse_hosts, place, Host
from ringtrain.launch.job import Job, command_line, rank_environment
from ringtrain.launch.mpi import LaunchError, find_installation
from ringtrain.launch.output import Terminal
from ringtrain.launch.plan import Plan
from ringtrain.version import __version__

LAUNCH_FAILED = 125


def main(arguments: list[str] | None = None) -> int:
    """Runs `ringtrainrun` with these arguments (the process's own by default) and returns its exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(options)
    except (HostsError, OSError) as error:
        parser.error(str(error))
    terminal = Terminal(sys.stdout.buffer, sys.stderr.buffer)
    try:
        check_command(plan)
        installation = find_installation()
        if options.verbose or options.dry_run:
            for line in account(plan, installation):
                terminal.say(line)
        return 0 if options.dry_run else Job(plan, installation, terminal).run()
    except LaunchError as error:
        terminal.say(str(error))
        return LAUNCH_FAILED


def make_parser() -> argparse.ArgumentParser:
    """The options, spelled as Horovod's launcher spells them."""
    parser = argparse.ArgumentParser(
        prog="ringtrainrun", allow_abbrev=False, usage="%(prog)s -np N [-H host:slots,...] [options] command ...",
        description="Runs a command on N ranks, for example: ringtrainrun -np 2 python train.py")
    parser.add_argument("-np", "--num-proc", dest="ranks", type=rank_count, required=True, metavar="N",
                        help="number of ranks in all; may exceed the number of cores")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many ranks each may run, filled "
                       "in this order (default: all ranks on this host)")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="the same from a file: one 'host slots=N' a line")
    parser.add_argument("--verbose", action="store_true", help="say which MPI and which command line are used, and "
                        "pass on everything that the engine says")
    parser.add_argument("--dry-run", action="store_true", help="say it and start nothing")
    parser.add_argument("--version", action="version", version=f"ringtrainrun {__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs, with its arguments")
    return parser


def rank_count(text: str) -> int:
    """Reads the value of -np."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, but found '{text}'")
    return int(text)


def make_plan(options: argparse.Namespace) -> Plan:
    """Decides what runs where. Raises HostsError, OSError for a host file that cannot be read."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise HostsError("command: expected what each rank has to run, but found nothing. "
                         "Write for example: ringtrainrun -np 2 python train.py")
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hostfile(Path(options.hostfile).read_text(), options.hostfile)
    else:
        hosts = [Host("localhost", options.ranks)]
    return Plan(command, options.ranks, place(hosts, options.ranks), verbose=options.verbose)


def check_command(plan: Plan) -> None:
    """Refuses a command that this host cannot run; other hosts say so themselves. Raises LaunchError."""
    program = plan.command[0]
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
    if plan.has_remote_hosts or shutil.which(program, path=path):
        return
    if program.endswith(".py") and os.path.isfile(program):
        raise LaunchError(f"command '{program}': it must be executable, but is a file without that permission. "
                          f"Put python before it: ringtrainrun -np {plan.ranks} python {shlex.join(plan.command)}")
    raise LaunchError(f"command '{program}': it must be a program on PATH or the path of one, but there is none. "
                      "Check its spelling.")


def account(plan: Plan, installation) -> list[str]:
    """What --verbose and --dry-run say."""
    environment = rank_environment(plan, installation)
    added = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    return [f"MPI library {installation.library} ({installation.version})",
            f"added to the environment: {' '.join(added) or 'nothing'}",
            f"command line: {shlex.join(command_line(plan, installation))}"]


if __name__ == "__main__":
    sys.exit(main())
