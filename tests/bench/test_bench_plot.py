"""`--json` of every benchmark has one form, of the rows that were printed; `bench plot` draws it."""

from __future__ import annotations

import copy
import importlib.util
import xml.etree.ElementTree as xml

import pytest

from ringtrain.bench import __main__ as command_line
from ringtrain.bench import documents, plot, shaped

MACHINE = {"command": "ringtrain bench allreduce --json /somewhere/out.json --sizes 4KB --measured-rate 17 -np 2", "cores": 2,
           "processor": "a processor", "ringtrain": "ringtrain 1.0, built", "date": "2026-01-02", "others": 0.02}  # fmt: skip


def result(system: str, seconds: float, **further: object) -> dict:
    return {"system": system, "op": "allreduce", "np": 2, "seconds_median": seconds, "verified": True, **further}


def document(benchmark: str, *results: dict, **further: object) -> dict:
    documents.begin(benchmark, "ringtrain bench")
    return documents.make(MACHINE, results, [{"headings": ["a"], "rows": [["1"]]}], **further)


ALLREDUCE = [result(system, seconds * size / 1e6, bytes=size)
             for size in (4096, 1 << 20) for system, seconds in (("ringtrain", 2.0), ("gloo", 6.0), ("memcpy", 1.0))]  # fmt: skip
TRAIN = [result(system, seconds, op="train", network=network) for network in ("mlp", "convnet")
         for system, seconds in (("ringtrain", 0.03), ("ddp", 0.04), ("alone", 0.02))]  # fmt: skip


def test_a_document_is_read_as_it_was_written(tmp_path):
    made = document("allreduce", *ALLREDUCE, hosts=2)
    documents.write(tmp_path / "out.json", made)
    assert documents.read(tmp_path / "out.json") == made
    assert made["schema"] == 1 and made["benchmark"] == "allreduce" and made["hosts"] == 2


