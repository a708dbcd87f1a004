"""Worlds whose tensors are on fake GPUs: gpu/worlds.py has one check for each thing that must hold."""

from __future__ import annotations

import pytest
from fakes import check

from gpu import worlds

# Neighbours of a check that every run has: other functions that fail in the same way, and what a smaller world shows
# too. And what is fast or late, but never wrong, where it fails: old releases, registered memory, what is opened beside.
FOR_LONG_RUNS = {"every_operation_of_1_ranks_staged", "every_operation_of_2_ranks_staged", "every_operation_of_2_ranks_nccl",
                 "two_devices_and_the_host_staged", "cuStreamCreateWithPriority_may_fail", "cuMemcpyHtoDAsync_may_fail",
                 "cuStreamWaitEvent_may_fail", "cuEventCreate_may_fail", "cuModuleGetFunction_may_fail", "cuMemAlloc_may_fail",
                 "cuModuleLoadData_may_fail", "products_keep_their_order_by_way_of_the_host",
                 "an_nccl_that_cannot_register_does_without", "what_does_not_open_beside_in_time_is_done_without",
                 "an_older_nccl_aborts_communicators_side_by_side", "windows_take_the_place_of_registrations",
                 "buffers_are_registered_with_each_communicator", "another_process_set_opens_beside_a_kernel_that_hangs",
                 "communicators_take_turns", "nccl_is_opened_beside_operations_of_several_dtypes",
                 "nccl_is_opened_beside_what_goes_through_the_host", "many_small_tensors_travel_together",
                 "two_devices_and_the_host_by_nccl", "operations_go_on_beside_the_capture_of_a_graph"}  # fmt: skip


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
