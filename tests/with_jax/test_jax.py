"""Operations of ``ringtrain.jax`` inside programs: results, gradients, batches, loops, orders, errors; on ranks as threads.

Each rank traces functions of its own: compiled programs belong to the rank whose thread traced them.
"""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringtrain as rt
import ringtrain.jax as hvd
from ringtrain._binding import tables
from ringtrain._runtime import context, exits
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.jax import library
from ringtrain.testing import World

# Ranks in one process share XLA's threads, and a program that waits for another rank holds one: each rank runs its own.
jax.config.update("jax_cpu_enable_async_dispatch", False)

OPERATIONS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "allgather": hvd.allgather,
    "broadcast": lambda x: hvd.broadcast(x, 1),
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "alltoall": hvd.alltoall,
}


def on_ranks(function, size=2, **options):
    with World(size, **options) as world:
        return world.run(function)


def contribution(rank: int, dtype: str = "float32", rows: int = 4) -> jax.Array:
    return (jnp.arange(rows * 3).reshape(rows, 3) % 7 + rank).astype(dtype)


def all_operations(array: jax.Array) -> dict[str, jax.Array]:
    return {name: operation(array) for name, operation in OPERATIONS.items()}


def expected(rank: int, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    """What the operations give, by NumPy."""
    members, total = len(arrays), sum(arrays[1:], arrays[0])
    return {
        "allreduce": total,
        "allgather": np.concatenate(arrays),
        "broadcast": arrays[1],
        "reducescatter": np.array_split(total, members)[rank],
        "alltoall": np.concatenate([np.split(array, members)[rank] for array in arrays]),
    }


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", *(pytest.param(name, marks=pytest.mark.long) for name in ("float16", "int32", "int8", "uint8"))]
)  # fmt: skip
def test_operations_in_a_program_and_outside(dtype):
    def on_rank(rank):
        array = contribution(rank, dtype)
        return jax.jit(lambda x: all_operations(x))(array), all_operations(array)

    arrays = [np.asarray(contribution(rank, dtype)) for rank in range(2)]
    for rank, both in enumerate(on_ranks(on_rank)):
        for results in both:
            for name, wanted in expected(rank, arrays).items():
                assert isinstance(results[name], jax.Array) and results[name].dtype == dtype
                np.testing.assert_array_equal(np.asarray(results[name]), wanted, err_msg=name)


def test_the_other_dtypes():
    """Whole numbers without sign, complex ones, and floats of 8 bits, which are moved only."""
    sums = {
        "uint16": [65535, 2], "uint32": [2**31 - 1, 2], "complex64": [1 + 2j, 3],
        "float8_e4m3fn": None, "float8_e5m2": None,
    }  # fmt: skip

    def on_rank(rank):
        arrays = {name: jnp.asarray([1, rank] if each is None else each).astype(name) for name, each in sums.items()}
        gathered = jax.jit(lambda given: {name: hvd.allgather(each, name) for name, each in given.items()})(arrays)
        of_sums = {name: each for name, each in arrays.items() if sums[name]}
        added = jax.jit(lambda given: {name: hvd.allreduce(each, name, hvd.Sum) for name, each in given.items()})(
            of_sums
        )
        for name, each in gathered.items():
            assert each.dtype == name and hvd.allgather(arrays[name]).dtype == name
            np.testing.assert_array_equal(
                np.asarray(each),
                np.concatenate([np.asarray([1, r] if sums[name] is None else sums[name]) for r in range(2)]),
            )
        for name, each in added.items():
            np.testing.assert_array_equal(np.asarray(each), np.asarray(arrays[name]) * 2, err_msg=name)
        for refused in (lambda x: hvd.allreduce(x, "refused"), jax.jit(lambda x: hvd.allreduce(x, "refused"))):
            with pytest.raises((rt.RingtrainError, jax.errors.JaxRuntimeError), match="Cast to bfloat16 or float32"):
                refused(arrays["float8_e4m3fn"]).block_until_ready()

    on_ranks(on_rank)


