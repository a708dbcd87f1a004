"""Which rows a rank asks whom for: each once, by owner and then by place, whatever the ids are."""

import numpy as np
import pytest

from ringtrain.embedding import row_requests
from ringtrain.embedding.dealing import Dealing


def asked_plainly(dealing: Dealing, ids: np.ndarray) -> row_requests.Asked:
    rows = sorted(set(ids.tolist()), key=lambda row: (int(dealing.owners(np.array(row))), row))
    unique = np.array(rows, np.int64)
    owners = dealing.owners(unique)
    counts = np.array([np.count_nonzero(owners == rank) for rank in range(dealing.ranks)])
    inverse = np.array([rows.index(row) for row in ids.tolist()], np.int64)
    return row_requests.Asked(unique, counts, dealing.places(unique).astype(np.int32), inverse)


@pytest.mark.parametrize("kind", ["modulo", "blocks"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("rows, drawn", [(1, 5), (23, 0), (23, 1), (23, 200), (10**9, 300), (2**62, 70)])
def test_rows_are_asked_for_once_by_owner_and_place(rows, drawn, ranks, kind, monkeypatch):
    monkeypatch.setattr("ringtrain.embedding.dealing._MOST_ROWS", 2**63)
    dealing = Dealing(rows, ranks, kind)
    ids = np.random.default_rng(rows % 97 + drawn).zipf(1.3, drawn) * 2654435761 % rows
    found, wanted = row_requests.ask(dealing, ids.astype(np.int64)), asked_plainly(dealing, ids.astype(np.int64))
    for name in ("ids", "counts", "places", "inverse"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert np.array_equal(one, other) and one.dtype == other.dtype, name
    assert np.array_equal(found.ids[found.inverse], ids)
