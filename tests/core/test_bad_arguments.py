"""Every public operation with arguments that one rank alone gets wrong: all ranks fail with the same words, at once.

A row of BAD is the name of an argument and what makes a value that it cannot take. It is tried with every operation of
CALLS that has the argument, named and unnamed, on rank 1 of two, while rank 0 calls rightly; then the same operation is
called rightly by both. To try another value, add a row to BAD; for a new operation, a row to CALLS.
"""

import threading
import time

import numpy as np
import pytest
from refusals import said_alike
from worlds import World

import ringtrain as rt
from ringtrain._runtime import context, submission
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError

pytestmark = [
    pytest.mark.on_threads("a world of two"),
]

MOST_SECONDS = 60  # for both ranks to hear of it, on a busy machine; a stall takes twice as long


def ones():
    return np.ones((2, 3), np.float32)


def two():
    return [np.ones(4, np.float32), np.ones((2, 2), np.float64)]


TENSOR, TENSORS = {"tensor": ones}, {"tensors": two}
REDUCES = {"op": lambda: rt.Average, "prescale_factor": lambda: 1.0, "postscale_factor": lambda: 1.0,
           "compression": lambda: rt.Compression.none, "weight": lambda: 3}  # fmt: skip
ROOT = {"root_rank": lambda: 0}

# Each operation with what makes its right arguments; `name` and `process_set` come to all that have them.
CALLS = {
    "allreduce": TENSOR | REDUCES,
    "allreduce_async": TENSOR | REDUCES,
    "allreduce_": TENSOR | REDUCES,
    "allreduce_async_": TENSOR | REDUCES,
    "grouped_allreduce": TENSORS | REDUCES,
    "grouped_allreduce_async": TENSORS | REDUCES,
    "grouped_allreduce_": TENSORS | REDUCES,
    "grouped_allreduce_async_": TENSORS | REDUCES,
    "allgather": TENSOR,
    "allgather_async": TENSOR,
    "grouped_allgather": TENSORS,
    "grouped_allgather_async": TENSORS,
    "broadcast": TENSOR | ROOT,
    "broadcast_async": TENSOR | ROOT,
    "broadcast_": TENSOR | ROOT,
    "broadcast_async_": TENSOR | ROOT,
    "alltoall": TENSOR | {"splits": lambda: [1, 1]},
    "alltoall_async": TENSOR | {"splits": lambda: [1, 1]},
    "reducescatter": TENSOR | REDUCES,
    "reducescatter_async": TENSOR | REDUCES,
    "grouped_reducescatter": TENSORS | REDUCES,
    "grouped_reducescatter_async": TENSORS | REDUCES,
    "barrier": {},
    "broadcast_object": ROOT | {"obj": lambda: "an object"},
    "allgather_object": {"obj": lambda: "an object"},
    "check_replicas": {"tensors": lambda: {"w": ones()}, "every": lambda: 1},
    "check_finite": {"tensors": lambda: {"w": ones()}},
}
UNNAMED = {"barrier", "check_replicas", "check_finite"}  # they take no name


class Raises:
    """An array that fails when it is looked at."""

    def __array__(self, *_, **__):
        raise ZeroDivisionError("division by zero\0in an array")


class Speechless(Exception):
    """An exception that cannot say what it is about."""

    def __str__(self):
        raise RuntimeError("no words")


class RaisesSpeechless:
    def __array__(self, *_, **__):
        raise Speechless

    def __repr__(self):
        raise Speechless


class Huge:
    """More memory than there is."""

    def __array__(self, *_, **__):
        raise MemoryError


class NoPickle:
    def __reduce__(self):
        raise TypeError("this object cannot travel \udc80")


def gone():
    removed = rt.ProcessSet([0, 1])
    removed.process_set_id = 77
    return removed


