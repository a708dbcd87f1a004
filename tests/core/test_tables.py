"""The tables are read by C++ and Python alike, and nothing that hangs on a row was forgotten."""

import pathlib
import re

import numpy as np
import oracle
import pytest

import ringtrain as rt
from ringtrain import errors
from ringtrain._binding import tables
from ringtrain._binding._native import ffi, lib
from ringtrain._binding.tensor_memory import _CARRIERS

ROOT = pathlib.Path(__file__).parents[2]
TABLES = {
    "dtypes": tables.DTYPES,
    "operations": tables.OPERATIONS,
    "attributes": tables.ATTRIBUTES,
    "reductions": tables.REDUCTIONS,
    "compressions": tables.COMPRESSIONS,
    "status": tables.STATUS,
    "counters": tables.COUNTERS,
    "options": tables.OPTIONS,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_file_is_here(name):
    rows = re.findall(r"^RT_[A-Z_]+\(", (ROOT / "native" / "tables" / f"{name}.def").read_text(), re.MULTILINE)
    assert len(TABLES[name]) == len(rows) > 0


def test_unknown_table():
    assert lib.rt_table(b"nonsense") == ffi.NULL


@pytest.mark.parametrize("row", tables.DTYPES.values(), ids=lambda row: row.name)
def test_dtypes_have_numpys_size(row):
    assert _CARRIERS[row.id].itemsize == row.bytes == row.dlpack_bits // 8
    if not row.is_foreign and row.name != "bool":
        kinds = {"i": 0, "u": 1, "f": 2, "c": 5}
        assert kinds[np.dtype(row.name).kind] == row.dlpack_code


@pytest.mark.parametrize("row", tables.OPERATIONS.values(), ids=lambda row: row.name)
def test_operation_is_complete(row):
    """An oracle if it carries data, a public function, a place in the docs, an adjoint that exists."""
    assert row.layout in ("kNone", "kPair") or callable(getattr(oracle, row.name))
    assert callable(getattr(rt, row.name)) and getattr(rt, row.name).__doc__
    assert row.name in (ROOT / "docs" / "operations.md").read_text()
    assert row.adjoint == "" or row.adjoint in tables.OPERATIONS
    if row.layout != "kNone":
        assert callable(getattr(rt, f"{row.name}_async"))
    if row.layout == "kWhole":
        assert callable(getattr(rt, f"{row.name}_")) and callable(getattr(rt, f"{row.name}_async_"))


def test_reductions_are_constants_with_horovods_numbers():
    assert (rt.Average, rt.Sum, rt.Min, rt.Max, rt.Product, rt.L2Norm) == (0, 1, 3, 4, 5, 6)
    assert (rt.BitAnd, rt.BitOr, rt.BitXor, rt.PerItem) == (7, 8, 9, 10)
    names = "Adasum Average BitAnd BitOr BitXor L2Norm Max Min PerItem Product Sum".split()
    assert {name.lower(): getattr(rt, name) for name in names} == tables.REDUCTIONS


@pytest.mark.parametrize(
    "name, status", [(name, status) for name, status in tables.STATUS.items() if name not in ("ok", "pending")]
)
def test_status_has_a_class_of_its_name(name, status):
    kind = errors.of_status(status)
    assert kind.__name__ == "".join(part.capitalize() for part in name.split("_")) + "Error"
    assert issubclass(kind, errors.RingtrainError) and kind.__doc__


def test_errors_are_built_in_types_too():
    assert issubclass(errors.TimeoutError, TimeoutError) and issubclass(errors.MismatchError, ValueError)
    assert issubclass(errors.InvalidArgumentError, ValueError) and issubclass(
        errors.UnsupportedError, NotImplementedError
    )
    assert issubclass(errors.NotInitializedError, ValueError) and issubclass(errors.PeerLostError, ConnectionError)
    assert rt.HorovodInternalError is rt.RingtrainError and issubclass(rt.RingtrainError, RuntimeError)


def test_version_and_build():
    assert re.fullmatch(r"\d+\.\d+\.\d+", rt.__version__)
    assert f"ringtrain {rt.__version__}" in rt.build_info() and "kernels" in rt.build_info()


def test_every_function_of_the_abi_is_called():
    """From Python, the soak's or the package's own: a declared function that nobody calls is a promise untested."""
    declared = set(re.findall(r"\b(rt_[a-z_]+)\(", (ROOT / "native" / "include" / "ringtrain.h").read_text()))
    callers = [*(ROOT / "ringtrain").glob("**/*.py"), *(ROOT / "tests" / "soak").glob("*.py")]
    called = set(re.findall(r"\blib\.(rt_[a-z_]+)", "".join(path.read_text() for path in callers)))
    assert declared - called == set()
