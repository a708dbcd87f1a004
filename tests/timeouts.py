"""A pytest plugin: the time of a test ends within a phase of the test, and never while pytest writes its report.

pytest-timeout raises wherever the main thread is. Between two phases that is in pytest itself, which then ends the whole run with
an INTERNALERROR. There the alarm waits for the next phase; of a test that has failed, pytest-timeout takes it back.
"""

import signal
from collections.abc import Iterator

import pytest

AGAIN = 0.1  # seconds until an alarm that came between two phases comes again


class Phase:
    """Whether a test is being set up, called or torn down."""

    runs = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_timeout_set_timer() -> Iterator[None]:
    result = yield
    if callable(fail := signal.getsignal(signal.SIGALRM)):

        def fail_within_a_phase(number, frame) -> None:
            __tracebackhide__ = True
            if Phase.runs:
                fail(number, frame)
            else:
                signal.setitimer(signal.ITIMER_REAL, AGAIN)

        signal.signal(signal.SIGALRM, fail_within_a_phase)
    return result


def phase() -> Iterator[None]:
    Phase.runs = True
    try:
        return (yield)
    finally:
        Phase.runs = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from phase())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call() -> Iterator[None]:
    return (yield from phase())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    return (yield from phase())
