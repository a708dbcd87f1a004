"""Groups of many tensors: described by one call of the core where they are plain arrays, and the same results in every other case.

And requests that are kept for the next operation of their name, whatever that looks like.
"""

import sys
import weakref

import numpy as np
import oracle
import pytest
from worlds import World, sizes

import ringtrain as rt
from ringtrain._binding import array_groups, tables
from ringtrain._binding._native import ffi
from ringtrain._runtime.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError

DTYPES = [name for name, row in tables.DTYPES.items() if name != "bool" and not row.is_foreign]
SHAPES = [
    (),
    (0,),
    (1,),
    (7, 3),
    (2, 1, 3, 2),
    (1, 2, 1, 2, 1, 2),
    (1,) * 9 + (5,),
]  # the core holds four extents in place


def integers(rank, index, shape, dtype="float32"):
    """Whole numbers that differ between ranks and tensors, small enough for each dtype to add them up exactly."""
    return ((np.arange(int(np.prod(shape))) + index) % 5 + rank).astype(dtype).reshape(shape)


def group_of(rank):
    """Tensors of all dtypes and shapes, in one order on all ranks."""
    kinds = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    return [integers(rank, index, shape, dtype) for index, (dtype, shape) in enumerate(kinds)]


def sums(size, make=group_of):
    """What a group must become, by one process."""
    return [oracle.allreduce(list(each), "sum")[0] for each in zip(*(make(rank) for rank in range(size)), strict=True)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), place
        assert one.tobytes() == other.tobytes(), place


@pytest.mark.parametrize("size", sizes())
def test_a_group_of_all_dtypes_and_shapes(size):
    expected = sums(size)

    def on_rank(rank):
        given = group_of(rank)
        assert array_groups.in_place(given) is not None
        for turn in range(3):  # the same operation again, with other arrays and with the same
            results = rt.grouped_allreduce(given, name="new", op=rt.Sum)
            assert_equal(results, expected)
            assert_equal(given, group_of(rank))
            again = group_of(rank)
            returned = rt.grouped_allreduce_(again, name="in place", op=rt.Sum)
            assert all(one is other for one, other in zip(returned, again, strict=True)), turn
            assert_equal(again, expected)
            handle = rt.grouped_allreduce_async(given, op=rt.Sum)  # without a name
            assert_equal(rt.synchronize(handle), expected)
            assert rt.synchronize(handle) is rt.synchronize(handle)

    with World(size) as world:
        world.run(on_rank)


def strided(array):
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return wide[..., 0]


