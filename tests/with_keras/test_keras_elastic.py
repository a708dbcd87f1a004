"""Elastic states and callbacks of Keras on TensorFlow; tests/faults/test_elastic_frames.py has real jobs."""

import threading

import elastic_checks as checks
import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
import ringtrain.tensorflow
import ringtrain.tensorflow.keras
from ringtrain._bootstrap import membership
from ringtrain._training.presence import DENSE, MISSING
from ringtrain.errors import InvalidArgumentError, MismatchError, UnsupportedError
from ringtrain.tensorflow import presence
from ringtrain.testing import World


@pytest.fixture
def alone():
    with World(1) as world:
        yield world


@pytest.mark.parametrize("check", [checks.check_restore, checks.check_sync, checks.check_who_ends_the_training])
def test_states_and_callbacks(check):
    check(keras, hvd)


@pytest.mark.parametrize("module", [hvd, ringtrain.tensorflow.keras], ids=["keras", "tensorflow.keras"])
def test_any_order_of_the_callbacks_commits_alike(module):
    checks.check_callbacks(keras, module, first_commits=True)
    checks.check_callbacks(keras, module, first_commits=False)


def test_names_of_one_module_stand_in_the_other():
    from ringtrain.tensorflow.elastic import TensorFlowKerasState
    from ringtrain.tensorflow.keras import elastic

    assert elastic.KerasState is hvd.elastic.KerasState and issubclass(TensorFlowKerasState, elastic.KerasState)
    assert set(hvd.elastic.__all__) == set(elastic.__all__)


def test_what_cannot_be_a_state(alone):
    def check(_rank):
        model = keras.Sequential([keras.layers.Dense(1)])
        with pytest.raises(ValueError, match="KerasState: the model must be built"):
            hvd.elastic.KerasState(model)
        model.build((None, 2))
        local = hvd.DistributedOptimizer(keras.optimizers.SGD(), mode=hvd.LocalSteps(every=4))
        with pytest.raises(UnsupportedError, match="LocalSteps cannot be used with KerasState"):
            hvd.elastic.KerasState(model, local)
        state = hvd.elastic.KerasState(model, keras.optimizers.SGD())
        for callback in (hvd.elastic.UpdateBatchStateCallback, hvd.elastic.UpdateEpochStateCallback):
            with pytest.raises(InvalidArgumentError, match="the state must have an attribute '(batch|epoch)'"):
                callback(state)
        with pytest.raises(InvalidArgumentError, match="batches_per_commit must be at least 1, but is 0"):
            hvd.elastic.CommitStateCallback(state, 0)
        with pytest.raises(InvalidArgumentError, match="variables must be given outside of a graph"):
            ringtrain.tensorflow.elastic.TensorFlowState()

    alone.run(check)


def test_variables_are_kept_and_taken_over():
    def check(rank):
        variables = [tf.Variable([1.5 * rank, 2.0]), tf.Variable(rank), tf.Variable("text")]
        state = ringtrain.tensorflow.elastic.TensorFlowState(variables, step=rank)
        variables[0].assign([9.0, 9.0])
        state.restore()
        assert variables[0].numpy().tolist() == [1.5 * rank, 2.0]
        state.sync()
        variables[1].assign(5)
        state.restore()
        return [variables[0].numpy().tolist(), int(variables[1]), state.step]

    with World(2) as world:
        assert world.run(check) == [[[0.0, 2.0], 0, 0]] * 2


def test_variables_of_a_session():
    with tf.Graph().as_default(), World(1) as world, tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("weight", initializer=tf.constant([1.0, 2.0]))
        session.run(tf.compat.v1.global_variables_initializer())
        double = variable.assign(2.0 * variable)

        def check(_rank):
            state = ringtrain.tensorflow.elastic.TensorFlowState(session=session, step=0)
            session.run(double)
            state.sync()
            session.run(double)
            state.restore()
            return session.run(variable).tolist()

        assert world.run(check) == [[2.0, 4.0]]


class FakeMember:
    """A rank of an elastic job, of which only the loop's questions are asked."""

    wants_pause = False
    planned, balances = 0, False

    def __init__(self, ended):
        self._ended = ended

    def got_state(self):
        pass

    def world_has_ended(self):
        return self._ended


OURS = tf.errors.UnknownError(None, None, "{{node RingtrainAllreduce}} the rank in slot 1 was killed")
FOREIGN = tf.errors.UnknownError(None, None, "ValueError: broken data [[{{node PyFunc}}]]")


@pytest.mark.parametrize("problem, ended", [(OURS, False), (OURS, True), (FOREIGN, True)])
def test_an_error_of_the_worlds_end_goes_back_to_the_commit(problem, ended, alone, monkeypatch):
    monkeypatch.setattr(membership, "_member", FakeMember(ended))
    monkeypatch.setattr(ringtrain.tensorflow.elastic, "_next_world", lambda: None)
    met = []

    @hvd.elastic.run
    def train(state):
        met.append(state.step)
        state.step += 1
        if len(met) == 1:
            raise problem
        return "done"

    assert alone.run(lambda _rank: train(ringtrain.tensorflow.elastic.ObjectState(step=0))) == ["done"]
    assert met == [0, 0]


