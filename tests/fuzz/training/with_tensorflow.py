"""Runs a script of TensorFlow's tapes on ranks that are threads, and in one process with the batches of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import ringtrain.tensorflow as hvd
from training.fuzzing import Fuzzer, difference, on_ranks
from training.tape_script import LAYERS, LOCAL, SCRIPTS, Script, Turn

WIDTH, SAMPLES, ROWS, RATE = 3, 2, 8, 0.1
STALL_SECONDS = 20.0
TOLERANCES = {"none": 1e-10, "fp16": 1e-2}


class Loop:
    """The user's loop.

    Args:
        script: what it does.
        ranks: whose batches this process has.
        wraps: whether the tapes are distributed.
    """

    def __init__(self, script: Script, ranks: range, wraps: bool):
        self.script, self.ranks, self.wraps = script, ranks, wraps
        first = np.random.default_rng(11)
        # A rank starts from values of its own, so that a missing broadcast shows.
        own = ranks.start if wraps else 0
        self.layers = [tf.Variable(first.normal(size=(WIDTH, WIDTH)) / 2 + own) for _ in range(LAYERS)]
        self.table = tf.Variable(first.normal(size=(ROWS, WIDTH)) + own)
        if wraps:
            hvd.broadcast_variables([*self.layers, self.table], root_rank=0)
        self.local = dict.fromkeys(ranks, self.layers[LOCAL])
        if script.local and not wraps:
            self.local = {rank: tf.Variable(self.layers[LOCAL]) for rank in ranks}

    def run(self) -> list[list[np.ndarray]]:
        """Of each rank the parameters after each turn, those of the local layer last."""
        seen: list[list[np.ndarray]] = [[] for _ in self.ranks]
        for number, turn in enumerate(self.script.turns):
            step = tf.function(self.step) if self.script.in_graph else self.step
            step(number, turn)
            for place, rank in enumerate(self.ranks):
                own = [self.table, *self.layers[:LOCAL], self.local[rank]]
                seen[place].append(np.concatenate([each.numpy().ravel() for each in own]))
        return seen

    def step(self, number: int, turn: Turn) -> None:
        sources = self.sources(turn)
        sums: list[Any] = [None] * len(sources)
        for place, used in enumerate(turn.passes):
            with tf.GradientTape() as tape:
                losses = [self.loss(rank, used[rank], 100 * number + 10 * place + rank) for rank in self.ranks]
                loss = tf.add_n(losses) if self.wraps else tf.add_n(losses) / self.divisor
            gradients = (self.distributed(tape) if self.wraps else tape).gradient(loss, sources)
            dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
            sums = [b if a is None else a if b is None else a + b for a, b in zip(sums, dense, strict=True)]
        for source, gradient in zip(sources, sums, strict=True):
            if gradient is not None and not turn.discards:
                is_local = not self.wraps and any(source is each for each in self.local.values())
                source.assign_sub(RATE * gradient * (self.local_factor if is_local else 1.0))

    def sources(self, turn: Turn) -> list[tf.Variable]:
        asked = [layer for number, layer in enumerate(self.layers[:LOCAL]) if number not in turn.frozen]
        own = [] if LOCAL in turn.frozen else list({id(each): each for each in self.local.values()}.values())
        return [*asked, *own, *([self.table] if self.script.sparse else [])]

    def loss(self, rank: int, used: tuple[int, ...], seed: int) -> tf.Tensor:
        batch = np.random.default_rng(seed)
        x = tf.constant(batch.normal(size=(SAMPLES, WIDTH)))
        if not used:
            return tf.reduce_mean(x)
        if self.script.sparse:
            x += tf.gather(self.table, batch.permutation(ROWS)[:SAMPLES])
        for layer in used:
            x = tf.tanh(x @ (self.local[rank] if layer == LOCAL else self.layers[layer]))
        return tf.reduce_mean(tf.square(x - 0.3))

    def distributed(self, tape: tf.GradientTape) -> tf.GradientTape:
        script = self.script
        tape = hvd.DistributedGradientTape(
            tape,
            op=hvd.Average if script.op == "average" else hvd.Sum,
            groups=script.groups,
            gradient_predivide_factor=script.predivide,
            compression=getattr(hvd.Compression, script.compression),
            sparse_as_dense=script.sparse == "dense",
            scale_local_gradients=script.local == "scaled",
        )
        if script.local:
            tape.register_local_source(self.layers[LOCAL])
        return tape

    @property
    def divisor(self) -> float:
        """Of each loss in one process: what the ranks' tapes make of it."""
        return self.script.ranks if self.script.op == "average" else 1

    @property
    def local_factor(self) -> float:
        """On a local gradient in one process: what the ranks' tapes make of their own one."""
        if not self.script.local:
            return 1.0
        return self.divisor / (self.script.ranks if self.script.local == "scaled" else 1)


def verdict(script: Script) -> str:
    """What is wrong with a script's parameters on ranks; "" if they are those of one process."""
    expected = Loop(script, range(script.ranks), wraps=False).run()

    def found() -> list[list[np.ndarray]]:
        def run(rank: int) -> list[np.ndarray]:
            return Loop(script, range(rank, rank + 1), wraps=True).run()[0]

        return on_ranks(script.ranks, script.layout, STALL_SECONDS, run)

    shared = -WIDTH * WIDTH if script.local else None
    return difference(found, expected, TOLERANCES[script.compression], shared)


FUZZER = Fuzzer(SCRIPTS, verdict)
