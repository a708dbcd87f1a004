"""``ShardedEmbedding`` on Keras: ranks train as one process with ``keras.layers.Embedding``."""

import functools

import keras
import numpy as np
import pytest
from modes import in_mode

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.embedding import storage
from ringtrain.embedding.table import SelfUpdatingTable
from ringtrain.errors import UnsupportedError
from ringtrain.testing import World

ROWS, WIDTH, RANKS = 13, 4, 2
OPTIMIZERS = {
    "sgd": (lambda: hvd.layers.SGD(lr=0.5), lambda: keras.optimizers.SGD(0.5)),
    "adagrad": (
        lambda: hvd.layers.Adagrad(lr=0.1, initial_accumulator_value=0.1),
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.1),
    ),
}
IDS = np.array([[[1, 5], [5, 5], [12, 0]], [[5, 2], [1, 1], [7, 8]]])  # rank, sample, place
RATE = 0.05  # where all of a model learns
WANTED = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]])


def first(rows):
    return np.sin(rows[:, None] * 1.7 + np.arange(WIDTH))


class Plain(keras.layers.Layer):
    """An embedding whose gradient is dense: Keras' own Adagrad on TensorFlow squares each of a row's before they add up."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(ROWS, WIDTH), initializer="zeros", name="table")

    def call(self, ids):
        return keras.ops.matmul(keras.ops.one_hot(ids, ROWS), self.table)

    def compute_output_shape(self, input_shape):
        return (*input_shape, WIDTH)


def head(embedding, optimizer):
    """A dense part that stays as it is: with another optimizer for each part, both processes must know which is whose."""
    sums = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), embedding, keras.layers.Flatten(), sums])
    model.compile(optimizer, "mse")
    return model


def whole(table):
    rows = np.empty((ROWS, WIDTH), np.float32)
    for part, ids in rt.allgather_object((table.rows(), table.dealing.ids_of(table.rank))):
        rows[ids] = part
    return rows


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adagrad", marks=pytest.mark.long)])
def test_ranks_train_as_one_process(kind, tmp_path):
    ours, theirs = OPTIMIZERS[kind]
    plain = Plain()
    model = head(plain, theirs())
    plain.set_weights([first(np.arange(ROWS))])
    for _ in range(3):
        model.train_on_batch(IDS.reshape(-1, 2), WANTED.reshape(-1))
    expected = np.asarray(plain.get_weights()[0])

    def on_rank(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, ours(), initializer=first, name="words")
        model = head(layer, hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
        assert np.asarray(model.predict_on_batch(IDS[rank])).shape == (3, 1)
        for _ in range(3):
            model.train_on_batch(IDS[rank], WANTED[rank])
        layer.save_table(tmp_path)
        return whole(layer.table)

    with World(RANKS) as world:
        for found in world.run(on_rank):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected, first(np.arange(ROWS)), atol=1e-3)

    def on_three(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, ours(), name="words", dealing="blocks")
        layer.load_table(tmp_path)
        return whole(layer.table)

    with World(3) as world:
        np.testing.assert_allclose(world.run(on_three)[2], expected, rtol=1e-5, atol=1e-6)


def test_arguments_that_cannot_be():
    with World(1) as world:

        def on_rank(rank):
            with pytest.raises(rt.errors.InvalidArgumentError, match="optimizer must be a RowOptimizer or one of"):
                hvd.layers.ShardedEmbedding(5, 2, optimizer="adam").build()

        world.run(on_rank)


def batch(step, ranks=slice(None)):
    """Ids and what is wanted of them, of all ranks or of one."""
    return ((IDS[ranks] + 3 * step) % ROWS).reshape(-1, 2), WANTED[ranks].reshape(-1)


def learner(embedding, optimizer, dense_learns=True, policy=None):
    """A model of which the dense part learns too, by the same rule."""
    sums = keras.layers.Dense(1, kernel_initializer="ones", trainable=dense_learns, dtype=policy)
    model = keras.Sequential([keras.Input((2,), dtype="int64"), embedding, keras.layers.Flatten(), sums])
    model.compile(optimizer, "mse")
    return model


def alone(optimizer, steps, dense_learns=True, policy=None):
    """Rows, and all weights of the dense part, of one process that has trained on the batches of all ranks."""
    plain = Plain(dtype=policy)
    model = learner(plain, optimizer, dense_learns, policy)
    plain.set_weights([first(np.arange(ROWS))])
    for step in steps:
        model.train_on_batch(*batch(step))
    return [np.asarray(plain.get_weights()[0]), *map(np.asarray, model.layers[-1].get_weights())]


def together(make, steps, dense_learns=True, policy=None, spoil=lambda step, rank, wanted: wanted):
    """The same of two ranks; ``make`` makes the optimizer."""

    def on_rank(rank):
        layer = hvd.layers.ShardedEmbedding(
            ROWS, WIDTH, hvd.layers.SGD(lr=RATE), initializer=first, name="words", dtype=policy
        )
        model = learner(layer, make(), dense_learns, policy)
        for step in steps:
            ids, wanted = batch(step, rank)
            model.train_on_batch(ids, spoil(step, rank, wanted))
        assert float(layer.anchor.numpy()) == 0 and layer.table._came.passes == 0
        scale = getattr(model.optimizer, "dynamic_scale", None)
        dense = [np.asarray(each) for each in model.layers[-1].get_weights()]
        return [whole(layer.table), *dense], None if scale is None else float(scale.numpy())

    with World(RANKS) as world:
        ended = world.run(on_rank)
    for one, other in zip(*(values for values, _ in ended), strict=True):
        assert np.array_equal(one, other)
    assert ended[0][1] == ended[1][1]
    return ended[0]


def scaled(**given):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE, **given), initial_scale=2.0**10)


TREATED = {  # of the optimizer of one process, and of the ranks'
    "clipped by the norm of all": ({"global_clipnorm": 0.3}, {}),
    "clipped by the norm of each variable": ({"clipnorm": 0.2}, {}),
    "clipped by value": ({"clipvalue": 0.03}, {}),
    "scaled by a number": ({"loss_scale_factor": 8.0}, {}),
    "accumulated by Keras": ({"gradient_accumulation_steps": 2}, {}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}),
    "accumulated and clipped": ({"gradient_accumulation_steps": 2, "global_clipnorm": 0.3}, {}),
}  # fmt: skip
QUICK = {"clipped by the norm of all"}


@pytest.mark.parametrize(
    "what, scales",
    [
        pytest.param(each, scales, marks=() if each in QUICK and not scales else pytest.mark.long)
        for each, (given, _) in TREATED.items()
        for scales in (False, True)
        if not (scales and "loss_scale_factor" in given)  # which LossScaleOptimizer sets to None
    ],
)
def test_what_befalls_all_gradients_befalls_those_of_rows(what, scales):
    """As in one process, and to no effect without it."""
    given, distributed = TREATED[what]
    make = scaled if scales else lambda **given: keras.optimizers.SGD(RATE, **given)
    expected = alone(make(**given), range(4))
    own = {} if distributed else given
    found, _ = together(lambda: hvd.DistributedOptimizer(make(**own), **in_mode(distributed)), range(4))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    untreated = alone(keras.optimizers.SGD(RATE), range(4))
    if what != "scaled by a number":
        assert not np.allclose(untreated[0], expected[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dense_learns", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_gradients_of_a_rank_that_are_not_finite_skip_the_step_on_all(dense_learns, passes):
    """Rows, too, also where they alone learn; with the passes that were added up to them."""
    expected = alone(keras.optimizers.SGD(RATE), [0, 1], dense_learns)
    if passes == 2:
        expected = alone(keras.optimizers.SGD(2 * RATE, gradient_accumulation_steps=2), [0, 1], dense_learns)

    def spoil(step, rank, wanted):
        return np.full_like(wanted, 1e36) if (step, rank) == (5, 1) else wanted

    steps = [0, 5, 1] if passes == 1 else [3, 5, 0, 1]
    found, scale = together(
        lambda: hvd.DistributedOptimizer(scaled(), backward_passes_per_step=passes), steps, dense_learns, spoil=spoil
    )
    assert scale == 2.0**9
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("policy, exact", [("mixed_float16", 1e-3), ("mixed_bfloat16", 5e-3)])
def test_layers_compute_in_sixteen_bits(policy, exact):
    """Rows stay in 32; the loss is scaled where Keras does so."""
    make = scaled if policy == "mixed_float16" else lambda: keras.optimizers.SGD(RATE)
    found, _ = together(lambda: hvd.DistributedOptimizer(make()), range(3), policy=policy)
    expected = alone(make(), range(3), policy=policy)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=exact)
    assert found[0].dtype == np.float32 and not np.allclose(found[0], first(np.arange(ROWS)), atol=exact)


def test_layers_compute_in_sixty_four_bits():
    """Rows have 32, and are clipped together with what has 64: seed 6000018 of the drawn scripts."""
    make = functools.partial(keras.optimizers.SGD, RATE, global_clipnorm=0.3)
    found, _ = together(lambda: hvd.DistributedOptimizer(make()), range(2), policy="float64")
    for one, other in zip(found, alone(make(), range(2), policy="float64"), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


class Loop(keras.optimizers.SGD):
    """Clips in a way of its own."""

    def _clip_gradients(self, grads):
        return [grad * 0.5 for grad in grads]


REFUSED = {
    "to scale by what a rank alone has": (scaled, "not scale the loss by gradients that differ"),
    "to clip by what a rank alone has": (
        lambda: keras.optimizers.SGD(RATE, global_clipnorm=1.0), "not clip by the norm of all gradients",
    ),
    "to skip local steps": (lambda: hvd.DistributedOptimizer(scaled(), mode=hvd.LocalSteps(every=2)), "not scale the loss by gradients"),
    "to clip in local steps": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, global_clipnorm=1.0), mode=hvd.LocalSteps(2)),
        "without LocalSteps",
    ),
    "to clip late": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, clipnorm=1.0), mode=hvd.OneStepLate()),
        "accumulate gradients with OneStepLate",
    ),
    "to clip in another way": (lambda: hvd.DistributedOptimizer(Loop(0.5)), "not clip gradients in a way of its own"),
}  # fmt: skip


def test_a_model_is_saved_without_its_rows_which_have_files_of_their_own(tmp_path):
    """By one rank, as any model; all ranks load both."""

    def on_rank(rank):
        rule = hvd.layers.SGD(lr=0.25, momentum=0.5)
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, rule, scale=0.5, dealing="blocks", name="words")
        model = learner(layer, hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))
        model.train_on_batch(*batch(0, rank))
        if rank == 0:
            model.save(tmp_path / "model.keras")
        layer.save_table(tmp_path)
        loaded = hvd.load_model(tmp_path / "model.keras")
        again = loaded.get_layer("words")
        assert again._given == layer._given
        again.load_table(tmp_path)
        for step in (1, 2):
            for each in (model, loaded):
                each.train_on_batch(*batch(step, rank))
        assert keras.models.clone_model(model).get_layer("words").output_dim == WIDTH
        return whole(layer.table), whole(again.table)

    with World(RANKS) as world:
        for one, other in world.run(on_rank):
            assert np.array_equal(one, other)


def test_a_layer_of_some_ranks_has_no_place_in_a_file():
    def on_rank(rank):
        few = rt.add_process_set([0, 1])
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, process_set=few, name="words")
        with pytest.raises(UnsupportedError, match="ShardedEmbedding 'words': process_set must be that of all ranks"):
            layer.get_config()

    with World(RANKS) as world:
        world.run(on_rank)


@pytest.mark.parametrize(
    "stages", [(True, False, True), pytest.param((False, True), marks=pytest.mark.long)], ids=["then", "first"]
)
def test_rows_that_are_frozen_for_a_while_stay_and_forget_that_while(stages):
    """On TensorFlow the gradients of a frozen layer waited until it was trained again."""

    def trained(layer, make, ranks):
        model = learner(layer, make())
        if isinstance(layer, Plain):
            layer.set_weights([first(np.arange(ROWS))])
        for stage, learns in enumerate(stages):
            layer.trainable = learns
            model.compile(make(), "mse")  # Keras makes the step anew
            for step in range(2):
                model.train_on_batch(*batch(2 * stage + step, ranks))
        return [np.asarray(each) for each in model.layers[-1].get_weights()]

    plain = Plain()
    expected = trained(plain, lambda: keras.optimizers.SGD(RATE), slice(None))

    def on_rank(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, hvd.layers.SGD(lr=RATE), initializer=first, name="words")
        dense = trained(layer, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), rank)
        return [whole(layer.table), *dense]

    with World(RANKS) as world:
        for found in world.run(on_rank):
            for one, other in zip(found, [np.asarray(plain.get_weights()[0]), *expected], strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_the_best_weights_are_not_restored_beside_rows_of_another_epoch():
    def on_rank(rank):
        layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, name="words")
        model = learner(layer, hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))
        stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
        with pytest.raises(
            UnsupportedError, match="fit 'EarlyStopping': restore_best_weights must be False with .* 'words'"
        ):
            model.fit(*batch(0, rank), verbose=0, callbacks=[stopping])

    with World(RANKS) as world:
        world.run(on_rank)


def test_what_rows_cannot_share_in_is_refused():
    """Before any row is changed; in fit, and in a loop of one's own."""

    def on_rank(rank):
        for number, (make, words) in enumerate(REFUSED.values()):
            layer = hvd.layers.ShardedEmbedding(ROWS, WIDTH, "sgd", initializer=first, name=f"words{number}")
            optimizer = make()
            model = head(layer, optimizer)
            with pytest.raises(
                rt.errors.UnsupportedError, match=f"'words{number}': the model's optimizer must.* {words}"
            ):
                model.train_on_batch(IDS[rank], WANTED[rank])
            with pytest.raises(rt.errors.UnsupportedError, match=words):
                optimizer.apply([keras.ops.zeros(())], [layer.anchor])
            assert np.array_equal(whole(layer.table), first(np.arange(ROWS)).astype(np.float32))

    with World(RANKS) as world:
        world.run(on_rank)