def test_a_document_without_room_is_named():
    """Else the error is taken for one of stdout's."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        documents.write("/dev/full", document("allreduce"))


@pytest.mark.parametrize("text", ["", "[]", '{"results": []}', '{"schema": 2}', "\udcff"])
def test_what_is_no_document_is_refused(text, tmp_path, capsys):
    (tmp_path / "out.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        ValueError, match=r"out.json: expected what ringtrain bench --json writes, of schema 1, but found"
    ):
        documents.read(tmp_path / "out.json")


def test_jobs_of_one_benchmark_become_one_document():
    one, other = document("wire", ALLREDUCE[0]), document("wire", ALLREDUCE[1])
    both = documents.combine([one, other])
    assert both["results"] == ALLREDUCE[:2] and len(both["tables"]) == 2 and both["machine"] == MACHINE


def test_each_job_of_shaped_hosts_stands_in_the_file(monkeypatch, tmp_path):
    """They write it one after the other."""
    file = tmp_path / "out.json"
    file.write_text("of another run")
    chosen = command_line.COMMAND.parser().parse_args(["wire", "--json", str(file), "--ranks-per-host", "1,2"])
    chosen.measured_rate = 1.0

    def job(chosen, first, names, ranks_per_host, arguments, python):
        assert not file.exists()
        documents.write(file, document("wire", result("ringtrain", 1.0, np=2 * ranks_per_host)))
        return 0

    class Network(dict):
        def __init__(self, *_, **__):
            self.hosts = {}
            self["host-1"] = self["host-2"] = type("Host", (), {"cores": "", "addresses": []})()

        __enter__, __exit__ = (lambda self: self), (lambda *_: None)

    monkeypatch.setattr(shaped, "_run", job)
    monkeypatch.setattr(shaped, "measured_rate", lambda *_: 1.0)
    monkeypatch.setattr(shaped.namespaces, "missing", lambda: "")
    monkeypatch.setattr(shaped.namespaces, "find_program", lambda name: name)
    monkeypatch.setattr(shaped.namespaces, "HostNetwork", Network)
    assert shaped.start(chosen, []) == 0
    assert [each["np"] for each in documents.read(file)["results"]] == [2, 4]


def test_the_line_of_the_machine_says_whether_others_disturbed():
    quiet = documents.machine_line({"machine": MACHINE})
    assert quiet == "ringtrain bench allreduce --sizes 4KB -np 2 · 2 cores, a processor · ringtrain 1.0 · 2026-01-02"
    assert "OTHER PROGRAMS USED 60% OF THE CORES" in documents.machine_line({"machine": {**MACHINE, "others": 0.6}})
    assert "not known" in documents.machine_line({"machine": {**MACHINE, "others": None}})
    assert 0 <= documents.look_at_others() <= 1


# ---- what is drawn ----


def test_sizes_become_lines():
    (curves,) = plot.figures_of(document("allreduce", *ALLREDUCE))
    assert [(line.name, line.is_floor) for line in curves.lines] == [
        ("ringtrain", False),
        ("gloo", False),
        ("memcpy", True),
    ]
    assert curves.lines[1].seconds == {4096: 6.0 * 4096 / 1e6, 1 << 20: 6.0 * (1 << 20) / 1e6}


def test_each_number_of_ranks_has_a_figure_and_a_link_a_floor():
    results = [result("ringtrain-tcp", 1.0, bytes=size, floor_seconds=size / 1e3) for size in (1000, 2000)]
    results.append(result("ringtrain-tcp-fp16", 0.5, bytes=1000, floor_seconds=0.5))
    two, four = plot.figures_of(document("wire", *results, *[{**each, "np": 4} for each in results]))
    assert (two.title, four.title) == ("wire, 2 ranks", "wire, 4 ranks")
    assert two.lines[-1] == plot.Series("floor of the link", {1000: 1.0, 2000: 2.0}, True)


def test_steps_become_bars_beside_the_floor():
    (bars,) = plot.figures_of(document("train", *TRAIN))
    assert bars.groups == ["mlp", "convnet"] and bars.systems["ddp"] == [0.04, 0.04]
    assert bars.texts["ringtrain"] == ["1.50 x", "1.50 x"] and bars.texts["alone"] == ["1.00 x", "1.00 x"]


def test_a_system_that_was_not_measured_has_no_bar():
    (bars,) = plot.figures_of(document("train", *TRAIN[:-2]))
    assert bars.systems["ddp"] == [0.04, None] and bars.texts["ringtrain"] == ["1.50 x", ""]


def test_overlap_and_launch():
    measured = result("ringtrain-tcp", 0.3, bytes=10**6, free_cores="one", computing_seconds_median=0.2,
                      sending_seconds_median=0.25, beyond_the_larger=0.25)  # fmt: skip
    (bars,) = plot.figures_of(document("overlap", measured))
    assert bars.systems == {"computing alone": [0.2], "sending alone": [0.25], "both in one step": [0.3]}
    assert bars.texts == {"both in one step": ["+ 25%"]}
    job = {"job": "true", "ringtrainrun_seconds_median": 1.0, "torchrun_seconds_median": 4.0}
    (bars,) = plot.figures_of(document("launch", job, np=2))
    assert bars.systems == {"ringtrainrun": [1.0], "torchrun": [4.0]} and bars.groups == ["true"]


def test_results_that_are_no_times_are_not_drawn():
    assert plot.figures_of(document("idle", {"system": "ringtrain", "rank": 0, "threads": 2})) == []


def test_ours_peers_and_floors_have_colours_of_their_own():
    names = ["ringtrain", "ringtrain-int8", "gloo", "mpi", "memcpy"]
    colours = plot.colours_of(names)
    assert len(set(colours.values())) == 5 and colours["memcpy"] == plot.FLOOR and colours["ringtrain"] == plot.OURS[0]


# ---- the command ----


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command_line.main(["plot", "any.json", "-o", "anywhere"]) == 2
    assert "pip install 'ringtrain[plot]'" in capsys.readouterr().err


def test_svg_files_are_drawn_and_repeat(tmp_path, capsys):
    documents.write(tmp_path / "allreduce.json", document("allreduce", *ALLREDUCE))
    documents.write(tmp_path / "train.json", document("train", *TRAIN))
    files = [str(tmp_path / name) for name in ("allreduce.json", "train.json")]
    for folder in ("one", "other"):
        assert command_line.main(["plot", *files, "-o", str(tmp_path / folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    for name, words in (("allreduce", {"gloo", "memcpy", "4KB", "1MB"}), ("train", {"ddp", "mlp", "1.50 x"})):
        drawn = (tmp_path / "one" / f"{name}.svg").read_bytes()
        assert drawn == (tmp_path / "other" / f"{name}.svg").read_bytes()
        said = {
            "".join(text.itertext()).strip() for text in xml.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
        }
        assert words <= said and not any("/somewhere" in text for text in said)


def test_a_file_that_is_none_of_ours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    lacks = copy.deepcopy(document("train", *TRAIN))
    del lacks["results"][0]["system"]
    documents.write(tmp_path / "lacks.json", lacks)
    for name, words in (("absent.json", "No such file"), ("lacks.json", "a result lacks 'system'")):
        assert command_line.main(["plot", str(tmp_path / name), "-o", str(tmp_path)]) == 1
        assert words in capsys.readouterr().err
