"""What a test leaves behind is noticed, and what libraries do once is none of it."""

import sys
import threading

import leaks
import numpy as np
import pytest


def changes(change) -> list[str]:
    before = leaks.state()
    change()
    return leaks.differences(before, leaks.state())


def test_a_change_is_told_with_what_was_before(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    assert changes(lambda: monkeypatch.setenv("SOME_VARIABLE", "1")) == [
        "os.environ SOME_VARIABLE: '(missing)' before, '1' now"
    ]
    assert len(changes(lambda: monkeypatch.chdir(tmp_path))) == 1
    assert len(changes(lambda: monkeypatch.syspath_prepend(tmp_path))) == 1
    assert changes(lambda: None) == []


def test_settings_of_libraries_are_looked_at() -> None:
    with np.errstate(divide="ignore"):
        before = leaks.state()
    assert leaks.differences(before, leaks.state()) == ["np.geterr() divide: 'ignore' before, 'warn' now"]
    import torch

    before = leaks.state()
    torch.set_default_dtype(torch.float64)
    try:
        assert len(leaks.differences(before, leaks.state())) == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_hook_that_a_package_makes_once_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*_: object) -> None:
        pass

    monkeypatch.setattr(sys, "excepthook", hook)
    assert leaks.unless_for_good(sys.excepthook) is hook
    hook.__module__ = "ringtrain._runtime.exits"
    assert leaks.unless_for_good(sys.excepthook) == leaks.unless_for_good(sys.__excepthook__)


def test_threads_of_ranks_are_looked_at() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="rank-7", daemon=True)
    thread.start()
    assert thread in leaks.threads()
    end.set()
    thread.join()
    assert thread not in leaks.threads()
