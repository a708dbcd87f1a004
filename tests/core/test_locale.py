"""A program with a locale that has a decimal comma, as those of Qt and GTK: numbers of the core keep their points."""

import os
import subprocess
import sys

import needs

PROGRAM = """
import locale
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","
import numpy as np, ringtrain as rt
from ringtrain.testing import World
with World(2, stall_warning_seconds=2.5, dead_after_seconds=12.5) as world:
    world.run(lambda rank: rt.allreduce(np.ones(3), "a"))
    records = world.run(lambda rank: rt.flight_record())
assert all(record.operations[-1].finished > 1e9 for record in records), records
"""


@needs.packages("" if os.path.exists("/usr/share/i18n/locales/de_DE") else "needs a locale: apt-get install locales")
def test_numbers_have_points(tmp_path):
    made = tmp_path / "de_DE.UTF-8"
    subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", made], capture_output=True)  # it warns
    environment = dict(os.environ, LOCPATH=str(tmp_path), LC_ALL="", RINGTRAIN_STALL_ABORT_SECONDS="30.5")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
