"""Every example in a docstring runs, and prints what it says: on ranks that are threads, after a few lines that make what it names."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

from ringtrain.testing import World

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringtrain"

# Programs that make what the examples of a folder name; "" are those of NumPy.
NAMES = {
    "": """
import numpy as np, ringtrain as rt, ringtrain.elastic, ringtrain.torch as hvd
array = loss = np.ones(3)
weights, bias, x = np.zeros(3), np.zeros(1), np.ones((64, 3))
batches = [(x[:8], x[:8, 0])] * 4
images = labels = x
epoch, name, process_set = 0, "loss", rt.global_process_set
def gradient(*_): return np.ones(3)
def update(*_): pass
def train_on(*_): pass
def load_config(): return {"lr": 0.1}
def prepare_dataset(): pass
def train_one_epoch(): pass
""",
    "torch": """
import torch, ringtrain as rt, ringtrain.torch as hvd, torch.nn.functional as F
model = torch.nn.Linear(4, 1)
for parameter in model.parameters(): torch.nn.init.ones_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
x, y = dataset[:8]
micro_batches, correct, total, usual_batch = [(x, y)] * 3, 3, 4, 8
loss = loss_of = F.mse_loss
images, texts = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
ids = users = tags = torch.tensor([1, 5, 5])
labels, offsets = torch.zeros(3), torch.tensor([0, 2])
def clip_loss(logits): return F.cross_entropy(logits, torch.arange(len(logits)))
def loss_of_each(found, wanted): return (found - wanted) ** 2
def step(x, y): pass
def train_on(x, y): pass
""",
    "jax": """
import jax, jax.numpy as jnp, optax, ringtrain.jax as hvd
parameters, batch = {"w": jnp.ones(3)}, jnp.ones((8, 3))
gradients, optimizer = {"w": jnp.ones(3)}, optax.sgd(0.1)
state = optimizer.init(parameters)
images = texts = jnp.ones((4, 8))
def loss_of(parameters, batch): return jnp.mean((batch @ parameters["w"]) ** 2)
""",
    "keras": """
import keras, numpy as np, ringtrain.keras as hvd
x, y = np.ones((64, 4), np.float32), np.zeros((64, 1), np.float32)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
""",
    "tensorflow": """
import itertools, keras, numpy as np, tensorflow as tf, ringtrain.tensorflow as hvd
x, y = np.ones((64, 4), np.float32), np.zeros((64, 1), np.float32)
images = texts = tf.constant(x)
labels = tf.constant(y)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
optimizer, loss = keras.optimizers.SGD(0.1), tf.constant(1.0)
optimizer.build(model.trainable_variables)
batches = itertools.repeat((images, labels))
def loss_of(found, wanted): return tf.reduce_mean((found - wanted) ** 2)
""",
}
WRAPPED = "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())"
# What else a single example needs, by its file and name.
ALSO = {
    **{f"common/util.py {name}": NAMES["torch"] for name in ("check_extension", "gpu_available")},
    "_runtime/submission.py preparing": "cast, tensor = np.asarray, [1.0, 2.0]",
    "_training/adapter/checks.py check_replicas": NAMES["torch"],
    "_training/adapter/checks.py check_finite": NAMES["torch"],
    "_training/mode.py Synchronous": NAMES["torch"],
    "_training/mode.py LocalSteps": NAMES["torch"],
    "_training/mode.py OneStepLate": NAMES["torch"],
    "_training/mode.py ShardedStep": NAMES["torch"],
    "elastic/lossless.py survive": f"""{NAMES["torch"]}
{WRAPPED}
state, right, seen = hvd.elastic.State(model, optimizer, sampler=sampler), torch.ones(1), 4
""",
    "elastic/transparent.py save_every": "state = rt.elastic.State(weights=weights)",
    "jax/optax_transformation.py DistributedGradientTransformation": """
state = hvd.DistributedGradientTransformation(optax.adamw(1e-3)).init(parameters)
""",
    **{f"embedding/row_rules.py {name}": NAMES["keras"] for name in ("SGD", "Adagrad", "RowWiseAdagrad", "SparseAdam")},
    "keras/elastic/__init__.py module": """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()