@pytest.mark.parametrize(
    "problem", [FOREIGN, tf.errors.FailedPreconditionError(None, None, "{{node RingtrainAllreduce}} shapes differ")]
)
def test_other_errors_leave_the_function(problem, alone, monkeypatch):
    monkeypatch.setattr(membership, "_member", FakeMember(False))

    @hvd.elastic.run
    def train(state):
        raise problem

    def check(_rank):
        with pytest.raises(type(problem)) as met:
            train(ringtrain.tensorflow.elastic.ObjectState(step=0))
        assert met.value is problem

    alone.run(check)


def test_a_rank_that_traces_later_learns_what_others_remember(monkeypatch):
    """It asks nobody, and has zeros for what they had; what nobody had stays None."""
    monkeypatch.setattr(membership, "_member", FakeMember(False))

    def traces(rank, variables):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] * (variables[1] if rank == 0 else 1.0))
            found = ringtrain.tensorflow.DistributedGradientTape(tape).gradient(loss, variables)
            assert found[2] is None
            return found[:2]

        return step

    def check(rank):
        variables = [tf.Variable(3.0), tf.Variable(5.0), tf.Variable(7.0)]
        step, train = traces(rank, variables), ringtrain.tensorflow.elastic.run
        state, found = ringtrain.tensorflow.elastic.ObjectState(), []
        presence.share()
        if rank == 0:  # as one that was in a world before, where it has traced alone
            memory = presence._memory()
            names = ["step/grad.0.Variable", "step/grad.1.Variable", "step/grad.2.Variable"]
            memory._entries[(0, *names)] = [
                (list(map(presence.weakref.ref, variables)), presence.Remembered(bytes([DENSE, DENSE, MISSING])))
            ]
        monkeypatch.setattr(presence, "_agree", lambda *arguments: pytest.fail(f"rank {rank} asks the others"))
        train(lambda state: found.extend(np.array(step()).tolist()))(state)
        return found

    with World(2) as world:
        assert world.run(check) == [[3.0, 1.5]] * 2


class Seen(keras.callbacks.Callback):
    """The batches of ``fit``, by epoch and the state's count."""

    def __init__(self, state):
        super().__init__()
        self.state, self.batches = state, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append((self.epoch, self.state.batch))


def distributed_model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    return model


def fit(model, elastic, batches, *callbacks, **arguments):
    rows = np.zeros((batches, 1), np.float32)
    arguments = {"initial_epoch": elastic.epoch, "epochs": 3, "batch_size": 1, "verbose": 0, **arguments}
    model.fit(rows, rows, callbacks=[elastic, *callbacks], **arguments)


def test_fit_takes_the_rest_of_an_epoch_and_then_whole_ones(alone):
    def check(_rank):
        model = distributed_model()
        elastic = hvd.elastic.Elastic(model, epoch=1, batch=2, step=6)
        seen = Seen(elastic.state)
        fit(model, elastic, 4, seen)
        assert seen.batches == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
        assert (elastic.state.epoch, elastic.state.batch, elastic.state.step) == (3, 0, 12)
        with pytest.raises(InvalidArgumentError, match="one loop over all epochs, or one fit, but found another one"):
            fit(model, elastic, 4, epochs=4)

    alone.run(check)


def test_what_elastic_fit_refuses(alone):
    def check(_rank):
        with pytest.raises(InvalidArgumentError, match="elastic.Elastic: the model must be built, and compiled"):
            hvd.elastic.Elastic(keras.Sequential([keras.layers.Dense(1)]))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(), mode=hvd.LocalSteps(every=4)), "mse")
        with pytest.raises(UnsupportedError, match="LocalSteps cannot be used with elastic.State"):
            hvd.elastic.Elastic(model)
        model = distributed_model()
        elastic = hvd.elastic.Elastic(model)
        with pytest.raises(InvalidArgumentError, match="initial_epoch must be that of the state, 0, but is 1"):
            fit(model, elastic, 2, initial_epoch=1)
        elastic.state.batches = 3
        with pytest.raises(InvalidArgumentError, match="each epoch must have 3 batches .* have ended after 2"):
            fit(model, elastic, 2)
        model.compile(model.optimizer, "mse", steps_per_execution=2)
        with pytest.raises(InvalidArgumentError, match="steps_per_execution must divide the 3 batches"):
            fit(model, elastic, 2)

    alone.run(check)


def test_ranks_that_would_take_different_numbers_of_batches_are_refused():
    def check(rank):
        model = distributed_model()
        elastic = hvd.elastic.Elastic(model)
        with pytest.raises(MismatchError, match="number of batches of an epoch must be the same .* between 2 and 3"):
            fit(model, elastic, 2 + rank)

    with World(2) as world:
        world.run(check)


