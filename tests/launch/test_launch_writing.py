"""What stands between the launcher and whoever reads: a bounded queue, a thread that may block, an account of what is lost."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
import time

import pytest
from eventually import eventually

from ringtrain.launch.output import LastLines, Limits, RankStream, last_state
from ringtrain.launch.rank_files import RankFiles
from ringtrain.launch.terminal import Terminal
from ringtrain.launch.writing import MOST_BYTES, ROOM_BYTES, Loss, Sink, Writer

PATIENCE = 30.0


@pytest.fixture
def pipe():
    """A pipe, its reading end not blocking."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    for end in (reader, writer):
        os.close(end)


def read_all(reader: int, until: int) -> bytes:
    """Reads until so many bytes have come."""
    data, deadline = b"", time.monotonic() + PATIENCE
    while len(data) < until:
        assert time.monotonic() < deadline, len(data)
        try:
            data += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.005)
    return data


def waiting_in(reader: int) -> int:
    """Bytes that a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0]


def test_all_is_written_in_order_and_nobody_waits(pipe) -> None:
    reader, writer_end = pipe
    writer, sink = Writer("test"), Sink(Loss("pipe"), writer_end)
    lines = [b"%d %s\n" % (number, b"x" * (number * 50)) for number in range(200)]
    for line in lines:
        writer.put(sink, line)
    assert not writer.has_room, "a pipe takes 64 KiB, these are 1000"
    assert read_all(reader, sum(map(len, lines))) == b"".join(lines)
    eventually(lambda: writer.has_room, "there is room")
    assert sink.loss.size == 0


def test_room_is_told_by_the_thread(pipe) -> None:
    reader, writer_end = pipe
    writer, sink, told = Writer("test"), Sink(Loss("pipe"), writer_end), []
    writer.on_news = lambda: told.append(writer.has_room)
    writer.put(sink, b"x" * 100_000)
    for _ in range(10):
        writer.put(sink, b"x" * 50_000)
    assert not told
    read_all(reader, 600_000)
    eventually(lambda: told, "the room is told")
    assert all(told)


def test_what_nobody_reads_is_counted_beyond_the_bound(pipe) -> None:
    writer, sink = Writer("test"), Sink(Loss("pipe"), pipe[1])
    entry = b"y" * 999 + b"\n"
    for _ in range(2 * MOST_BYTES // 1000):
        writer.put(sink, entry)
    entries, kept = 2 * MOST_BYTES // 1000, MOST_BYTES // 1000
    assert entries - kept - 100 <= sink.loss.lines <= entries - kept and sink.loss.size == 1000 * sink.loss.lines
    began = time.monotonic()
    writer.finish(lambda: (0.5, 600.0))  # and not the 600 of whoever still reads
    assert time.monotonic() - began > 0.1
    assert sink.loss.lines >= entries - 100 and str(sink.loss).endswith("are missing there: nobody has read it")
    assert writer.has_room, "nobody need wait any longer"


def test_patience_lasts_while_somebody_reads_and_may_change(pipe) -> None:
    reader, writer_end = pipe
    writer, sink = Writer("test"), Sink(Loss("pipe"), writer_end)
    writer.put(sink, b"z" * 2_000_000)
    read_all(reader, 1)  # it has begun, so that it needs no lock to go on while `patience` reads
    looks = []

    def patience() -> tuple[float, float]:
        """Of somebody who takes longer in all than may pass without anything taken, and then hurries."""
        looks.append(time.monotonic())
        if len(looks) <= 8:
            before = writer._moved_at
            read_all(reader, 1)
            eventually(lambda: writer._moved_at > before, "the thread goes on")
        return (1.0, 60.0) if len(looks) <= 8 else (0.0, 0.0)

    writer.finish(patience)
    assert len(looks) == 9 and looks[-1] - looks[0] > 1.2
    assert sink.loss.lines == 1


def test_patience_begins_with_the_end_of_the_job(pipe) -> None:
    """Whoever has stopped reading long before has as much time as anybody else."""
    reader, writer_end = pipe
    writer, sink = Writer("test"), Sink(Loss("pipe"), writer_end)
    writer.put(sink, b"z" * 200_000)
    eventually(lambda: waiting_in(reader) == fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ), "the pipe is full")
    writer._moved_at -= 1000.0
    reads = threading.Timer(0.3, read_all, (reader, 140_000))
    reads.start()
    writer.finish(lambda: (60.0, 60.0))
    reads.join()
    assert not sink.loss.lines


class Disk(Sink):
    """A file that takes some writes, as a disk that is full for a while."""

    def __init__(self, path):
        super().__init__(Loss("disk"), os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        self.full = os.open("/dev/full", os.O_WRONLY)
        self.is_full = False

    def open(self) -> int:
        return self.full if self.is_full else self.descriptor


def test_a_gap_is_marked_where_it_is(tmp_path) -> None:
    disk = Disk(tmp_path / "file")
    for is_full, text in ((False, b"one\nbegun "), (True, b"two\nthree\n"), (True, b"four\n"), (False, b"five\n")):
        disk.is_full = is_full
        disk.write(text, lambda: None)
    assert (tmp_path / "file").read_text() == (
        "one\nbegun \nringtrainrun: 3 lines (15 bytes) are missing there: No space left on device.\nfive\n"
    )
    assert (disk.loss.lines, disk.loss.size, disk.loss.reason) == (3, 15, "No space left on device")


def test_a_line_that_is_lost_in_pieces_counts_once(tmp_path) -> None:
    """A busy launcher reads what a rank writes in pieces that end anywhere."""
    disk = Disk(tmp_path / "file")
    disk.is_full = True
    for piece in (b"one\ntw", b"o", b"\nthree\nfo", b"ur"):
        disk.write(piece, lambda: None)
    disk.is_full = False
    disk.write(b"\n", lambda: None)
    assert (tmp_path / "file").read_text().startswith("ringtrainrun: 4 lines (18 bytes) are missing there")
    assert (disk.loss.lines, disk.loss.size) == (4, 18)


def test_a_file_that_cannot_be_made_loses_its_lines_and_no_more(tmp_path) -> None:
    (tmp_path / "rank.1").write_text("in the way")
    files = RankFiles(str(tmp_path), 2)
    for rank in range(2):
        file = files.file(rank, 1)
        file.put(b"a\nb\n")
        file.end()
    files.finish(lambda: (10.0, 10.0))
    assert (tmp_path / "rank.0" / "stdout").read_text() == "a\nb\n"
    assert files.loss.size == 4 and files.loss.lines >= 2


def test_a_file_that_is_emptied_meanwhile_has_no_hole(tmp_path) -> None:
    """As by logrotate's copytruncate."""
    files = RankFiles(str(tmp_path), 1)
    file = files.file(0, 1)
    written = tmp_path / "rank.0" / "stdout"
    file.put(b"before\n")
    eventually(lambda: written.exists() and written.read_bytes() == b"before\n", "the file is written")
    os.truncate(written, 0)
    file.put(b"after\n")
    file.end()
    files.finish(lambda: (10.0, 10.0))
    assert written.read_bytes() == b"after\n"


