"""ringtrain bench: every benchmark on two ranks with tiny sizes: results verified, JSON as promised. No timings."""

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import environments
import needs
import pytest

from benchmarks import __main__ as further
from benchmarks import launch
from benchmarks.models import MODELS
from ringtrain.bench import __main__ as command_line
from ringtrain.bench import namespaces, shaped
from ringtrain.bench.command import bytes_text, parse_bytes
from ringtrain.bench.command import run as run_module

ROOT = Path(__file__).resolve().parents[2]


def package_of(benchmark: str) -> str:
    return "benchmarks" if benchmark in further.COMMAND.benchmarks else "ringtrain.bench"


def bench(mpi: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a benchmark in the environment with this MPI; it starts its ranks itself."""
    command = [environments.python_with(mpi), "-m", package_of(arguments[0]), *arguments]
    transport = {"RINGTRAIN_TRANSPORT": "tcp" if mpi == "tcp" else "mpi"}
    environment = environments.rank_environment(**transport)
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def document(mpi: str, path, *arguments: str) -> dict:
    finished = bench(mpi, *arguments, "-np", "2", "--json", str(path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads(path.read_text())
    assert written["machine"]["cores"] >= 1 and written["machine"]["ringtrain"].startswith("ringtrain ")
    assert written["schema"] == 1 and written["benchmark"] == arguments[0] and 0 <= written["machine"]["others"] <= 1
    for row in (row for table in written["tables"] for row in table["rows"]):  # as they were printed
        assert any(
            line.split()[-len(" ".join(row).split()) :] == " ".join(row).split()
            for line in finished.stdout.splitlines()
        )
    assert written["tables"]
    return written


@pytest.mark.parametrize(
    "mpi",
    [
        pytest.param("openmpi", marks=[pytest.mark.openmpi, pytest.mark.long]),
        pytest.param("mpich", marks=pytest.mark.mpich),
        pytest.param("tcp", marks=pytest.mark.tcp),
    ],
)
def test_allreduce(mpi, tmp_path):
    peers = {"openmpi": "gloo,mpi,adasum", "mpich": "mpi", "tcp": "gloo"}[mpi]
    systems = {"ringtrain", "ringtrain-ring", "memcpy", "exchange", *peers.split(",")}
    written = document(
        mpi, tmp_path / "out.json", "allreduce", "--sizes", "4,4KB,100KB", "--repetitions", "2", "--peers", peers,
        "--algorithm", "auto,ring",
    )  # fmt: skip
    measured = {(result["system"], result["bytes"]) for result in written["results"]}
    assert measured == {(system, size) for system in systems for size in (4, 4 << 10, 100 << 10)}
    for result in written["results"]:
        assert result["verified"] is True and result["op"] == "allreduce" and result["np"] == 2
        assert 0 < result["seconds_min"] <= result["seconds_median"]
        assert result["ratio_to_memcpy"] > 0
    assert {name: len(growth) for name, growth in written["memory_growth_bytes"].items()} == {
        "ringtrain": 2,
        "ringtrain-ring": 2,
    }


@pytest.mark.parametrize(
    "operation",
    [pytest.param(each, marks=pytest.mark.long) for each in ("alltoall", "allgather", "broadcast", "reducescatter")],
)
def test_other_collectives_and_a_pause(operation, tmp_path):
    written = document(
        "openmpi", tmp_path / "out.json", "allreduce", "--operation", operation, "--sizes", "4KB,100KB", "--peers",
        "gloo,mpi", "--repetitions", "2", *(["--pause", "1"] if operation == "alltoall" else []),
    )  # fmt: skip
    measured = {(result["system"], result["bytes"], result["op"]) for result in written["results"]}
    systems = ("ringtrain", "gloo", "mpi", "memcpy")
    assert measured == {(system, size, operation) for system in systems for size in (4 << 10, 100 << 10)}
    assert all(result["verified"] and result["ratio_to_memcpy"] > 0 for result in written["results"])


def test_a_peer_without_the_operation_is_refused():
    done = bench("openmpi", "allreduce", "--operation", "alltoall", "--sizes", "4", "--peers", "adasum")
    assert done.returncode == 1 and "bench: peer 'adasum': it has an allreduce, but no alltoall" in done.stderr, done


@pytest.mark.tcp
def test_mpi_is_no_peer_where_none_started_the_ranks():
    done = bench("tcp", "allreduce", "--sizes", "4", "--peers", "mpi")
    assert done.returncode == 1 and "bench: peer 'mpi': an MPI must have started the ranks, but TCP" in done.stderr, (
        done
    )
    assert "Traceback" not in done.stderr


@pytest.mark.long  # 16 s of a core for a benchmark of developers
@environments.EACH_MPI
def test_step(mpi, tmp_path):
    written = document(mpi, tmp_path / "out.json", "step", "--repetitions", "1", "--fusion-bytes", "0,1MB")
    assert [result["fusion_threshold_bytes"] for result in written["results"]] == [0, 1 << 20]
    for result in written["results"]:
        assert result["verified"] is True and result["bytes"] == 4 * 25_557_032
        assert result["ratio_to_one_operation"] > 0
        assert result["group_ratio_to_one_operation"] > 0


@environments.EACH_MPI
def test_idle(mpi, tmp_path):
    written = document(mpi, tmp_path / "out.json", "idle", "--seconds", "0.5", "--transports", "mpi,tcp")
    found = [(result["system"], result["rank"]) for result in written["results"]]
    assert found == [(f"ringtrain-{transport}", rank) for transport in ("mpi", "tcp") for rank in (0, 1)]
    assert all(result["threads"] >= 1 and result["context_switches_per_second"] >= 0 for result in written["results"])


@pytest.mark.long  # eight processes that import PyTorch
@pytest.mark.openmpi
def test_train(tmp_path):
    written = document(
        "openmpi", tmp_path / "out.json", "train", "--networks", "convnet", "--peers", "ddp,ddp-ringtrain",
        "--repetitions", "1",
    )  # fmt: skip
    assert [result["system"] for result in written["results"]] == ["ringtrain", "ddp", "ddp-ringtrain", "alone"]
    for result in written["results"]:
        assert result["verified"] is True and result["network"] == "convnet" and result["tensors"] == 10
        assert result["samples_per_second"] > 0 and result["of_alone"] > 0 and result["of_ddp"] > 0
    assert 0 < written["hook_seconds"]["convnet"]["median"] < 1


@pytest.mark.long
@pytest.mark.tcp
def test_a_step_of_100_mb_over_the_backend_alone(tmp_path):
    """One by one, where no system has opened gloo's group or our world for another."""
    written = document(
        "tcp", tmp_path / "out.json", "train", "--networks", "wide", "--peers", "ddp-ringtrain,ddp", "--one-by-one",
        "--repetitions", "1",
    )  # fmt: skip
    assert [result["system"] for result in written["results"]] == ["ringtrain", "ddp-ringtrain", "ddp", "alone"]
    assert all(result["verified"] for result in written["results"])
    assert {4 * result["parameters"] for result in written["results"]} == {24 << 22}


@pytest.mark.long
@pytest.mark.tcp
def test_jax(tmp_path):
    written = document(
        "tcp", tmp_path / "out.json", "jax", "--floats", "1000", "--tensors", "10", "--peers", "psum", "--repetitions", "2"
    )  # fmt: skip
    assert [result["system"] for result in written["results"]] == ["identity", "ringtrain", "psum"]
    assert all(result["verified"] and result["bytes"] == 4000 for result in written["results"])


def test_a_framework_that_is_not_installed_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    """And a module of ours that is not there is a fault."""
    package = tmp_path / "measured"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import no_such_framework.nn\n")
    (package / "wire.py").write_text("import measured.gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = SimpleNamespace(package="measured", command="ringtrain bench")
    assert run_module(chosen, "train", {}) is False
    assert capsys.readouterr().err == (
        "ringtrain bench: train needs no_such_framework, which is not installed. Run: pip install no_such_framework\n"
    )
    with pytest.raises(ModuleNotFoundError):
        run_module(chosen, "wire", {})
    (package / "allreduce.py").write_text("def run(peers):\n    raise ModuleNotFoundError(name='torch')\n")
    assert run_module(chosen, "allreduce", {"peers": ["gloo"]}) is False
    assert capsys.readouterr().err == (
        "ringtrain bench: --peers gloo needs torch, which is not installed. Run: pip install torch\n"
    )


@pytest.mark.long
@pytest.mark.openmpi
def test_accumulation(tmp_path):
    """Between hosts where they can be made, so that tensors and negotiation take a wire."""
    apart = [] if namespaces.missing() else ["--rate", "1gbit", "--ranks-per-host", "1"]
    written = document(
        "openmpi", tmp_path / "out.json", "accumulation", "--network", "transformer", "--passes", "1,3",
        "--repetitions", "1", *apart,
    )  # fmt: skip
    once, thrice = written["results"]
    assert once["verified"] is thrice["verified"] is True
    assert once["bytes_sent"] == pytest.approx(3 * thrice["bytes_sent"], rel=0.01)
    assert once["operations"] == pytest.approx(3 * thrice["operations"])
    assert thrice["early_bytes"] == thrice["early_operations"] == 0


# A system with a fault, its benchmark, and the column in which it is called WRONG.
FAULTS = {
    "an element left out": (
        "from ringtrain.bench import systems\n"
        "run = systems.Mpi.run\n"
        "def leave_one_out(self):\n"
        "    kept = self._work[-1]\n"
        "    run(self)\n"
        "    self._work[-1] = kept\n"
        "systems.Mpi.run = leave_one_out\n",
        ["allreduce", "--sizes", "4KB", "--peers", "mpi"],
        " mpi ",
    ),
    "gradients that are not averaged": (
        "from ringtrain.bench import torch_systems\n"
        "torch_systems.RingtrainTorch.use = torch_systems.NoExchange.use\n",
        ["train", "--networks", "convnet"],
        " ringtrain ",
    ),
    "gradients that DDP's group does not add up": (
        "from ringtrain.bench import torch_systems\n"
        "torch_systems.DdpOfOurs.use = torch_systems.NoExchange.use\n"
        "torch_systems.DdpOfOurs.step = torch_systems.NoExchange.step\n",
        ["train", "--networks", "convnet", "--peers", "ddp-ringtrain"],
        " ddp-ringtrain ",
    ),
    "a sum of JAX that misses a rank": (
        "from benchmarks import jax_systems\n"
        "jax_systems.Ringtrain.add_up = jax_systems.Identity.add_up\n",
        ["jax", "--floats", "100", "--tensors", "4"],
        "ringtrain ",
    ),
    "a step that talks before its last pass": (
        "import ringtrain\n"
        "from ringtrain.bench import torch_networks\n"
        "loss_of = torch_networks.loss_of\n"
        "torch_networks.loss_of = lambda *given: (ringtrain.allreduce(1.0), loss_of(*given))[1]\n",
        ["accumulation", "--network", "convnet", "--passes", "2"],
        "] 2 ",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.openmpi
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_result_is_seen(fault, tmp_path):
    """The verification has teeth: it calls the system WRONG and fails the run."""
    planted, arguments, row = FAULTS[fault]
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"{planted}import sys\n"
        f"from {package_of(arguments[0])} import __main__\n"
        f"sys.exit(__main__.main({[*arguments, '--repetitions', '1']}))\n"
    )
    command = environments.ringtrainrun("openmpi", 2, environments.python_with("openmpi"), str(broken))
    environment = environments.rank_environment(PYTHONPATH=str(ROOT))
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert finished.returncode == 1
    assert [line.split()[-1] for line in finished.stdout.splitlines() if row in line] == ["WRONG"]


@pytest.mark.long
@pytest.mark.openmpi
def test_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "JOBS", {"true": launch.JOBS["true"]})
    assert launch.start(2, 1, str(tmp_path / "out.json")) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["job"] == "true" and result["ringtrainrun_seconds_median"] > 0 < result["torchrun_seconds_median"]


@pytest.mark.long
@needs.hosts
def test_launch_on_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "JOBS", {"first allreduce": launch.JOBS["first allreduce"]})
    assert launch.start(4, 1, str(tmp_path / "out.json"), 2) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["hosts"] == 2 and written["results"][0]["ringtrainrun_seconds_median"] > 0


def test_models_have_the_published_sizes():
    sizes = {name: (len(shapes()), sum(map(math.prod, shapes()))) for name, shapes in MODELS.items()}
    assert sizes == {"resnet50": (161, 25_557_032), "bert-base": (199, 109_482_240), "thousand": (1000, 256_000)}


@pytest.mark.parametrize(
    "text, count", [("4KB", 4096), ("1.5MB", 3 << 19), ("64mb", 64 << 20), ("1GB", 1 << 30), ("12B", 12), ("7", 7)]
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count
    assert parse_bytes(bytes_text(count)) == count


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["allreduce", "--sizes", "big"], "expected sizes such as 4KB"),
        (["allreduce", "--peers", "nccl"], "expected some of gloo, mpi, adasum but found 'nccl'"),
        (["allreduce", "--algorithm", "fast"], "but found 'fast'"),
        (["step", "--model", "vgg"], "invalid choice"),
        (
            ["train", "--peers", "gloo"],
            "4-passes, every-32, sharded-step, tcp, horovod, ddp, ddp-ringtrain, ddp-silent but found 'gloo'",
        ),
        (["accumulation", "--passes", "1,0"], "expected numbers such as 1,2,4 but found '1,0'"),
        (
            ["wire", "--rate", "1gbit,fast"],
            "expected rates such as 1gbit, 2.5gbit, 100mbit or unlimited but found 'fast'",
        ),
        ([], "required"),
    ],
)
def test_wrong_command_lines(arguments, words, capsys):
    command = further if arguments and package_of(arguments[0]) == "benchmarks" else command_line
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.openmpi
def test_tensorflow(tmp_path):
    """Our systems; MultiWorkerMirroredStrategy, which takes its time to start, has a long test."""
    written = document(
        "openmpi", tmp_path / "out.json", "tensorflow", "--floats", "1000", "--tensors", "10", "--layers", "8,4,2",
        "--repetitions", "2", "--peers", "torch",
    )  # fmt: skip
    measured = {(result["system"], result["op"]) for result in written["results"]}
    ours = {"identity", "ringtrain", "ringtrain-grouped"}
    assert measured == {(system, op) for system in ours for op in ("gradients", "training step")} | {
        ("ringtrain.torch", "gradients"),
        ("ringtrain-tape", "training step"),
        ("ringtrain-tape-uncompared", "training step"),
    }
    assert all(result["verified"] for result in written["results"])
    assert {result["parameters"] for result in written["results"] if result["op"] == "training step"} == {
        8 * 4 + 4 + 4 * 2 + 2
    }


