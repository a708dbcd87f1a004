"""Files that are replaced: whole, or as before."""

import os
import stat

import pytest

from ringtrain._binding.durable import replaced


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "record"
    path.write_bytes(b"before")
    with replaced(path, tmp_path / "record.new", 0o600) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after" and os.listdir(tmp_path) == ["record"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_block_that_raises_leaves_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "record"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="within"), replaced(path, tmp_path / "record.new") as file:
        file.write(b"half")
        raise ValueError("within")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["record"]


def test_a_link_at_the_place_of_the_unfinished_file_is_not_followed(tmp_path):
    """In a folder that others may write, it is theirs; a file that a killed process has left is replaced."""
    other, unfinished = tmp_path / "other", tmp_path / "record.new"
    other.write_bytes(b"kept")
    for leave in (lambda: unfinished.symlink_to(other), lambda: unfinished.write_bytes(b"a longer one than that")):
        leave()
        with replaced(tmp_path / "record", unfinished) as file:
            file.write(b"after")
        assert (tmp_path / "record").read_bytes() == b"after" and other.read_bytes() == b"kept"


def test_the_name_is_on_the_disk_before_the_block_is_over(tmp_path, monkeypatch):
    """The file's bytes first, then its name, then the folder that has the name."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given, name=name, real=real):
            kind = "folder" if name == "fsync" and stat.S_ISDIR(os.fstat(given[0]).st_mode) else name
            calls.append(kind)
            return real(*given)

        monkeypatch.setattr(os, name, noted)
    with replaced(tmp_path / "record", tmp_path / "record.new") as file:
        file.write(b"after")
    assert calls == ["fsync", "replace", "folder"]