NO_TENSORS = [
    ("nothing", lambda: None), ("text", lambda: "text"), ("an object", object), ("a list of texts", lambda: ["a", "b"]),
    ("a ragged list", lambda: [[1], [1, 2]]), ("long double", lambda: np.ones((2, 3), np.longdouble)),
    ("dates", lambda: np.zeros((2, 3), "M8[s]")), ("objects", lambda: np.array([[None] * 3] * 2)),
    ("a structure", lambda: np.zeros((2, 3), [("a", "f4")])), ("masked", lambda: np.ma.ones((2, 3), np.float32)),
    ("one that raises", Raises), ("one that raises without words", RaisesSpeechless), ("too large for the memory", Huge),
    ("another dtype", lambda: np.ones((2, 3), np.int16)), ("another rank", lambda: np.ones((2, 3, 1), np.float32)),
]  # fmt: skip
NO_NUMBERS = [
    ("nothing", lambda: None), ("text", lambda: "1.0"), ("a list", lambda: [1.0]), ("a complex number", lambda: 1j),
    ("nan", lambda: float("nan")), ("inf", lambda: float("inf")), ("-inf", lambda: -float("inf")), ("a huge int", lambda: 10**400),
    ("one that raises", Raises),
]  # fmt: skip
BAD = {
    "tensor": NO_TENSORS + [
        ("a generator", lambda: (i for i in range(3))),
    ],
    "tensors": [(f"a list with {what}", lambda make=make: [ones(), make()]) for what, make in NO_TENSORS] + [
        ("nothing", lambda: None), ("a number", lambda: 5), ("a generator that raises", lambda: (1 // 0 for _ in range(2))),
        ("fewer tensors", lambda: two()[:1]),
    ],
    "op": [
        ("text", lambda: "Sum"), ("unknown", lambda: 99), ("negative", lambda: -1), ("a list", lambda: [1]),
        ("an array", lambda: np.arange(3)), ("nan", lambda: float("nan")), ("another", lambda: rt.Max), ("raises", RaisesSpeechless),
    ],
    "prescale_factor": NO_NUMBERS + [("another", lambda: 2.0)],
    "postscale_factor": NO_NUMBERS + [("another", lambda: -1.0)],
    "compression": [
        ("nothing", lambda: None), ("unknown", lambda: "zip"), ("a list", list), ("another", lambda: rt.Compression.fp16),
    ],
    "weight": [
        ("negative", lambda: -1), ("1e30", lambda: 10**30), ("just too large", lambda: (1 << 40) + 1), ("a fraction", lambda: 0.5),
        ("text", lambda: "3"), ("none", lambda: None), ("an array", lambda: np.arange(3)), ("-2^63", lambda: -(1 << 63)),
    ],
    "root_rank": [
        ("too high", lambda: 2), ("negative", lambda: -1), ("2^40", lambda: 1 << 40), ("-2^70", lambda: -(1 << 70)),
        ("text", lambda: "0"), ("nothing", lambda: None), ("a fraction", lambda: 0.5), ("an array", lambda: np.arange(3)),
        ("another", lambda: 1),
    ],
    "splits": [
        ("too few", lambda: [2]), ("too many", lambda: [1, 1, 0]), ("negative", lambda: [3, -1]), ("too small", lambda: [0, 1]),
        ("a sum beyond int64", lambda: [(1 << 63) - 1, 3]), ("beyond int64", lambda: np.array([1 << 63, 1], np.uint64)),
        ("beyond any int", lambda: [1 << 70, 1]), ("fractions", lambda: [0.5, 1.5]), ("text", lambda: "11"), ("ragged", lambda: [[1], 1]),
        ("two dimensions", lambda: [[1, 1]]), ("one that raises", Raises), ("a number", lambda: 2),
    ],
    "process_set": [
        ("nothing", lambda: None), ("a number", lambda: 0), ("a list", lambda: [0, 1]), ("text", lambda: "world"),
        ("an unregistered one", lambda: rt.ProcessSet([0, 1])), ("one that raises", RaisesSpeechless),
    ],
    "obj": [("one that does not pickle", NoPickle), ("a lock", threading.Lock)],
    "every": [("0", lambda: 0), ("text", lambda: "1"), ("nothing", lambda: None)],
}  # fmt: skip
CHECKED = [
    ("nothing", lambda: None), ("a number", lambda: 5), ("no pairs", lambda: [1, 2]), ("a text", lambda: {"w": "text"}),
    ("another name", lambda: {"v": ones()}), ("one that raises", lambda: {"w": Raises()}), ("fewer", dict),
]  # fmt: skip
BAD_FOR = {("check_replicas", "tensors"): CHECKED, ("check_finite", "tensors"): CHECKED}  # in the place of BAD's rows
WRONG_RANK = {("broadcast_object", "obj"): 0}  # where it is not rank 1: only the root's object counts


def rows(operation):
    """Argument, what is wrong, and what makes it."""
    for argument in [*CALLS[operation], "process_set"]:
        for what, make in BAD_FOR.get((operation, argument), BAD[argument]):
            yield argument, what, make


def call(operation, name, **changed):
    arguments = {argument: make() for argument, make in (CALLS[operation] | changed).items()}
    if operation not in UNNAMED:
        arguments["name"] = name
    result = getattr(rt, operation)(**arguments)
    return rt.synchronize(result) if "_async" in operation else result


def same_bits(left, right):
    if isinstance(left, (list, tuple)):
        return all(same_bits(*pair) for pair in zip(left, right, strict=True))
    return np.array_equal(left, right)


@pytest.fixture(scope="module")
def pair():
    with World(2, stall_abort_seconds=2 * MOST_SECONDS) as world:
        yield world


def outcome(function, *arguments, **keywords):
    """Class and text of what it raised, or None; it must not take long."""
    begin = time.monotonic()
    try:
        function(*arguments, **keywords)
        text = None
    except rt.RingtrainError as problem:
        text = f"{type(problem).__name__}: {problem}"
    seconds = time.monotonic() - begin
    return text if seconds < MOST_SECONDS else f"after {seconds} s: {text}"  # which the other rank does not say alike


@pytest.mark.parametrize("operation", CALLS)
def test_one_rank_alone_is_wrong(pair, operation):
    for argument, what, make in rows(operation):
        wrong_rank = WRONG_RANK.get((operation, argument), 1)
        for name in ["x"] if operation in UNNAMED else ["x", None]:

            def on_rank(rank, wrong={argument: make}, wrong_rank=wrong_rank, name=name):
                return outcome(call, operation, name, **(wrong if rank == wrong_rank else {}))

            texts = pair.run(on_rank)
            row = f"{operation}({argument}={what}, name={name})"
            assert texts[0] is not None, f"{row}: nobody saw it"
            assert texts[0] == texts[1], row
            assert "\0" not in texts[0] and len(texts[0]) < 5000, row
            pair.run(lambda rank, name=name: call(operation, name))  # in step: also the numbers of unnamed ones


NO_NAMES = [
    ("a NUL", lambda: "x\0one", "must not contain a NUL"), ("a surrogate", lambda: "x\udc80", "UTF-8 can encode"),
    ("a list", lambda: ["x"], "must be a str, but is of type list"), ("a number", lambda: 5, "must be a str"),
    ("bytes", lambda: b"x", "must be a str"), ("empty", lambda: "", "must not be empty"),
]  # fmt: skip


@pytest.mark.parametrize("operation", sorted(CALLS.keys() - UNNAMED - {"broadcast_object", "allgather_object"}))
def test_wrong_names(pair, operation):
    """All ranks give it: a rank that alone has another name is one that left the operation out."""
    for what, make, words in NO_NAMES:
        texts = pair.run(lambda rank, name=make: outcome(call, operation, name()))
        assert texts[0] is not None and said_alike(texts) and words in texts[0], (what, texts)
        pair.run(lambda rank: call(operation, "x"))


def test_names_that_differ_behind_a_nul_are_not_added_up(pair):
    """A C text would end there, and the two would be one operation."""

    def on_rank(rank):
        return outcome(rt.allreduce, np.ones(3), f"q\0{rank}", rt.Sum)

    assert all(text is not None and "NUL" in text for text in pair.run(on_rank))


ADDED = [
    ("nothing", lambda: None), ("a number", lambda: 5), ("texts", lambda: ["a"]), ("no ranks", list), ("a rank twice", lambda: [0, 0]),
    ("a rank too high", lambda: [0, 2]), ("a negative rank", lambda: [-1, 0]), ("beyond int64", lambda: [1 << 70]),
    ("a fraction", lambda: [0.5]), ("digits", lambda: "01"), ("another set", lambda: [0]), ("a registered one", gone),
    ("one that raises", Raises),
]  # fmt: skip
REMOVED = [("nothing", lambda: None), ("a number", lambda: 1), ("one that is not there", gone)]


def test_process_sets(pair):
    def add(ranks):
        added = rt.add_process_set(ranks)
        rt.remove_process_set(added)

    for what, make in ADDED:
        texts = pair.run(lambda rank, make=make: outcome(add, make() if rank == 1 else [0, 1]))
        assert texts[0] is not None and texts[0] == texts[1], (what, texts)
        pair.run(lambda rank: add([0, 1]))
    both = pair.run(lambda rank: rt.add_process_set([0, 1]))
    for what, make in REMOVED:
        texts = pair.run(lambda rank, make=make: outcome(rt.remove_process_set, make() if rank == 1 else both[rank]))
        assert texts[0] is not None and texts[0] == texts[1], (what, texts)
    pair.run(lambda rank: rt.remove_process_set(both[rank]))


def test_the_cause_is_kept_and_interrupts_are_not_announced(pair):
    def on_rank(rank):
        with pytest.raises(
            InvalidArgumentError, match="rank 1 could not: ZeroDivisionError: division by zero"
        ) as caught:
            rt.allreduce(Raises() if rank == 1 else ones(), "x")
        assert (rank == 1) == isinstance(caught.value.__cause__, ZeroDivisionError)

    pair.run(on_rank)


@pytest.mark.parametrize("kind", [InvalidArgumentError, UnsupportedError, MismatchError])
def test_all_ranks_raise_the_class_that_one_has_met(pair, kind):
    def refused(rank):
        with submission.preparing("allreduce", "x", rt.global_process_set):
            if rank == 1:
                raise kind("this rank cannot.")
        rt.allreduce(ones(), "x")

    texts = pair.run(lambda rank: outcome(refused, rank))
    assert texts[0] == texts[1] == f"{kind.__name__}: allreduce 'x': this rank cannot. Found on rank 1."


def test_the_largest_text_is_cut(pair):
    class Wordy:
        def __array__(self, *_, **__):
            raise ValueError("ä" * 10_000_000)

    texts = pair.run(lambda rank: outcome(rt.allreduce, Wordy() if rank == 0 else ones(), "x"))
    assert texts[0] == texts[1] and texts[0].endswith("ää... Found on rank 0.")
    assert len(texts[0].removeprefix("InvalidArgumentError: ").encode()) <= 4000


@pytest.mark.parametrize("name", ["one\ntwo", "one\u2028two", "one\x1ctwo|three", 'tab\tquote"backslash\\'])
def test_line_ends_in_a_name_harm_nothing(name):
    def on_rank(rank):
        assert rt.allreduce(np.ones(1), name, rt.Sum)[0] == 2
        return [late.name for late in rt.stats().late]

    with World(2) as world:
        assert world.run(on_rank)[0] == [name.replace("\n", " ")]


def test_a_cause_with_odd_characters_reaches_the_peers():
    """The text of an uncaught exception may have anything in it, such as the bytes of a file's name."""

    def on_rank(rank):
        if rank == 1:
            context.current().abort("rank 1 ended: no file 'a\0b\udc80'")
        return outcome(rt.allreduce, np.ones(1), "x")

    with World(2) as world:
        assert world.run(on_rank) == ["PeerLostError: rank 1 ended: no file 'a\\x00b\\udc80'"] * 2
