"""What a new collective, reduction, codec, request attribute, flag or mode touches: docs/internals/changes.md is short, and true.

What was added before is the example: every file of the product that names it is in its list. Where that is cheap, one is planted.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from dataclasses import dataclass

import click
import pytest
import torch

import ringtrain
import ringtrain.torch as hvd
from ringtrain._binding import tables
from ringtrain._training import mode, needs
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import cli, planning, settings
from ringtrain.testing import World
from ringtrain.torch.modes.base import AroundSteps

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "internals" / "changes.md").read_text()
# They train with it: another collective changes nothing there.
USERS_OF_REDUCESCATTER = {
    "ringtrain/torch/modes/sharded_buckets.py",
    "ringtrain/torch/mpi_ops.py",  # Horovod's names of its autograd functions, which are as many as it had
    "ringtrain/bench/collectives.py",
}
START_JOBS_WITH_SHARED_GPUS = {
    "ringtrain/launch/doctor.py", "ringtrain/bench/command.py", "ringtrain/bench/shaped.py",
}  # fmt: skip
TRAIN_IN_SHARDED_STEPS = {"ringtrain/bench/torch_systems.py"}
MOST_FOR_A_COLLECTIVE, MOST_FOR_A_CODEC, MOST_FOR_A_REDUCTION, MOST_FOR_AN_ATTRIBUTE = 13, 7, 6, 8
MOST_FOR_A_FLAG, MOST_FOR_A_MODE = 5, 10


def product():
    """The files that are written by hand, as paths from the root."""
    patterns = ("native/**/*.def", "native/**/*.h", "native/**/*.cc", "native/**/*.cu", "ringtrain/**/*.py")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def section(title):
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/internals/changes.md: no section '{title}'"
    return found.group(1)


def listed(text):
    """Files of a table's first column, with what its second says."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", text, re.MULTILINE)
    assert rows and len(rows) == len(dict(rows))
    return dict(rows)


def naming(pattern):
    return {path for path, text in product().items() if re.search(pattern, text, re.MULTILINE)}


def lists(title, border="**Tests and docs.**"):
    """The two tables of a section."""
    first, second = section(title).split(border)
    return listed(first), listed(second)


def named(rows, name, *whens):
    """The files of a table, for an addition with a file of that name; of all rows, or those with one of these conditions."""
    return {path.replace("NAME", name) for path, when in rows.items() if when in whens or not whens}


COLLECTIVE, TESTS_OF_COLLECTIVE = lists("Adding a collective")
CODEC = listed(section("Adding a codec"))
REDUCTION, TESTS_OF_REDUCTION = lists("Adding a reduction")
ATTRIBUTE, OF_WEIGHT = lists("Adding a request attribute", "**Beyond the list.**")
FLAG, TESTS_OF_FLAG = lists("Adding a launcher flag")
MODE, TESTS_OF_MODE = lists("Adding a mode")


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


@pytest.mark.parametrize("rows, pattern", [
    pytest.param(TESTS_OF_COLLECTIVE, "(?i)reducescatter", id="collective"),
    pytest.param(TESTS_OF_REDUCTION, "(?i)l2norm|kRoot", id="reduction"),
    pytest.param(TESTS_OF_FLAG, "shares?[_-]gpus", id="flag"),
    pytest.param(TESTS_OF_MODE, "ShardedStep", id="mode"),
])  # fmt: skip
def test_tests_and_docs_name_the_example(rows, pattern):
    silent = {path for path in rows if not re.search(pattern, (ROOT / path).read_text())}
    assert silent == set(), "listed, but needless"


def test_codec_is_in_few_files():
    always = {path for path, when in CODEC.items() if when == "always"}
    cast = naming(r"Compression::kBFloat16|RT_COMPRESSION\(kBFloat16|Compression\.bf16|^    bf16 = ")
    assert cast == always
    blocks = naming(r"Int4Form|Compression::kInt4|RT_COMPRESSION\(kInt4|Compression\.int4|^    int4 = ")
    assert blocks == {path.replace("NAME", "scaled_blocks") for path in CODEC}
    assert len(CODEC) <= MOST_FOR_A_CODEC


def test_reduction_is_in_few_files():
    """Product stands for one of known parts, L2Norm for one that has brought a map and a finish."""
    always = {path for path, when in REDUCTION.items() if when == "always"}
    assert naming(r"\bkProduct, +\d|^Product = tables|^    \"Product\",$") == always
    assert naming(r"\bk?L2Norm\b|\bkSquare\b|\bkRoot\b") <= REDUCTION.keys()
    assert len(REDUCTION) <= MOST_FOR_A_REDUCTION


