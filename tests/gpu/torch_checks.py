"""What is checked with PyTorch: operations, streams, training, mixed precision, graphs, memory.

On the first GPU where torch sees one; else on the CPU, so that CI runs these lines too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from modes import in_mode

import ringtrain.torch as hvd

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def model(device: torch.device = DEVICE) -> torch.nn.Module:
    """A few layers, the same each time."""
    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(256, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    ]
    return torch.nn.Sequential(*layers).to(device)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    torch.manual_seed(2)
    return torch.randn(64, 256).to(DEVICE), torch.randint(10, (64,)).to(DEVICE)


def loss_of(network: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of one batch."""
    return torch.nn.functional.cross_entropy(network(inputs), labels)


def share_of(rank: int, size: int) -> slice:
    """The samples of a batch that a rank takes."""
    return slice(rank, None, size)


def own_share() -> slice:
    """Those of this rank."""
    return share_of(hvd.rank(), hvd.size())


WHOLE = slice(None)  # the samples of a process that trains alone


def train(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, share: slice, passes: int = 1
) -> None:
    """Takes steps, of so many backward passes each, on some samples of the batch."""
    device = next(network.parameters()).device
    inputs, labels = (part[share].to(device) for part in batch())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(network, inputs, labels).backward()
        optimizer.step()


def momentum(network: torch.nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    """A plain optimizer with a state."""
    return torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)


