"""``python -m benchmarks compress``: a batch that computes while its gradients travel in each of the modes of sending them.

As ``overlap``, but the time to compute is given, and each mode of ``ringtrain.launch.modes`` has a row: the bytes that a
host sends for each batch, by the native counters, an exchange alone, a batch, and this beside a batch that sends nothing;
the time of the codec; and what ``ringtrain doctor`` would have foretold from the first two. ``shaped`` makes the hosts.
Behind these stand PowerSGD and fragments that travel (``compress_further``); the exchange of the former has its arithmetic.

A row is right if the last sums are, up to what the mode may lose, and if a host has sent as many bytes as it must.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from benchmarks.compress_further import WAYS, Way
from benchmarks.computing import Computation, backward, cores_to_compute_on
from ringtrain._runtime.context import Context
from ringtrain._runtime.operations import Handle
from ringtrain.bench import allreduce, ranks, report
from ringtrain.bench.command import bytes_text
from ringtrain.bench.measured_worlds import MeasuredWorld
from ringtrain.bench.systems import LOSSES
from ringtrain.bench.turns import time_in_turn, time_of
from ringtrain.launch.modes import MODES, SendingMode, bytes_sent, expect

CALIBRATIONS = 3
WARM_UP = 2  # turns that do not count: what is kept of each tensor has two places, which memory is made for one by one
# Of the bytes that a mode must send; blocks that end with a tensor and negotiation are beyond.
TOLERANCE = 0.01
COUNTED = ("wire_bytes_sent", "codec_nanoseconds")


def run(size_bytes: int, tensors: int, step_ms: float, modes: Sequence[str], free_cores: Sequence[str],
        transports: Sequence[str], repetitions: int, addresses: Mapping[str, Sequence[str]], json: str | None,
        **_of_the_hosts: Any) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether every mode sent what it must, and was right."""
    chosen = [mode for mode in MODES if mode.name in modes]
    cases = {free: cores for free, cores in cores_to_compute_on().items() if free in free_cores}
    results = []
    hosts = 1
    for transport in transports:
        world = MeasuredWorld(transport, addresses)
        world.enter()
        hosts = rt.cross_size()
        gradients = Gradients(size_bytes, tensors)
        for free, cores in cases.items():
            further = {name: make(gradients.work) for name, make in WAYS.items() if name in modes}
            results += _measure(world, hosts, free, cores, gradients, chosen, further, step_ms / 1e3, repetitions)
        world.close()
    total = bytes_text(size_bytes // tensors // 4 * 4 * tensors)
    report.say(f"{total} of gradients in {tensors} tensors, {ranks.size()} ranks on {hosts} hosts, "
               f"{len(cores_to_compute_on()['none'])} cores in all; each figure for one batch, but an exchange's")  # fmt: skip
    report.print_table(
        ["free cores", "system", "mode", "a host sends", "exchange", "codec", "computing", "batch", "fastest",
         "/ computing", "fastest", "foretold", "result"],
        [_row(result) for result in results],
    )  # fmt: skip
    report.write_json(json, results, hosts=hosts)
    return all(result["verified"] for result in results)


class Gradients:
    """Those of a model, with values of which float32 holds the sums exactly."""

    def __init__(self, size_bytes: int, tensors: int):
        pairs = [allreduce.arrays(size_bytes // tensors) for _ in range(tensors)]
        self.work = [work for work, _ in pairs]
        self._source = pairs[0][1]  # all are alike
        self.nbytes = sum(work.nbytes for work in self.work)

    def fill(self) -> None:
        """With this rank's values."""
        for work in self.work:
            np.copyto(work, self._source)

    def are_sums(self, loss: float) -> bool:
        """Whether all are the sums over the ranks, up to this share of the largest element."""
        expected = sum(allreduce.Inputs(self._source), np.zeros_like(self._source))
        allowed = loss * np.abs(expected).max()
        return all(np.abs(work - expected).max() <= allowed for work in self.work)


class _Counted:
    """A turn, what it adds to the counters of this rank, and whether its last sums are right."""

    def __init__(self, context: Context, turn: Callable[[], list[float]], turns: int, is_right: Callable[[], bool]):
        self._context, self._turn, self._turns, self._is_right = context, turn, turns, is_right
        self._grown: list[dict[str, int]] = []
        self.right = False

    def __call__(self) -> list[float]:
        before = self._context.counters()
        seconds = self._turn()
        after = self._context.counters()
        self._grown.append({name: after[name] - before[name] for name in COUNTED})
        if len(self._grown) == self._turns:
            self.right = self._is_right()
        return seconds

    def of_all_ranks(self, counter: str) -> np.ndarray:
        """What each turn but the first has added, by rank and turn."""
        return np.array(ranks.gathered([grown[counter] for grown in self._grown[WARM_UP:]]))


def _measure(
    world: MeasuredWorld,
    hosts: int,
    free: str,
    cores: Collection[int],
    gradients: Gradients,
    modes: Sequence[SendingMode],
    further: Mapping[str, Way],
    step_seconds: float,
    repetitions: int,
) -> list[dict[str, Any]]:
    computation = Computation(cores)
    rounds = computation.rounds_for(step_seconds / len(gradients.work))
    # So many short ones take another time than a long one. The fastest, since other programs only slow it down.
    taken = min(ranks.slowest([_turn(world, gradients, computation, rounds, None)[0] for _ in range(CALIBRATIONS)]))
    rounds = max(1, round(rounds * step_seconds / taken))
    exact = SendingMode("float32", "")
    exchanges = {mode.compression: mode for mode in [exact, *modes]}
    timed: dict[Any, Callable[[], list[float]]] = {
        "computing": partial(_turn, world, gradients, computation, rounds, None),
        **{
            ("exchange", each): partial(_turn, world, gradients, computation, 0, SendingMode(each, "", each))
            for each in exchanges
        },
    }
    batches = {
        mode.name: _Counted(
            world.context,
            partial(_turn, world, gradients, computation, rounds, mode),
            WARM_UP + repetitions,
            partial(gradients.are_sums, LOSSES[mode.compression]),
        )
        for mode in modes
    }
    for name, way in further.items():
        timed["exchange", name] = partial(_turn_of, world, gradients, way, computation, 0)
        turn = partial(_turn_of, world, gradients, way, computation, rounds)
        batches[name] = _Counted(world.context, turn, WARM_UP + repetitions, partial(_is_right, world, way))
    seconds = time_in_turn({**timed, **batches}, repetitions, WARM_UP)
    computation.close()
    computing, alone = seconds["computing"], {each: seconds["exchange", each] for each in exchanges}
    results = []
    for mode in modes:
        sent = batches[mode.name].of_all_ranks("wire_bytes_sent").mean(axis=1).sum() / hosts
        codec = batches[mode.name].of_all_ranks("codec_nanoseconds").max(axis=0) * 1e-9
        must = bytes_sent(gradients.nbytes, hosts, mode)
        (foretold,) = expect(gradients.nbytes, hosts, float(np.median(computing)),
                             float(np.median(alone["none"])), 0.0, {mode.compression: float(np.median(codec))}, [mode])  # fmt: skip
        results.append(
            report.result(
                f"ringtrain-{world.transport}", "compress", seconds[mode.name],
                ranks.all_true(batches[mode.name].right) and bool(abs(sent - must) <= TOLERANCE * must),
                mode=mode.name, bytes=gradients.nbytes, tensors=len(gradients.work), free_cores=free,
                threads=computation.threads, bytes_sent=sent / mode.batches,
                exchange_seconds_median=float(np.median(alone[mode.compression])),
                exchange_seconds_min=float(alone[mode.compression].min()),
                computing_seconds_median=float(np.median(computing)), computing_seconds_min=float(computing.min()),
                codec_seconds_median=float(np.median(codec)) / mode.batches,
                codec_seconds_min=float(codec.min()) / mode.batches,
                of_computing=float(np.median(seconds[mode.name]) / np.median(computing)),
                of_computing_fastest=float(seconds[mode.name].min() / computing.min()),
                foretold_seconds=foretold.batch_seconds,
            )
        )  # fmt: skip
    for name, way in further.items():
        sent = batches[name].of_all_ranks("wire_bytes_sent").mean(axis=1).sum() / hosts
        must, exchange = way.bytes_sent(hosts), seconds["exchange", name] * way.batches
        median = float(np.median(computing))
        results.append(
            report.result(
                f"ringtrain-{world.transport}", "compress", seconds[name],
                ranks.all_true(batches[name].right) and bool(abs(sent - must) <= TOLERANCE * must),
                mode=name, bytes=gradients.nbytes, tensors=len(gradients.work), free_cores=free,
                threads=computation.threads, bytes_sent=sent / way.batches,
                exchange_seconds_median=float(np.median(exchange)), exchange_seconds_min=float(exchange.min()),
                computing_seconds_median=median, computing_seconds_min=float(computing.min()),
                codec_seconds_median=0.0, codec_seconds_min=0.0,
                of_computing=float(np.median(seconds[name]) / median),
                of_computing_fastest=float(seconds[name].min() / computing.min()),
                foretold_seconds=way.foretold(median, float(np.median(exchange)), float(np.median(alone["none"]))),
            )
        )  # fmt: skip
    return results


def _turn_of(
    world: MeasuredWorld, gradients: Gradients, way: Way, computation: Computation, rounds: int
) -> list[float]:
    """``_turn`` in a further way."""
    gradients.fill()
    world.enter()
    return [time_of(lambda: way.run(lambda: backward(gradients.work, computation, rounds, None))) / way.batches]


def _turn(
    world: MeasuredWorld, gradients: Gradients, computation: Computation, rounds: int, mode: SendingMode | None
) -> list[float]:
    """Seconds of a batch in this mode, or of one that sends nothing; computes these rounds before each gradient."""
    gradients.fill()
    return [time_of(lambda: _batches(world, gradients.work, computation, rounds, mode)) / (mode.batches if mode else 1)]


def _batches(
    world: MeasuredWorld,
    gradients: Sequence[np.ndarray],
    computation: Computation,
    rounds: int,
    mode: SendingMode | None,
) -> None:
    world.enter()
    if mode is None:
        backward(gradients, computation, rounds, None)
        return
    submit = partial(_submit, mode)
    if mode.delays:  # the gradients of the batch before
        handles = [submit(index, gradient) for index, gradient in enumerate(gradients)]
        backward(gradients, computation, rounds, None)
        for handle in handles:
            handle.wait()
        return
    for _ in range(mode.batches - mode.overlaps):
        backward(gradients, computation, rounds, None)
    backward(gradients, computation, rounds if mode.overlaps else 0, submit)


def _submit(mode: SendingMode, index: int, gradient: np.ndarray) -> Handle:
    compression = getattr(rt.Compression, mode.compression)
    return rt.allreduce_async_(gradient, name=f"compress.{mode.name}.{index}", op=rt.Sum, compression=compression)


def _is_right(world: MeasuredWorld, way: Way) -> bool:
    world.enter()
    return way.is_right()


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["free_cores"],
        result["system"],
        result["mode"],
        bytes_text(round(result["bytes_sent"])),
        report.seconds_text(result["exchange_seconds_median"]),
        report.seconds_text(result["codec_seconds_median"]),
        report.seconds_text(result["computing_seconds_median"]),
        report.seconds_text(result["seconds_median"]),
        report.seconds_text(result["seconds_min"]),
        f"{result['of_computing']:.2f}",
        f"{result['of_computing_fastest']:.2f}",
        report.seconds_text(result["foretold_seconds"]),
        report.verdict(result),
    ]