def test_flag_is_in_few_files():
    """``--share-gpus`` stands for one that the launcher reads, ``--num-nccl-streams`` for one that gives ranks a variable."""
    read = named(FLAG, "preflight", "read by the launcher")
    assert naming(r"\bshares?_gpus\b|--share-gpus") == read | START_JOBS_WITH_SHARED_GPUS
    assert naming(r"--num-nccl-streams\b|RINGTRAIN_NCCL_COMMUNICATORS") == named(FLAG, "", "gives the ranks a variable")
    of_elastic_jobs = named(FLAG, "", "of `--elastic` alone")
    assert naming(r"--notice-grace\b") == of_elastic_jobs
    assert max(Counter(FLAG.values()).values()) <= MOST_FOR_A_FLAG


def test_each_flag_is_on_a_page():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    flags = [
        option.opts for option in cli.ringtrainrun.params if isinstance(option, click.Option) and not option.hidden
    ]
    assert not [flag for flag in flags if not any(re.search(rf"{re.escape(each)}\b", pages) for each in flag)]
    assert any("--share-gpus" in flag for flag in flags)


def test_one_row_makes_a_flag(monkeypatch, tmp_path):
    """A variable of the ranks, from the command line and from the configuration file, which the line wins over."""
    row = settings.Setting(
        ("--urgency",), settings.WholeNumber(1, 9), "how soon", lambda value: {"RINGTRAIN_URGENCY": str(value)},
        ("params", "urgency"),
    )  # fmt: skip
    monkeypatch.setattr(settings, "SETTINGS", (*settings.SETTINGS, row))
    command = cli._with_tables(click.Command("ringtrainrun"))

    def chosen(*line, file=None):
        given = command.make_context("ringtrainrun", list(line)).params
        return planning.chosen_settings({**given, "config_file": file}).get("RINGTRAIN_URGENCY")

    file = tmp_path / "settings.yaml"
    file.write_text("params: {urgency: 3}")
    assert chosen("--urgency", "7") == "7" and chosen(file=str(file)) == "3" and chosen() is None
    assert chosen("--urgency", "7", file=str(file)) == "7"
    with pytest.raises(click.BadParameter, match="10 is not in the range"):
        chosen("--urgency", "10")


def test_mode_is_in_few_files():
    """``ShardedStep`` stands for one of PyTorch, ``OneStepLate`` for one of all frameworks that have modes."""
    files = naming(r"\bShardedStep\b")
    own = {path for path in files if path.startswith("ringtrain/torch/modes/sharded_")}
    assert files - own == (named(MODE, "sharded_step", "always", "in PyTorch") - own) | TRAIN_IN_SHARDED_STEPS
    assert "ringtrain/torch/modes/sharded_step.py" in own
    assert named(MODE, "one_step_late") <= naming(r"\bOneStepLate\b"), "listed, but needless"
    assert len(MODE) <= MOST_FOR_A_MODE


@dataclass(frozen=True)
class Halved(mode.Mode):
    """Half of the gradients' average."""


class HalvedMode(AroundSteps):
    @classmethod
    def of(cls, optimizer, wrapping):
        return cls()

    def before_step(self, optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                hvd.allreduce_(parameter.grad, name="halved", postscale_factor=0.5)

    def after_step(self, optimizer):
        """Nothing is left of a step."""


def test_a_class_a_row_and_a_column_make_a_mode(monkeypatch):
    module = types.ModuleType("ringtrain.torch.modes.halved")
    module.HalvedMode = HalvedMode
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules["ringtrain.torch.optimizer"]._MODES, Halved, "halved.HalvedMode")

    def step(rank, **arguments):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), mode=Halved(), **arguments)
        parameter.grad = torch.full((2,), 2.0 + 4.0 * rank)
        optimizer.step()
        return parameter.tolist()

    with World(2) as world, pytest.raises(KeyError, match="Halved"):
        world.run(step)
    monkeypatch.setitem(needs.NEEDS, "Halved", {"sum": "half of a sum is no mean"})
    with World(2) as world:
        assert world.run(step) == [[-2.0, -2.0]] * 2
    with World(1) as world, pytest.raises(InvalidArgumentError, match="half of a sum is no mean"):
        world.run(lambda rank: step(rank, op=hvd.Sum))


def test_wire_has_its_form_from_the_codec_alone():
    """The data plane asks how many bytes travel, and in which form: it neither converts nor knows a compression."""
    knowing = {path for path in naming(r"\bCompression::k") if not path.startswith("native/kernels/")}
    assert knowing == {"native/agree/check.cc"}
    converting = {path for path in naming(r"\bConvert\(") if path.startswith("native/collectives/")}
    # Adasum's vectors have a dtype on every way.
    assert converting == {"native/collectives/adasum.cc", "native/collectives/move.h"}


