"""What a script for ``horovod.torch`` relies on: names, signatures, constants, modules, probes and error classes.

The table of signatures is the contract, written by hand: argument names, their order and their defaults. Ours may have
more arguments, behind those.
"""

import importlib
import inspect
import os
import subprocess
import sys

import pytest
import torch
from modes import in_mode
from refusals import said_alike

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.common import exceptions, util
from ringtrain.common.basics import HorovodBasics
from ringtrain.runner.common.util.env import get_env_rank_and_size
from ringtrain.runner.util.threads import in_thread
from ringtrain.testing import World
from ringtrain.torch import mpi_ops
from ringtrain.torch.optimizer import _DistributedOptimizer

NONE, FACTORS, SET = "compression=Compressor", "prescale_factor=1.0, postscale_factor=1.0", "process_set=GLOBAL"
REDUCE = f"average=None, name=None, op=None, {FACTORS}, {SET}"
REDUCE_WAITING = f"average=None, name=None, {NONE}, op=None, {FACTORS}, {SET}"
SCATTER = f"name=None, op=0, {SET}, {FACTORS}"
SCATTER_WAITING = f"name=None, {NONE}, op=0, {SET}, {FACTORS}"
NOTHING = (
    "shutdown is_initialized rank size local_rank local_size cross_rank cross_size is_homogeneous stop_timeline "
    "mpi_enabled gloo_enabled mpi_threads_supported"
).split()
BUILT = "mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built".split()
SIGNATURES = {
    **dict.fromkeys(NOTHING, ""),
    **dict.fromkeys(BUILT, ""),
    "init": "comm=None, process_sets=None",
    "gpu_available": "ext_base_name, verbose=False",
    "start_timeline": "file_path, mark_cycles=False",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": f"tensor, {REDUCE_WAITING}",
    **dict.fromkeys(("allreduce_async", "allreduce_", "allreduce_async_"), f"tensor, {REDUCE}"),
    "grouped_allreduce": f"tensors, {REDUCE_WAITING}",
    **dict.fromkeys(
        ("grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"), f"tensors, {REDUCE}"
    ),
    "sparse_allreduce_async": f"tensor, name, op, {SET}",
    **dict.fromkeys(("allgather", "allgather_async"), f"tensor, name=None, {SET}"),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), f"tensors, name=None, {SET}"),
    **dict.fromkeys(
        ("broadcast", "broadcast_async", "broadcast_", "broadcast_async_"), f"tensor, root_rank, name=None, {SET}"
    ),
    **dict.fromkeys(("alltoall", "alltoall_async"), f"tensor, splits=None, name=None, {SET}"),
    "reducescatter": f"tensor, {SCATTER_WAITING}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {SCATTER_WAITING}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "join": "device=-1",
    "barrier": SET,
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {SET}",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": f"optimizer, named_parameters=None, {NONE}, backward_passes_per_step=1, op=0, "
    f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {SET}",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "check_extension": "ext_name, ext_env_var, pkg_path, *args",
    "broadcast_buffers": "model, root_rank=0, every_forward=False",  # not Horovod's
}
CONSTANTS = {"Average": 0, "Sum": 1, "Adasum": 2, "Min": 3, "Max": 4, "Product": 5}
OTHERS = {"Compression", "ProcessSet", "global_process_set", "HorovodInternalError", "elastic"}
BEYOND_HOROVOD = {
    "gather_with_gradient",
    "DistributedSampler",
    "Handle",
    "BitAnd",
    "BitOr",
    "BitXor",
    "L2Norm",
    "LocalSteps",
    "OneStepLate",
    "Outer",
    "PerItem",
    "ShardedStep",
    "Synchronous",
    "RingtrainError",
    "RowWiseAdagrad",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingCollection",
    "clip_grad_norm_",
    "dense_state_dict",
    "resume_together",
    "load_tables",
    "plain_weight",
    "save_tables",
    "shard",
    "until_all_are_done",
    "flight_record",
    "stats",
}
MODULES = {
    "ringtrain.torch.mpi_ops": set(SIGNATURES) - {
        "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allgather_object",
        "DistributedOptimizer", "SyncBatchNorm", "check_extension", "broadcast_buffers",
    } | set(CONSTANTS),
    "ringtrain.torch.compression": {"Compression", "Compressor", "NoneCompressor", "FP16Compressor"},
    "ringtrain.torch.functions": {
        "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allgather_object"
    },
    "ringtrain.torch.optimizer": {"DistributedOptimizer"},
    "ringtrain.torch.sync_batch_norm": {"SyncBatchNorm"},
    "ringtrain.torch.elastic": {"run", "TorchState", "ElasticSampler", "State", "ObjectState"},
    "ringtrain.torch.elastic.state": {"TorchState"},
    "ringtrain.torch.elastic.sampler": {"ElasticSampler"},
    "ringtrain.common.exceptions": {
        "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError", "get_version_mismatch_message"
    },
    "ringtrain.common.process_sets": {"ProcessSet", "global_process_set", "add_process_set", "remove_process_set"},
    "ringtrain.common.basics": {"HorovodBasics"},
    "ringtrain.common.util": {
        *BUILT, "EXTENSIONS", "check_extension", "check_installed_version", "env", "extension_available", "get_ext_suffix",
        "get_average_backwards_compatibility_fun", "get_extension_full_path", "gpu_available", "is_iterable",
        "is_version_greater_equal_than", "num_rank_is_power_2", "split_list",
    },
    "ringtrain.runner": {"run"},
    "ringtrain.runner.launch": {"run_commandline"},
    "ringtrain.common.elastic": {"State", "ObjectState", "run_fn"},
}  # fmt: skip


