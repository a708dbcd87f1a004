"""How a rank of an elastic job opens its worlds, and who leads it. Loaded by those alone."""

from collections.abc import Sequence
from typing import Any

from ringtrain._binding import options
from ringtrain._binding._native import CData
from ringtrain._bootstrap import leading, membership
from ringtrain._bootstrap.member import SECONDS_TO_CONNECT, Member
from ringtrain._bootstrap.opening import listen, mark_as_rank, open_alone, open_tcp, start_seconds
from ringtrain._rendezvous import by_address, launcher
from ringtrain._rendezvous import rendezvous as places
from ringtrain._runtime.context import Context
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.version import __version__

FIRST_WORLD = 1  # of an elastic job, as the launcher counts them
SEVERAL = 2  # hosts, where their number is not known
SECONDS_OF_SILENCE = 5.0  # in an elastic job a false death costs less than a wait


class WorldsOfAJob:
    """Opens the worlds of an elastic job."""

    def __init__(self, listens: str, chosen: dict[str, str]):
        self._listens = listens
        self.chosen = {
            "dead_after_seconds": str(SECONDS_OF_SILENCE),
            **chosen,
            "start_timeout_seconds": str(SECONDS_TO_CONNECT),
        }

    def listen_at(self, addresses: str) -> None:
        """From the next world on: the job has hosts that share fewer networks."""
        self._listens = addresses

    def listen(self) -> tuple[CData, str]:
        """For the next world."""
        return listen(self._listens)

    def open(self, listener: CData, rank: int, peers: Sequence[str], secret: bytearray, epoch: int) -> Context:
        """A world of these peers."""
        if len(peers) == 1:
            return open_alone(self.chosen)
        opening = {} if epoch == FIRST_WORLD else {"nccl_opening": "beside"}  # what goes on does not wait for NCCL
        return open_tcp(listener, rank, peers, secret, epoch, opening | self.chosen)


def open_elastic(comm: Any, chosen: dict[str, str]) -> Context:
    """The next world that has been formed, of whoever lives then."""
    if comm or chosen.get("transport") == "mpi":
        given = "comm is given" if comm else "transport is 'mpi'"
        raise UnsupportedError(
            f"init: an elastic job must be connected by TCP, all of its ranks together, but {given}. "
            "Leave it out, or start the job without --elastic."
        )
    member = membership.enter(lambda: _member_of_job(chosen))
    context = member.take()
    context.explain = member.explain
    mark_as_rank(context, context.size)
    return context


def _member_of_job(chosen: dict[str, str]) -> Member:
    """This process in its job, which the launcher leads, or an authority."""
    environ = options.environment()
    if place := launcher.find_elastic(environ):
        return Member(place, __version__, WorldsOfAJob(place.listens, chosen), leading.AgentLink(place.number))
    return _led_by_an_authority(launcher.find_authority(environ), chosen)


def _led_by_an_authority(text: str, chosen: dict[str, str]) -> Member:
    """Calls it, as it may still be starting."""
    address, secret = by_address.parse(text), places.secret_of(options.environment())
    if address is None:
        raise InvalidArgumentError(
            f"{launcher.AUTHORITY} '{text}': it must be host:port, where `ringtrain authority` listens, but is something else. "
            "Write for example node-1:4711."
        )
    if not secret:
        raise InvalidArgumentError(
            f"{places.SECRET}: it must have the secret of the job where {launcher.AUTHORITY} names its authority, but is not set. "
            "Give the authority and all ranks the same: openssl rand -hex 32"
        )
    hosts = 1 if by_address.names_this_host(address) else SEVERAL
    listens = places.listening_addresses(options.environment(), address.host, hosts, start_seconds(chosen))
    link = leading.AuthorityLink(address, secret)
    place = link.enter(start_seconds(chosen), listens)
    return Member(place, __version__, WorldsOfAJob(listens, chosen), link)
