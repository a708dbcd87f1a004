"""What strikes the ranks of test_elastic_frameworks.py: statements by slot, step and place, from the environment, each once.

A place is "begun", "holding" (this rank has results, which are lost if it raises) or "released". PLANTED is a fault of the
product's, for all ranks.
"""

import json
import os
import signal
import time
from pathlib import Path

import ringtrain as rt
from ringtrain._bootstrap import membership
from ringtrain.elastic import TransparentState, adapters, transparent, values  # noqa: F401  faults use them
from ringtrain.elastic.transaction import Transaction  # noqa: F401
from ringtrain.errors import PeerLostError

slot = int(os.environ.get("RINGTRAIN_RANK", "0"))
folder = Path(os.environ.get("FOLDER") or os.environ["TMPDIR"])  # one for all ranks, on whichever host
_FAULTS = json.loads(os.environ.get("FAULTS", "{}"))
_NAMES = {"os": os, "signal": signal, "time": time, "folder": folder, "PeerLostError": PeerLostError, "rt": rt}
_AWAITED_AT = json.loads(os.environ.get("AWAITED_AT", "[9]"))
_step = 0
(folder / f"pid-{slot}").write_text(str(os.getpid()))


def statement(step, place):
    """What is to strike this rank there; "" for nothing."""
    return _FAULTS.get(f"{slot}/{step}/{place}", "")


def strike(step, place):
    """Executes what is to strike here."""
    global _step
    _step = step
    statement = _FAULTS.get(f"{slot}/{step}/{place}")
    mark = folder / f"struck-{slot}-{step}-{place}"
    if statement and not mark.exists():
        mark.touch()
        exec(statement, _NAMES)


def await_joiners(step):
    """At step 9, or those of AWAITED_AT: returns when so many ranks as JOINED says are there, or wait to join."""
    while (
        step in _AWAITED_AT and rt.size() < int(os.environ.get("JOINED", "1")) and not membership.current().wants_pause
    ):
        time.sleep(0.02)


_survive = TransparentState.survive


def _survive_or_fail(self, function):
    def holding():
        result = function()
        strike(_step, "holding")
        return result

    return _survive(self, holding)


TransparentState.survive = _survive_or_fail
exec(os.environ.get("PLANTED", ""))
