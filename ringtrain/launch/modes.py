"""Modes of sending gradients between hosts: what each sends, what it risks, and how long a batch takes with it.

All of this is pure. `doctor` foretells with it, and `python -m benchmarks compress` measures the same modes beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# By compression, how many times fewer bytes travel than of float32.
SHRINKS = {"none": 1.0, "bf16": 2.0, "fp16": 2.0, "int8": 1024 / 260, "int4": 512 / 66}
# Of the shorter of computing and sending, what even a good overlap adds to the longer one: the last gradients are there
# only when all is computed. `python -m benchmarks overlap` measures it.
REST = 0.15
# Beyond computing alone, what a batch may take in a mode that "pays".
LITTLE = 1.15
# Latencies in an exchange, whatever its size: it is agreed on, summed up and handed out.
ROUNDS = 3


@dataclass(frozen=True)
class SendingMode:
    """One way of sending gradients between hosts.

    Attributes:
        name: in tables and on command lines.
        risk: what it changes beside the time.
        compression: its name in ``ringtrain.Compression``.
        argument: what to write in a script, of a mode that is no compression.
        batches: that share one exchange.
        overlaps: whether the exchange goes on while the last of these batches is computed; else it follows.
        delays: whether it goes on while the next batch is computed, from its beginning.
    """

    name: str
    risk: str
    compression: str = "none"
    argument: str = ""
    batches: int = 1
    overlaps: bool = True
    delays: bool = False

    @property
    def how(self) -> str:
        """What to write in a script; "" for the default."""
        compressed = "" if self.compression == "none" else f"compression=Compression.{self.compression}"
        return self.argument or compressed

    @property
    def shrinks(self) -> float:
        """How many times fewer bytes an exchange has than of float32."""
        return SHRINKS[self.compression]

    def batch_seconds(self, computing: float, sending: float) -> float:
        """Of one batch, if it takes so long to compute alone, and an exchange so long alone; with a core to send."""
        if self.delays:
            last = max(computing, sending)
        elif self.overlaps:
            last = max(computing, sending) + REST * min(computing, sending)
        else:
            last = computing + sending
        return ((self.batches - 1) * computing + last) / self.batches


# Those with less risk first.
MODES = [
    SendingMode("float32", "none: exact"),
    SendingMode("bf16", "sums between hosts keep 8 significant bits", "bf16"),
    SendingMode("fp16", "sums beyond 65504 become infinite", "fp16"),
    SendingMode("int8", "8 bits, and the next step makes up for the loss", "int8"),
    SendingMode("int4", "4 bits, likewise; compare the loss", "int4"),
    SendingMode(
        "4 batches", "exact, for a batch 4 times larger: fewer steps", argument="backward_passes_per_step=4", batches=4
    ),
    SendingMode(
        "one step late",
        "the gradients of the step before; compare the loss",
        argument="mode=OneStepLate()",
        delays=True,
    ),
    SendingMode(
        "32 local steps",
        "another algorithm; compare the loss",
        argument="mode=LocalSteps(every=32)",
        batches=32,
        overlaps=False,
    ),
]


LATE_INT8 = SendingMode(
    "one step late, int8",
    "8 bits of the gradients of the step before; compare the loss",
    "int8",
    "mode=OneStepLate(), compression=Compression.int8",
    delays=True,
)  # which the doctor names beside the modes
FURTHER = ("powersgd-2", "fragments=4")  # what `benchmarks compress` measures beside the modes
STREAMING = {"every": 32, "fragments": 4, "overlap": 4}  # what the doctor names beside the modes


def streaming_batch_seconds(computing: float, sending: float, every: int, fragments: int, overlap: int) -> float:
    """Of a local step whose fragments travel; only what ``overlap`` steps do not cover of a fragment is waited for.

    Args:
        computing: seconds of a batch that sends nothing.
        sending: seconds of an exchange of all parameters alone.
        every, fragments, overlap: as for ``LocalSteps``.
    """
    return computing + fragments * max(0.0, sending / fragments - overlap * computing) / every


@dataclass(frozen=True)
class Expected:
    """What to expect of a mode.

    Attributes:
        mode: which.
        bytes_sent: by a host, for each batch.
        sending_seconds: of one exchange alone.
        codec_seconds: of a rank's processor, in one exchange.
        batch_seconds: of a batch, where a core is free to send.
    """

    mode: SendingMode
    bytes_sent: float
    sending_seconds: float
    codec_seconds: float
    batch_seconds: float


def bytes_sent(model_bytes: float, hosts: int, mode: SendingMode) -> float:
    """By each host, in one exchange of float32 gradients of so many bytes."""
    return 2 * (hosts - 1) / hosts * model_bytes / mode.shrinks


def sending_seconds(mode: SendingMode, exact: float, latency: float, codec: float) -> float:
    """Of an exchange alone, if that of float32 takes ``exact``: the wire and the codec work at once, each chunk in turn."""
    waiting = min(exact, ROUNDS * latency)
    return max(waiting + (exact - waiting) / mode.shrinks, codec)


def expect(
    model_bytes: float,
    hosts: int,
    computing: float,
    exact: float,
    latency: float,
    codecs: Mapping[str, float],
    modes: Iterable[SendingMode] = MODES,
) -> list[Expected]:
    """What to expect of each mode.

    Args:
        model_bytes: of all gradients in float32.
        hosts: how many exchange them.
        computing: seconds of a batch that sends nothing.
        exact: seconds of an exchange of float32.
        latency: seconds from host to host.
        codecs: seconds of a rank's codec in one exchange, by compression; 0 for one that is not listed.
        modes: which.
    """
    expected = []
    for mode in modes:
        codec = codecs.get(mode.compression, 0.0)
        sending = sending_seconds(mode, exact, latency, codec)
        sent = bytes_sent(model_bytes, hosts, mode) / mode.batches
        expected.append(Expected(mode, sent, sending, codec, mode.batch_seconds(computing, sending)))
    return expected


def first_that_pays(expected: Sequence[Expected], computing: float) -> Expected:
    """The first, so that of least risk, with which a batch takes little longer than computing alone; if none, the fastest."""
    return next(
        (each for each in expected if each.batch_seconds <= LITTLE * computing),
        min(expected, key=lambda each: each.batch_seconds),
    )
