"""What fails in the operations for TensorFlow: mismatches, names, arguments, lost ranks, ended worlds."""

import logging
import time

import pytest
import tensorflow as tf
from test_tensorflow_operations import mode, three  # noqa: F401 - the fixtures

import ringtrain.tensorflow as hvd
from ringtrain._runtime import exits
from ringtrain.testing import World

ERRORS = tf.errors


def await_record(caplog, text):
    """Waits until the library has logged a line with this text."""
    deadline = time.monotonic() + 60
    while not any(text in record.getMessage() for record in caplog.records):
        assert time.monotonic() < deadline, f"nothing was logged of: {text}"
        time.sleep(0.05)


def test_a_mismatch_has_the_same_words_on_every_rank(three, mode):
    def body(rank):
        with pytest.raises(ERRORS.FailedPreconditionError) as caught:
            mode(lambda x: hvd.allreduce(x, name="loss"))(tf.ones([2 if rank == 1 else 3]))
        assert hvd.allreduce(tf.constant(1.0), name="loss") == 1.0  # the name is free, and the world is well
        return (
            caught.value.message.partition("allreduce")[2].partition("\n")[0].partition(" [[")[0].partition(" [Op:")[0]
        )

    texts = three.run(body)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        " 'loss': shape must be the same on all ranks, but is [3] on ranks 0, 2 and [2] on rank 1."
    )


def test_a_name_in_flight_is_refused(caplog):
    """The first operation of that name goes on unharmed, and the step fails once it is done."""

    def body(rank):
        if rank == 1:
            await_record(
                caplog, "allreduce 'twice': waiting"
            )  # rank 0 began its step a second ago, so it has submitted both
            return float(hvd.allreduce(tf.constant(2.0), name="twice"))
        step = tf.function(lambda x: (hvd.allreduce(x, name="twice"), hvd.allreduce(x, name="twice")))
        with pytest.raises(ERRORS.InvalidArgumentError, match="'twice': the name must not be in flight"):
            step(tf.constant(1.0))

    with caplog.at_level(logging.WARNING, "ringtrain"), World(2, stall_warning_seconds=1) as world:
        assert world.run(body) == [None, 1.5]


@pytest.mark.parametrize("arguments, error, text", [
    ({"op": 17}, ValueError, "allreduce 'x': op must be one of Average"),
    ({"op": hvd.Sum, "average": True}, ValueError, "expected op or the deprecated average but found both"),
    ({"process_set": 5}, ValueError, "process_set: expected a ProcessSet but found 5"),
])  # fmt: skip
def test_bad_arguments(three, arguments, error, text):
    with pytest.raises(error, match=text):
        three.run(lambda _: hvd.allreduce(tf.constant(1.0), name="x", **arguments))


def test_without_a_world():
    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(tf.constant(1.0))


def test_an_abort_fails_what_is_pending(mode):
    """In the middle of a step: the rank that waits raises the cause, instead of waiting for ever."""

    def body(rank):
        if rank == 1:
            hvd.allreduce(tf.constant(1.0), name="first")
            raise ValueError("no more data")
        with pytest.raises(ERRORS.UnknownError, match="rank 1 raised ValueError: no more data") as caught:
            mode(lambda x: [hvd.allreduce(x, name=name) for name in ("first", "second", "third")])(tf.constant(1.0))
        assert exits.words_of(caught.value) == "rank 1 raised ValueError: no more data"  # of a text of many lines
        with pytest.raises(ERRORS.UnknownError, match="no more data") as caught:
            hvd.allreduce(tf.constant(1.0))
        assert exits.words_of(caught.value) == "rank 1 raised ValueError: no more data"
        assert exits.error_of_a_peer(caught.value) is caught.value  # so that the launcher does not blame this rank
        survived.append(rank)

    survived = []
    with World(2) as world, pytest.raises(ValueError, match="no more data"):
        world.run(body)
    assert survived == [0]


def test_a_stall_is_reported_while_tensorflow_waits(caplog):
    """Nobody in Python waits for the operation, so its waits pass no lines on."""

    def body(rank):
        if rank == 1:
            await_record(caplog, "allreduce 'slow': waiting")
        return float(tf.function(lambda x: hvd.allreduce(x, name="slow"))(tf.constant(1.0)))

    with caplog.at_level(logging.WARNING, "ringtrain"), World(2, stall_warning_seconds=0.1) as world:
        assert world.run(body) == [1.0, 1.0]


def test_a_graph_of_a_closed_world_fails_and_says_so():
    functions = {}

    def body(rank):
        functions[rank] = tf.function(lambda x: hvd.allreduce(x))
        functions[rank](tf.constant(1.0))

    with World(2) as world:
        world.run(body)
    with pytest.raises(ERRORS.UnknownError, match=r"call init\(\) to start again"):
        functions[1](tf.constant(1.0))


class NoTensor:
    """What TensorFlow cannot convert."""


GOOD = tf.ones([4, 2])
BAD_CALLS = {
    "allreduce": (lambda name: hvd.allreduce(NoTensor(), name=name), lambda name: hvd.allreduce(GOOD, name=name)),
    "allreduce's op": (lambda name: hvd.allreduce(GOOD, op=17, name=name), lambda name: hvd.allreduce(GOOD, name=name)),
    "allgather": (lambda name: hvd.allgather(NoTensor(), name=name), lambda name: hvd.allgather(GOOD, name=name)),
    "broadcast": (lambda name: hvd.broadcast(NoTensor(), 0, name=name), lambda name: hvd.broadcast(GOOD, 0, name=name)),
    "broadcast's root": (lambda name: hvd.broadcast(GOOD, "0", name=name), lambda name: hvd.broadcast(GOOD, 0, name=name)),
    "alltoall": (lambda name: hvd.alltoall(GOOD, [1.5, 2.5], name=name), lambda name: hvd.alltoall(GOOD, [2, 2], name=name)),
    "reducescatter": (lambda name: hvd.reducescatter(NoTensor(), name=name), lambda name: hvd.reducescatter(GOOD, name=name)),
    "set": (lambda name: hvd.allreduce(GOOD, name=name, process_set=None), lambda name: hvd.allreduce(GOOD, name=name)),
    "barrier": (lambda name: hvd.barrier(process_set=None), lambda name: hvd.barrier()),
}  # fmt: skip


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_what_one_rank_cannot_submit_fails_on_all(case, name):
    """In seconds, with one text, and unnamed operations stay in step: the next one is right."""
    bad, good = BAD_CALLS[case]

    def body(rank):
        with pytest.raises(ERRORS.InvalidArgumentError if rank == 0 else ValueError) as caught:
            (good if rank == 0 else bad)(name)
        assert bool(tf.reduce_all(hvd.allreduce(tf.ones([3]), op=hvd.Sum, name=name) == 2.0))
        return str(caught.value)

    with World(2, stall_abort_seconds=20, stall_warning_seconds=10) as world:
        here, there = world.run(body)
    assert there in here