def test_attribute_is_in_few_files():
    named = weight_names()
    assert named <= ATTRIBUTE.keys() | OF_WEIGHT.keys()
    assert len(ATTRIBUTE) <= MOST_FOR_AN_ATTRIBUTE
    assert OF_WEIGHT.keys() <= named, "listed, but needless"


def test_attribute_that_is_only_carried_is_in_the_list_alone():
    """Compression acts by the batch's codec, which is no attribute: no file of the core but those of the list knows it."""
    core = {path for path in naming(r"(request|from|\b[ab])(\.|->)compression\b") if path.startswith("native/")}
    assert core <= ATTRIBUTE.keys()
    outside = {
        path for path in naming(r"\bcompression\b") if re.fullmatch(r"ringtrain/((_runtime|_binding)/)?\w+\.py", path)
    }
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
    for path in (
        "_runtime/operations",
        "torch/operations",
        "torch/reductions",
        "tensorflow/operations",
        "keras/value_operations",
    ):
        text = (ROOT / "ringtrain" / f"{path}.py").read_text()
        defined = set(re.findall(r"^def ([a-z]\w*)\(", text, re.MULTILINE))
        exported = set(re.findall(r'^    "(\w+)",$', text[text.index("__all__ = [") :].split("]")[0], re.MULTILINE))
        assert defined == {name for name in exported if name.islower()}
    assert {row.name for row in tables.OPERATIONS.values()} <= set(dir(ringtrain))


PROGRAM = """
#include <cstdio>
#include "agree/check.h"
#include "agree/fusion.h"
#include "agree/match.h"
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
  Request rows, more;
  rows.name = more.name = "x";
  rows.operation = more.operation = Operation::kReversedGather;
  rows.tensors = {{DType::kFloat32, {4, 3}}};
  more.tensors = {{DType::kFloat32, {2, 3}}};
  const bool gathers = Match({&rows, &more}, {0, 1}, {}, &both).ok();
  std::printf("%d %d %d\\n", gathers, static_cast<int>(both.rows[0]), static_cast<int>(both.rows[1]));
  more.tensors = {{DType::kFloat32, {2, 5}}};
  std::puts(Match({&rows, &more}, {0, 1}, {}, &both).message().c_str());
  one.share = Request::kNoCount, one.reduction = Reduction::kPower, one.tensors = {{DType::kInt32, {4}}};
  std::puts(Check(one, {0, 1}).message().c_str());
  one.reduction = Reduction::kMax, one.compression = Compression::kSixBits, one.tensors = {{DType::kFloat32, {4}}};
  std::puts(Check(one, {0, 1}).message().c_str());
  std::puts(TableText("attributes"));
}
"""


ROWS = {
    "operations": 'RT_OPERATION(kReversedGather, 99, "reversed_gather", 0, 0, kGather, 1, "allreduce")',
    "reductions": 'RT_REDUCTION(kPower, 99, "power", kSquare, kAdd, kLeave)',
    "compressions": 'RT_COMPRESSION(kSixBits, 7, "six bits", 1, 0)',
}


def test_one_row_makes_what_is_added_travel_match_and_fuse(tmp_path):
    """The core, compiled with one more row in four tables: nothing else of it names what they add."""
    compiler = shutil.which("g++")
    assert compiler, "needs a C++ compiler, as the library does"
    shutil.copytree(ROOT / "native" / "tables", tmp_path / "tables")
    for name, planted in ROWS.items():
        with (tmp_path / "tables" / f"{name}.def").open("a") as rows:
            rows.write(f"{planted}\n")
    table = tmp_path / "tables" / "attributes.def"
    row = 'RT_ATTRIBUTE(urgency, kFactor, 0.0, kReduces, "urgency", "Pass the same urgency on every rank.")\n'
    own = 'RT_OWN_ATTRIBUTE(share, kOwnCount, -1, kReduces, "sharing", "Pass a share on every rank.")\n'
    undef = "#undef RT_OWN_ATTRIBUTE"
    table.write_text(table.read_text().replace(undef, row + own + undef))
    (tmp_path / "main.cc").write_text(PROGRAM)
    sources = [
        "base/decimal.cc",
        "agree/check.cc",
        "agree/request.cc",
        "agree/match.cc",
        "agree/fusion.cc",
        "collectives/rows.cc",
    ]
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
    assert said[5] == "1 4 2"
    assert said[6].startswith(
        "reversed_gather 'x': shape must be the same on all ranks, but is [*, 3] on rank 0 and [*, 5]"
    )
    assert said[7].startswith("allreduce 'x': reduction power needs float32 or float64, but found int32[4].")
    assert "six bits" in said[8] and "max" in said[8], said[8]
    assert "urgency\tkFactor\t0.0\tkReduces" in said
