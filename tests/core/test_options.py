"""Options: where they come from, which one wins, and what is refused."""

import pathlib

import pytest
from worlds import World, sizes

from ringtrain._binding import options, tables
from ringtrain._runtime import context
from ringtrain.errors import InvalidArgumentError, RingtrainError

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "options.md"


def test_document_is_generated_from_the_table():
    assert DOCUMENT.read_text() == options.markdown(), "run: python -m ringtrain._binding.options > docs/options.md"


def test_argument_beats_our_variable_beats_horovods():
    name, ours, theirs = "fusion_threshold_bytes", "RINGTRAIN_FUSION_THRESHOLD_BYTES", "HOROVOD_FUSION_THRESHOLD"
    assert options.resolve({}, {}) == {}
    assert options.resolve({}, {theirs: "1"}) == {name: "1"}
    assert options.resolve({}, {theirs: "1", ours: "2"}) == {name: "2"}
    assert options.resolve({name: 3}, {theirs: "1", ours: "2"}) == {name: "3"}
    assert options.resolve({name: None}, {ours: "2"}) == {name: "2"}
    assert options.resolve({}, {ours: ""}) == {}, "an empty variable is an unset one"


def test_horovods_word_for_a_timeline_that_starts_later():
    assert options.resolve({}, {"HOROVOD_TIMELINE": "DYNAMIC"}) == {}
    assert options.resolve({}, {"HOROVOD_TIMELINE": "trace.json"}) == {"timeline": "trace.json"}


@pytest.mark.parametrize("option", tables.OPTIONS, ids=lambda option: option.name)
def test_every_option(option):
    """The default passes, in the environment and as an argument; nonsense is refused and the text names its source."""
    if option.initial:
        assert options.resolve({}, {option.variable: option.initial}).keys() == {option.name}
        assert options.resolve({option.name: option.initial}, {}).keys() == {option.name}
    nonsense = "two\nlines" if option.type == "kText" else "nonsense"
    with pytest.raises(InvalidArgumentError, match=option.variable):
        options.resolve({}, {option.variable: nonsense})
    with pytest.raises(InvalidArgumentError, match=f"option {option.name}"):
        options.resolve({option.name: nonsense}, {})


@pytest.mark.parametrize(
    "value", ["", " ", "1.5", "0x10", "1e3", "ten", "(None,)", True, "nan", "-1", "99999999999999"]
)
def test_whole_numbers_are_parsed_strictly(value):
    with pytest.raises(InvalidArgumentError, match="whole number"):
        options.resolve({"cache_capacity": value}, {})


@pytest.mark.parametrize("value", ["inf", "nan", "-0.1", "soon", False])
def test_numbers_are_parsed_strictly(value):
    with pytest.raises(InvalidArgumentError, match="number"):
        options.resolve({"start_timeout_seconds": value}, {})


def test_library_parses_the_same_lines():
    """Every default, spelled out, opens a world; what gets past Python is refused by the library too."""
    chosen = {option.name: option.initial for option in tables.OPTIONS if option.initial}
    with World(sizes()[0], **chosen) as world:
        world.run(lambda rank: None)
    assert options.as_lines({"a": "1", "b": "x=y"}) == b"a=1\nb=x=y\n"


@pytest.mark.on_threads("opens ranks with different options")
@pytest.mark.parametrize("size", sizes(least=2))
def test_ranks_must_agree_on_what_shapes_the_exchange(size):
    from ringtrain._bootstrap import opening

    original = opening.open_in_process

    def differing(hub, rank, chosen):
        return original(hub, rank, {**chosen, "chunk_bytes": str(4096 * (1 + rank // (size - 1)))})

    opening.open_in_process = differing
    try:
        with pytest.raises(
            RingtrainError, match=f"RINGTRAIN_CHUNK_BYTES must be the same on all ranks.*rank {size - 1}"
        ):
            World(size)
    finally:
        opening.open_in_process = original


@pytest.mark.on_threads("opens ranks with different options")
def test_ranks_of_a_host_must_be_at_one_site(monkeypatch):
    from ringtrain._bootstrap import opening

    original = opening.open_in_process
    monkeypatch.setattr(
        opening, "open_in_process", lambda hub, rank, chosen: original(hub, rank, {**chosen, "site": f"s{rank}"})
    )
    with World(3, "1+1+1") as world:
        assert world.run(lambda rank: context.current().site) == [0, 1, 2]
    with pytest.raises(
        RingtrainError,
        match="option site must be the same on all ranks of a host, but is 's0' on rank 0 and 's1' on rank 1",
    ):
        World(3, "2+1")


def test_log_level():
    assert options.log_level({}) is None
    assert options.log_level({"RINGTRAIN_LOG_LEVEL": "Warning"}) == 30
    with pytest.raises(InvalidArgumentError, match="debug, info, warning, error but found 'trace'"):
        options.log_level({"RINGTRAIN_LOG_LEVEL": "trace"})


def test_variables_of_autotune_are_told_to_have_no_effect():
    line = (
        "HOROVOD_AUTOTUNE, HOROVOD_AUTOTUNE_LOG: without effect, since other settings are not tried while a job runs. "
        "docs/options.md has them."
    )
    assert options.remarks({"HOROVOD_AUTOTUNE_LOG": "log.csv", "HOROVOD_AUTOTUNE": "1", "PATH": "/"}) == [line]
    assert options.remarks({"HOROVOD_AUTOTUNE_LOG": "log.csv", "HOROVOD_AUTOTUNE": "0"}) == []
    assert options.resolve({}, {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"}) == {}


def test_a_misspelt_variable_is_told_with_the_nearest_name():
    line = (
        "RINGTRAIN_DEAD_AFTER_SECOND: it must be a known variable to have an effect, "
        "but there is none of this name. The nearest is RINGTRAIN_DEAD_AFTER_SECONDS."
    )
    of_others = dict.fromkeys(
        ("RINGTRAIN_TEST_JOB", "RINGTRAIN_VENV", "RINGTRAIN_SLOTS", "RINGTRAIN_MY_OWN", "PATH"), "1"
    )
    assert options.misspelt({"RINGTRAIN_DEAD_AFTER_SECOND": "3", "RINGTRAIN_DEAD_AFTER_SECONDS": "3", **of_others}) == [
        line
    ]