def test_several_arrays_are_one_operation():
    """In a program and outside, of several dtypes, empty ones too; with gradients and batches as of one array."""

    def on_rank(rank):
        arrays = [contribution(rank), jnp.arange(3) + rank, jnp.zeros((0, 2)), jnp.asarray(float(rank))]

        def added(arrays):
            return hvd.grouped_allreduce(arrays, "group", hvd.Sum, compression=hvd.Compression.none)

        def loss(arrays):
            first, _, _, last = added(arrays)
            return (first**2).sum() * last

        floats = [arrays[0], arrays[1].astype("float32"), *arrays[2:]]
        program = jax.jit(added)
        text = program.lower(arrays).as_text()
        assert text.count("ringtrain_collective") == 1 and hvd.grouped_allreduce([]) == []
        batched = jax.jit(jax.vmap(lambda x, y: added([x, y])[0], in_axes=(1, None)))(arrays[0], arrays[3])
        return program(arrays), added(arrays), jax.jit(jax.grad(loss))(floats)[0], batched

    total = sum(np.asarray(contribution(rank)) for rank in range(2))
    for results, same, gradient, batched in on_ranks(on_rank):
        for found in (results, same):
            np.testing.assert_array_equal(found[0], total)
            assert found[1].tolist() == [1, 3, 5] and found[2].shape == (0, 2) and float(found[3]) == 1.0
        np.testing.assert_allclose(gradient, 2 * 2 * total)  # of both ranks' losses
        np.testing.assert_array_equal(batched, total.T)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_group_fails_as_a_whole(compiled):
    def on_rank(rank):
        arrays = [jnp.zeros(2), jnp.zeros(2 + rank)]
        run = jax.jit(lambda given: hvd.grouped_allreduce(given, "group")) if compiled else hvd.grouped_allreduce
        with pytest.raises((MismatchError, jax.errors.JaxRuntimeError), match="shape must be the same on all ranks"):
            jax.block_until_ready(run(arrays))

    on_ranks(on_rank)