def described(parameter: inspect.Parameter) -> str:
    """A parameter as the table writes it."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = parameter.default
    text = "GLOBAL" if default is hvd.global_process_set else getattr(default, "__name__", repr(default))
    return f"{parameter.name}={text}"


def assert_signature(function, contract: str) -> None:
    expected = contract.split(", ") if contract else []
    assert [described(each) for each in inspect.signature(function).parameters.values()][: len(expected)] == expected


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert_signature(getattr(hvd, name), SIGNATURES[name])
    assert getattr(hvd, name).__doc__


def test_another_order_of_arguments_is_noticed():
    def allreduce(tensor, name=None, average=None):
        """Arguments in another order."""

    with pytest.raises(AssertionError):
        assert_signature(allreduce, SIGNATURES["allreduce"])


def test_all_names_are_exported_and_listed():
    assert set(hvd.__all__) == {*SIGNATURES, *CONSTANTS, *OTHERS, *BEYOND_HOROVOD}
    assert {name: getattr(hvd, name) for name in CONSTANTS} == CONSTANTS
    assert hvd.HorovodInternalError is exceptions.HorovodInternalError is rt.RingtrainError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


@pytest.mark.parametrize("module", MODULES)
def test_module(module):
    found = importlib.import_module(module)
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []


def test_common_modules_import_no_framework():
    names = [name for name in MODULES if name.startswith("ringtrain.common")]
    code = f"import sys, {', '.join(names)}; print({{'torch', 'tensorflow', 'mpi4py.MPI'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_probes():
    built = {name: getattr(hvd, name)() for name in BUILT}
    assert built.pop("nccl_built") == 0 and type(hvd.nccl_built()) is int
    assert built.pop("mpi_built") is True and built.pop("gloo_built") is True and set(built.values()) == {False}
    assert hvd.mpi_enabled() is False and hvd.gloo_enabled() is False
    with pytest.raises(ValueError, match="without"):
        hvd.mpi_threads_supported()
    hvd.check_extension("ringtrain.torch", "RINGTRAIN_WITH_PYTORCH", __file__, "mpi_lib_v2")


def test_exceptions():
    mismatch = exceptions.HorovodVersionMismatchError("torch", "2.1", "2.2")
    assert isinstance(mismatch, ImportError)
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.1", "2.2")
    updated = exceptions.HostsUpdatedInterrupt(skip_sync=True)
    assert isinstance(updated, RuntimeError) and updated.skip_sync and not exceptions.HostsUpdatedInterrupt().skip_sync


# ---- helpers at their places ----


def test_basics():
    basics = HorovodBasics(__file__, "mpi_lib_v2")
    assert {name: getattr(basics, name) for name in CONSTANTS} == CONSTANTS
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        basics.rank()

    def on_rank(rank):
        assert (basics.rank(), basics.size(), basics.local_rank(), basics.cross_size()) == (rank, 2, rank, 1)
        assert basics.is_initialized() and basics.is_homogeneous()
        assert (basics.mpi_enabled(), basics.gloo_enabled()) == (False, True)

    with World(2) as world:
        world.run(on_rank)
    assert basics.nccl_built() == 0 and basics.mpi_built() and basics.gloo_built()


@pytest.mark.parametrize(
    "count, parts", [(2, [[0, 1, 2], [3, 4]]), (5, [[0], [1], [2], [3], [4]]), (1, [[0, 1, 2, 3, 4]])]
)
def test_split_list(count, parts):
    assert util.split_list(list(range(5)), count) == parts
    assert util.split_list([1], 3) == [[1], [], []]


def test_env(monkeypatch):
    monkeypatch.setenv("RT_SET", "before")
    monkeypatch.delenv("RT_UNSET", raising=False)
    with pytest.raises(KeyError), util.env(RT_SET="within", RT_UNSET="1", RT_NONE=None):
        assert (os.environ["RT_SET"], os.environ["RT_UNSET"], "RT_NONE" in os.environ) == ("within", "1", False)
        raise KeyError
    assert os.environ["RT_SET"] == "before" and "RT_UNSET" not in os.environ


@pytest.mark.parametrize(
    "version, target, answer",
    [("2.10.0", "2.9.0", True), ("2.9", "2.9.0", True), ("2.9.0rc1", "2.9.0", False), ("2.13.0+cpu", "2.13.0", True),
     ("1.15.5", "2.0.0", False)],
)  # fmt: skip
def test_versions(version, target, answer):
    assert util.is_version_greater_equal_than(version, target) is answer


def test_what_helpers_refuse():
    for version, target in [("2.0.0", "2.0"), (2, "2.0.0"), ("new", "2.0.0")]:
        with pytest.raises(ValueError, match="is_version_greater_equal_than"):
            util.is_version_greater_equal_than(version, target)
    op_of = util.get_average_backwards_compatibility_fun(hvd)
    assert op_of(None, None) == hvd.Average and op_of(hvd.Max, None) == hvd.Max
    with pytest.warns(DeprecationWarning, match="average"):
        assert op_of(None, False) == hvd.Sum
    with pytest.raises(ValueError, match="found both"):
        op_of(hvd.Sum, True)


def test_other_helpers():
    assert util.is_iterable([]) and not util.is_iterable(1)
    assert util.get_extension_full_path("/a/b.py", "c", "lib") == f"/a/c/lib{util.get_ext_suffix()}"
    assert [util.num_rank_is_power_2(count) for count in (0, 1, 2, 3, 4)] == [False, True, True, False, True]
    assert [util.extension_available(name) for name in ("torch", "tensorflow", "mxnet")] == [True, True, False]
    assert util.gpu_available("torch") is False and util.check_installed_version("torch", "1.0") is None


# ---- which class an error has ----

X = torch.ones(4)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


# case: the class on every rank, what each rank calls
ON_EVERY_RANK = {
    "dtypes": (RuntimeError, lambda rank: hvd.allreduce(X.to([torch.float32, torch.float64][rank]), name="a")),
    "shapes": (RuntimeError, lambda rank: hvd.allreduce(torch.ones(2 + rank), name="a")),
    "reductions": (RuntimeError, lambda rank: hvd.allreduce(X, name="a", op=[hvd.Sum, hvd.Max][rank])),
    "prescale": (RuntimeError, lambda rank: hvd.allreduce(X, name="a", prescale_factor=1.0 + rank)),
    "postscale": (RuntimeError, lambda rank: hvd.allreduce(X, name="a", postscale_factor=1.0 + rank)),
    "roots": (RuntimeError, lambda rank: hvd.broadcast(X, rank, name="a")),
    "kinds": (RuntimeError, lambda rank: [hvd.allreduce, hvd.allgather][rank](X, name="a")),
    "trailing dimensions": (RuntimeError, lambda rank: hvd.allgather(torch.ones(2, 2 + rank), name="a")),
    "numbers of dimensions": (RuntimeError, lambda rank: hvd.alltoall(torch.ones([2] * (1 + rank)), name="a")),
    "sparse shapes": (
        RuntimeError,
        lambda rank: hvd.allreduce(torch.ones(2 + rank).to_sparse(), name="a"),
    ),
    "sparse and dense": (
        RuntimeError,
        lambda rank: hvd.allreduce(X.to_sparse() if rank else X, name="a"),
    ),
    "0 dimensions": (RuntimeError, lambda rank: hvd.allgather(torch.ones(()), name="a")),
    "one refuses": (RuntimeError, lambda rank: hvd.allreduce(X.bool() if rank else X, name="a")),
    "a scalar to scatter": (ValueError, lambda rank: hvd.reducescatter(torch.ones(()), name="a")),
    "no such root": (ValueError, lambda rank: hvd.broadcast(X, 2, name="a")),
    "splits of another length": (ValueError, lambda rank: hvd.alltoall(X, [4], name="a")),
    "splits of another sum": (ValueError, lambda rank: hvd.alltoall(X, [4, 4], name="a")),
    "splits below the sum": (ValueError, lambda rank: hvd.alltoall(X, [1, 1], name="a")),
    "splits of 2 dimensions": (ValueError, lambda rank: hvd.alltoall(X, torch.ones(1, 2).int(), name="a")),
    "nothing to divide": (ValueError, lambda rank: hvd.alltoall(torch.ones(3), name="a")),
    "an unknown dtype": (ValueError, lambda rank: hvd.allreduce(X.to(torch.complex32), name="a")),
    "op and average": (ValueError, lambda rank: hvd.allreduce(X, average=True, op=hvd.Sum)),
    "an unknown op": (ValueError, lambda rank: hvd.allreduce(X, op=17)),
    "Adasum of integers": (ValueError, lambda rank: hvd.allreduce(X.int(), op=hvd.Adasum, name="a")),
    "rows of an Adasum": (NotImplementedError, lambda rank: hvd.reducescatter(X, op=hvd.Adasum, name="a")),
    "an optimizer's Max": (ValueError, lambda rank: hvd.DistributedOptimizer(sgd(), op=hvd.Max)),
    "sparse Adasum": (NotImplementedError, lambda rank: hvd.sparse_allreduce_async(X.to_sparse(), "a", hvd.Adasum)),
    "sparse Max": (ValueError, lambda rank: hvd.sparse_allreduce_async(X.to_sparse(), "a", hvd.Max)),
    "no set": (ValueError, lambda rank: hvd.allreduce(X, process_set=hvd.ProcessSet([0]))),
    "no tensor": (ValueError, lambda rank: hvd.allreduce([1.0])),
    "no handle": (ValueError, lambda rank: hvd.synchronize(1)),
    "no handle to poll": (ValueError, lambda rank: hvd.poll(None)),
}


def raised(function, *arguments) -> Exception:
    with pytest.raises(hvd.HorovodInternalError) as caught:
        function(*arguments)
    return caught.value


def test_class_of_each_error():
    def on_rank(rank):
        for case, (kind, call) in ON_EVERY_RANK.items():
            problem = raised(call, rank)
            assert isinstance(problem, kind), f"{case}: {problem!r}"
            texts = hvd.allgather_object(str(problem))
            assert said_alike(texts), f"{case}: other words on each rank: {texts}"
        if rank == 1:
            handle = hvd.allreduce_async(X, name="twice")
            assert isinstance(raised(lambda: hvd.allreduce_async(X, name="twice")), ValueError)
        hvd.barrier()
        if rank == 0:
            handle = hvd.allreduce_async(X, name="twice")
        assert hvd.synchronize(handle) is hvd.synchronize(handle)

    with World(2) as world:
        world.run(on_rank)


def test_before_init():
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, lambda: hvd.start_timeline("x.json"), hvd.stop_timeline, lambda: hvd.allreduce(X)):
        problem = raised(call)
        assert isinstance(problem, ValueError) and "Horovod has not been initialized" in str(problem)


def test_handles_as_scripts_use_them():
    """In dicts, lists and sets, compared, tested for truth, polled in a loop, dropped."""

    def on_rank(rank):
        handles = {name: hvd.allreduce_async_(torch.ones(3), name=name, op=hvd.Sum) for name in "abc"}
        assert all(handles.values()) and len(set(handles.values())) == 3 and handles["a"] != handles["b"]
        for handle in handles.values():
            while not hvd.poll(handle):
                pass
            assert hvd.synchronize(handle).tolist() == [2.0] * 3
        del handles
        assert callable(hvd.sparse_allreduce_async(X.to_sparse(), "sparse", hvd.Sum))

    with World(2) as world:
        world.run(on_rank)


# ---- names that public programs and Horovod's own tests import ----


def test_horovods_autograd_functions(world):
    """``apply`` takes their arguments in their order, and gradients flow through."""
    everyone, size = rt.global_process_set, world.size

    def on_rank(rank):
        x = torch.full((size, 2), rank + 1.0, requires_grad=True)
        results = [
            mpi_ops.HorovodAllreduce.apply(x, None, "a", hvd.Sum, 1.0, 1.0, everyone),
            mpi_ops.HorovodAllgather.apply(x, "b", everyone),
            mpi_ops.HorovodBroadcast.apply(x, 0, "c", everyone),
            mpi_ops.HorovodAlltoall.apply(x, None, "d", everyone),
            mpi_ops.HorovodReducescatter.apply(x, hvd.Sum, "e", everyone, 1.0, 1.0),
        ]
        total = sum(range(1, size + 1))
        assert [tuple(each.shape) for each in results] == [(size, 2), (size * size, 2), (size, 2), (size, 2), (1, 2)]
        assert results[0][0, 0] == total and results[2][0, 0] == 1 and results[4][0, 0] == total
        sum(each.sum() for each in results).backward()
        assert x.grad is not None and torch.isfinite(x.grad).all()
        rows, received = mpi_ops.HorovodAlltoall.apply(x, [1] * size, "f", everyone)
        assert len(rows) == size and received.tolist() == [1] * size

    world.run(on_rank)


def test_a_distributed_optimizer_is_known_by_horovods_class(world):
    def on_rank(rank):
        model = torch.nn.Linear(2, 1)
        for arguments in ({}, {"every": 2}, {"late": True}):
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            assert not isinstance(plain, _DistributedOptimizer)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **in_mode(arguments))
            assert isinstance(optimizer, _DistributedOptimizer)

    world.run(on_rank)


def test_what_horovods_own_tests_import(monkeypatch):
    seen = []
    in_thread(seen.append, args=(1,)).join()
    in_thread(lambda: 1 / 0, silent=True).join()
    assert seen == [1] and hvd.gpu_available("torch") is False
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "RINGTRAIN_"))]:
        monkeypatch.delenv(name)
    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert get_env_rank_and_size() == (2, 3)
