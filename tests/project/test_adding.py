"""What a new collective, codec or request attribute touches: the lists in docs/architecture.md are short, and true.

Reducescatter, bf16, int8 and ``weight`` stand for what is to be added: every file of the product that names one is in its list.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

import ringtrain
from ringtrain import tables

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# They train with it: another collective changes nothing there.
USERS_OF_REDUCESCATTER = {
    "ringtrain/torch/modes/sharded_buckets.py",
    "ringtrain/torch/mpi_ops.py",  # Horovod's names of its autograd functions, which are as many as it had
    "ringtrain/bench/collectives.py",
}
MOST_FOR_A_COLLECTIVE, MOST_FOR_A_CODEC, MOST_FOR_AN_ATTRIBUTE = 13, 7, 8


def product():
    """The files that are written by hand, as paths from the root."""
    patterns = ("native/**/*.def", "native/**/*.h", "native/**/*.cc", "native/**/*.cu", "ringtrain/**/*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def section(title):
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/architecture.md: no section '{title}'"
    return found.group(1)


def listed(text):
    """Files of a table's first column, with what its second says."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", text, re.MULTILINE)
    assert rows and len(rows) == len(dict(rows))
    return dict(rows)


def naming(pattern):
    return {path for path, text in product().items() if re.search(pattern, text, re.MULTILINE)}


COLLECTIVE, TESTS_OF_COLLECTIVE = (listed(part) for part in section("Adding a collective").split("**Tests and docs.**"))
CODEC = listed(section("Adding a codec"))
ATTRIBUTE, OF_WEIGHT = (listed(part) for part in section("Adding a request attribute").split("**Beyond the list.**"))


def test_collective_is_in_few_files():
    # NCCL's and MPI's functions are spelled ReduceScatter and reduce_scatter: they are not this operation.
    files = naming(r"[Rr]educescatter|\bkScatter\b")
    assert USERS_OF_REDUCESCATTER <= files <= COLLECTIVE.keys() | USERS_OF_REDUCESCATTER
    assert len(COLLECTIVE) <= MOST_FOR_A_COLLECTIVE


def test_what_every_collective_touches_names_this_one():
    always = {path for path, when in COLLECTIVE.items() if when in ("always", "a new layout")}
    silent = always - naming(r"[Rr]educe_?[Ss]catter|\bkScatter\b")
    assert silent == set(), "listed, but needless"
    assert all((ROOT / path).exists() for path in COLLECTIVE if "NAME" not in path)


def test_tests_and_docs_of_a_collective_name_this_one():
    silent = {path for path in TESTS_OF_COLLECTIVE if not re.search("reducescatter", (ROOT / path).read_text(), re.I)}
    assert silent == set(), "listed, but needless"


def test_codec_is_in_few_files():
    always = {path for path, when in CODEC.items() if when == "always"}
    cast = naming(r"Compression::kBFloat16|RT_COMPRESSION\(kBFloat16|Compression\.bf16|^    bf16 = ")
    assert cast == always
    blocks = naming(r"Int4Form|Compression::kInt4|RT_COMPRESSION\(kInt4|Compression\.int4|^    int4 = ")
    assert blocks == {path.replace("NAME", "scaled_blocks") for path in CODEC}
    assert len(CODEC) <= MOST_FOR_A_CODEC


def test_wire_has_its_form_from_the_codec_alone():
    """The data plane asks how many bytes travel, and in which form: it neither converts nor knows a compression."""
    knowing = {path for path in naming(r"\bCompression::k") if not path.startswith("native/kernels/")}
    assert knowing == {"native/core/request.cc"}
    converting = {path for path in naming(r"\bConvert\(") if path.startswith("native/collectives/")}
    assert converting == {"native/collectives/adasum.cc"}  # whose vectors have a dtype on every way


def test_attribute_is_in_few_files():
    named = weight_names()
    assert named <= ATTRIBUTE.keys() | OF_WEIGHT.keys()
    assert len(ATTRIBUTE) <= MOST_FOR_AN_ATTRIBUTE
    assert OF_WEIGHT.keys() <= named, "listed, but needless"


def test_attribute_that_is_only_carried_is_in_the_list_alone():
    """Compression acts by the batch's codec, which is no attribute: no file of the core but those of the list knows it."""
    core = {path for path in naming(r"(request|from|\b[ab])(\.|->)compression\b") if path.startswith("native/")}
    assert core <= ATTRIBUTE.keys()
    outside = {path for path in naming(r"\bcompression\b") if re.fullmatch(r"ringtrain/\w+\.py", path)}
    assert outside <= ATTRIBUTE.keys()


