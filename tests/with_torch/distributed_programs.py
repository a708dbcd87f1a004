"""What programs do with torch.distributed beside single collectives: groups, objects, DDP's features, checkpoints.

    torchrun --nproc-per-node 4 distributed_programs.py

Each function is a case, on the backend "ringtrain" and the CPU; who has done one prints its name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.distributed.nn.functional as differentiable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BACKEND = "ringtrain"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def require_sums(group: dist.ProcessGroup | None = None) -> None:
    """The group's ranks, and no others, add up what they have."""
    total = torch.full((4,), float(RANK))
    dist.all_reduce(total, group=group)
    assert total[0] == sum(dist.get_process_group_ranks(group or dist.group.WORLD)), total


# ---- groups ----


def groups_again_and_again() -> None:
    """The default group is destroyed and made anew."""
    for _ in range(10):
        dist.destroy_process_group()
        dist.init_process_group(BACKEND)
        require_sums()


def groups_in_any_order() -> None:
    pairs = [dist.new_group([first, (first + 1) % SIZE]) for first in range(SIZE)]
    for first in reversed(range(SIZE)):
        if RANK in (first, (first + 1) % SIZE):
            require_sums(pairs[first])


def groups_that_only_their_ranks_make() -> None:
    first = RANK // 2 * 2
    require_sums(dist.new_group([first, first + 1], use_local_synchronization=True))


def groups_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("rows", "columns"))
    require_sums(mesh.get_group("rows"))
    require_sums(mesh.get_group("columns"))
    mesh["rows", "columns"]._flatten("all")
    require_sums(mesh["all"].get_group())


def a_fork_behind_a_group() -> None:
    dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.init_process_group(BACKEND)
    require_sums()


# ---- what is sent ----


def large_objects() -> None:
    found: list = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "bytes": bytes(3_000_000)})
    assert [each["rank"] for each in found] == list(range(SIZE))
    listed = [list(range(100_000)) if RANK == 1 else None]
    dist.broadcast_object_list(listed, 1)
    assert len(listed[0]) == 100_000
    if RANK == 0:
        dist.send_object_list([{"a": 1}, "x" * 100_000], 1)
    if RANK == 1:
        sent: list = [None, None]
        dist.recv_object_list(sent, 0)
        assert sent == [{"a": 1}, "x" * 100_000]


def gradients_through_collectives() -> None:
    x = torch.ones(3, requires_grad=True)
    differentiable.all_reduce(x * (RANK + 1)).sum().backward()
    assert x.grad[0] == SIZE * (RANK + 1)
    own = torch.full((2,), float(RANK), requires_grad=True)
    sum((place + 1) * part.sum() for place, part in enumerate(differentiable.all_gather(own))).backward()
    assert own.grad[0] == SIZE * (RANK + 1)


def several_at_once() -> None:
    tensors = [torch.ones(3), torch.ones(2)]
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    assert all(each[0] == SIZE for each in tensors)
    around = [
        dist.P2POp(dist.isend, torch.full((100_000,), float(RANK)), (RANK + 1) % SIZE),
        dist.P2POp(dist.irecv, found := torch.empty(100_000), (RANK - 1) % SIZE),
    ]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    assert (found == (RANK - 1) % SIZE).all()


# ---- DDP ----


def gradients_of(prepare: Callable[[DistributedDataParallel], object] = lambda model: None, **features: object) -> list:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)), **features)
    prepare(model)
    for step in range(3):
        torch.manual_seed(10 * step + RANK)
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def features_of_ddp() -> None:
    wanted = gradients_of()
    for features in (
        {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-4},
    ):  # fmt: skip
        for ours, plain in zip(gradients_of(**features), wanted, strict=True):
            torch.testing.assert_close(ours, plain)


def hooks_of_ddp() -> None:
    """Those that send what DDP would, in fewer bits or as it is; and those whose values are of their own."""
    wanted = gradients_of()
    for hook, loses in ((default_hooks.allreduce_hook, 1e-6), (default_hooks.fp16_compress_hook, 1e-2)):
        for ours, plain in zip(
            gradients_of(lambda model, hook=hook: model.register_comm_hook(None, hook)), wanted, strict=True
        ):
            torch.testing.assert_close(ours, plain, atol=loses, rtol=loses)
    averages = post_localSGD_hook.PostLocalSGDState(None, None, 10)
    for state, hook in (
        (averages, post_localSGD_hook.post_localSGD_hook),
        (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ):
        for ours in gradients_of(lambda model, state=state, hook=hook: model.register_comm_hook(state, hook)):
            of_the_first = ours.clone()
            dist.broadcast(of_the_first, 0)
            assert torch.equal(ours, of_the_first), hook


def ranks_that_end_sooner() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with model.join():
        for _ in range(RANK + 1):
            model(torch.randn(2, 4)).sum().backward()


def a_sharded_optimizer() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(0)
    weight = model.module.weight.detach()
    of_the_first = weight.clone()
    dist.broadcast(of_the_first, 0)
    assert torch.equal(weight, of_the_first)


# ---- tensors that are dealt ----


def a_layer_that_is_dealt() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x = torch.randn(3, 8)
    wanted = model(x)
    dealt = parallelize_module(
        model, init_device_mesh("cpu", (SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    torch.testing.assert_close(dealt(x), wanted)


def a_checkpoint_that_is_dealt_otherwise() -> None:
    """Saved in the background by rows, and loaded by columns."""
    mesh, whole = init_device_mesh("cpu", (SIZE,)), torch.arange(32.0).view(8, 4)
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    checkpoints.async_save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder[0]).result()
    dist.barrier()
    state = {"w": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)])}
    checkpoints.load(state, checkpoint_id=folder[0])
    assert torch.equal(state["w"].full_tensor(), whole)


CASES = [
    groups_again_and_again, groups_in_any_order, groups_that_only_their_ranks_make, groups_of_a_mesh, a_fork_behind_a_group,
    large_objects, gradients_through_collectives, several_at_once, features_of_ddp, hooks_of_ddp, ranks_that_end_sooner,
    a_sharded_optimizer, a_layer_that_is_dealt, a_checkpoint_that_is_dealt_otherwise,
]  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group(BACKEND)
    for case in CASES:
        case()
        os.write(1, f"done: {case.__name__}\n".encode())
    dist.destroy_process_group()
