"""Runs a script of JAX on ranks that are threads, and in one process with the batches of all."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pytest import MonkeyPatch

import ringtrain.jax as hvd
from ringtrain._training import drift
from training.fuzzing import Fuzzer, difference, on_ranks
from training.jax_script import ALL, FROZEN, LAYERS, SCRIPTS, Script, Turn, segments

NARROW, WIDE, SAMPLES, MODELS = 3, 17, 6, 2  # samples are dealt over 2 ranks or 3
STALL_SECONDS = 60.0
KEPT_PROGRAMS = 200  # of so many scripts, which take 2 GB
CLIP, RATE = 0.5, 0.1
FACTOR = 1.5
TOLERANCES = {"float64": 1e-7, "complex128": 1e-7, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "none": 1e-7}
# A small program is compiled in a seventh of the time so, to the same order of operations with other ranks.
QUICKLY = {
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 0,
}
# eps large enough that what rounds otherwise is not divided by next to nothing
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda learning_rate: optax.sgd(learning_rate),
    "momentum": lambda learning_rate: optax.chain(
        optax.add_decayed_weights(0.01), optax.sgd(learning_rate, momentum=0.9, nesterov=True)
    ),
    "adam": lambda learning_rate: optax.adam(learning_rate, eps=1e-2),
    "adamw": lambda learning_rate: optax.adamw(learning_rate, eps=1e-2, weight_decay=0.1),
    "rmsprop": lambda learning_rate: optax.rmsprop(learning_rate, eps=1e-2, momentum=0.5),
    "adagrad": lambda learning_rate: optax.adagrad(learning_rate, eps=1e-2),
    "lamb": lambda learning_rate: optax.lamb(learning_rate, eps=1e-2),
    "noise": lambda learning_rate: optax.chain(optax.add_noise(0.01, 0.5, 7), optax.sgd(learning_rate)),
}
# What all ranks are told.
MISTAKES = {
    "start": "must be the same on all ranks, but those of rank",
    "rate": "learning_rate must be the same on all ranks, but is",
    "raises": "raised LookupError: this batch is broken",
    "shape": "shape must be the same on all ranks, but is",
}


_scripts = itertools.count()

# Ranks in one process share XLA's threads, and a program that waits for another rank holds one: each rank runs its own.
jax.config.update("jax_cpu_enable_async_dispatch", False)


@contextmanager
def configured(looks: bool) -> Iterator[None]:
    """JAX with float64.

    Args:
        looks: whether ranks compare their parameters in every step.
    """
    before = jax.config.jax_enable_x64
    with MonkeyPatch.context() as patch:
        if looks:
            patch.setattr(drift, "PERIOD", 0.0)
            patch.setattr(drift, "SHARE", float("inf"))
        jax.config.update("jax_enable_x64", True)
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)


class Alone:
    """What ranks do together, where one process has the batches of all.

    Args:
        ranks: how many these are.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks

    def mean(self, total: jax.Array) -> jax.Array:
        return total / self.ranks

    def average(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [sum(values[1:], values[0]) / len(values)] * len(values)

    def gather(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.concatenate(list(rows))] * len(rows)

    def deal(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        parts = [jnp.split(each, len(rows)) for each in rows]
        return [jnp.concatenate(mine) for mine in zip(*parts, strict=True)]


class Together:
    """The same among ranks, of which this process has one.

    Args:
        process_set: who these are.
    """

    def __init__(self, process_set: Any):
        self.process_set = process_set

    def mean(self, total: jax.Array) -> jax.Array:
        return hvd.allreduce(total, "loss", process_set=self.process_set)

    def average(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [hvd.allreduce(values[0], process_set=self.process_set)]

    def gather(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        return [hvd.gather_with_gradient(rows[0], process_set=self.process_set)]

    def deal(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        return [hvd.alltoall(rows[0], process_set=self.process_set)]


class Transformation:
    """The transformation of a script.

    Args:
        script: which one.
        distributed: what makes one distributed.
        adds_up: whether that has it add up the gradients of several passes.
        tree: as that of the parameters.
    """

    def __init__(self, script: Script, distributed: Callable[[Any], Any], adds_up: bool, tree: Any):
        self.script, self.distributed, self.adds_up, self.tree = script, distributed, adds_up, tree

    def made(self) -> Any:
        script = self.script
        inner = self.base()
        if script.frozen.endswith("within"):
            inner = self.freezing(inner)
        if script.finite == "within":
            inner = optax.apply_if_finite(inner, 100)
        if script.accumulates == "within":
            inner = optax.MultiSteps(inner, script.every).gradient_transformation()
        if script.frozen == "two":
            each = {"one": self.distributed(inner), "other": self.distributed(inner)}
            whole = optax.partition(each, self.labels("one", "other"))
        else:
            whole = self.distributed(inner)
        if script.frozen.endswith("around"):
            whole = self.freezing(whole)
        if script.accumulates == "around" or (script.accumulates == "passes" and not self.adds_up):
            whole = optax.MultiSteps(whole, script.every).gradient_transformation()
        if script.finite == "around":
            whole = optax.apply_if_finite(whole, 100)
        return optax.with_extra_args_support(whole)

    def base(self) -> Any:
        script = self.script
        make = OPTIMIZERS[script.optimizer]
        if script.rate == "hyperparameter":
            base = optax.inject_hyperparams(make)(learning_rate=RATE)
        else:
            base = make(optax.exponential_decay(RATE, 2, 0.5) if script.rate == "schedule" else RATE)
        if script.clips == "behind":
            base = optax.chain(optax.clip_by_global_norm(CLIP), base)
        if script.plateau:
            base = optax.chain(base, optax.contrib.reduce_on_plateau(0.5, patience=1, atol=1e-3))
        return base

    def freezing(self, inner: Any) -> Any:
        if self.script.frozen.startswith("partition"):
            each = {"trained": inner, "frozen": optax.set_to_zero()}
            return optax.partition(each, self.labels("frozen", "trained"))
        zeros = optax.masked(optax.set_to_zero(), self.labels(True, False))
        return optax.chain(optax.masked(inner, self.labels(False, True)), zeros)

    def labels(self, frozen: Any, others: Any) -> Any:
        """The tree, with a label for each leaf of the layer that may be frozen, and another one for all others."""
        labels = jax.tree.map(lambda _: others, self.tree)
        labels["layers"][FROZEN] = jax.tree.map(lambda _: frozen, self.tree["layers"][FROZEN])
        return labels


class Loop:
    """The user's loop.

    Args:
        script: what it does.
        members: the ranks that train together.
        rank: whose batches this process has; None for those of all members.
    """

    def __init__(self, script: Script, members: tuple[int, ...], rank: int | None = None):
        self.script, self.members = script, members
        self.ranks = members if rank is None else (rank,)
        self.wraps = rank is not None
        self.is_wrong = rank == members[-1]
        self.width = WIDE if script.wide else NARROW
        self.others: Any = Alone(len(members))
        self.process_set = hvd.global_process_set
        if self.wraps:
            registered = {each: hvd.add_process_set(each) for each in script.together}
            self.process_set = registered.get(members, self.process_set)
            self.others = Together(self.process_set)
        self.optimizer = Transformation(script, self.distributed, self.wraps, self.parameters()).made()
        self.programs: dict[str, Callable] = {}

    def run(self, turns: range, before: Any = None) -> tuple[list[np.ndarray], Any]:
        """The numbers after each of these turns, and what is saved after the last one; begins with what was saved before."""
        parameters, state = self.first()
        if before is not None:
            parameters, state = loaded(before, (parameters, state))
        if self.script.compiled == "loop":
            return self.run_in_a_program(parameters, state)
        seen = []
        for number in turns:
            turn = self.script.turns[number]
            parameters, state = self.before(turn, number, parameters, state)
            if turn.discards:
                self.discard(turn, number, parameters)
                loss = jnp.zeros(())
            else:
                parameters, state, loss = self.step(parameters, state, self.batches(turn, number), self.used(turn))
            seen.append(numbers_of(parameters, loss))
        return seen, saved((parameters, state))

    def run_in_a_program(self, parameters: Any, state: Any) -> tuple[list[np.ndarray], Any]:
        """All turns at once."""
        batches = [self.batches(turn, number) for number, turn in enumerate(self.script.turns)]

        def loop(parameters: Any, state: Any, batches: Any) -> Any:
            def body(carried: Any, batch: Any) -> Any:
                parameters, state, loss = self.whole_step(*carried, batch)
                return (parameters, state), (parameters, loss)

            return jax.lax.scan(body, (parameters, state), batches)[1]

        stacked = jax.tree.map(lambda *each: np.stack(each), *batches)
        seen = self.program(loop, donates=True)(parameters, state, stacked)
        return [numbers_of(*jax.tree.map(lambda leaf: leaf[n], seen)) for n in range(len(batches))], None

    # ---- parameters ----

    def parameters(self) -> Any:
        """A tree of leaves of several dtypes, a number and an empty array among them."""
        drawn = np.random.default_rng(11)

        def array(dtype: str, *shape: int) -> jax.Array:
            return jnp.asarray(drawn.normal(size=shape) / np.sqrt(self.width)).astype(dtype)

        tree = {
            "layers": [{"w": array(each, self.width, self.width)} for each in self.script.dtypes],
            "scale": jnp.asarray(1.25, "float64"),
            "empty": jnp.zeros((0, 2), self.script.dtypes[-1]),
        }  # fmt: skip
        tree["layers"][0]["b"] = array(self.script.dtypes[0], self.width)  # each leaf costs time: one is enough
        return jax.tree.map(of_models, tree) if self.script.maps == "models" else tree

    def first(self) -> tuple[Any, Any]:
        """Parameters and state before the first turn."""
        parameters = self.parameters()
        if self.wraps:
            parameters = self.broadcast(parameters)
        return parameters, self.mapped(self.optimizer.init)(self.trained(parameters))

    def broadcast(self, parameters: Any) -> Any:
        """Those of the first member, where only that has the right ones."""
        mistake, root = self.script.mistake, self.members[0]
        if self.ranks != (root,):
            parameters = jax.tree.map(lambda leaf: (leaf + 1).astype(leaf.dtype), parameters)
        if mistake == "shape" and self.is_wrong:
            parameters["layers"][0]["b"] = parameters["layers"][0]["b"][..., :-1]
        if mistake == "start":
            return parameters
        return hvd.broadcast_parameters(parameters, root, process_set=self.process_set)

    def before(self, turn: Turn, number: int, parameters: Any, state: Any) -> tuple[Any, Any]:
        """What the user does before a turn."""
        if turn.reloads == "own":
            parameters, state = loaded(saved((parameters, state)), (parameters, state))
        if turn.reloads == "broadcast" and self.wraps:
            if self.ranks[0] != self.members[0]:
                parameters, state = jax.tree.map(lost, (parameters, state))
            parameters, state = hvd.broadcast_parameters(
                (parameters, state), self.members[0], "all", process_set=self.process_set
            )
        rate = turn.rate
        if self.wraps and self.is_wrong and number == len(self.script.turns) - 1:
            if self.script.mistake == "raises":
                raise LookupError("this batch is broken")
            if self.script.mistake == "rate":
                rate = 3.0
        if rate != 1:
            state = with_rate(state, rate)
        return parameters, state

    def trained(self, parameters: Any) -> Any:
        """Those that gradients are asked of."""
        if self.script.frozen != "argument":
            return parameters
        layers = [None if number == FROZEN else each for number, each in enumerate(parameters["layers"])]
        return {**parameters, "layers": layers}

    def completed(self, trained: Any, parameters: Any) -> Any:
        if self.script.frozen != "argument":
            return trained
        layers = [parameters["layers"][n] if n == FROZEN else each for n, each in enumerate(trained["layers"])]
        return {**trained, "layers": layers}

    # ---- data ----

    def batches(self, turn: Turn, number: int) -> Any:
        """Of each pass and rank here: samples, a mask of layers, and a factor of the loss."""
        shape = SAMPLES, self.width
        seeds = [[1000 * number + 10 * place + rank for rank in self.ranks] for place in range(len(turn.passes))]
        samples = np.array([[np.random.default_rng(seed).normal(size=shape) for seed in each] for each in seeds])
        masks = np.array([[[n in used[r] for n in range(LAYERS)] for r in self.ranks] for used in turn.passes])
        factors = np.ones(masks.shape[:2])
        factors[-1] = [np.inf if turn.overflow in (rank, ALL) else 1.0 for rank in self.ranks]
        return samples, masks, factors

    def used(self, turn: Turn) -> Any:
        """Of each pass and rank here the layers; None where the mask has them, so that programs of ranks are alike."""
        if self.script.compiled:
            return None
        return tuple(tuple(each[rank] for rank in self.ranks) for each in turn.passes)

    # ---- steps ----

    def step(self, parameters: Any, state: Any, batches: Any, used: Any) -> tuple[Any, Any, Any]:
        """One turn's updates, of which the script says what is compiled."""
        compiled = self.script.compiled
        if compiled == "step":
            return self.program(self.whole_step, donates=True)(parameters, state, batches)
        gradient = self.program(self.gradients) if compiled in ("gradient", "parts") else None
        update = self.program(self.update) if compiled in ("update", "parts") else None
        return self.whole_step(parameters, state, batches, used, gradient, update)

    def whole_step(
        self, parameters: Any, state: Any, batches: Any, used: Any = None, gradient: Any = None, update: Any = None
    ) -> tuple[Any, Any, Any]:
        for part, layers in self.parts(batches, used):
            gradients, loss = gradient(parameters, part) if gradient else self.gradients(parameters, part, layers)
            parameters, state, loss = (update or self.update)(gradients, parameters, state, loss)
        return parameters, state, loss

    def parts(self, batches: Any, used: Any) -> list[tuple[Any, Any]]:
        """What each update takes."""
        if not self.script.updates_each_pass:
            return [(batches, used)]
        count = batches[0].shape[0]
        return [
            (jax.tree.map(lambda each, n=n: each[n : n + 1], batches), used and used[n : n + 1]) for n in range(count)
        ]

    def program(self, function: Callable, donates: bool = False) -> Callable:
        """A function compiled."""
        if function.__name__ not in self.programs:
            donated = (0, 1) if donates and self.script.donates else ()
            options = None if self.script.optimized else QUICKLY
            self.programs[function.__name__] = jax.jit(function, donate_argnums=donated, compiler_options=options)
        return self.programs[function.__name__]

    def discard(self, turn: Turn, number: int, parameters: Any) -> None:
        """Gradients that nobody uses, reduced all the same."""
        gradients, _ = self.gradients(parameters, self.batches(turn, number), self.used(turn))
        if self.wraps:
            hvd.allreduce_gradients(gradients[0], process_set=self.process_set)

    def mapped(self, function: Callable, axes: Any = 0) -> Callable:
        return jax.vmap(function, axes) if self.script.maps == "models" else function

    # ---- gradients ----

    def gradients(self, parameters: Any, batches: Any, used: Any = None) -> tuple[list[Any], jax.Array]:
        """The sums of all passes: the gradients of each rank here, and the losses of all of them."""
        of_pass = self.mapped(lambda given, batch: self.gradients_of_pass(given, batch, None), (0, None))
        if self.script.accumulates == "scan" and used is None:

            def add(sums: Any, batch: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, sums, of_pass(parameters, batch)), None

            first, rest = (jax.tree.map(lambda each, cut=cut: each[cut], batches) for cut in (0, slice(1, None)))
            return jax.lax.scan(add, of_pass(parameters, first), rest)[0]
        found = []
        for number in range(batches[0].shape[0]):
            batch, layers = [each[number] for each in batches], used and used[number]
            of_these = self.mapped(functools.partial(self.gradients_of_pass, used=layers), (0, None))
            found.append(of_these(parameters, batch))
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), found)

    def gradients_of_pass(self, parameters: Any, batch: Any, used: Any) -> tuple[list[Any], jax.Array]:
        def total(copies: list[Any]) -> jax.Array:
            return self.total_loss([self.completed(each, parameters) for each in copies], batch, used)

        total = jax.checkpoint(total) if self.script.remakes else total

        def with_aux(copies: list[Any]) -> tuple[jax.Array, dict[str, Any]]:
            loss = total(copies)
            return loss, {"loss": loss, "samples": SAMPLES}

        copies = [self.trained(parameters)] * len(self.ranks)  # so that each rank's gradients are told apart
        if self.script.form == "aux":
            gradients, aux = jax.grad(with_aux, has_aux=True)(copies)
            return gradients, aux["loss"]
        if self.script.form == "grad":
            return jax.grad(total)(copies), jnp.zeros(())
        loss, gradients = jax.value_and_grad(total)(copies)
        return gradients, loss

    def total_loss(self, copies: list[Any], batch: Any, used: Any) -> jax.Array:
        """The sum of the losses of the ranks here, each of which has parameters of its own."""
        each = zip(copies, batch[0], batch[1], used or [None] * len(copies), strict=True)
        rows = [self.forward(*given) for given in each]
        if self.script.coupled == "centered":
            rows = self.centered(rows)
        elif self.script.coupled == "loop":
            rows = jax.lax.scan(lambda rows, _: (self.centered(jax.tree.map(jnp.sin, rows)), None), rows, length=2)[0]
        elif self.script.coupled == "gathered":
            rows = [jax.nn.softmax(each @ each.T) for each in self.others.gather(rows)]
        elif self.script.coupled == "dealt":
            rows = self.others.deal(rows)
        losses = [jnp.mean(jnp.square(each - 0.3)) * factor for each, factor in zip(rows, batch[2], strict=True)]
        return sum(losses[1:], losses[0])

    def centered(self, rows: list[jax.Array]) -> list[jax.Array]:
        means = self.others.average([each.mean(0) for each in rows])
        return [each - mean for each, mean in zip(rows, means, strict=True)]

    def forward(self, parameters: Any, samples: jax.Array, mask: jax.Array, used: tuple[int, ...] | None) -> jax.Array:
        def of_rows(x: jax.Array) -> jax.Array:
            for number, layer in enumerate(parameters["layers"]):
                if used is None or number in used:
                    wide = jnp.promote_types(layer["w"].dtype, jnp.float64)
                    y = jax.lax.dot(x.astype(wide), jax.lax.convert_element_type(layer["w"], wide))
                    if "b" in layer:
                        y = y + layer["b"].astype(wide)
                    y = jax.lax.tanh(jax.lax.real(y) if jnp.iscomplexobj(y) else y)
                    x = y if used is not None else jnp.where(mask[number], y, x)
            return x * parameters["scale"]

        return jax.vmap(of_rows)(samples) if self.script.maps == "samples" else of_rows(jnp.asarray(samples))

    # ---- updates ----

    def update(self, gradients: list[Any], parameters: Any, state: Any, loss: jax.Array) -> tuple[Any, Any, jax.Array]:
        return self.mapped(self.update_of_model)(gradients, parameters, state, loss)

    def update_of_model(
        self, gradients: list[Any], parameters: Any, state: Any, loss: jax.Array
    ) -> tuple[Any, Any, Any]:
        loss = self.others.mean(loss)
        if self.script.clips == "before":
            clip = optax.clip_by_global_norm(CLIP)
            gradients = [clip.update(each, clip.init(each))[0] for each in gradients]
        extra = {"value": loss} if self.script.plateau else {}
        trained = self.trained(parameters)
        given = trained if self.script.gives else None
        updates, state = self.optimizer.update(self.reduced(gradients), state, given, **extra)
        return self.completed(optax.apply_updates(trained, updates), parameters), state, loss

    def reduced(self, gradients: list[Any]) -> Any:
        """What the transformation takes."""
        if self.wraps:
            takes = self.script.reduces == "gradients"
            return hvd.allreduce_gradients(gradients[0], **self.arguments()) if takes else gradients[0]
        return jax.tree.map(lambda *each: summed(each, self.factor), *gradients)

    @property
    def factor(self) -> float:
        """Of the sum of all ranks' gradients, in one process: what the ranks' transformations make of it."""
        script = self.script
        passes = script.every if script.accumulates == "passes" and not script.averages_passes else 1
        return passes * (FACTOR if script.factors else 1.0) / (len(self.members) if script.op == "average" else 1)

    def distributed(self, inner: Any) -> Any:
        """The transformation with the gradients of all ranks, where these are processes of their own."""
        script = self.script
        if not self.wraps or script.reduces == "gradients":
            return inner
        adds = {"backward_passes_per_step": script.every, "average_aggregated_gradients": script.averages_passes}
        passes = adds if script.accumulates == "passes" else {}
        return hvd.DistributedGradientTransformation(
            inner, mode=hvd.Synchronous(replicas=script.replicas), **passes, **self.arguments()
        )

    def arguments(self) -> dict[str, Any]:
        """Of what reduces."""
        script = self.script
        factor = {f"{script.factors}_factor": FACTOR} if script.factors else {}
        op = hvd.Average if script.op == "average" else hvd.Sum
        return {"op": op, "compression": script.compression, "process_set": self.process_set, **factor}


def with_rate(state: Any, factor: float) -> Any:
    """A state in which the user has multiplied the learning rate."""

    def changed(node: Any) -> Any:
        if not hasattr(node, "hyperparams"):
            return node
        rate = node.hyperparams["learning_rate"]
        return node._replace(hyperparams={**node.hyperparams, "learning_rate": rate * factor})

    return jax.tree.map(changed, state, is_leaf=lambda node: hasattr(node, "hyperparams"))


def of_models(leaf: jax.Array) -> jax.Array:
    """A leaf for each of several models."""
    return jnp.stack([(leaf * (1 - 0.25 * model)).astype(leaf.dtype) for model in range(MODELS)])


def summed(leaves: Sequence[jax.Array], factor: float) -> jax.Array:
    """The sum of what ranks have, times a factor, with one rounding."""
    wide = jnp.promote_types(leaves[0].dtype, jnp.float64)
    return (sum(each.astype(wide) for each in leaves) * factor).astype(leaves[0].dtype)


def saved(tree: Any) -> bytes:
    """As a checkpoint has it."""
    return pickle.dumps(jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree))


def loaded(given: bytes, like: Any) -> Any:
    """What was saved, with keys where the other tree has some."""

    def leaf_of(array: np.ndarray, other: Any) -> jax.Array:
        return jax.random.wrap_key_data(array) if is_key(other) else jnp.asarray(array)

    return jax.tree.map(leaf_of, pickle.loads(given), like)


def lost(leaf: jax.Array) -> jax.Array:
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(leaf)))
    return jnp.zeros_like(leaf)


