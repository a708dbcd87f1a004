"""Checks of the elastic states and callbacks, for Keras 3 on either backend and for tf_keras; in worlds of threads."""

import numpy as np

from ringtrain.testing import World

ROWS = 24


def bits(state):
    return [np.array(variable.numpy()).tobytes() for variable in state._variables()]


def state_of(keras, hvd, rank, **kwargs):
    """A trained model with a dropout's seed and Adam's slots; each rank's own."""
    keras.utils.set_random_seed(rank)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.0625)), "mse", run_eagerly=True)
    return hvd.elastic.KerasState(model, **kwargs)


def step(state):
    x = np.ones((2, 3), "float32")
    state.model.train_on_batch(x, x[:, :1])


def check_restore(keras, hvd):
    """What was committed comes back bit for bit, as often as it is asked for."""

    def check(rank):
        state = state_of(keras, hvd, rank, epoch=3, seen=[1])
        step(state)
        state.commit()
        kept = bits(state)
        for _ in range(2):
            step(state)
            state.seen.append(2)
            state.epoch += 1
            assert bits(state) != kept
            state.restore()
            assert bits(state) == kept and (state.epoch, state.seen) == (3, [1])

    with World(1) as world:
        world.run(check)


def check_sync(keras, hvd):
    """All have what rank 0 has, and keep it; the seeds of dropout differ."""

    def check(rank):
        state = state_of(keras, hvd, rank, epoch=rank)
        if rank == 0:
            state.optimizer.iterations.assign(7)
        state.sync()
        kept = bits(state)
        values = [variable.numpy() for variable in state._variables()]
        for variable in state.model.trainable_variables:
            variable.assign(variable.numpy() + 1.0)
        state.restore()
        assert bits(state) == kept and state.epoch == 0 and int(state.optimizer.iterations.numpy()) == 7
        return values

    with World(2) as world:
        one, other = world.run(check)
    differing = [a for a, b in zip(one, other, strict=True) if np.any(a != b)]
    assert all("int" in str(a.dtype) for a in differing), differing  # the seeds


class Says:
    """Notes in a list what the state does, among what ``fit`` does."""

    def __init__(self, state, did):
        self._state, self._did = state, did

    def __getattr__(self, name):
        if name in ("commit", "save"):
            return lambda: self._did.append((name, self._state.epoch, self._state.batch))
        return getattr(self._state, name)


def check_callbacks(keras, hvd, first_commits):
    """Where the commits stand, wherever the callback does; and the first epoch is as long as is left of it."""

    def check(rank):
        state = state_of(keras, hvd, rank, epoch=0, batch=2)
        did, commits = [], []

        class Commit(hvd.elastic.CommitStateCallback):
            """As programs for Horovod make it."""

            def commit(self):
                commits.append(self.state.batch)
                super().commit()

        commit = Commit(Says(state, did), batches_per_commit=3)
        updates = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
        stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: did.append("end"))
        x = np.ones((ROWS, 3), "float32")
        callbacks = [commit, *updates, stop] if first_commits else [stop, *updates, commit]
        state.model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        assert all(each.state is state for each in updates)
        return did, int(state.optimizer.iterations.numpy()), commits

    with World(1) as world:
        ((did, steps, commits),) = world.run(check)
    first = [("commit", 0, 5), "end"]  # 4 of 6 batches are left: 2 are done before
    second = [("commit", 1, 0), ("commit", 1, 3), "end", ("save", 2, 0)]
    assert (did, steps, commits) == (first + second, 10, [5, 0, 3]), (did, steps, commits)


def check_who_ends_the_training(keras, hvd):
    """The end of a shortened epoch hides nobody's wish to stop, and a batch at least is done."""

    def check(rank):
        state = state_of(keras, hvd, rank, batch=9)
        ends = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: setattr(state.model, "stop_training", True)
        )
        x = np.ones((ROWS, 3), "float32")
        update = hvd.elastic.UpdateBatchStateCallback(state)
        state.model.fit(x, x[:, :1], batch_size=4, epochs=5, verbose=0, callbacks=[ends, update])
        assert state.batch == 0 and int(state.optimizer.iterations.numpy()) == 1

    with World(1) as world:
        world.run(check)


def check_all(keras, hvd):
    """Everything here."""
    check_restore(keras, hvd)
    check_sync(keras, hvd)
    check_callbacks(keras, hvd, first_commits=True)
    check_callbacks(keras, hvd, first_commits=False)
    check_who_ends_the_training(keras, hvd)