def test_a_failure_to_close_is_a_loss(tmp_path) -> None:
    """As file servers tell of a full disk."""
    files = RankFiles(str(tmp_path), 1)
    file = files.file(0, 1)
    file.put(b"a\n")
    written = tmp_path / "rank.0" / "stdout"
    eventually(lambda: written.exists() and written.read_text(), "the file is written")
    os.close(file.descriptor)
    file.end()
    files.finish(lambda: (10.0, 10.0))
    assert files.loss.lines == 1 and files.loss.reason == "Bad file descriptor"


def test_streams_that_are_one_file_keep_the_order_of_their_lines(tmp_path) -> None:
    with open(tmp_path / "log", "wb") as stdout, open(tmp_path / "log", "ab") as stderr:
        terminal = Terminal(stdout, stderr)
        for number in range(500):
            terminal.write_line(1 + number % 2, b"%d" % number)
        terminal.finish(lambda: (10.0, 10.0))
    assert [int(line) for line in (tmp_path / "log").read_text().split()] == list(range(500))


# ---- what is kept ----


def test_kept_lines_are_bounded_in_bytes() -> None:
    kept = LastLines(8000)
    for number in range(1000):
        kept.append(b"%d" % number)
    kept.append(b"ValueError: " + b"x" * 10_000_000)
    assert sum(map(len, kept)) < 8000 and len(kept) > 500
    assert list(kept)[-1].startswith(b"ValueError: xxx") and list(kept)[-1].endswith(b" ... (10000012 bytes)")


def test_limits_share_a_total_out() -> None:
    assert Limits.of(ranks=2, hosts=1) == Limits()
    for ranks in (1, 10, 100, 1000, 2000):
        limits = Limits.of(ranks, hosts=max(1, ranks // 8))
        assert 2 * ranks * limits.line + ranks * limits.kept + max(1, ranks // 8) * limits.window <= 96 << 20
        assert limits.line >= 8 << 10 and limits.kept >= 4 << 10 and limits.window >= 64 << 10


class Screen:
    """Takes lines at once."""

    lines = 0

    def __init__(self):
        self.sizes = []
        self.states = []

    def write_of_rank(self, rank: int, stream: int, text: bytes) -> None:
        self.lines += 1
        self.sizes.append(len(text))

    def show_progress(self, text: bytes) -> None:
        self.states.append(text)


def test_a_line_without_an_end_is_cut() -> None:
    screen = Screen()
    stream = RankStream(screen, 2, 1, limits=Limits(line=10_000))
    for _ in range(160):
        stream.feed(b"x" * 65536)
    stream.close()
    assert max(screen.sizes) == 10_000 and sum(screen.sizes) == 160 * 65536
    assert sum(map(len, stream.kept)) <= Limits().kept


def test_a_progress_bar_without_an_end_stays_small() -> None:
    screen = Screen()
    stream = RankStream(screen, 2, 0)
    for number in range(1000):
        stream.feed(b"\r%d " % number)
        stream.feed(b"#" * 50)
    assert len(stream._partial) < 100 and screen.states[-1] == b"[0] 999 " + b"#" * 50 and not screen.sizes


@pytest.mark.parametrize("line", [b"", b"a", b"\r", b"\r\r", b"a\r", b"\ra", b"a\rb", b"a\r\rb\r\r", b"\r1\r2\r"])
def test_last_state_is_what_a_terminal_shows(line: bytes) -> None:
    assert last_state(line) == next((part for part in reversed(line.split(b"\r")) if part), b"")


def test_the_room_is_smaller_than_the_bound() -> None:
    assert ROOM_BYTES < MOST_BYTES