@pytest.mark.long
def test_rows_that_no_rank_can_share_equally():
    def on_rank(rank):
        array = contribution(rank, rows=5)
        shares = jax.jit(lambda x: hvd.reducescatter(x, op=hvd.Sum))(array)
        back = jax.jit(jax.grad(lambda x: (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum()))(array)
        return shares, back

    (first, back), (second, same) = on_ranks(on_rank)
    total = sum(np.asarray(contribution(rank, rows=5)) for rank in range(2))
    np.testing.assert_array_equal(np.concatenate([first, second]), total)
    np.testing.assert_array_equal(back, same)
    assert back[:, 0].tolist() == [2, 2, 2, 4, 4]  # twice the exact gradient, as in Horovod


def test_gradients_are_those_of_one_process():
    """Exact ones of the sum of all ranks' losses, for the operations where Horovod has these; with and without a program."""

    def loss_of(results):
        return (results["allreduce"] ** 2).sum() + (results["alltoall"] ** 3).sum()

    def alone(arrays):
        total = sum(arrays)
        halves = [jnp.concatenate([array[2 * rank : 2 * rank + 2] for array in arrays]) for rank in range(2)]
        return sum((total**2).sum() + (half**3).sum() for half in halves)

    def on_rank(rank):
        def loss(array):
            return loss_of({name: OPERATIONS[name](array) for name in ("allreduce", "alltoall")})

        array = contribution(rank)
        return jax.jit(jax.grad(loss))(array), jax.grad(loss)(array)

    wanted = jax.grad(alone)([contribution(rank) for rank in range(2)])
    for rank, gradients in enumerate(on_ranks(on_rank)):
        for gradient in gradients:
            np.testing.assert_allclose(gradient, wanted[rank], rtol=1e-6)


@pytest.mark.long
def test_gradients_of_what_only_moves():
    """The average over the ranks, as the other adapters have it."""

    def on_rank(rank):
        weight = jnp.arange(8.0).reshape(8, 1)
        gathered = jax.grad(lambda x, factor: (hvd.allgather(x) * weight * factor).sum())
        cast = jax.grad(lambda x, factor: (hvd.broadcast(x, 1) * factor).sum())
        array, factor = contribution(rank), rank + 1.0
        return jax.jit(lambda x, f: (gathered(x, f), cast(x, f)))(array, factor)

    for rank, (gathered, cast) in enumerate(on_ranks(on_rank)):
        assert gathered[:, 0].tolist() == [1.5 * (4 * rank + row) for row in range(4)]
        assert np.unique(cast).tolist() == [1.5 if rank == 1 else 0.0]


@pytest.mark.long
def test_batches_loops_branches_and_tangents():
    def on_rank(rank):
        batch = jnp.stack([contribution(rank), contribution(rank) * 2])
        mapped = jax.jit(jax.vmap(lambda x: all_operations(x)))(batch)
        each = [jax.jit(lambda x: all_operations(x))(one) for one in batch]
        for name in OPERATIONS:
            np.testing.assert_array_equal(mapped[name], np.stack([one[name] for one in each]), err_msg=name)

        def body(carry, x):
            y = hvd.allreduce(x * carry, op=hvd.Sum)
            return carry + y.sum(), y

        arrays = jnp.arange(6.0).reshape(3, 2) + rank
        looped = jax.jit(lambda xs: jax.lax.scan(body, 1.0, xs)[0])(arrays)
        slope = jax.jit(jax.grad(lambda xs: jax.lax.scan(body, 1.0, xs)[0]))(arrays)
        branch = jax.jit(lambda yes, x: jax.lax.cond(yes, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda x: x, x))
        remade = jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sin(hvd.allreduce(jnp.sin(x))).sum())))
        tangent = jax.jit(lambda x: jax.jvp(lambda y: hvd.allreduce(y) ** 2, (x,), (jnp.ones(2) * (rank + 1),))[1])
        return looped, slope, branch(True, arrays[0]), branch(False, arrays[0]), remade(arrays), tangent(arrays[0])

    def alone(both):
        def body(carry, xs):
            y = (xs * carry).sum(0)
            return carry + y.sum(), y

        return jax.lax.scan(body, 1.0, both)[0]

    both = jnp.stack([jnp.arange(6.0).reshape(3, 2) + rank for rank in range(2)], axis=1)
    for rank, (looped, slope, taken, left, remade, tangent) in enumerate(on_ranks(on_rank)):
        assert looped == alone(both)
        np.testing.assert_allclose(slope, 2 * jax.grad(alone)(both)[:, rank], rtol=1e-6)  # of two equal losses
        assert taken.tolist() == [1, 3] and left.tolist() == [rank, 1 + rank]
        mean = jnp.sin(both).mean(1)
        np.testing.assert_allclose(remade, jnp.cos(mean) * jnp.cos(both[:, rank]), rtol=1e-5)
        np.testing.assert_allclose(tangent, 2 * both[0].mean(0) * 1.5)


def test_many_are_under_way_in_other_orders_on_each_rank():
    """Rank 1 waits for each operation, in reverse order, and rank 0 for none."""

    def on_rank(rank):
        arrays = [jnp.full(1000, float(number)) for number in range(20)]
        if rank == 0:
            return jax.jit(lambda all: [hvd.allreduce(x, name=f"array {n}", op=hvd.Sum) for n, x in enumerate(all)])(
                arrays
            )
        results = [hvd.allreduce(arrays[n], name=f"array {n}", op=hvd.Sum) for n in reversed(range(20))]
        return results[::-1]

    for results in on_ranks(on_rank, stall_abort_seconds=20):
        assert all((np.asarray(result) == 2 * number).all() for number, result in enumerate(results))


def test_ranks_compile_the_same_program():
    """XLA runs small programs one instruction after the other; so what differs between ranks must not be an instruction."""

    def on_rank(rank):
        def loss(x):
            return sum((operation(x) ** 2).sum() for operation in OPERATIONS.values())

        text = jax.jit(lambda x: jax.grad(loss)(x)).lower(contribution(0)).as_text()
        return re.sub(r"(slot|keeps) = \d+", "", text)

    first, second = on_ranks(on_rank)
    assert first == second and first.count(library.TARGET) == 10  # forward and backward


