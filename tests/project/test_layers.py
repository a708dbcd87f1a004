"""Imports and includes point down, few parts read the environment, one file opens the library, few make code of bytes.

The rows are those of docs/architecture.md, "Layers", where the highest comes first.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE, NATIVE = ROOT / "ringtrain", ROOT / "native"

# Rooms of the package: its folders and files. One may import those of earlier rows, and of two in one row none imports the other.
PYTHON_LAYERS = [
    ["errors", "version", "_core"],
    ["_binding"],
    ["_rendezvous"],
    ["_runtime"],
    ["_bootstrap"],
    ["_training", "testing"],
    ["api", "elastic"],
    ["", "embedding"],  # "": ringtrain/__init__.py
    ["common", "jax", "launch"],
    ["torch", "runner", "spark"],
    ["keras", "lightning", "huggingface", "ignite"],
    ["tensorflow"],  # tf.keras is Keras, too
    ["bench"],
]
# A folder may include its own headers and those of earlier rows.
NATIVE_LAYERS = [
    ["include", "tables"],
    ["base"],
    ["transport", "kernels", "elastic"],
    ["device", "observe"],
    ["collectives"],
    ["agree", "gpu"],
    ["world"],
    ["run"],
    ["c_api"],
    ["tensorflow", "jax"],  # libraries of their own
]


def layer(name, layers):
    found = [number for number, names in enumerate(layers) if name in names]
    assert found, f"{name} is in no layer: add it to tests/project/test_layers.py and docs/architecture.md"
    return found[0]


def imports_of(path):
    """Rooms of ringtrain that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "ringtrain":
            names = [f"ringtrain.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ringtrain":
                first = parts[1] if len(parts) > 1 else ""
                is_module = (PACKAGE / f"{first}.py").exists() or (PACKAGE / first).is_dir() or first == "_core"
                yield first if is_module else ""


def part_of(path):
    """The layer's name for a file of the package: its module, or its subpackage."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def test_imports_point_down():
    for path in sorted(PACKAGE.rglob("*.py")):
        check_imports(path)


def check_imports(path):
    own = part_of(path)
    for name in imports_of(path):
        if name == own:
            continue
        assert layer(name, PYTHON_LAYERS) < layer(own, PYTHON_LAYERS), f"{path.name} imports {name or 'ringtrain'}"


def test_the_check_finds_what_it_looks_for(tmp_path, monkeypatch):
    """An upward import is found in each of its spellings."""
    for line in (
        "import ringtrain._runtime.operations",
        "from ringtrain import _runtime",
        "from ringtrain._runtime.operations import Sum",
    ):
        upward = tmp_path / "buffers.py"
        upward.write_text(line)
        assert list(imports_of(upward)) == ["_runtime"]
    assert layer("_runtime", PYTHON_LAYERS) > layer("_binding", PYTHON_LAYERS)


def rows_of_page(title):
    """The names in the first column of a table of the section "Layers", the lowest row first."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Layers\n")[1].split("\n## ")[0]
    table = section.split(f"\n| `{title}` |")[1].split("\n\n")[0]
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in reversed(table.splitlines()) if line[:3] == "| `"]


@pytest.mark.parametrize(
    "title, layers, own", [("ringtrain/", PYTHON_LAYERS, "__init__"), ("native/", NATIVE_LAYERS, "")]
)
def test_layers_are_those_of_the_page(title, layers, own):
    assert rows_of_page(title) == [[name or own for name in row] for row in layers]


SOURCES = sorted(path for pattern in ("*.h", "*.cc", "*.def") for path in NATIVE.rglob(pattern))


def test_includes_point_down():
    for path in SOURCES:
        own = path.relative_to(NATIVE).parts[0] if path.parent != NATIVE else ""
        for included in re.findall(r'#include "([^"]+)"', path.read_text()):
            folder = included.split("/")[0]
            if folder != own:
                assert layer(folder, NATIVE_LAYERS) < layer(own, NATIVE_LAYERS), f"{path.name} includes {included}"


@pytest.mark.parametrize("folder", ["_training", "_training/adapter", "_training/averaging"])
def test_floors_shared_by_all_adapters_import_no_framework(folder):
    allowed = set(sys.stdlib_module_names) | {"numpy", "ringtrain"}
    for path in (ROOT / "ringtrain" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.partition(".")[0] for name in names} <= allowed, path.name


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_libraries_beside_the_core_include_the_interface_and_the_tables_alone(framework):
    texts = [path.read_text() for path in SOURCES if path.parent == NATIVE / framework]
    folders = {included.split("/")[0] for text in texts for included in re.findall(r'#include "([^"]+)"', text)}
    assert folders == {framework, "include", "tables"}


def test_native_code_reads_no_environment_and_prints_nothing():
    words = re.compile(r"\b(getenv|setenv|environ|printf|puts|cout|cerr)\b(?!_)")
    for path in SOURCES:
        assert not words.search(re.sub(r"//.*|/\*[\s\S]*?\*/", "", path.read_text())), path.name


