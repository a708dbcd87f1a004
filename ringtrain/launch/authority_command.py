"""`ringtrain authority`: numbers the worlds of an elastic job whose processes an engine of the user's starts."""

from __future__ import annotations

import re
import signal
import socket
import sys

import click

from ringtrain._binding.options import environment
from ringtrain._rendezvous.rendezvous import SECRET, secret_of
from ringtrain._rendezvous.server import Server
from ringtrain.errors import RingtrainError
from ringtrain.launch import settings
from ringtrain.launch.authority import Rules
from ringtrain.launch.elastic_flags import BATCHES, ELASTIC_SECONDS, LAUNCHER_GRACE, PAUSES, signals_of_a_notice
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import HostsError
from ringtrain.launch.record import RecordFile
from ringtrain.launch.service import Service, Terms

GATHER = 10.0  # seconds until the first world, once there are enough ranks


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "-np",
    "ranks",
    type=settings.NumberOfRanks(),
    metavar="MIN:MAX",
    required=True,
    help="how many ranks the job may have",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    required=True,
    help="where it listens, such as 0.0.0.0:4711; ranks have RINGTRAIN_AUTHORITY=host:port and the same RINGTRAIN_SECRET",
)
@click.option("--state", default="", metavar="FILE", help="what an authority that is started again goes on from")
@click.option(
    "--gather",
    type=settings.NumberInRange(0, settings.LONGEST_SECONDS),
    default=GATHER,
    show_default=True,
    help="seconds from the moment in which there are MIN ranks to the first world, if MAX have not come",
)
@click.option(
    "--elastic-timeout",
    type=settings.NumberInRange(1, settings.LONGEST_SECONDS),
    default=ELASTIC_SECONDS,
    show_default=True,
    help="seconds with less than MIN ranks until the job ends",
)
@click.option("--reset-limit", type=settings.WholeNumber(min=0), default=0, help="worlds after the first (any number)")
@click.option(
    "--grace",
    type=settings.NumberInRange(0, settings.LONGEST_SECONDS),
    default=LAUNCHER_GRACE,
    show_default=True,
    help="seconds that ranks go on without an authority; then they end",
)
@click.option(
    "--notice-signal", metavar="NAME", help="a signal beside SIGTERM by which a rank is asked to leave (USR1)"
)
@click.option(
    "--leave-code",
    type=click.IntRange(0, 255),
    default=0,
    show_default=True,
    help="exit code of a rank that leaves on notice, for engines that replace only what has failed",
)
@click.option(
    "--batch",
    type=click.Choice(BATCHES),
    default="rank",
    show_default=True,
    help="what stays the same when the number of ranks changes: the batch of each rank, or that of a step",
)
def authority(
    ranks: tuple[int, int],
    listen: str,
    state: str,
    gather: float,
    elastic_timeout: float,
    reset_limit: int,
    grace: float,
    notice_signal: str | None,
    leave_code: int,
    batch: str,
) -> int:
    """Numbers the worlds of an elastic job whose processes something else starts and restarts (Slurm, Kubernetes, Ray)."""
    minimum, maximum = ranks
    try:
        rules = Rules(
            minimum,
            elastic_timeout,
            *PAUSES,
            reset_limit,
            notices=signals_of_a_notice(notice_signal),
            launcher_grace=grace,
            planned=0 if batch == "rank" else maximum,
            balances=batch == "balanced",
        )
        secret = secret_of(environment())
        if not secret:
            raise LaunchError(
                f"{SECRET}: it must have the secret of the job, the same for the authority and all ranks, but is not set. Draw it with: "
                "openssl rand -hex 32"
            )
        file = RecordFile(state)
        record = file.read()
        listener = listening(listen)
    except (HostsError, LaunchError, RingtrainError) as error:
        raise click.ClickException(str(error)) from None
    goes_on = "goes on with the job" if record is not None and record.world else "waits for ranks"
    host, port = listener.getsockname()[:2]
    say(f"{goes_on} at {f'[{host}]' if ':' in host else host}:{port}.")
    server = Server([listener], secret)
    service = Service(Terms(rules, maximum, gather, leave_code), server, file, record, say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: service.interrupt(number))
    try:
        return service.run()
    finally:
        server.close()


def listening(text: str) -> socket.socket:
    """A listener at host:port. Raises LaunchError."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if not matched or int(matched[3]) > 65535:
        raise LaunchError(
            f"--listen '{text}': it must be host:port, but is something else. Write for example 0.0.0.0:4711."
        )
    try:
        found = socket.getaddrinfo(matched[1] or matched[2], int(matched[3]), type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        is_all = where[0] == "::" and socket.has_dualstack_ipv6()  # those of IPv4, too
        return socket.create_server(where[:2], family=family, backlog=1024, dualstack_ipv6=is_all)
    except OSError as error:
        raise LaunchError(
            f"--listen '{text}': it must be an address of this host with a free port, but: {error.strerror or error}. Name "
            "another one."
        ) from None


def say(line: str) -> None:
    """For whoever reads the output."""
    print(f"ringtrain authority: {line}", file=sys.stderr, flush=True)