def step_with_a_scaler(share: slice, overflows: Sequence[bool]) -> tuple[list[bool], float, torch.Tensor]:
    """Steps in mixed precision, some of whose losses are infinite on this rank.

    Returns:
        which steps have changed a weight, the scale at the end, and the parameters.
    """
    network = model()
    optimizer = distributed(torch.optim.SGD(network.parameters(), lr=0.1), network)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8)
    inputs, labels = batch()
    changed = []
    for overflow in overflows:
        before = network[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.float16 if DEVICE.type == "cuda" else torch.bfloat16):
            loss = loss_of(network, inputs[share], labels[share]) * (float("inf") if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(not torch.equal(before, network[0].weight))
    return changed, scaler.get_scale(), _flat(network).cpu()


def results_are_on_the_device() -> bool:
    """Each operation gives tensors of the device, with the right values."""
    right = True
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        given = torch.arange(12, device=DEVICE).reshape(3, 4).to(dtype)
        found = [
            hvd.allreduce(given, op=hvd.Sum), hvd.broadcast(given, 0), hvd.allgather(given), hvd.reducescatter(given, op=hvd.Sum),
            hvd.alltoall(given), hvd.allreduce_(given.clone(), op=hvd.Max), hvd.allreduce(given.t(), op=hvd.Sum).t(),
        ]  # fmt: skip
        right = right and all(
            each.device == DEVICE and each.dtype == dtype and torch.equal(each, given) for each in found
        )
    return right


def training_is_the_same() -> bool:
    """Five steps of a distributed optimizer of one rank are those of a plain one, as far as sums repeat on the device."""
    ends = []
    for wrap in (lambda optimizer, network: optimizer, distributed):
        network = model()
        train(network, wrap(momentum(network), network), 5, WHOLE)
        ends.append(_flat(network))
    return torch.allclose(*ends, rtol=1e-4, atol=1e-5) and not torch.allclose(
        ends[0], _flat(model()), rtol=1e-3, atol=1e-3
    )


def an_overflow_skips_the_step() -> bool:
    """With a GradScaler: a step whose gradients overflow changes nothing but the scale, the next one trains."""
    changed, scale, _ = step_with_a_scaler(WHOLE, [True, False])
    return changed == [False, True] and scale == 2.0**7


def views_train_alike() -> bool:
    """Some steps whose gradients become views of buckets are those of a distributed optimizer without, on every rank."""
    ends = []
    for chosen in ({}, {"gradient_as_bucket_view": True}):
        network = model()
        train(network, distributed(momentum(network), network, **chosen), 8, own_share())
        ends.append(_flat(network))
    memories = {parameter.grad.untyped_storage().data_ptr() for parameter in network.parameters()}
    return all(hvd.allgather_object(torch.allclose(*ends, rtol=1e-4, atol=1e-5) and len(memories) == 1))


def two_train_as_one(steps: int) -> bool:
    """Steps on each rank's share of the batch are those of one process on the whole of it, on every rank."""
    ends = []
    for alone in (True, False):
        network = model()
        optimizer = momentum(network) if alone else distributed(momentum(network), network)
        train(network, optimizer, steps, WHOLE if alone else own_share())
        ends.append(_flat(network))
    flats = hvd.allgather_object(ends[1].cpu())
    return torch.allclose(*ends, rtol=1e-3, atol=1e-4) and all(torch.equal(flats[0], flat) for flat in flats)


def streams_are_followed(rounds: int) -> bool:
    """Behind a late kernel on a stream that is not the default one: its values are summed, and the result is read there."""
    stream = torch.cuda.Stream()
    right = True
    with torch.cuda.stream(stream):
        given, copy = torch.zeros(100003, device=DEVICE), torch.zeros(100003, device=DEVICE)
        for index in range(rounds):
            torch.cuda._sleep(50_000_000)
            given.fill_(index)
            copy.copy_(hvd.allreduce(given, name="on a stream", op=hvd.Sum))
            stream.synchronize()
            right = right and bool((copy == index * hvd.size()).all())
    return right


def dropped_tensors_are_not_used_again(rounds: int) -> bool:
    """The caching allocator gives memory out again as soon as nobody keeps it: not that of an operation under way."""
    kept = [torch.zeros(1 << 20, device=DEVICE) for _ in range(4)]
    handles = []
    for index in range(rounds):
        given = torch.full((1 << 20,), float(index), device=DEVICE)
        handles.append(hvd.allreduce_async(given, name=f"dropped {index}", op=hvd.Sum))
        del given
        kept[index % 4] = torch.full((1 << 20,), -1.0, device=DEVICE)  # into what was freed, if anything was
    return all(bool((hvd.synchronize(handle) == index * hvd.size()).all()) for index, handle in enumerate(handles))


def graphs_are_captured_beside_operations(graphs: int) -> bool:
    """CUDA graphs are captured, for which no thread may do what is unsafe then, while another thread's operations go on."""
    ready, done = threading.Event(), threading.Event()
    summed: list[bool] = []

    def operate() -> None:
        tensors = [torch.ones(1 << 18, device=DEVICE) for _ in range(4)]
        with torch.cuda.stream(torch.cuda.Stream()):
            ready.set()  # what the thread needs of torch's memory it has
            while not done.is_set():
                handles = [hvd.allreduce_async_(each, name=f"beside {at}") for at, each in enumerate(tensors)]
                for handle in handles:
                    hvd.synchronize(handle)
        torch.cuda.synchronize()
        summed.append(all(bool((each == 1).all()) for each in tensors))

    given = torch.arange(1024.0, device=DEVICE)
    hvd.allreduce_(given.clone(), name="once before")
    beside = threading.Thread(target=operate)
    beside.start()
    ready.wait(60)
    replayed = []
    try:
        for index in range(graphs):
            hvd.allreduce_async_(torch.ones(1 << 22, device=DEVICE), name=f"under way {index % 2} {index}")
            graph, result = torch.cuda.CUDAGraph(), torch.zeros_like(given)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                for _ in range(200):  # so that the capture lasts some milliseconds
                    result.copy_(given + 1)
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            replayed.append(torch.equal(result, given + 1))
    finally:
        done.set()
        beside.join(60)
    return all(replayed) and summed == [True]


def an_operation_in_a_graph_is_refused() -> bool:
    """With an error that says so, and both the world and the next graph go on."""
    given = torch.ones(8, device=DEVICE)
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce_(given, name="captured")
    except Exception as problem:  # of ours, or torch's about the graph that was given up
        said = str(problem) + str(problem.__context__)
    return "graph" in said and bool((hvd.allreduce(given, name="after a graph", op=hvd.Sum) == hvd.size()).all())


def an_overflow_of_one_rank_skips_on_all() -> bool:
    """Of the last rank alone, with a GradScaler: no rank steps, all take the same scale, and replicas stay equal."""
    last = hvd.rank() == hvd.size() - 1
    ends = hvd.allgather_object(step_with_a_scaler(own_share(), [False, last, False, False]))
    return all(
        end[0] == [True, False, True, True] and end[1] == 2.0**7 and torch.equal(end[2], ends[0][2]) for end in ends
    )


def ddp_trains_as_one(backend: str, steps: int) -> bool:
    """DistributedDataParallel on one of ringtrain's backends: the steps of one process on the whole batch."""
    torch.distributed.init_process_group(backend)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    ends = []
    for alone in (True, False):
        network = model()
        wrapped = network if alone else torch.nn.parallel.DistributedDataParallel(network)
        train(wrapped, momentum(network), steps, WHOLE if alone else share_of(rank, size))
        ends.append(_flat(network))
    flats = [torch.empty_like(ends[1]) for _ in range(size)]
    torch.distributed.all_gather(flats, ends[1])
    torch.distributed.destroy_process_group()
    return torch.allclose(*ends, rtol=1e-3, atol=1e-4) and all(torch.equal(flats[0], flat) for flat in flats)


def fsdp_trains_as_one(backend: str, steps: int) -> bool:
    """FSDP2 on one of ringtrain's backends: the steps of one process on the whole batch, on every rank."""
    from torch.distributed.fsdp import fully_shard  # here: torch has it from 2.6 on

    torch.distributed.init_process_group(backend)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (size,))
    ends = []
    for alone in (True, False):
        network = model()
        for layer in [] if alone else [network[0], network[2], network[4], network]:
            fully_shard(layer, mesh=mesh)
        train(network, momentum(network), steps, WHOLE if alone else share_of(rank, size))
        whole = [each if alone else each.full_tensor() for each in network.parameters()]
        ends.append(torch.cat([each.detach().flatten() for each in whole]))
    torch.distributed.destroy_process_group()
    return torch.allclose(*ends, rtol=1e-3, atol=1e-4)


