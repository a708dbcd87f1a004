"""`bin/test --changed`: which tests a change reaches, and which of them there is time for."""

import budget
import changed
import pytest

REACHES = {
    "tests/with_torch/test_a.py": {"ringtrain/torch/optimizer.py"},
    "tests/with_torch/test_b.py": {"ringtrain/torch/reducer.py"},
    "tests/launch/test_c.py": {"ringtrain/launch/job.py", "ringtrain/__init__.py"},
    "tests/core/test_d.py": {"ringtrain/__init__.py"},
    "tests/native/match_test.cc": {"native/agree/match.h"},
    "ringtrain/torch/optimizer.py": {"ringtrain/torch/reducer.py", "ringtrain/__init__.py"},
    "ringtrain/__init__.py": {"ringtrain/_binding/_native.py"},
    "ringtrain/_binding/_native.py": {"native/agree/match.cc"},
    "native/agree/match.h": {"native/agree/match.cc"},
}


def chosen(*files: str, room: float = 1000.0, **seconds: float) -> tuple[list[str], list[str]]:
    """The names of what is taken and of what is left."""
    of_files = {file: seconds.get(file.rpartition("_")[2].partition(".")[0], 1.0) for file in REACHES}
    taken, left = changed.choose(REACHES, set(files), of_files, room)
    return [each.file for each in taken], [each.file for each in left]


def test_nearer_tests_come_first_and_only_what_reaches_the_change() -> None:
    assert chosen("ringtrain/torch/reducer.py") == (["tests/with_torch/test_b.py", "tests/with_torch/test_a.py"], [])
    assert chosen("ringtrain/launch/job.py") == (["tests/launch/test_c.py"], [])
    assert chosen("docs/nothing.md") == ([], [])


def test_a_change_of_the_core_reaches_its_own_tests_and_then_those_of_python() -> None:
    taken, left = chosen("native/agree/match.cc")
    assert taken[:2] == ["tests/native/match_test.cc", "tests/core/test_d.py"] and not left
    assert set(taken[2:]) == {"tests/launch/test_c.py", "tests/with_torch/test_a.py"}


def test_what_takes_too_long_is_left_and_the_nearest_never() -> None:
    assert chosen("ringtrain/torch/reducer.py", room=10.0, b=11.0) == (
        ["tests/with_torch/test_b.py"],
        ["tests/with_torch/test_a.py"],
    )
    assert chosen("ringtrain/torch/reducer.py", room=10.0, a=10.0)[1] == ["tests/with_torch/test_a.py"]


def test_a_test_that_has_changed_is_run() -> None:
    assert chosen("tests/core/test_d.py") == (["tests/core/test_d.py"], [])


@pytest.fixture(scope="module")
def of_this_checkout() -> dict[str, set[str]]:
    return changed.reaches()


@pytest.mark.parametrize(
    "file, first, never_first",
    [
        ("ringtrain/torch/exchange.py", "tests/with_torch/", "tests/launch/"),
        ("ringtrain/launch/job.py", "tests/launch/", "tests/with_torch/"),
        ("ringtrain/keras/reduction.py", "tests/with_keras/", "tests/launch/"),
        ("native/agree/negotiator.cc", "tests/native/", "tests/launch/"),
    ],
)
def test_in_this_checkout(file: str, first: str, never_first: str, of_this_checkout: dict[str, set[str]]) -> None:
    taken, _ = changed.choose(of_this_checkout, {file}, changed.measured())
    assert taken[0].file.startswith(first) and taken[0].way[-1] == file
    nearest = [each.file for each in taken[:5]]
    assert not [each for each in nearest if each.startswith(never_first)]
    assert sum(each.seconds for each in taken) < changed.ROOM + 0.1


def test_what_many_tests_use_leads_to_nothing_else(of_this_checkout: dict[str, set[str]]) -> None:
    """Neither does bin/test by the tests that it names, nor a fixture of all tests by an adapter, nor a text that says `bin/test`."""
    taken, left = changed.choose(of_this_checkout, {"ringtrain/jax/operations.py"}, {})
    files = [each.file for each in taken + left]
    assert "tests/with_jax/test_jax.py" in files and len(files) < 50, files
    assert not [file for file in files if file.startswith("tests/native/")]
    taken, left = changed.choose(of_this_checkout, {"tests/conftest.py"}, {})
    assert {each.file for each in taken + left} == {file for file in of_this_checkout if changed.is_test(file)}


def test_tests_that_start_a_program_reach_it(of_this_checkout: dict[str, set[str]]) -> None:
    taken, left = changed.choose(of_this_checkout, {"ringtrain/launch/job.py"}, {})
    ways = {each.file: each.way for each in taken + left}
    assert "ringtrain/launch/__main__.py" in ways["tests/launch/test_launch_shells.py"]
    taken, _ = changed.choose(of_this_checkout, {"tests/faults/elastic_fit.py"}, {})
    assert "tests/faults/test_elastic_frameworks.py" in [each.file for each in taken]


def test_a_file_that_is_as_it_was_is_not_read_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(changed, "KNOWN", tmp_path / "known.json")
    first = changed.reaches()
    monkeypatch.setattr(changed, "references", lambda file, text: pytest.fail(f"{file} was read again", pytrace=False))
    assert changed.reaches() == first


def test_each_file_that_was_measured_is_there() -> None:
    gone = [file for file in changed.measured() if not (changed.ROOT / file).exists()]
    assert not gone, "type: bin/test tests/project/test_changed.py -- --record-seconds"


def test_a_run_records_its_files_and_forgets_those_that_are_gone() -> None:
    here, other = "tests/project/test_changed.py", "tests/project/test_bin.py"
    assert budget.recorded({here: 1.0, other: 2.0, "tests/gone.py": 3.0}, {here: 4.0}) == {here: 4.0, other: 2.0}


def test_every_folder_that_is_named_has_tests() -> None:
    folders = {folder for each in changed.FOLDERS.values() for folder in each}
    assert {folder for folder in folders if not (changed.ROOT / "tests" / folder).is_dir()} == set()