""",
    "keras/elastic/fit.py batches": "sampler = hvd.elastic.BatchSampler(len(x), batch_size=32)",
    "keras/elastic/fit.py ElasticHooks": "model.run_eagerly = True",  # in a graph threads of TensorFlow, which are no ranks, call
    "keras/elastic/fit_hooks.py UpdateEpochHooks": """
import tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
state = hvd.elastic.KerasState(model, epoch=0)
""",
    "tensorflow/__init__.py module": "with tf.GradientTape() as tape: loss = loss_of(model(images), labels)",
    "tensorflow/keras/__init__.py module": "import ringtrain.tensorflow.keras as hvd",
    "tensorflow/keras/optimizer.py DistributedOptimizer": "import ringtrain.tensorflow.keras as hvd",
    "tensorflow/on_host.py late_gradients": """
with tf.GradientTape() as tape:
    loss = loss_of(model(images), labels)
hvd.DistributedGradientTape(tape, mode=hvd.OneStepLate()).gradient(loss, model.trainable_variables)
""",
    "torch/elastic/__init__.py State": WRAPPED,
    "torch/elastic/transparent.py TransparentState": WRAPPED,
    "torch/uneven.py until_all_are_done": "model = lambda ids: ids.float()\nloader = [(ids, labels)]",
    "torch/optimizer.py no_sync": WRAPPED,
}  # fmt: skip
# What is smaller here than in an example.
SMALLER = {
    "100_000_000": "1000",
    "10**8": "1000",
    "10**6": "1000",
    "90": "2",
    "steps(1000)": "steps(20)",
    "500": "4",
    "10_000": "10",
    "< 1000": "< 20",
}
ALONE = [  # in a world of one rank, as their results show
    "_bootstrap/start.py init", "_bootstrap/start.py shutdown", "_runtime/flight_recorder.py flight_record",
    "_runtime/operations.py allreduce", "jax/operations.py allreduce",
]  # fmt: skip
MAKES_ITS_WORLD = ["testing.py World"]
ELSEWHERE = {  # what needs processes, a trainer or root is run by other tests
    "huggingface": "tests/with_torch/test_hugging_face.py",
    "lightning": "tests/with_torch/test_lightning.py",
    "ignite.py": "tests/with_torch/test_other_trainers.py",
    "spark": "tests/launch/test_spark.py",
    "launch/function.py": "tests/launch/test_launch_function.py",
    "torch/distributed": "tests/with_torch/test_torch_distributed.py",
    "bench/namespaces.py": "tests/launch/test_hosts.py",
}


def with_examples() -> dict[str, list[doctest.Example]]:
    """The examples of each docstring that has some, by its file and name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>>" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ">>>" in (
                ast.get_docstring(node) or ""
            ):
                name = f"{path.relative_to(PACKAGE)} {getattr(node, 'name', 'module')}"
                found[name] = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
    return found


EXAMPLES = with_examples()
HERE = [
    pytest.param(
        name, marks=pytest.mark.long if name.startswith(("keras", "tensorflow", "embedding/row_rules")) else ()
    )  # which take half a minute
    for name in EXAMPLES
    if not name.startswith(tuple(ELSEWHERE))
]


def run(name: str) -> None:
    """Runs the examples of a docstring one after the other, among the names of its module, as doctest does."""
    module = "ringtrain." + name.partition(" ")[0].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    namespace: dict[str, Any] = dict(vars(importlib.import_module(module.removesuffix(".__init__"))))
    exec(NAMES.get(name.partition("/")[0], NAMES[""]), namespace)
    exec(ALSO.get(name, ""), namespace)
    for example in EXAMPLES[name]:
        source = example.source
        for of_users, here in SMALLER.items():
            source = source.replace(of_users, here)
        if example.want and not source.startswith("print("):  # what is printed has times in it
            assert repr(eval(source, namespace)) == example.want.strip(), source
        else:
            exec(compile(source, name, "exec"), namespace)


@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name in MAKES_ITS_WORLD:
        return run(name)
    with World(1 if name in ALONE else 2) as world:
        world.run(lambda rank: run(name))


def test_what_is_run_elsewhere_is_there() -> None:
    assert [prefix for prefix in ELSEWHERE if not any(name.startswith(prefix) for name in EXAMPLES)] == []
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).exists()] == []