def test_a_program_that_goes_on_with_python_does_not_hold_the_core_up():
    """What follows an operation may call Python, even wait for another operation: not on the core's thread."""

    def on_rank(rank):
        own, threads = context.current(), []

        def ask_all(array):
            context.make_current(own)
            threads.append(threading.get_native_id())
            return np.asarray(rt.allreduce(np.asarray(array), name="within", op=rt.Sum))

        def step(array):
            first = hvd.allreduce(array, op=hvd.Sum)
            return hvd.allreduce(jax.pure_callback(ask_all, jax.ShapeDtypeStruct(first.shape, first.dtype), first))

        return jax.jit(step)(jnp.ones(3)).tolist()

    assert on_ranks(on_rank) == [[4.0] * 3] * 2


# ---- names ----


@pytest.mark.long
def test_a_rank_may_trace_alone_and_operations_of_one_kind_are_told_apart():
    def on_rank(rank):
        def step(x, flag):
            return hvd.allreduce(x), hvd.allreduce(x * 2), hvd.allgather(x)

        text = jax.jit(step, static_argnums=1).lower(jnp.ones(2), 0).as_text()
        assert re.findall(r'name = "([^"]*)"', text) == ["step/allreduce", "step/allreduce.2", "step/allgather"]
        compiled = jax.jit(step, static_argnums=1)
        compiled(jnp.ones(2), 0)
        return [compiled(jnp.ones(2) * rank, rank + 1 if turn else 0)[1].tolist() for turn in range(2)]

    assert on_ranks(on_rank) == [[[1.0, 1.0]] * 2] * 2


# ---- errors ----


def failure(call) -> tuple[type, str]:
    try:
        jax.block_until_ready(call())
    except Exception as problem:
        return type(problem), str(problem), exits.error_of_a_peer(problem) is not None
    raise AssertionError("nothing was raised")


def test_a_mismatch_has_our_text_on_all_ranks():
    def on_rank(rank):
        array = jnp.ones(3 + rank)
        return failure(lambda: jax.jit(lambda x: hvd.allreduce(x, name="x"))(array)), failure(
            lambda: hvd.allreduce(array, name="x")
        )

    for (compiled, text, of_a_peer), (eager, plain, _) in on_ranks(on_rank):
        assert issubclass(compiled, jax.errors.JaxRuntimeError) and eager is MismatchError
        assert text.startswith("FAILED_PRECONDITION: allreduce 'x': shape must be the same on all ranks")
        assert "[3] on rank 0 and [4] on rank 1" in text and plain in text and not of_a_peer


def test_a_lost_rank_ends_a_program_with_the_cause():
    told = []

    def on_rank(rank):
        if rank == 0:
            raise LookupError("this batch is broken")
        told.append(failure(lambda: jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(3))))

    with pytest.raises(LookupError):
        on_ranks(on_rank)
    ((kind, text, of_a_peer),) = told
    assert issubclass(kind, jax.errors.JaxRuntimeError) and of_a_peer
    assert text == "ABORTED: rank 0 raised LookupError: this batch is broken"


def test_an_error_that_later_programs_have_passed_on_is_still_of_a_peer():
    """XLA leaves the text, and puts INTERNAL and a phrase for each of these programs before it."""

    def on_rank(rank):
        if rank == 0:
            raise LookupError("batch 7 is broken")
        failure(lambda: jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(3)))

    with pytest.raises(LookupError):
        on_ranks(on_rank)
    before = "INTERNAL: " + 20 * "Error dispatching computation: "
    told, others = (jax.errors.JaxRuntimeError(before + text)
                    for text in ("rank 0 raised LookupError: batch 7 is broken", "out of memory"))  # fmt: skip
    assert exits.error_of_a_peer(told) is told and exits.error_of_a_peer(others) is None
    assert exits.words_of(told) == "rank 0 raised LookupError: batch 7 is broken"
    assert exits.words_of(others) == "out of memory" and exits.words_of(ValueError("x: y")) == "x: y"


