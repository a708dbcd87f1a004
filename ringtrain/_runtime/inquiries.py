"""Answers whoever asks from another process of this host how the job goes: ``ringtrain top``.

A thread sleeps in ``accept`` until somebody asks, so that a job which nobody looks at pays nothing. The socket has no file;
its name says whose it is, and both ends ask the kernel who the other one is: a user's jobs answer this user, and root, alone.
"""

import contextlib
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PREFIX = "ringtrain-top"  # then user, process, and something that nobody can take before
_NAME = re.compile(rf"@({_PREFIX}-(\d+)-(\d+)-[0-9a-f]+)$", re.MULTILINE)
_SECONDS_TO_TAKE_IT = 2.0
_LONGEST_ANSWER = 1 << 28  # bytes
_CREDENTIALS = "3i"  # process, user, group
_listening: set[int] = set()  # processes, since a fork's child has no thread


def answer_with(answer: Callable[[], bytes]) -> None:
    """Starts to answer, once for a process. Called on another thread, each time that somebody asks."""
    if os.getpid() in _listening:
        return
    _listening.add(os.getpid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{_PREFIX}-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")
        listener.listen(4)
    except OSError:  # a sandbox without such sockets: the job goes on, and cannot be looked at
        listener.close()
        return
    threading.Thread(target=_serve, args=(listener, answer), name="ringtrain-inquiries", daemon=True).start()


def those_who_answer() -> dict[int, str]:
    """The names of sockets of this user's processes on this host, by process; all users' for root. None if the kernel does not say."""
    try:
        found = _NAME.findall(Path("/proc/self/net/unix").read_text())
    except OSError:  # a container may lack this part of /proc
        return {}
    return {
        int(process): name
        for name, user, process in found
        if os.getuid() in (0, int(user)) and _is_of(name, int(user))  # whoever it names: anybody may take a name
    }


def ask(name: str, seconds: float) -> bytes:
    """What the process behind a socket answers.

    Raises:
        OSError: it is gone, does not answer in time, or belongs to another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(seconds)
        asking.connect(f"\0{name}")
        if os.getuid() not in (0, _user_of(asking)):
            raise PermissionError("it belongs to another user")
        answer, deadline = bytearray(), time.monotonic() + seconds
        while part := asking.recv(1 << 16):
            answer += part
            if len(answer) > _LONGEST_ANSWER or time.monotonic() > deadline:
                raise OSError("its answer has no end")
        return bytes(answer)


def _is_of(name: str, user: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(f"\0{name}")
        except BlockingIOError:  # busy with others who ask
            return True
        except OSError:  # it has ended
            return False
        return _user_of(asking) == user


def _serve(listener: socket.socket, answer: Callable[[], bytes]) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError:  # out of descriptors; whoever asks waits in vain, the next one may not
            threading.Event().wait(1.0)
            continue
        with asking, contextlib.suppress(OSError):
            asking.settimeout(_SECONDS_TO_TAKE_IT)
            if _user_of(asking) in (0, os.getuid()):
                asking.sendall(answer())


def _user_of(other_end: socket.socket) -> int:
    credentials = other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS))
    return struct.unpack(_CREDENTIALS, credentials)[1]