def sampled(count=7, size=2, **objects):
    """A model, its Elastic, and data that a sampler deals; which samples come is in ``seen``, and which model is trained."""
    model, seen = distributed_model(), []
    sampler = hvd.elastic.BatchSampler(count, size, shuffle=False, **objects)
    elastic = hvd.elastic.Elastic(model, sampler=sampler)

    def load(indices):
        seen.append(indices.tolist())
        return np.ones((len(indices), 1), np.float32), np.ones((len(indices), 1), np.float32)

    return model, elastic, sampler, load, seen


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_fit_reads_what_its_sampler_deals_and_nothing_ahead(eager, alone):
    def check(_rank):
        model, elastic, sampler, load, seen = sampled()
        model.compile(model.optimizer, "mse", run_eagerly=eager)
        data = hvd.elastic.batches(sampler, load)
        ends = []
        at_end = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append((elastic.state.step, sampler.batches_left, seen[-1][0]))
        )
        history = model.fit(data, epochs=2, initial_epoch=elastic.epoch, callbacks=[elastic, at_end], verbose=0)
        assert ends == [(step + 1, 3 - step % 4, 2 * (step % 4)) for step in range(8)]
        assert len(history.history["loss"]) == 2 and seen[-4:] == [[0, 1], [2, 3], [4, 5], [6]]
        assert (elastic.state.epoch, elastic.state.batch, elastic.state.step) == (2, 0, 8)

    alone.run(check)


def test_fit_with_a_sampler_leaves_out_what_is_too_small(alone):
    def check(_rank):
        model, elastic, sampler, load, _ = sampled(drop_last=True)
        data = hvd.elastic.batches(sampler, load, workers=2)
        model.fit(data, epochs=2, initial_epoch=elastic.epoch, callbacks=[elastic], verbose=0)
        assert elastic.state.step == 6

    alone.run(check)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_read_by_the_rank_whose_they_are(workers):
    """In threads of TensorFlow, and of workers, where ranks are threads too."""

    def check(rank):
        model, elastic, sampler, load, seen = sampled(count=12)
        model.compile(model.optimizer, "mse", run_eagerly=True)
        asked = []

        def load_as_rank(indices):
            asked.append(hvd.rank())
            return load(indices)

        data = hvd.elastic.batches(sampler, load_as_rank, workers=workers)
        model.fit(data, epochs=1, initial_epoch=elastic.epoch, callbacks=[elastic], verbose=0)
        assert elastic.state.step == 3 and set(asked) == {rank}
        return {index for batch in seen[-3:] for index in batch}

    with World(2, stall_abort_seconds=60) as world:
        one, other = world.run(check)
    assert one | other == set(range(12)) and not one & other


def test_what_fit_refuses_beside_a_sampler(alone):
    def check(_rank):
        model, elastic, sampler, load, _ = sampled()
        with pytest.raises(InvalidArgumentError, match="with a sampler the data must be batches"):
            fit(model, elastic, 4)
        with pytest.raises(TypeError, match="the sampler must be a BatchSampler, but is a int"):
            hvd.elastic.Elastic(model, sampler=3)
        with pytest.raises(TypeError, match="the sampler must be a BatchSampler, but is a NoneType"):
            hvd.elastic.batches(None, load)
        with pytest.raises(TypeError, match="epoch must be a whole number, but is '1'"):
            hvd.elastic.Elastic(model, epoch="1")
        model, elastic, sampler, load, _ = sampled()
        model.compile(model.optimizer, "mse", steps_per_execution=2)
        with pytest.raises(InvalidArgumentError, match="with a sampler steps_per_execution must be 1"):
            model.fit(hvd.elastic.batches(sampler, load), epochs=1, callbacks=[elastic], verbose=0)

    alone.run(check)


def test_data_that_are_read_ahead_are_refused(alone):
    """Of ranks that come and go it would not be known who has used them. What happens to be read in time harms nobody."""

    def check(_rank):
        model, elastic, sampler, load, _ = sampled()
        drawn, drawn_twice, take = [], threading.Event(), sampler.take

        def note_and_take():
            try:
                take()
            finally:
                drawn.append(1)
                if len(drawn) > 1:
                    drawn_twice.set()

        def slow_loss(expected, found):  # of a step that lasts until the next batch is read
            assert drawn_twice.wait(60)
            return keras.losses.mean_squared_error(expected, found)

        sampler.take = note_and_take
        model.compile(model.optimizer, slow_loss, run_eagerly=True)
        data = hvd.elastic.batches(sampler, load).prefetch(3)
        with pytest.raises(Exception, match="must be read when their step begins, but are read ahead"):
            model.fit(data, epochs=1, initial_epoch=elastic.epoch, callbacks=[elastic], verbose=0)

    alone.run(check)
