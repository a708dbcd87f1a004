"""A rank of a job of test_elastic_keras_tables.py, which learns rows of a table with Keras: KIND says by which rule.

With PLAN it takes the steps of a plan in a job of a fixed size instead, from where the job before has left the table.
FAULTS says who dies where: "forward" and "fetched" are around the look-up, "backward" stands before gradients wait, "held" is
between the sums of rows and the word that all have them, "norm" before the norm of gradients is known, "released" behind the
step. LOOP has a loop of its own instead of ``fit``, COMMITS one under ``elastic.run``.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import elastic_faults
import keras
import numpy as np

import ringtrain.embedding.row_gradients as row_gradients
import ringtrain.keras as hvd
from ringtrain.embedding import committed_rows, kept_rows, moving  # noqa: F401  faults use them
from ringtrain.embedding.table import SelfUpdatingTable
from ringtrain.keras import rows
from ringtrain.keras.backends import backend

# So many samples that the ranks' shares of a batch are equal in all tests: weights of others round otherwise.
ROWS, WIDTH, BATCH, SAMPLES, EPOCHS, PLACES = 23, 4, 4, 96, 2, 6
COMMITS = 9  # steps under elastic.run, each committed
RULES = {
    "sgd": lambda: hvd.layers.SGD(lr=0.2),
    "momentum": lambda: hvd.layers.SGD(lr=0.1, momentum=0.5),
    "adagrad": lambda: hvd.layers.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    "rowwise": lambda: hvd.layers.RowWiseAdagrad(lr=0.1),
    "adam": lambda: hvd.layers.SparseAdam(lr=0.05),
}
slot, folder = elastic_faults.slot, elastic_faults.folder
kind, how = os.environ["KIND"].partition("+")[::2]
drawn: list[int] = []  # this rank, and samples


def samples(indices):
    """Six ids each, some of them twice, and what is wanted."""
    own = [int(index) for index in indices]
    drawn[:] = [hvd.rank(), *own]
    made = [np.random.default_rng(index) for index in own]
    ids = np.stack([each.integers(ROWS, size=PLACES) for each in made])
    return ids, np.array([each.standard_normal(1) for each in made], np.float32)


def learner():
    """A model with a table, and the table's layer."""
    storage = {"storage": "file", "path": str(folder)} if os.environ.get("STORAGE") == "file" else {}
    words = hvd.layers.ShardedEmbedding(
        ROWS, WIDTH, RULES[kind](), seed=3, scale=1.0, name="words", dealing=os.environ.get("DEALING", "modulo"),
        replicas=int(os.environ.get("REPLICAS", "2")), **storage,
    )  # fmt: skip
    inputs = keras.Input((PLACES,), dtype="int64")
    start = keras.initializers.Constant(np.linspace(-1, 1, WIDTH).reshape(WIDTH, 1))
    dense = keras.layers.Dense(1, kernel_initializer=start if slot == 0 or "PLAN" in os.environ else "ones")
    model = keras.Model(inputs, dense(keras.ops.mean(words(inputs), 1)))
    clips = {"global_clipnorm": 0.5} if how == "clipped" else {}
    several = {"gradient_accumulation_steps": 2} if how == "accumulated" else {}
    optimizer = keras.optimizers.SGD(0.125, momentum=0.5, **clips, **several)
    if how == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10, dynamic_growth_steps=4)
    passes = {"backward_passes_per_step": 2} if how == "passes" else {}
    model.compile(hvd.DistributedOptimizer(optimizer, **passes), "mse", run_eagerly="EAGER" in os.environ)
    model.optimizer.build(model.trainable_variables)
    return model, words


def replicated(model):
    """Variables that all ranks have alike."""
    return [*model.trainable_variables, *model.optimizer.variables]


def kept(table):
    """All lines of each row that this rank keeps, its own and others'."""
    places = np.arange(table.owned if table.kept is None else table.kept.layout.count(table.rank))
    ids = (table.dealing if table.kept is None else table.kept.layout).ids(table.rank, places)
    lines = {"weight": table._rows, **table._state}
    return [
        (int(row), {key: each.gather(np.array([place]))[0].tolist() for key, each in lines.items()})
        for row, place in zip(ids, places, strict=True)
    ]


def finish(model, words, steps):
    """Leaves what was learnt for the test; fails if two ranks keep one row with other bits."""
    by_row = {}
    for told in hvd.allgather_object(kept(words.table), "end"):
        for row, lines in told:
            assert by_row.setdefault(row, lines) == lines, row
    assert sorted(by_row) == list(range(ROWS))
    values = {key: np.array([by_row[row][key] for row in range(ROWS)], np.float32) for key in sorted(by_row[0])}
    for place, variable in enumerate(replicated(model)):
        values[f"variable {place}"] = keras.ops.convert_to_numpy(variable)
    values["step"] = np.array(words.table.step)
    if hvd.rank() == 0:
        np.savez(folder / "end.npz", **values)
    bits = b"".join(name.encode() + value.tobytes() for name, value in sorted(values.items()))
    print("end", steps, hashlib.sha256(bits).hexdigest(), flush=True)