def train_until_a_rank_has_died(die: Callable[[], None]) -> tuple[int, bool]:
    """An elastic job, of which rank 1 dies in the third step: the ranks at its end, and whether they are replicas."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    hvd.init()
    optimizer = distributed(optimizer, network)
    inputs, labels = batch()
    samples = torch.utils.data.TensorDataset(inputs.repeat(8, 1).cpu(), labels.repeat(8).cpu())
    sampler = hvd.elastic.ElasticSampler(samples)
    loader = torch.utils.data.DataLoader(samples, batch_size=16, sampler=sampler)
    state = hvd.elastic.State(model=network, optimizer=optimizer, sampler=sampler)
    for _ in state.epochs(2):
        for given, wanted in loader:
            if hvd.rank() == 1 and state.step == 2:
                die()
            optimizer.zero_grad()
            loss_of(network, given.to(DEVICE), wanted.to(DEVICE)).backward()
            optimizer.step()
    flats = hvd.allgather_object(_flat(network).cpu())
    return hvd.size(), all(torch.equal(flats[0], flat) and flat.isfinite().all() for flat in flats)


MODES: dict[str, dict[str, object]] = {
    "plain": {},
    "two passes a step": {"backward_passes_per_step": 2},
    "groups": {"groups": 2},
    "predivided": {"gradient_predivide_factor": 2.0},
    "Adasum": {"op": hvd.Adasum},
    "fp16": {"compression": hvd.Compression.fp16},
    "int8": {"compression": hvd.Compression.int8},
    "PowerSGD": {"compression": hvd.Compression.powersgd(rank=2)},
    "delayed": {"late": True},
    "local steps": {"every": 3},
    "DiLoCo": {"every": 3, "outer": hvd.Outer()},
    "streamed local steps": {"every": 4, "fragments": 2, "overlap": 1},
}


def trained(device: torch.device, chosen: dict[str, object], steps: int) -> torch.Tensor:
    """The parameters after some steps of a mode on each rank's share of the batch, on a device."""
    network = model(device)
    optimizer = distributed(momentum(network, 0.05), network, **chosen)
    train(network, optimizer, steps, own_share(), chosen.get("backward_passes_per_step", 1))
    if "late" in chosen:
        optimizer.flush()
    if "every" in chosen:
        optimizer.synchronize()
    return _flat(network).cpu()


def a_mode_trains_as_on_the_host(chosen: dict[str, object]) -> bool:
    """Its steps on the device are those on the CPU as far as floats allow, and all ranks have the same parameters."""
    ends = [trained(device, chosen, 8) for device in (torch.device("cpu"), DEVICE)]
    flats = hvd.allgather_object(ends[1])
    return torch.allclose(*ends, rtol=1e-2, atol=2e-3) and all(torch.equal(flats[0], flat) for flat in flats)


def statistics_are_those_of_the_whole_batch() -> bool:
    """SyncBatchNorm's output and gradients, of each rank's share."""
    torch.manual_seed(3)
    inputs = torch.randn(16, 8, 5, 5).to(DEVICE)
    whole, share = torch.nn.BatchNorm2d(8).to(DEVICE), own_share()
    own = hvd.SyncBatchNorm(8).to(DEVICE)
    results = []
    for layer, given in ((whole, inputs.clone()), (own, inputs[share].clone())):
        given.requires_grad_()
        output = layer(given)
        (output**3).sum().backward()
        results.append((output.detach(), given.grad))
    return all(torch.allclose(one[share], other, rtol=1e-3, atol=1e-4) for one, other in zip(*results, strict=True))


def bytes_used() -> int:
    """Of the device's memory, by all processes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def growth_over_steps(steps: int) -> int:
    """Bytes of the device that steps take and keep, after the first hundred."""
    network = model()
    optimizer = distributed(torch.optim.SGD(network.parameters(), lr=0.01), network)
    step = step_of(network, optimizer)
    for _ in range(100):
        step()
    before = bytes_used()
    for _ in range(steps - 100):
        step()
    return bytes_used() - before


def growth_over_worlds(worlds: int) -> int:
    """Bytes of the device that worlds keep which were opened, used and closed, after the first two."""
    before = 0
    for index in range(worlds):
        hvd.init()
        hvd.allreduce(torch.ones(1 << 20, device=DEVICE), name="in a world")
        hvd.grouped_allreduce([torch.ones(99, device=DEVICE) for _ in range(50)], name="many in a world")
        hvd.shutdown()
        if index == 1:
            before = bytes_used()
    return bytes_used() - before


def step_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A training step, until the device has finished it."""
    inputs, labels = batch()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(network, inputs, labels).backward()
        optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return step


def _flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def distributed(optimizer: torch.optim.Optimizer, network: torch.nn.Module, **chosen: object) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), **in_mode(chosen))
