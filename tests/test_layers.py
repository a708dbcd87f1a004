"""Imports and includes point down, the environment is read in two places, one file opens the library, few make code of bytes."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE, NATIVE = ROOT / "ringtrain", ROOT / "native"

# A module may import those that stand in an earlier row, or in its own.
PYTHON_FLOORS = [
    ["version", "errors", "_core", "_build"],
    ["_native"],
    ["tables"],
    ["options", "dlpack", "cuda_arrays", "nccl", "launcher", "announce", "exits", "reports"],
    ["log", "buffers"],
    ["mpi"],
    ["context"],
    ["process_sets", "probes", "stalls", "statistics"],
    ["operations"],
    ["objects", "sharding", "checks", "gradient_arguments"],
    ["testing"],
    [""],  # ringtrain/__init__.py
    ["common"],
    ["torch", "tensorflow", "launch"],
    ["keras", "bench"],  # on TensorFlow or on PyTorch; measures any of them
]
STRANGERS = PYTHON_FLOORS[-2] + PYTHON_FLOORS[-1]  # of two on one floor none knows the other
# A folder may include its own headers and those of earlier rows.
NATIVE_FLOORS = [
    ["include", "tables"],
    ["base"],
    ["transport", "kernels"],
    ["device"],
    ["collectives"],
    ["gpu"],
    ["core"],
    [""],  # native/c_api.cc
    ["tensorflow"],  # a library of its own
]


def floor(name, floors):
    found = [number for number, names in enumerate(floors) if name in names]
    assert found, f"{name} stands on no floor: add it to tests/test_layers.py and docs/architecture.md"
    return found[0]


def imports_of(path):
    """Modules of ringtrain that a file imports, as their first part below the package."""
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
    """The floor's name for a file of the package: its module, or its subpackage."""
    parts = path.relative_to(PACKAGE).parts
    if parts[:2] == ("tensorflow", "keras"):
        return "keras"
    first = parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = part_of(path)
    for name in imports_of(path):
        if name == own:
            continue
        assert floor(name, PYTHON_FLOORS) <= floor(own, PYTHON_FLOORS), f"{path.name} imports {name or 'ringtrain'}"
        assert floor(name, PYTHON_FLOORS) < floor(own, PYTHON_FLOORS) or own not in STRANGERS, (
            f"{own} knows {name}: adapters, launcher and benchmark do not know their neighbours"
        )


def test_the_check_finds_what_it_looks_for(tmp_path, monkeypatch):
    """An upward import is found in each of its spellings."""
    for line in (
        "import ringtrain.operations",
        "from ringtrain import operations",
        "from ringtrain.operations import Sum",
    ):
        upward = tmp_path / "buffers.py"
        upward.write_text(line)
        assert list(imports_of(upward)) == ["operations"]
    assert floor("operations", PYTHON_FLOORS) > floor("buffers", PYTHON_FLOORS)


SOURCES = sorted(path for pattern in ("*.h", "*.cc", "*.def") for path in NATIVE.rglob(pattern))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_includes_point_down(path):
    own = path.relative_to(NATIVE).parts[0] if path.parent != NATIVE else ""
    for included in re.findall(r'#include "([^"]+)"', path.read_text()):
        folder = included.split("/")[0]
        if folder != own:
            assert floor(folder, NATIVE_FLOORS) < floor(own, NATIVE_FLOORS), f"{path.name} includes {included}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_native_code_reads_no_environment_and_prints_nothing(path):
    assert not re.search(
        r"\b(getenv|setenv|environ|printf|puts|cout|cerr)\b(?!_)", re.sub(r"//.*|/\*[\s\S]*?\*/", "", path.read_text())
    )


def test_environment_is_read_in_options_and_by_the_launcher():
    readers = {
        part_of(path) for path in PACKAGE.rglob("*.py") if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    }
    assert readers <= {"options", "launch", "bench"}


def test_one_file_opens_the_library():
    importers = [path.name for path in PACKAGE.rglob("*.py") if "_core" in imports_of(path)]
    assert importers == ["_native.py"]


# What turns bytes into code, and where: objects between ranks over MPI, functions of ringtrain.run in private files, and at build
# time the version; `reach` writes it into the command that starts the agent with the launcher's own text.
MAKES_CODE = {"pickle.loads", "pickle.load", "pickle.Unpickler", "cloudpickle.loads", "cloudpickle.load", "marshal.loads",
              "marshal.load", "dill.loads", "torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}
MAY_MAKE_CODE = {"objects.py", "torch/functions.py", "launch/call.py", "launch/function.py", "_build.py"}


def makes_code(text):
    """Whether a program uses something that may run code which comes as data."""
    return not MAKES_CODE.isdisjoint(ast.unparse(node) for node in ast.walk(ast.parse(text))
                                     if isinstance(node, (ast.Attribute, ast.Name)))


def test_bytes_become_code_in_few_places():
    assert {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if makes_code(path.read_text())} == MAY_MAKE_CODE


@pytest.mark.parametrize("planted", ["import pickle\npickle.loads(socket.recv(99))", "torch.load(path)", "run = eval"])
def test_planted_code_from_bytes_is_found(planted):
    assert makes_code(planted) and not makes_code("json.loads(text)\nmodel.eval()")