def is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def numbers_of(parameters: Any, loss: jax.Array) -> np.ndarray:
    """All parameters and the loss, as real numbers, one after the other."""
    leaves = [np.asarray(leaf) for leaf in (*jax.tree.leaves(parameters), loss)]
    wide = [leaf.astype(np.complex128 if leaf.dtype.kind == "c" else np.float64).ravel() for leaf in leaves]
    return np.nan_to_num(np.concatenate([leaf.view(np.float64) for leaf in wide]))


def verdict(script: Script) -> str:
    """What is wrong with a script's parameters on ranks, or with what they are told; "" if nothing is."""
    if next(_scripts) % KEPT_PROGRAMS == KEPT_PROGRAMS - 1:
        jax.clear_caches()
    with configured(script.looks):
        return verdict_of_mistake(script) if script.mistake else verdict_of_numbers(script)


def verdict_of_numbers(script: Script) -> str:
    whole = range(len(script.turns))
    compiles = script.compiled or script.updates_each_pass  # branches take long outside of programs
    alone = replace(script, compiled="step" if compiles else "", donates=False, optimized=False)
    of_set = {members: Loop(alone, members).run(whole)[0] for members in script.sets}
    set_of = {rank: members for members in script.sets for rank in members}

    def found() -> list[list[np.ndarray]]:
        seen: list[list[np.ndarray]] = [[] for _ in range(script.ranks)]
        states: list[Any] = [None] * script.ranks
        for turns in segments(script):

            def run(rank: int, turns: range = turns) -> None:
                numbers, states[rank] = Loop(script, set_of[rank], rank).run(turns, states[rank])
                seen[rank].extend(numbers)

            on_ranks(script.ranks, script.layout, STALL_SECONDS, run)
        return seen

    twins = [set_of[rank][0] for rank in range(script.ranks)]
    tolerance = max(TOLERANCES[each] for each in (script.compression, *script.dtypes))
    return difference(found, [of_set[set_of[rank]] for rank in range(script.ranks)], tolerance, twins=twins)


def verdict_of_mistake(script: Script) -> str:
    """What is wrong with what ranks are told of a mistake of one of them."""
    told: dict[int, str] = {}
    members, wrong = script.sets[0], script.sets[0][-1]

    def run(rank: int) -> None:
        try:
            Loop(script, members, rank).run(range(len(script.turns)))
        except Exception as problem:
            told[rank] = str(problem)
            if rank == wrong:
                raise

    try:
        on_ranks(script.ranks, script.layout, STALL_SECONDS, run)
    except Exception as problem:
        told.setdefault(wrong, str(problem))
    else:
        return f"not told: of {script.mistake}"
    silent = [rank for rank in members if rank not in told]
    others = [text for rank, text in told.items() if not (rank == wrong and script.mistake == "raises")]
    unclear = [text for text in others if MISTAKES[script.mistake] not in text]
    return f"not told: ranks {silent}" if silent else f"unclear: {unclear[0]}" if unclear else ""


FUZZER = Fuzzer(SCRIPTS, verdict)