@pytest.mark.long
def test_rows_of_ranks_that_differ_are_refused_in_a_program():
    def on_rank(rank):
        return failure(lambda: jax.jit(lambda x: hvd.allgather(x, name="x"))(jnp.ones(2 + rank)))

    for _, text, _ in on_ranks(on_rank):
        assert "allgather 'x': the result must have the shape" in text and "but has [5]. Give an array of one" in text


def test_a_program_without_a_world_says_so():
    compiled = {}

    def on_rank(rank):
        compiled[rank] = jax.jit(lambda x: hvd.allreduce(x, name="x"))
        compiled[rank](jnp.ones(3)).block_until_ready()

    on_ranks(on_rank)
    kind, text, of_a_peer = failure(lambda: compiled[0](jnp.ones(3)))
    assert issubclass(kind, (jax.errors.JaxRuntimeError, ValueError)) and of_a_peer and "has called shutdown()" in text
    on_ranks(lambda rank: library.slots.current())  # which empties the slots of the world before
    assert (
        "ABORTED: allreduce 'x': there is no world. Call init() first." == failure(lambda: compiled[0](jnp.ones(3)))[1]
    )


@pytest.mark.parametrize(
    "program, kind, words",
    [
        (lambda x: hvd.allreduce(x, op=17), InvalidArgumentError, "op must be one of"),
        (lambda x: hvd.allreduce(x, compression="zip"), InvalidArgumentError, "compression must be one of"),
        (lambda x: hvd.allgather(x.sum()), InvalidArgumentError, "found a scalar"),
        (lambda x: hvd.alltoall(x[:3]), InvalidArgumentError, "for each of the 2 ranks, but there are 3"),
        (lambda x: hvd.allreduce(x.astype(jnp.int4)), UnsupportedError, "found int4"),
        (jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum()), UnsupportedError, "but it is Max"),
        (jax.vmap(lambda x: hvd.allgather(x.sum())), InvalidArgumentError, "found a scalar"),
    ],
)
def test_what_a_trace_can_see_to_be_wrong(program, kind, words):
    for found, text, _ in on_ranks(lambda rank: failure(lambda: jax.jit(lambda x: program(x))(jnp.ones((4, 3))))):
        assert found is kind and words in text


def test_releases_that_were_not_tried_are_refused():
    library.check_release("0.7.2")
    library.check_release("0.12.0.1")
    with pytest.raises(UnsupportedError, match=r"JAX '0\.6\.2': expected 0\.7\.2 or newer"):
        library.check_release("0.6.2")


def test_a_call_of_another_version_is_refused_by_the_handler():
    def wrong(x):
        return jax.ffi.ffi_call(library.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, name="x")

    _, text, _ = failure(lambda: jax.jit(wrong)(jnp.ones(3)))
    assert "the attribute slot is missing, or of another type" in text


def test_exports():
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert {row.name for row in tables.OPERATIONS.values() if row.adjoint} <= set(hvd.__all__)


# ---- training ----


