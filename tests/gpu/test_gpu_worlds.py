"""Worlds whose tensors are on fake GPUs: gpu/worlds.py has one check for each thing that must hold."""

from __future__ import annotations

import pytest
from fakes import check

from gpu import worlds

# Neighbours of a check that every run has: other functions that fail in the same way, and what a smaller world shows
# too.
FOR_LONG_RUNS = {"every_operation_of_1_ranks_staged", "every_operation_of_2_ranks_staged", "every_operation_of_2_ranks_nccl",
                 "two_devices_and_the_host_staged", "cuStreamCreateWithPriority_may_fail", "cuMemcpyHtoDAsync_may_fail",
                 "cuStreamWaitEvent_may_fail", "cuEventCreate_may_fail", "cuModuleGetFunction_may_fail", "cuMemAlloc_may_fail",
                 "cuModuleLoadData_may_fail", "products_keep_their_order_by_way_of_the_host",
                 "an_nccl_that_cannot_register_does_without", "what_does_not_open_beside_in_time_is_done_without"}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in FOR_LONG_RUNS else name
        for name in check.CHECKS[worlds.__name__]
    ],
)
def test_gpu_worlds(name: str) -> None:
    problem = check.run(worlds.__name__, name)
    assert not problem, problem
