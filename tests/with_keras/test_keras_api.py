"""What scripts for ``horovod.keras`` and ``horovod.tensorflow.keras`` call: arguments in their order, and values."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain as rt
import ringtrain.keras
import ringtrain.tensorflow.keras
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

BOTH = {"keras": ringtrain.keras, "tensorflow.keras": ringtrain.tensorflow.keras}
_BEGIN = (
    "optimizer name=None device_dense='' device_sparse='' compression sparse_as_dense=False "
    "gradient_predivide_factor=1.0 op=0"
)
# In Horovod's order, with its defaults, but for average, whose True made any op an error, and for those that stand here
# bare. What ringtrain has beyond comes after.
SIGNATURES = {
    "DistributedOptimizer": (
        f"{_BEGIN} num_groups=0 groups=None",
        f"{_BEGIN} backward_passes_per_step=1 average_aggregated_gradients=False num_groups=0 groups=None process_set "
        "scale_local_gradients=True"),
    "PartialDistributedOptimizer": (
        f"{_BEGIN} backward_passes_per_step=1 average_aggregated_gradients=False groups=None process_set "
        "local_layers=None scale_local_gradients=True",),
    "allreduce": (
        "value name=None average=None prescale_factor=1.0 postscale_factor=1.0 op=None compression",),
    "allgather": ("value name=None",),
    "broadcast": ("value root_rank name=None",),
    "reducescatter": ("value name=None op=0",),
    "broadcast_global_variables": ("root_rank",),
    "load_model": ("filepath custom_optimizers=None custom_objects=None compression legacy_opts=False",),
    "callbacks.BroadcastGlobalVariablesCallback": ("root_rank device='' local_variables=None",),
    "callbacks.MetricAverageCallback": ("device=''",),
    "callbacks.LearningRateScheduleCallback": (
        "initial_lr multiplier start_epoch=0 end_epoch=None staircase=True momentum_correction=True "
        "steps_per_epoch=None",),
    "callbacks.LearningRateWarmupCallback": (
        "initial_lr warmup_epochs=5 momentum_correction=True steps_per_epoch=None verbose=0",),
    "callbacks.BestModelCheckpoint": (
        "monitor='val_loss' verbose=0 mode='auto' save_freq='epoch'",
        "monitor='val_loss' verbose=0 save_weights_only=False mode='auto' save_freq='epoch'"),
}  # fmt: skip
NAMES = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
    Average Sum Adasum Compression ProcessSet global_process_set add_process_set remove_process_set callbacks elastic"""


@pytest.fixture
def two():
    """Ranks as threads of this process."""
    with World(2) as opened:
        yield opened


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_arguments_are_horovods(module, name):
    found = BOTH[module]
    for part in name.split("."):
        found = getattr(found, part)
    expected = SIGNATURES[name][0 if module == "keras" else -1].split()
    parameters = list(inspect.signature(found).parameters.values())
    for text, parameter in zip(expected, parameters, strict=False):
        argument, _, default = text.partition("=")
        assert parameter.name == argument, f"{name}: {parameter.name} stands where Horovod has {argument}"
        if default:
            assert repr(parameter.default) == default or str(parameter.default) == default, f"{name}: {parameter}"
    assert len(parameters) >= len(expected)
    further = [parameter for parameter in parameters[len(expected) :] if parameter.kind is not parameter.VAR_KEYWORD]
    assert all(parameter.default is not parameter.empty for parameter in further)


@pytest.mark.parametrize("module", BOTH)
def test_names_are_horovods(module):
    missing = [name for name in NAMES.split() if not hasattr(BOTH[module], name)]
    assert not missing


def test_arguments_arrive_where_they_belong(two):
    def body(rank):
        for hvd in BOTH.values():
            positional = {
                "keras": (None, "", "", None, False, 1.0, rt.Sum, 0, 2),
                "tensorflow.keras": (None, "", "", None, False, 1.0, rt.Sum, 3, True, 0, 2),
            }[next(name for name, module in BOTH.items() if module is hvd)]
            settings = hvd.DistributedOptimizer(keras.optimizers.SGD(), *positional)._gradient_reduction.settings
            assert (settings.op, settings.groups) == (rt.Sum, 2)
            assert settings.backward_passes_per_step == (1 if hvd is ringtrain.keras else 3)

    two.run(body)