def test_two_ranks_train_as_one_process_does_on_the_whole_batch():
    data = np.random.default_rng(0).normal(size=(5, 8, 3)).astype(np.float32)

    def loss(parameters, batch):
        hidden = jnp.tanh(batch @ parameters["layers"][0])
        return ((hidden @ parameters["layers"][1] - batch.sum(1)) ** 2).mean()

    def parameters_of(seed):
        keys = jax.random.split(jax.random.key(seed))
        return {"layers": [jax.random.normal(keys[0], (3, 4)), jax.random.normal(keys[1], (4,))]}

    def train(optimizer, parameters, batches):
        state = optimizer.init(parameters)

        @jax.jit
        def step(parameters, state, batch):
            updates, state = optimizer.update(jax.grad(loss)(parameters, batch), state, parameters)
            return optax.apply_updates(parameters, updates), state

        for batch in batches:
            parameters, state = step(parameters, state, batch)
        return parameters

    def on_rank(rank):
        parameters = hvd.broadcast_parameters(parameters_of(rank), root_rank=1)
        key = hvd.broadcast_parameters(jax.random.key(rank), root_rank=1)
        optimizer = hvd.DistributedGradientTransformation(optax.adam(0.05))
        mine = [batch[4 * rank : 4 * rank + 4] for batch in data]
        twice = optax.MultiSteps(optimizer, every_k_schedule=2)
        return train(optimizer, parameters, mine), jax.random.key_data(key), train(twice, parameters, [*mine, mine[0]])

    wanted = train(optax.adam(0.05), parameters_of(1), data)
    accumulated = train(optax.MultiSteps(optax.adam(0.05), 2), parameters_of(1), [*data, data[0]])
    for parameters, key, twice in on_ranks(on_rank):
        jax.tree.map(lambda mine, one: np.testing.assert_allclose(mine, one, rtol=2e-5, atol=1e-6), parameters, wanted)
        jax.tree.map(lambda mine, one: np.testing.assert_allclose(mine, one, rtol=2e-5, atol=1e-6), twice, accumulated)
        assert key.tolist() == jax.random.key_data(jax.random.key(1)).tolist()


def test_leaves_that_are_no_arrays_are_named_on_all_ranks():
    def on_rank(rank):
        leaf = "a text" if rank == 0 else jnp.ones(2)
        return failure(lambda: hvd.broadcast_parameters({"w": leaf}))

    for kind, text, _ in on_ranks(on_rank):
        assert kind is InvalidArgumentError and "parameters['w']: expected an array or a number but found str" in text


def test_leaves_that_only_some_ranks_have_are_named():
    def on_rank(rank):
        return failure(lambda: hvd.broadcast_parameters({"w": jnp.ones(2), **({"b": jnp.ones(1)} if rank else {})}))

    for kind, text, _ in on_ranks(on_rank):
        assert kind is MismatchError and "parameters: the tensors must have the same names" in text
        assert "\"['b']\" is missing on rank 0" in text or "'['b']' is missing on rank 0" in text


def test_a_tree_given_to_an_operation_on_one_array_is_told_where_to_go():
    def on_rank(rank):
        tree = {"w": jnp.ones(2)}
        return failure(lambda: hvd.allreduce(tree, name="x")), failure(lambda: jax.jit(hvd.allreduce)(tree))

    for failures in on_ranks(on_rank):
        for (kind, text, _), subject in zip(failures, ("allreduce 'x': ", ""), strict=True):
            said = (
                f"{subject}tensor of allreduce: expected an array or a number but found dict. Use allreduce_gradients"
            )
            assert kind is InvalidArgumentError and text.startswith(said)


@pytest.mark.parametrize("compiled", [False, True], ids=["at once", "in a program"])
def test_gathered_rows_have_the_sum_of_all_gradients(compiled):
    """So a loss over the rows of all ranks, as a contrastive one, is that of one process once gradients are averaged."""
    x = np.arange(8.0).reshape(4, 2).astype("float32") / 8

    def loss_of(weights, rows_of):
        rows = rows_of(weights)
        return jnp.sum(jax.nn.softmax(rows @ rows.T) ** 2)

    def body(rank):
        own = x[2 * rank : 2 * rank + 2]

        def gradient(weights):
            found = jax.grad(loss_of)(weights, lambda weights: hvd.gather_with_gradient(own @ weights))
            return hvd.allreduce_gradients(found)

        return np.asarray((jax.jit(gradient) if compiled else gradient)(jnp.ones((2, 3))))

    expected = jax.grad(loss_of)(jnp.ones((2, 3)), lambda weights: x @ weights)
    for found in on_ranks(body):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_what_is_traced_once_may_be_used_twice():
    """Tangents of a linearization, cotangents of a pull-back, and a name that the user gives twice: none is taken for another."""

    def program(x, one, other):
        def total(x):
            return jnp.sum(hvd.allreduce(x**3, op=hvd.Sum) * x)

        _, tangents = jax.linearize(jax.grad(total), x)
        _, pull = jax.vjp(lambda x: hvd.allreduce(x**3, op=hvd.Sum), x)
        named = [hvd.allreduce(each, "named", op=hvd.Sum) for each in (one, other)]
        return [tangents(one), tangents(other), pull(one)[0], pull(other)[0], *named]

    def on_rank(rank):
        given = [jnp.full(1000, value) for value in (rank + 1.0, 2.0 + rank, 5.0 - rank)]
        text = jax.jit(program).lower(*given).as_text()
        found = re.findall(r'name = "([^"]*)"', text)
        return found, [float(each[0]) for each in program(*given)]

    (names, wanted), other = on_ranks(on_rank)
    assert len(names) == len(set(names)) > 6 and {"named", "named.2"} < set(names)
    assert names == other[0] and wanted[:2] == [93.0, 180.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["at once", "in a program"])
