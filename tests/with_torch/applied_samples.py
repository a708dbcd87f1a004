"""What elastic jobs of tests print of the samples in each step: ``applied EPOCH [INDICES]``."""

from __future__ import annotations

import collections
import json
import re
import subprocess


def require_each_sample_once(done: subprocess.CompletedProcess, samples: int, epochs: int, most_repeated: int) -> None:
    """But for those that are repeated at an epoch's end, where the rest does not divide by the ranks."""
    applied: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for epoch, indices in re.findall(r"^\[\d+\] applied (\d+) (\[.*\])$", done.stdout, re.MULTILINE):
        applied[epoch].update(json.loads(indices))
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert applied.keys() == {str(epoch) for epoch in range(epochs)}, said
    for counts in applied.values():
        assert counts.keys() == set(range(samples)) and counts.total() - samples in range(most_repeated + 1), said