@pytest.mark.long
@pytest.mark.openmpi
def test_the_strategy(tmp_path):
    written = document(
        "openmpi", tmp_path / "out.json", "tensorflow", "--floats", "1000", "--tensors", "10", "--layers", "8,4,2",
        "--repetitions", "2", "--peers", "mwms",
    )  # fmt: skip
    measured = [result for result in written["results"] if result["system"] in ("mwms", "mwms-tuned")]
    assert len(measured) == 4 and all(result["verified"] for result in measured)


@pytest.mark.tcp
@pytest.mark.long  # TensorFlow and JAX in each rank
def test_replicas(tmp_path):
    written = document("tcp", tmp_path / "out.json", "replicas", "--layers", "8,4,2", "--repetitions", "1")
    assert [result["system"] for result in written["results"]] == [
        f"{framework}-{way}"
        for framework in ("torch", "keras", "tensorflow", "jax")
        for way in ("uncompared", "settings", "parameters")
    ]
    for result in written["results"]:
        assert result["verified"] and result["bytes"] == 4 * (8 * 4 + 4 + 4 * 2 + 2)
        assert result["processor_seconds"] > 0 < result["of_uncompared"] and result["look_seconds"] >= 0


@pytest.mark.openmpi
@pytest.mark.long
def test_embedding(tmp_path):
    written = document(
        "openmpi", tmp_path / "out.json", "embedding", "--rows", "1000", "--batch", "64", "--repetitions", "2"
    )  # fmt: skip
    assert [result["system"] for result in written["results"]] == ["sharded", "replicated"]
    sharded = written["results"][0]
    assert sharded["verified"] is True
    assert sharded["least_bytes"] < max(sharded["sent_bytes"])


@pytest.mark.parametrize(
    "options, needs",
    [
        ({"transports": ["tcp"], "peers": ["gloo"]}, False),
        ({"transports": ["mpi", "tcp"]}, True),
        ({"transports": ["tcp"], "peers": ["mpi"]}, True),
        ({"peers": ["horovod"]}, True),
        ({}, False),
    ],
    ids=str,
)
def test_an_mpi_starts_ranks_only_where_something_of_it_is_measured(options, needs):
    assert shaped.needs_mpi(SimpleNamespace(**options)) is needs