def test_gradients_that_no_optimizer_applies_are_said(monkeypatch):
    """A loop that leaves the anchor out would not learn rows, and say nothing."""
    monkeypatch.setattr("ringtrain.embedding.table._MOST_PASSES", 2)

    def on_rank(rank):
        table = SelfUpdatingTable("words", ROWS, WIDTH, "sgd")
        for _ in range(2):
            rows, _, trip = table.look_up(np.array([1, 2]))
            assert table.bring(trip, np.ones_like(rows)) == 0
        rows, _, trip = table.look_up(np.array([1, 2]))
        with pytest.raises(rt.errors.InvalidArgumentError, match="'words': a Keras optimizer must apply the gradients"):
            table.bring(trip, np.ones_like(rows))

    with World(RANKS) as world:
        world.run(on_rank)


def test_what_the_optimizer_keeps_is_let_go_as_the_rows_are(monkeypatch, tmp_path):
    """Its file was let go at a bound of its own, 1 GiB, whatever had been asked for."""
    let_go = set()
    advise = storage.Rows.let_go
    monkeypatch.setattr(
        storage.Rows, "let_go", lambda rows: advise(rows) or let_go.add((id(rows), rows._touched_bytes))
    )

    def on_rank(rank):
        table = SelfUpdatingTable("words", ROWS, WIDTH, "adagrad", storage="file", path=tmp_path, resident_bytes=1)
        rows, _, trip = table.look_up(np.array([1, 2]))
        table.bring(trip, np.ones_like(rows))
        table.accept()
        table.change()
        return [id(each) for each in (table._rows, *table._state.values())]

    with World(1) as world:
        (files,) = world.run(on_rank)
    assert len(files) == 2 and let_go >= {(each, 0) for each in files}