@pytest.mark.parametrize("module", BOTH)
def test_values_are_tensors_of_keras(two, module):
    hvd = BOTH[module]

    def body(rank):
        mean = hvd.allreduce(float(rank), name="a")
        assert mean.numpy() == float(mean) == mean == 0.5 and mean.dtype == tf.float32
        assert hvd.allreduce(rank, average=False).numpy() == 1
        assert hvd.allreduce(np.array([rank], np.float64), op=rt.Max).numpy().tolist() == [1.0]
        assert hvd.allreduce([rank], None, None, 2.0, 3.0, rt.Sum).numpy().tolist() == [6]
        assert hvd.allreduce(tf.Variable([1.0 + rank]), compression=hvd.Compression.fp16).numpy().tolist() == [1.5]
        assert hvd.allgather([rank]).numpy().tolist() == [0, 1]
        assert hvd.broadcast(np.float64(rank), 1, "b").numpy() == 1.0
        assert hvd.broadcast(rank == 0, 0).numpy()
        assert hvd.reducescatter(np.array([2.0, 4.0]), op=rt.Sum).numpy().tolist() == [4.0 + 4.0 * rank]
        with pytest.raises(rt.RingtrainError, match="either average or op"):
            hvd.allreduce(1.0, average=True, op=rt.Sum)

    two.run(body)


def test_values_within_a_function(two):
    def body(rank):
        hvd = ringtrain.keras

        @tf.function
        def step(x):
            means = [hvd.allreduce(x, name="one"), hvd.allreduce(2 * x, name="one")]  # a graph numbers equal names
            return [*means, hvd.allgather(x), hvd.broadcast(x, 1), hvd.reducescatter(x, op=rt.Sum), hvd.allreduce(3.0)]

        for _ in range(2):
            found = [tensor.numpy().tolist() for tensor in step(tf.constant([1.0 + rank, 3.0]))]
        return found

    expected = [[1.5, 3.0], [3.0, 6.0], [1.0, 3.0, 2.0, 3.0], [2.0, 3.0]]
    assert two.run(body) == [[*expected, [3.0], 3.0], [*expected, [6.0], 3.0]]


def test_values_in_a_graph_of_tensorflow_1_are_arrays(two):
    def body(rank):
        with tf.Graph().as_default():
            mean = ringtrain.tensorflow.keras.allreduce(float(rank), "loss")
        assert isinstance(mean, (np.ndarray, np.generic)) and mean == 0.5

    two.run(body)


@pytest.mark.parametrize("module", BOTH)
def test_wrong_arguments_of_optimizers_and_callbacks(module):
    hvd = BOTH[module]
    with World(1) as world:
        for wrong in [
            lambda: ringtrain.keras.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[1]),
            lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[1]),
            lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0),
            lambda: hvd.callbacks.LearningRateScheduleCallback(1.0, None),
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=rt.Max),
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups=0),
        ]:
            with pytest.raises(ValueError):
                world.run(lambda rank, wrong=wrong: wrong())
        world.run(lambda rank: hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", tf.Variable([1.0, 2.0])))


def test_names_that_pages_and_public_programs_use():
    """For Horovod: GRACE and Ludwig import them from these modules."""
    from ringtrain import tensorflow
    from ringtrain.tensorflow.compression import FP16Compressor, NoneCompressor

    assert {module.SyncBatchNormalization for module in BOTH.values()} == {tensorflow.SyncBatchNormalization}
    assert (NoneCompressor, FP16Compressor) == (tensorflow.Compression.none, tensorflow.Compression.fp16)


def test_what_one_rank_passes_in_place_of_variables_is_told_on_all(two):
    good = keras.Variable([1.0], name="a")

    def on_rank(rank):
        with pytest.raises(InvalidArgumentError) as refused:
            ringtrain.keras.broadcast_variables(None if rank else [good], root_rank=0)
        return str(refused.value)

    said = two.run(on_rank)
    assert said[0] == said[1] and "'NoneType' object is not iterable" in said[0], said


def test_variables_in_another_order_on_a_rank_are_told():
    def on_rank(rank):
        first, second = (keras.Variable([float(number)], name=name) for number, name in enumerate("ab"))
        ringtrain.keras.broadcast_variables([first, second] if rank == 0 else [second, first], root_rank=0)

    with (
        World(2) as world,
        pytest.raises(MismatchError, match="same order on all ranks, but number 0 is 'b' on rank 1"),
    ):
        world.run(on_rank)
