"""Worlds over each transport, on the same ranks at once, so that one job measures them in turn.

The one over MPI is that of ``rt.init``. A context over TCP is opened beside it; its ranks tell each other through that
MPI where they listen.
"""

import secrets
import socket
from collections.abc import Mapping, Sequence

import ringtrain as rt
from ringtrain._binding import options
from ringtrain._bootstrap import opening
from ringtrain._rendezvous.meeting import SECRET_BYTES, endpoint
from ringtrain._runtime import context as contexts
from ringtrain._runtime.context import Context
from ringtrain.bench import ranks

LOOPBACK = "127.0.0.1"


class MeasuredWorld:
    """This rank in a world of all ranks of the job.

    Args:
        transport: ``mpi`` or ``tcp``.
        addresses: of the links of each host, by the host's name; one that is not named has its loopback.
        chosen: options of a world over TCP, as for ``init``.
    """

    def __init__(self, transport: str, addresses: Mapping[str, Sequence[str]], **chosen: object):
        self.transport = transport
        if transport == "mpi":
            rt.init(transport="mpi")
            self.context = contexts.current()
        else:
            self.context = _open_tcp(addresses.get(socket.gethostname(), [LOOPBACK]), chosen)

    def enter(self) -> None:
        """From now on the functions of ``ringtrain`` act in this world, if this thread calls them."""
        contexts.make_current(self.context)

    def close(self) -> None:
        """Leaves it."""
        contexts.make_current(None)
        self.context.close()


def _open_tcp(addresses: Sequence[str], chosen: Mapping[str, object]) -> Context:
    listener, listens = opening.listen(",".join(endpoint(address, "0") for address in addresses))
    everyone = ranks.gathered((listens, secrets.token_bytes(SECRET_BYTES)))
    peers = [theirs for theirs, _ in everyone]
    return opening.open_tcp(listener, ranks.rank(), peers, bytearray(everyone[0][1]), 1, options.resolve(chosen))
