"""Runs the cases that torch has for its own backends on the backend "ringtrain", on processes of the CPU.

    python torchs_own_cases.py [--ranks N] [--backend NAME] [WORD ...]     all, or those with one of the words in their names

Each case of ``torch.testing._internal.distributed.distributed_test`` is run, or named in ``LEFT_OUT`` with the reason.
Which backends a case was written for, and that it wants GPUs, does not count: what it puts on a GPU stays on the CPU
(``OnTheCpu``). Ranks are forked, so that torch is imported once. The last line is JSON: names by outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import unittest
from unittest import mock

SECONDS = 60  # of a case
_parser = argparse.ArgumentParser()
_parser.add_argument("--ranks", type=int, default=4)
_parser.add_argument("--backend", choices=("ringtrain", "gloo"), default="ringtrain", help="gloo, to compare with")
_parser.add_argument("words", nargs="*")
ARGUMENTS = _parser.parse_args()
os.environ |= {"BACKEND": ARGUMENTS.backend, "WORLD_SIZE": str(ARGUMENTS.ranks)}  # torch's cases read them at import
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(SECONDS)
os.environ |= {"TEMP_DIR": "", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

# By words in their names; the first that fits.
LEFT_OUT = {
    "monitored_barrier_allreduce_hang|mixed_backend_err": "makes groups of NCCL by name",
    "barrier_timeout_global": "meets by a file that only torch's own run of the cases has",
    "nccl": "NCCL's own options",
    "average_parameters": "makes groups of NCCL by name",
    "SyncBatchNorm|sync_bn|ddp_inference": "DDP takes torch's SyncBatchNorm on GPUs alone",
    "apply_optim_in_backward": "streams of an accelerator",
    "compile": "minutes of a compiler; tests/with_torch/test_torch_distributed_launched.py compiles DDP",
    "hook_pickling": "torch skips it everywhere, as it fails with its own backends too",
    "mixed_precision|with_amp|SyncBatchNorm_half": "arithmetic of a GPU",
    "non_default_stream": "streams of a GPU",
    "profiling": "asks for GPU kernels in a trace",
    "ddp_device$|DistributedDataParallel$": "moves inputs to a GPU by itself",
    "logging_data_gpu": "what DDP logs of GPUs",
    "ddp_uneven_inputs$": "convolutions of minutes a step on a CPU; the cases beside it have join()",
}
# Cases that choose their module by the backend's name, with a branch for CPUs that only gloo and MPI take.
AS_GLOO = "accumulate_gradients_no_sync"


def is_gpu(place: object) -> bool:
    """Whether an argument names a GPU: by number, by text or as a device."""
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return (isinstance(place, int) and not isinstance(place, bool)) or (
        isinstance(place, str) and place.startswith("cuda")
    )


class OnTheCpu(TorchFunctionMode):
    """What a case puts on a GPU stays where it is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function in (torch.Tensor.to, torch._C._nn._parse_to):  # the second is of modules
            args = tuple("cpu" if is_gpu(each) else each for each in args)
        return function(*args, **kwargs)


def runs_anyway(*_arguments, **_named):
    """Stands for a decorator that skips a case by backend, number of GPUs or number of ranks."""
    return lambda case: case


@contextlib.contextmanager
def decorators_that_skip_nothing():
    with contextlib.ExitStack() as replaced:
        for name in (
            "skip_if_lt_x_gpu",
            "nccl_skip_if_lt_x_gpu",
            "require_n_gpus_for_nccl_backend",
            "requires_nccl_version",
        ):
            if hasattr(common_distributed, name):  # each release has its own
                replaced.enter_context(mock.patch.object(common_distributed, name, runs_anyway))
        for name in ("skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_odd_worldsize", "skip_if_rocm_multiprocess"):
            if hasattr(common_distributed, name):
                replaced.enter_context(mock.patch.object(common_distributed, name, lambda case: case))
        for name in ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"):
            replaced.enter_context(mock.patch.object(common_utils, name, runs_anyway))
        yield


with decorators_that_skip_nothing():
    from torch.testing._internal.distributed import distributed_test

import ringtrain.torch.distributed  # noqa: F401 - here, and not in each process anew


@contextlib.contextmanager
def without_gpus(case: str):
    """Has torch do without GPUs what cases ask of them."""
    ddp = torch.nn.parallel.DistributedDataParallel
    make = ddp.__init__

    @functools.wraps(make)
    def make_on_the_cpu(self, module, device_ids=None, output_device=None, *arguments, **named):
        make(self, module, None, None, *arguments, **named)

    def gpus_of_ranks(size, _backend):
        return {rank: [rank] for rank in range(size)}

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(ddp, "__init__", make_on_the_cpu))
        replaced.enter_context(mock.patch.object(torch.cuda, "current_device", torch.distributed.get_rank))
        for name in ("set_device", "synchronize"):  # one function each, as the compiler tells functions apart
            replaced.enter_context(mock.patch.object(torch.cuda, name, lambda *_arguments, **_named: None))
        replaced.enter_context(mock.patch.object(torch.cuda, "device", lambda *_: contextlib.nullcontext()))
        replaced.enter_context(mock.patch.object(distributed_test, "init_multigpu_helper", gpus_of_ranks))
        if AS_GLOO in case:
            replaced.enter_context(mock.patch.object(distributed_test, "BACKEND", "gloo"))
        replaced.enter_context(OnTheCpu())
        yield


class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Torch's, in processes that are forked."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, name, pipe):
        with without_gpus(name):
            super().run_test(name, pipe)


class Outcomes(unittest.TestResult):
    """Names of cases by what became of them; a line for each."""

    def __init__(self):
        super().__init__()
        self.passed, self.skipped_by_torch, self.failed = [], {}, {}

    def addSuccess(self, test):
        self.passed.append(test._testMethodName)
        say("passed", test._testMethodName)

    def addSkip(self, test, reason):
        self.skipped_by_torch[test._testMethodName] = reason
        say("skipped by torch", test._testMethodName, reason)

    def addError(self, test, problem):
        text = "".join(self._exc_info_to_string(problem, test)).strip()
        self.failed[test._testMethodName] = text[-3000:]
        say("FAILED", test._testMethodName, text[-1500:])

    addFailure = addError


def say(outcome: str, name: str, reason: str = "") -> None:
    print(f"{outcome}: {name}{': ' if reason else ''}{reason}", flush=True)


def main(words: list[str]) -> int:
    """Runs the cases; exit code 3 if one has failed."""
    outcomes, left_out = Outcomes(), {}
    for name in unittest.defaultTestLoader.getTestCaseNames(Cases):
        if words and not any(word in name for word in words):
            continue
        reason = next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, name)), None)
        if reason and name not in words:
            left_out[name] = reason
            say("left out", name, reason)
        else:
            Cases(name).run(outcomes)
    found = {"passed": outcomes.passed, "failed": outcomes.failed, "skipped by torch": outcomes.skipped_by_torch}
    print(json.dumps(found | {"left out": left_out}))
    return 3 if outcomes.failed else 0


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS.words))