def test_environment_is_read_in_few_places():
    readers = {
        part_of(path) for path in PACKAGE.rglob("*.py") if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers == {"_binding", "launch", "bench"}


def test_one_file_opens_the_library():
    importers = [path.name for path in PACKAGE.rglob("*.py") if "_core" in imports_of(path)]
    assert importers == ["_native.py"]


# What turns bytes into code, and where: objects between ranks over MPI, functions of ringtrain.run in private files,
# and at build time the version.
MAKES_CODE = {
    "pickle.loads",
    "pickle.load",
    "pickle.Unpickler",
    "cloudpickle.loads",
    "cloudpickle.load",
    "marshal.loads",
    "marshal.load",
    "dill.loads",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "eval",
    "exec",
}
MAY_MAKE_CODE = {
    "_runtime/objects.py",
    "torch/functions.py",
    "launch/call.py",
    "launch/function.py",
    "_binding/_build.py",
}
MAY_MAKE_CODE |= {"torch/distributed/replica.py"}  # between processes of a torchrun, as torch's own objects
MAY_MAKE_CODE |= {"spark/driver.py", "spark/task.py"}  # what Spark has carried between its driver and its tasks


def makes_code(text):
    """Whether a program uses something that may run code which comes as data."""
    nodes = list(ast.walk(ast.parse(text)))
    reads_data = [
        node.func
        for node in nodes
        if isinstance(node, ast.Call) and "weights_only=True" in map(ast.unparse, node.keywords)
    ]
    return not MAKES_CODE.isdisjoint(
        ast.unparse(node) for node in nodes if isinstance(node, (ast.Attribute, ast.Name)) and node not in reads_data
    )


def test_bytes_become_code_in_few_places():
    assert {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if makes_code(path.read_text())
    } == MAY_MAKE_CODE


@pytest.mark.parametrize("planted", ["import pickle\npickle.loads(socket.recv(99))", "torch.load(path)", "run = eval"])
def test_planted_code_from_bytes_is_found(planted):
    assert makes_code(planted)
    assert not makes_code("json.loads(text)\nmodel.eval()\ntorch.load(path, weights_only=True)")


def test_the_agent_imports_nothing_else_of_the_package():
    """It starts in milliseconds, without the library, on hosts of which nothing is known yet."""
    for path in (PACKAGE / "launch" / "agent").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ringtrain"):
                assert node.module.startswith(("ringtrain.launch.agent", "ringtrain.version")), (
                    f"{path.name}: {node.module}"
                )


def test_files_of_the_launcher_import_each_other_one_way():
    """A circle would show in the order in which their imports are met; what a function imports counts too."""
    folder = PACKAGE / "launch"
    known = {path.stem for path in folder.glob("*.py")}
    below = {
        name: {
            imported
            for node in ast.walk(ast.parse((folder / f"{name}.py").read_text()))
            if isinstance(node, ast.ImportFrom)
            for imported in (
                [alias.name for alias in node.names]
                if node.module == "ringtrain.launch"
                else [node.module.removeprefix("ringtrain.launch.")]
            )
            if imported in known
        }
        for name in known
    }
    while below:
        lowest = {name for name, imported in below.items() if not imported & below.keys()}
        assert lowest, f"these import each other: {sorted(below)}"
        below = {name: imported for name, imported in below.items() if name not in lowest}


MOST_MODULES = 110
NICHES = (
    "elastic",
    "embedding",
    "_training.averaging",
    "launch",
    "torch.elastic",
    "torch.embedding",
    "torch.modes.local_steps",
)


def test_what_few_use_is_loaded_by_those() -> None:
    """``import ringtrain.torch``, beside torch itself."""
    program = """
import sys, torch
before = set(sys.modules)
import ringtrain.torch
print(*(name for name in set(sys.modules) - before if name.split(".")[0] == "ringtrain"))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = [name.removeprefix("ringtrain.") for name in run.stdout.split()]
    assert len(loaded) <= MOST_MODULES
    assert not [name for name in loaded if any(name == room or name.startswith(f"{room}.") for room in NICHES)]


def test_the_launcher_starts_without_numpy() -> None:
    """A third of its start, which a job of many hosts awaits, and tests hundreds of times."""
    program = "import sys, ringtrain.launch.cli; print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "False\n"


def test_what_averages_local_steps_is_loaded_by_those_who_do() -> None:
    """In Keras on PyTorch; ``with_tensorflow/test_tensorflow_alone.py`` asks the same of TensorFlow."""
    program = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import ringtrain.keras as hvd
print(*(name for name in sys.modules if name.startswith("ringtrain._training.averaging")))
assert "Outer" in dir(hvd) and hvd.Outer(0.7).rate == 0.7
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not run.stdout.split()