OTHERS = {
    "strided": strided,
    "Fortran's order": np.asfortranarray,
    "of a subclass": lambda array: array.view(np.recarray),
    "of the other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "with metadata": lambda array: array.view(np.dtype(array.dtype, metadata={"unit": "m"})),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_one_that_is_not_plain_takes_the_whole_group_the_longer_way(kind):
    def given_by(rank):
        plain = [integers(rank, index, (4, 6)) for index in range(5)]
        return [*plain[:3], OTHERS[kind](plain[3]), plain[4]]

    def on_rank(rank):
        given = given_by(rank)
        assert array_groups.in_place(given) is None
        rt.grouped_allreduce_(given, name="mixed", op=rt.Sum)
        expected = [integers(0, index, (4, 6)) + integers(1, index, (4, 6)) for index in range(5)]
        for found, right in zip(given, expected, strict=True):
            assert np.array_equal(found, right), kind
        results = rt.grouped_allreduce(given_by(rank), name="mixed new", op=rt.Sum)
        assert all(map(np.array_equal, results, expected))

    with World(2) as world:
        world.run(on_rank)


def test_one_that_may_not_be_written_is_refused_on_all_ranks():
    def on_rank(rank):
        given = [integers(rank, index, (3,)) for index in range(4)]
        given[2].flags.writeable = rank != 1
        with pytest.raises(InvalidArgumentError, match="read-only"):
            rt.grouped_allreduce_(given, name="locked", op=rt.Sum)
        before = [integers(rank, index, (3,)) for index in range(4)]
        assert_equal(given, before)
        results = rt.grouped_allreduce(given, name="read", op=rt.Sum)  # reading is no matter
        assert_equal(results, [integers(0, index, (3,)) + integers(1, index, (3,)) for index in range(4)])

    with World(2) as world:
        world.run(on_rank)


def test_ranks_that_differ_hear_which_tensor_it_is():
    def on_rank(rank):
        for _ in range(2):  # in the second turn the request is one that was kept
            given = [np.zeros(3 + (rank == 1 and index == 2), np.float32) for index in range(4)]
            with pytest.raises(MismatchError, match=r"allreduce 'differs'.*\[4\]"):
                rt.grouped_allreduce_(given, name="differs", op=rt.Sum)

    with World(2) as world:
        world.run(on_rank)


def test_without_the_layout_each_array_is_looked_at_by_itself(monkeypatch):
    monkeypatch.setattr(array_groups, "_READABLE", None)
    monkeypatch.setattr(array_groups, "_WRITABLE", None)
    expected = sums(2)

    def on_rank(rank):
        given = group_of(rank)
        assert array_groups.in_place(given) is None
        assert_equal(rt.grouped_allreduce(given, name="new", op=rt.Sum), expected)
        assert_equal(rt.grouped_allreduce_(given, name="in place", op=rt.Sum), expected)

    with World(2) as world:
        world.run(on_rank)


@pytest.mark.parametrize("field", ["data", "ndim", "shape", "dtype", "flags"])
def test_a_layout_with_a_field_elsewhere_is_not_believed(field):
    layout = ffi.new("rt_layout *", array_groups._WRITABLE[0])
    assert array_groups._fits(layout, np.ones((2, 3)))
    if field == "shape":  # where another array of that many extents has its own would be another address
        layout.shape = layout.data
    else:
        setattr(layout, field, getattr(layout, field) + (4 if field in ("ndim", "flags") else 8))
    assert not array_groups._fits(layout, np.ones((2, 3)))


def test_arrays_of_a_pending_group_live_and_stay_in_their_place():
    def on_rank(rank):
        given = [np.full(5, rank, np.float32) for _ in range(3)]
        watched = weakref.ref(given[0])
        if rank == 1:
            rt.barrier()  # until rank 0 has looked
        handle = rt.grouped_allreduce_async_(given, name="pending", op=rt.Sum)
        if rank == 0:
            with pytest.raises(ValueError, match="resize"):
                given[1].resize(100)
            del given, handle  # the operation goes on, and needs them
            assert watched() is not None
            rt.barrier()
            rt.allreduce(np.zeros(1), name="behind")
            rt.allreduce(np.zeros(1), name="lets go of what has ended")
            assert watched() is None
        else:
            assert rt.synchronize(handle)[0][0] == 1
            rt.allreduce(np.zeros(1), name="behind")
            rt.allreduce(np.zeros(1), name="lets go of what has ended")

    with World(2) as world:
        world.run(on_rank)


def test_the_arrays_of_a_group_are_let_go_of_when_it_is_done():
    def on_rank(rank):
        given = [np.full(5, rank, np.float32) for _ in range(3)]
        references = [sys.getrefcount(array) for array in given]
        rt.grouped_allreduce_(given, name="done", op=rt.Sum)
        assert [sys.getrefcount(array) for array in given] == references

    with World(2) as world:
        world.run(on_rank)


def test_a_name_comes_again_with_whatever_else():
    """Kept requests are filled anew with all that differs: shapes, dtypes, numbers of tensors, factors, operations."""
    turns = [
        [integers(0, 1, (4,))], [integers(0, 2, (4,))], [integers(0, 3, (2, 2))], [integers(0, 4, (2, 2), "int32")],
        [integers(0, index, (3,)) for index in range(5)], [integers(0, index, (3, 1)) for index in range(2)],
        [strided(integers(0, index, (3, 1))) for index in range(2)], [strided(integers(0, index, (7,))) for index in range(2)],
        [strided(integers(0, index, (7,), "int64")) for index in range(2)], [strided(integers(0, index, (2, 3))) for index in range(4)],
        [integers(0, 7, (1,) * 12)], [integers(0, 8, (4,))], [integers(0, 9, ())],
    ]  # fmt: skip

    def on_rank(rank):
        for _ in range(2):
            for turn, given in enumerate(turns):
                mine = [array.copy() if array.flags.c_contiguous else strided(array) for array in given]
                for array in mine:
                    array += np.array(rank, array.dtype)
                for factor in (1.0, 3.0, 1.0):
                    alone = rt.allreduce(mine[0], name="again", op=rt.Sum, prescale_factor=factor)
                    assert np.array_equal(alone, (2 * given[0] + 1) * factor), (turn, factor)
                for name in ("again", "again together"):  # after one tensor, and after another group
                    together = rt.grouped_allreduce(mine, name=name, op=rt.Max)
                    assert all(np.array_equal(one, each + 1) for one, each in zip(together, given, strict=True)), turn
                if given[0].ndim:
                    gathered = rt.allgather(mine[0], name="again")
                    assert np.array_equal(gathered, np.concatenate([given[0], given[0] + 1])), turn
                assert np.array_equal(rt.broadcast(mine[0], 1, name="again"), given[0] + 1), turn

    with World(2) as world:
        world.run(on_rank)


def test_splits_of_one_alltoall_are_not_those_of_the_next():
    def on_rank(rank):
        for splits in ([1, 3], None, [4, 0], None):
            rows, received = rt.synchronize(rt.alltoall_async(np.arange(4.0) + 10 * rank, splits, name="rows"))
            counts = splits or [2, 2]
            begin = 0 if rank == 0 else counts[0]
            mine = np.arange(4.0)[begin : begin + counts[rank]]
            assert np.array_equal(rows, np.concatenate([mine, mine + 10])), splits
            assert list(received) == [counts[rank]] * 2

    with World(2) as world:
        world.run(on_rank)


def test_what_is_kept_of_names_is_bounded(monkeypatch):
    monkeypatch.setattr("ringtrain._runtime.context._MOST_REQUESTS", 10)

    def on_rank(rank):
        for turn in range(35):
            total = rt.allreduce(np.array([turn + rank]), name=f"name {turn}", op=rt.Sum)
            assert total[0] == 2 * turn + 1
            assert len(current()._requests) <= 10

    with World(2) as world:
        world.run(on_rank)


def test_factors_that_are_equal_and_not_the_same():
    """What is remembered of arguments: -0.0 is not 0.0, True is no reduction, and 1 is a factor like 1.0."""

    def on_rank(rank):
        for zero in (0.0, -0.0, 0.0):
            result = rt.allreduce(np.ones(2), name=f"zero {zero}", op=rt.Sum, prescale_factor=zero)
            assert np.array_equal(np.signbit(result), np.signbit([zero, zero])), zero
        assert rt.allreduce(np.ones(1), name="one", op=rt.Sum, prescale_factor=1)[0] == 2
        assert rt.allreduce(np.ones(1), name="two", op=rt.Sum)[0] == 2
        with pytest.raises(InvalidArgumentError, match="op must be one of"):
            rt.allreduce(np.ones(1), name="three", op=True)

    with World(2) as world:
        world.run(on_rank)