def test_gradients_of_whole_numbers_stay_as_they_are(compiled):
    """Of float0: ``jax.grad`` gives them with ``allow_int``, and they hold nothing."""

    def on_rank(rank):
        def gradients(parameters):
            found = jax.grad(lambda p: jnp.sum(p["weights"] * p["count"]), allow_int=True)(parameters)
            return hvd.allreduce_gradients(found)

        given = {"weights": jnp.ones(3), "count": jnp.array(rank)}
        found = (jax.jit(gradients) if compiled else gradients)(given)
        with pytest.raises(rt.RingtrainError, match=r"allreduce 'count': .*float0"):
            hvd.allreduce(found["count"], "count")
        return found["weights"].tolist(), found["count"].dtype == jax.dtypes.float0

    assert on_ranks(on_rank) == [([0.5] * 3, True)] * 2


# ---- passes of one step ----


@pytest.mark.parametrize("compiled", [False, True], ids=["at once", "in a program"])
@pytest.mark.parametrize("averages", [False, True], ids=["sums", "averages"])
def test_only_the_sums_of_several_passes_travel(compiled, averages):
    def on_rank(rank):
        inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        optimizer = hvd.DistributedGradientTransformation(
            inner,
            mode=hvd.Synchronous(replicas="differ"),
            backward_passes_per_step=3,
            average_aggregated_gradients=averages,
        )
        parameters = {"w": jnp.ones(300), "half": jnp.ones((2,), jnp.bfloat16)}
        state = optimizer.init(parameters)
        update = jax.jit(optimizer.update) if compiled else optimizer.update
        sent, seen = [], []
        for number in range(6):
            gradients = jax.tree.map(lambda leaf, n=number: leaf * 0.02 * (rank + n), parameters)
            updates, state = update(gradients, state, parameters)
            parameters = jax.block_until_ready(optax.apply_updates(parameters, updates))
            seen.append(np.asarray(parameters["w"]))
            sent.append(sum(row.operations for row in rt.stats().traffic))
        return sent, seen

    alone = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    parameters = {"w": jnp.ones(300), "half": jnp.ones((2,), jnp.bfloat16)}
    state, wanted = alone.init(parameters), [np.ones(300)] * 2
    for numbers in ((0, 1, 2), (3, 4, 5)):
        total = [jax.tree.map(lambda leaf, n=n: leaf * 0.02 * (n + 0.5), parameters) for n in numbers]
        divisor = 3 if averages else 1
        updates, state = alone.update(jax.tree.map(lambda *each: sum(each) / divisor, *total), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        wanted += [np.asarray(parameters["w"])] * (3 if len(wanted) == 2 else 1)
    for sent, seen in on_ranks(on_rank):
        assert sent == [0, 0, 2, 2, 2, 4]
        for found, one in zip(seen, wanted, strict=True):
            np.testing.assert_allclose(found, one, atol=2e-3)


def test_passes_that_cannot_be_are_refused():
    with pytest.raises(InvalidArgumentError, match="DistributedGradientTransformation: backward_passes_per_step must"):
        hvd.DistributedGradientTransformation(optax.sgd(0.1), backward_passes_per_step=0)