def weight_names():
    """Models have weights too: in Python only the argument counts."""
    native = {path for path in naming(r"\bweights?\b") if path.startswith("native/")}
    return native | {
        path for path in naming(r"\bweight: int|\bweight=|\bweighted: bool") if path.startswith("ringtrain/")
    }


@pytest.mark.parametrize("name", ATTRIBUTE)
def test_listed_file_carries_every_attribute_of_a_reduction(name):
    text = (ROOT / name).read_text()
    assert re.search(r"\b(postscale|weight|compression)", text)


def test_modules_of_operations_list_what_they_define():
    """Adapters export by these lists."""
    for path in ("operations", "torch/operations", "torch/reductions", "tensorflow/operations", "keras/values"):
        text = (ROOT / "ringtrain" / f"{path}.py").read_text()
        defined = set(re.findall(r"^def ([a-z]\w*)\(", text, re.MULTILINE))
        exported = set(re.findall(r'^    "(\w+)",$', text[text.index("__all__ = [") :].split("]")[0], re.MULTILINE))
        assert defined == {name for name in exported if name.islower()}
    assert {row.name for row in tables.OPERATIONS.values()} <= set(dir(ringtrain))


PROGRAM = """
#include <cstdio>
#include "core/fusion.h"
#include "core/match.h"
using namespace ringtrain;
int main() {
  Request one, other;
  one.name = other.name = "x";
  one.tensors = other.tensors = {{DType::kFloat32, {4}}};
  other.urgency = 2.5;
  Encoder encoder;
  Encode(other, &encoder);
  const std::string bytes = encoder.Take();
  Decoder decoder(bytes);
  std::printf("%g %d\\n", DecodeRequest(&decoder).urgency, one == other);
  Response agreed;
  std::puts(Match({&one, &other}, {0, 1}, {}, &agreed).message().c_str());
  Response first, second;
  first.request = one, second.request = other;
  std::printf("%d %d\\n", CanFuse(first, first), CanFuse(first, second));
  other.urgency = 0, one.share = 2, other.share = 5;
  Response both;
  const bool matches = Match({&one, &other}, {0, 1}, {}, &both).ok();
  std::printf("%d %zu %d\\n", matches, both.shares.size(), both.RequestOf(1, 2) == other);
  other.share = Request::kNoCount;
  std::puts(Match({&one, &other}, {0, 1}, {}, &both).message().c_str());
  std::puts(TableText("attributes"));
}
"""


def test_one_row_makes_an_attribute_travel_match_and_fuse(tmp_path):
    """The core, compiled with one more row: nothing else of it names the attribute."""
    compiler = shutil.which("g++")
    assert compiler, "needs a C++ compiler, as the library does"
    shutil.copytree(ROOT / "native" / "tables", tmp_path / "tables")
    table = tmp_path / "tables" / "attributes.def"
    row = 'RT_ATTRIBUTE(urgency, kFactor, 0.0, kReduces, "urgency", "Pass the same urgency on every rank.")\n'
    own = 'RT_OWN_ATTRIBUTE(share, kOwnCount, -1, kReduces, "sharing", "Pass a share on every rank.")\n'
    undef = "#undef RT_OWN_ATTRIBUTE"
    table.write_text(table.read_text().replace(undef, row + own + undef))
    (tmp_path / "main.cc").write_text(PROGRAM)
    sources = ["base/decimal.cc", "core/request.cc", "core/match.cc", "core/fusion.cc", "collectives/rows.cc"]
    subprocess.run(
        [
            compiler, "-std=c++17", "-O0", f"-I{tmp_path}", f"-I{ROOT / 'native'}", tmp_path / "main.cc",
            tmp_path / "tables" / "tables.cc", *(ROOT / "native" / source for source in sources), "-o", tmp_path / "main",
        ],
        check=True,
    )  # fmt: skip
    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert said[0] == "2.5 0"
    assert said[1] == (
        "allreduce 'x': urgency must be the same on all ranks, but is 0 on rank 0 and 2.5 on rank 1. "
        "Pass the same urgency on every rank."
    )
    assert said[2] == "1 0"
    assert said[3] == "1 2 1"
    assert said[4] == (
        "allreduce 'x': sharing must be the same on all ranks, but is by shares on rank 0 and none on rank 1. "
        "Pass a share on every rank."
    )
    assert "urgency\tkFactor\t0.0\tkReduces" in said
