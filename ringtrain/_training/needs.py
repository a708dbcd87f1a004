"""What each way of training cannot be combined with, and why: one table, one comparison, one sentence for each pair. Pure.

``tests/project/test_modes.py`` makes the table of docs/modes-together.md from it, and tries each pair.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ringtrain.errors import InvalidArgumentError, UnsupportedError


@dataclass(frozen=True)
class Trait:
    """Something that a script can ask for, or have, beside a mode.

    Attributes:
        words: in errors and in the table.
        is_argument: whether a script gives it as an argument; else it is what its optimizer, model or job is.
    """

    words: str
    is_argument: bool = True


TRAITS = {
    "sum": Trait("op=Sum"),
    "adasum": Trait("op=Adasum"),
    "per item": Trait("op=PerItem"),
    "averaged passes": Trait("average_aggregated_gradients"),
    "groups": Trait("groups"),
    "groups on the host": Trait("groups, in Keras and TensorFlow"),
    "own compression": Trait("a compression class of your own"),
    "int8": Trait("Compression.int8 or int4"),
    "powersgd": Trait("Compression.powersgd"),
    "process set": Trait("a process set other than the world"),
    "closure": Trait("step(closure)"),
    "local layers": Trait("local layers or variables", is_argument=False),
    "float8": Trait("float8 layers", is_argument=False),
    "sharded embedding": Trait("rows of a sharded embedding of PyTorch", is_argument=False),
    "ShardedEmbedding": Trait("ShardedEmbedding of Keras", is_argument=False),
    "apex": Trait("copies of parameters by NVIDIA Apex", is_argument=False),
    "elastic.State": Trait("elastic.State, whose steps survive", is_argument=False),
    "survives on the host": Trait("elastic.State or Elastic, of TensorFlow and Keras", is_argument=False),
    "KerasState": Trait("KerasState", is_argument=False),
    "lightning": Trait("a strategy of Lightning", is_argument=False),
    "accelerate": Trait("Accelerate and Hugging Face's Trainer", is_argument=False),
    "elastic": Trait("an elastic job", is_argument=False),
    "keras": Trait("an optimizer of Keras", is_argument=False),
    "tape": Trait("DistributedGradientTape", is_argument=False),
    "jax": Trait("a gradient transformation of JAX", is_argument=False),
    "tf1": Trait("an optimizer of tf.compat.v1.train", is_argument=False),
    "not elementwise": Trait("an optimizer that does not update each element by itself", is_argument=False),
    "differentiable": Trait("differentiable=True", is_argument=False),
    "late": Trait("OneStepLate"),
    "exact steps of Keras": Trait("exact steps of an optimizer of Keras", is_argument=False),
    "device": Trait("parameters that are not dense, floating-point and on the CPU", is_argument=False),
}  # fmt: skip

_CHANGES = "ranks send what they have changed, not gradients"
_ROWS = "backward() settles their gradients; give them an optimizer of their own"
_EARLY = "gradients that travel are of this step, those that are applied of the step before"
_SHARES = "each rank has a share of the sum alone"
_FRAMEWORKS_OWN = "gradients lie where their framework has put them"
_PROGRAM = "a compiled step belongs to the world in which it was made"

# By column: a mode, an option of one, or an argument that is an algorithm of its own.
NEEDS: Mapping[str, Mapping[str, str]] = {
    "Synchronous": {},
    "gradient_as_bucket_view": {
        "own compression": "it takes gradients one by one",
        "powersgd": "it takes gradients one by one",
        "keras": _FRAMEWORKS_OWN,
        "tape": _FRAMEWORKS_OWN,
        "jax": _FRAMEWORKS_OWN,
        "tf1": _FRAMEWORKS_OWN,
    },
    "LocalSteps": {
        "sum": f"{_CHANGES}, and the sum of them is no step",
        "per item": f"{_CHANGES}; count_samples() says what they weigh",
        "adasum": f"{_CHANGES}, once in a while",
        "averaged passes": f"{_CHANGES}; divide the loss instead",
        "own compression": f"{_CHANGES}, as the core compresses them",
        "powersgd": f"{_CHANGES}, which are of no low rank",
        "sharded embedding": _ROWS,
        "apex": "the model's own parameters are averaged; use torch.amp",
        "elastic.State": "a rank that is lost takes along what it has changed",
        "KerasState": "ranks that join have no period",
        "lightning": "return a DistributedOptimizer from configure_optimizers, and call its synchronize() before evaluation",
        "accelerate": "it does not know when to synchronize the parameters",
        "tape": "the script itself updates; use an optimizer of Keras, or ringtrain.PeriodicAverage",
        "jax": "it sees gradients, not what a step has changed; use ringtrain.PeriodicAverage",
        "tf1": "it has no place to count updates; use an optimizer of Keras",
    },
    "named_buffers": {
        "keras": "fit finds the model's statistics; in a loop of your own call optimizer.average_also(variables)",
    },
    "within": {
        "process set": "a host, or a site, is one worker of the world",
        "elastic": "which ranks are one worker would change with the world",
    },
    "OneStepLate": {
        "per item": "the items of a step would be those of the step before",
        "adasum": "it combines the changes of this step",
        "groups": "each gradient travels alone",
        "own compression": "gradients are compressed by the core",
        "powersgd": "its second factor would arrive a step later still",
        "closure": "it computes the gradients that this step would apply",
        "local layers": _EARLY,
        "float8": "their maxima are of this step",
        "sharded embedding": _EARLY,
        "elastic.State": "gradients on their way are lost with a rank",
        "lightning": "return a DistributedOptimizer from configure_optimizers, and call its flush() before evaluation",
        "accelerate": "it does not know when to flush the last gradients",
        "KerasState": "gradients on their way are lost with their world",
        "jax": "it has no place to keep what is on its way",
        "tf1": "it has no place to keep what is on its way; use an optimizer of Keras",
    },
    "ShardedStep": {
        "adasum": _SHARES,
        "groups": "buckets of its own share the parameters out",
        "own compression": f"{_SHARES}, of gradients that the core compresses",
        "int8": "its feedback belongs to whole gradients",
        "powersgd": "its feedback belongs to whole gradients",
        "closure": "its loss would need the values of all parameters at once",
        "sharded embedding": "a rank has all of its rows; give them an optimizer of their own",
        "elastic": "a share of the optimizer's state is lost with its rank",
        "elastic.State": "a share of the optimizer's state is lost with its rank",
        "keras": "Keras' optimizers update whole variables",
        "tape": "the script itself updates whole variables",
        "jax": "it updates whole arrays",
        "tf1": "its optimizers update whole variables",
        "lightning": "it does not know when to put the optimizer's state together",
        "accelerate": "it does not know when to put the optimizer's state together",
        "not elementwise": "a rank updates a part of a parameter",
        "differentiable": "the update is made over shares",
        "device": "shares are dealt out in the host's memory",
    },
    "KERAS_BACKEND=jax": {
        "own compression": "compiled steps send gradients as the core compresses them",
        "ShardedEmbedding": "a compiled step has arrays of fixed shapes, and rows come in any number",
        "KerasState": _PROGRAM,
        "survives on the host": _PROGRAM,
        "elastic.State": _PROGRAM,
    },
    "op=Adasum": {
        "averaged passes": "no gradients are sent; leave it out",
        "powersgd": "it sends changes, which are of no low rank",
        "sharded embedding": _ROWS,
    },
    "op=PerItem": {
        "averaged passes": "items are counted over all passes; leave it out",
        "powersgd": "what it keeps would weigh as much as the next step",
        "sharded embedding": _ROWS,
    },
    "count_samples": {
        "sum": "a sum has no weights; scale the loss",
        "adasum": "changes are combined by their directions",
        "per item": "count() says what losses are sums of",
        "powersgd": "what it keeps would weigh as much as the next step",
        "late": "samples would be those of the step before",
        "sharded embedding": _ROWS,
        "exact steps of Keras": "gradients count alike; weigh the loss",
    },
    "average_aggregated_gradients": {
        "sharded embedding": _ROWS,
    },
    "Compression.powersgd": {
        "survives on the host": "its factors cannot be sent again in another world",
        "groups on the host": "matrices travel as factors, each alone",
    },
}  # fmt: skip


def check_needs(columns: Iterable[str], given: Mapping[str, object], owner: str = "DistributedOptimizer") -> None:
    """Raises the error of the first pair that cannot be.

    Args:
        columns: of ``NEEDS``: the mode, and what else is an algorithm of its own.
        given: traits, by key of ``TRAITS``, and whether a script has them, or the name of what has.
        owner: who speaks.

    Raises:
        InvalidArgumentError: an argument cannot go with another.
        UnsupportedError: nor the optimizer, model or job with the mode.
    """
    for column in columns:
        for key, why in NEEDS[column].items():
            found = given.get(key)
            if found:
                trait = TRAITS[key]
                kind = InvalidArgumentError if trait.is_argument else UnsupportedError
                named = f" ({found})" if isinstance(found, str) else ""
                raise kind(f"{owner}: {column} cannot be used with {trait.words}{named}: {why}. Leave one of them out.")


def table() -> str:
    """``NEEDS`` as a table of Markdown: a row for each pair, in the order of the modes."""
    rows = [
        f"| {_code(column)} | {_code(TRAITS[key].words)} | {why} |"
        for column, pairs in NEEDS.items()
        for key, why in pairs.items()
    ]
    return "\n".join(["| what | cannot be used with | because |", "|---|---|---|", *rows])


def _code(words: str) -> str:
    """In code, if it is what a script has; words of English else."""
    return f"`{words}`" if " " not in words else words


def write_page(path: str) -> None:
    """Puts the table into the page of the modes."""
    with open(path, encoding="utf-8") as page:
        text = page.read()
    before, rest = text.split("<!-- needs -->")
    _, after = rest.split("<!-- /needs -->")
    with open(path, "w", encoding="utf-8") as page:
        page.write(f"{before}<!-- needs -->\n{table()}\n<!-- /needs -->{after}")


if __name__ == "__main__":
    write_page("docs/modes-together.md")
