"""Where a rank listens within a range of ports: not where others do, but where their connections only linger."""

import socket

import pytest

from ringtrain._bootstrap.opening import listen
from ringtrain.errors import InvalidArgumentError


def test_a_port_on_which_a_connection_lingers_serves_again():
    """As those of an earlier world do for a minute: a range would be used up by a few deaths."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # with SO_REUSEADDR, as ranks listen
        port = listener.getsockname()[1]
        caller = socket.create_connection(("127.0.0.1", port))
        called, _ = listener.accept()
        with pytest.raises(
            InvalidArgumentError, match=r"must be able to listen there, but cannot: Address already in use"
        ):
            listen(f"127.0.0.1:{port}-{port}")
    called.close()  # first, so that it is its port that lingers
    assert caller.recv(1) == b""
    caller.close()
    _, address = listen(f"127.0.0.1:{port}-{port}")
    assert address == f"127.0.0.1:{port}"