def strike_in(owner, name, before="", after=""):
    """Has this rank struck around a method, or a function, of the product's."""
    original = getattr(owner, name)

    def struck(*given, **named):
        if before == "norm" and "SIGKILL" in elastic_faults.statement(progress.state.step, before):
            print("applied", progress.state.step, *drawn, flush=True)
        elastic_faults.strike(progress.state.step, before)
        result = original(*given, **named)
        if after == "held" and "SIGKILL" in elastic_faults.statement(progress.state.step, after):
            print("perhaps", progress.state.step, *drawn, flush=True)
        elastic_faults.strike(progress.state.step, after)
        return result

    setattr(owner, name, struck)


class Progress:
    """How far this rank is."""

    state: Any

    def tell(self, words):
        """Tells which samples this rank has brought to a step, and saves rows where that is asked for."""
        step = self.state.step
        print("applied", step, *drawn, flush=True)
        elastic_faults.strike(step, "released")
        if step == int(os.environ.get("SAVED_AT", "-1")):
            words.save_table(os.environ["SAVED_IN"])
            words.load_table(os.environ["SAVED_IN"], lost_only=True)


class Steps(keras.callbacks.Callback):
    """Waits for ranks that join, and tells."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    def on_train_batch_begin(self, batch, logs=None):
        elastic_faults.await_joiners(progress.state.step)

    def on_train_batch_end(self, batch, logs=None):
        progress.tell(self.words)


def planned():
    """Takes the steps of a plan, from the files of the plan before, which it replaces by its own."""
    plan = json.loads(Path(os.environ["PLAN"]).read_text())
    model, words = learner()
    done, before, after = plan["done"], folder / f"tables-{plan['number']}", folder / f"tables-{plan['number'] + 1}"
    if plan["number"]:
        words.load_table(before)
        saved = np.load(before / "rest.npz")
        for place, variable in enumerate(replicated(model)):
            variable.assign(saved[str(place)])
    elif (first := os.environ.get("ROWS_FROM")) is not None:
        words.load_table(first)
    own = [step[hvd.rank()] for step in plan["steps"]]
    if "LOOP" in os.environ or "COMMITS" in os.environ:
        for each in own:
            model.train_on_batch(*samples(each))
    else:  # TensorFlow optimizes a graph in another way, to other bits, where it knows the size of a batch
        data = backend.dataset(lambda: map(samples, own), samples(range(BATCH)))
        model.fit(data, steps_per_epoch=len(own), verbose=0)
    if hvd.rank() == 0:
        after.mkdir()
        rest = {str(place): keras.ops.convert_to_numpy(each) for place, each in enumerate(replicated(model))}
        np.savez(after / "rest.npz", **rest)
    hvd.allgather_object(None, "made")
    words.save_table(after)
    finish(model, words, done + len(plan["steps"]))


def run_to_commits():
    """Learns under ``elastic.run``: a step whose world is lost is done again, from the commit before it."""
    model, words = learner()
    state = hvd.elastic.KerasState(model, step=0)
    progress.state = state
    strike_in(SelfUpdatingTable, "look_up", "forward", "fetched")
    strike_in(SelfUpdatingTable, "bring", "backward")
    exchange = committed_rows.allreduce

    def strike_within(*given, name, **named):
        result = exchange(*given, name=name, **named)
        elastic_faults.strike(state.step, name.split(".")[-1])
        return result

    committed_rows.allreduce = strike_within

    @hvd.elastic.run
    def train(state):
        while state.step < COMMITS:
            elastic_faults.await_joiners(state.step)
            step, size = state.step, hvd.size()
            print("attempt", step, size, flush=True)
            model.train_on_batch(*samples(samples_of(step, size, hvd.rank())))
            elastic_faults.strike(step, "stepped")
            state.step += 1
            state.commit()

    train(state)
    finish(model, words, state.step)


def samples_of(step, size, rank):
    """Under ``elastic.run``, which leaves to the script what a rank learns in a step."""
    return [((step * size + rank) * BATCH + place) % SAMPLES for place in range(BATCH)]


def run_to_end():
    """Learns in ``fit``, or in a loop of its own."""
    model, words = learner()
    if (first := os.environ.get("ROWS_FROM")) is not None:
        words.load_table(first)
    sampler = hvd.elastic.BatchSampler(SAMPLES, BATCH)
    strike_in(SelfUpdatingTable, "look_up", "forward", "fetched")
    strike_in(SelfUpdatingTable, "bring", "backward")
    strike_in(row_gradients.RowGradients, "reduce", "", "held")
    strike_in(rows, "norms", "norm")
    if "LOOP" in os.environ:
        progress.state = hvd.elastic.State(model=model, optimizer=model.optimizer, sampler=sampler)
        for _ in progress.state.epochs(EPOCHS):
            for indices in sampler:
                model.train_on_batch(*samples(indices))
                progress.tell(words)
    else:
        elastic = hvd.elastic.Elastic(model, sampler=sampler)
        progress.state = elastic.state
        data = hvd.elastic.batches(sampler, samples)
        held_out = {"validation_data": samples(range(8))} if "VALIDATES" in os.environ else {}
        callbacks = [Steps(words), elastic]  # the first counts from the step that is not done yet
        model.fit(data, epochs=EPOCHS, initial_epoch=elastic.epoch, callbacks=callbacks, verbose=0, **held_out)
    finish(model, words, progress.state.step)


hvd.init()
progress = Progress()
exec(os.environ.get("PLANTED_IN_TABLES", ""))
if "PLAN" in os.environ:
    planned()
elif "COMMITS" in os.environ:
    run_to_commits()
else:
    run_to_end()
