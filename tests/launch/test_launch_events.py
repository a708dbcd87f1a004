"""The loop around a selector, of the launcher and of its agents."""

import os
import selectors

from ringtrain.launch.agent.events import call_ready


def test_what_an_earlier_call_has_closed_is_not_called():
    first, second = os.pipe(), os.pipe()
    called = []
    with selectors.DefaultSelector() as selector:

        def close(own, other):
            called.append(own)
            for descriptor in (own, other):
                selector.unregister(descriptor)
                os.close(descriptor)

        for own, other in ((first[0], second[0]), (second[0], first[0])):
            selector.register(own, selectors.EVENT_READ, lambda own=own, other=other: close(own, other))
        for _, write_end in (first, second):
            os.close(write_end)
        call_ready(selector, 1.0)
    assert len(called) == 1


def test_a_new_descriptor_of_the_same_number_is_not_taken_for_the_old_one():
    first, second, third = os.pipe(), os.pipe(), os.pipe()
    called = []
    with selectors.DefaultSelector() as selector:

        def replace(own, other):
            called.append(own)
            selector.unregister(other)
            os.dup2(third[0], other)
            selector.register(other, selectors.EVENT_READ, lambda: called.append("new"))

        for own, other in ((first[0], second[0]), (second[0], first[0])):
            selector.register(own, selectors.EVENT_READ, lambda own=own, other=other: replace(own, other))
        for _, write_end in (first, second):
            os.write(write_end, b"x")
        call_ready(selector, 1.0)
    assert len(called) == 1 and "new" not in called
    for descriptor in (*first, *second, *third):
        os.close(descriptor)
