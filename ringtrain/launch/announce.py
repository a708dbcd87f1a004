"""What a rank's own program tells the launcher: that it fails now, before its peers hear of it and fail in turn."""

from __future__ import annotations

import json
import os
import socket
import time


def announce_failure() -> None:
    """Marks this rank as failing from this moment on, so that it is reported as the first cause even if it leaves last.

    For exception hooks, to be called before the other ranks are told. Without ringtrainrun on this host it does nothing.
    """
    path, rank = os.environ.get("RINGTRAIN_LAUNCHER"), os.environ.get("RINGTRAIN_RANK")
    if not path or not rank:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
            launcher.connect(path)
            launcher.sendall(json.dumps({"rank": int(rank), "failed_at": time.monotonic()}).encode() + b"\n")
    except OSError:  # the launcher is on another host, or gone
        pass
