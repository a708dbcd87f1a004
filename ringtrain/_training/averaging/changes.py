"""The changes of a worker's tensors, on their way to the others and back: sent, awaited, merged into the common copy."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringtrain._binding import tables
from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._training import residuals
from ringtrain._training.averaging.common import CommonCopy
from ringtrain._training.averaging.fragments import Fragments, merged
from ringtrain._training.averaging.in_transit import Leg, PartInTransit
from ringtrain._training.averaging.outer import Outer, advance
from ringtrain._training.averaging.period import Period, factor_of
from ringtrain._training.averaging.shared import Copy, Role
from ringtrain._training.session import Session
from ringtrain.errors import RingtrainError


class Changes:
    """What this rank sends of its tensors, a part at a time.

    Args:
        session: the rank, and the process set that averages.
        period: which steps average, and what the samples since then weigh.
        outer: the outer optimizer; None for plain averaging.
        compression: of what parameters have changed; a row of ``tables.COMPRESSIONS``.
        common: the common copy.

    Attributes:
        prefix: of all names that are submitted; the worker's in the present world.
        flights: what is on its way, in the order in which it was sent.
    """

    def __init__(self, session: Session, period: Period, outer: Outer | None, compression: str, common: CommonCopy):
        self.prefix = ""
        self.flights: list[PartInTransit] = []
        self._session, self._period = session, period
        self._outer, self._compression = outer, compression
        self._common = common

    @property
    def _fragments(self) -> Fragments:
        return self._period.fragments

    def send(self, part: int, samples: int, workers: int) -> None:
        """Sends what has changed of a part.

        Args:
            part: which.
            samples: of all ranks, that its average is over; 0: nothing is to be averaged.
            workers: how many have come.
        """
        flight = PartInTransit(part, self._period.steps, self._period.send(part))
        self.flights.append(flight)
        if samples:
            factor = factor_of(flight.samples, samples, workers)
            for name, copy in self._common.of_part(part):
                self._depart(flight, name, copy, factor)

    def arriving(self) -> list[PartInTransit]:
        """What must be merged after the present step."""
        return [flight for flight in self.flights if flight.left + self._fragments.overlap <= self._period.steps]

    def land(self, flights: Iterable[PartInTransit]) -> None:
        """Waits for parts, and takes them into the common copy and the tensors."""
        flights = list(flights)
        for flight in flights:  # all of them, so that no name stays in flight
            self._await(flight)
        for flight in flights:
            if flight.problem is not None:
                raise flight.problem
            self._advance(flight)
            for leg in flight.legs:
                if leg.name in self._common.copies:
                    self._merge(flight, leg, self._common.copies[leg.name])
            self.flights.remove(flight)

    def await_all(self, heeds: bool = True) -> None:
        """Waits for all of it; raises what has failed, if ``heeds``."""
        for flight in self.flights:
            self._await(flight)
            if heeds and flight.problem is not None:
                raise flight.problem

    def give_up(self, waits: bool) -> None:
        """Ends what is on its way: parts that arrive belong to the common copy, as on ranks that had waited for them."""
        flights, self.flights = self.flights, []
        for flight in flights:
            self._await(flight, waits)
            if waits and flight.problem is None:
                self._advance(flight)
            else:
                self._settle(flight.part, used=False)

    def recall(self) -> None:
        """The world has ended: what was on its way has not come, and is sent again with what is changed from now on."""
        for flight in self.flights:
            self._period.recall(flight.part, flight.samples)
        self.flights = []

    def _depart(self, flight: PartInTransit, name: str, copy: Copy, factor: float) -> None:
        change, arguments = self._sent(copy, factor)
        buffer = [as_buffer(change)]
        context, process_set = self._session.context, self._session.process_set_id
        try:
            operation = context.submit(
                "allreduce",
                f"{self._prefix_of(flight.part)}{name}",
                buffer,
                buffer,
                process_set=process_set,
                **arguments,
            )
        except RingtrainError as refused:  # the others' operation fails with its text
            flight.problem = flight.problem or refused
            return
        flight.legs.append(Leg(name, change, self._kept(copy), operation))

    def _kept(self, copy: Copy) -> np.ndarray | None:
        """The values that are sent, where they are needed to merge."""
        travels = self._fragments.overlap and copy.shared.role is Role.PARAMETER
        return copy.shared.read().copy() if travels and self._fragments.merge == "additive" else None

    def _prefix_of(self, part: int) -> str:
        """Of the names of what a part sends."""
        return f"{self.prefix}.{part}." if self._fragments.streams else f"{self.prefix}."

    def _await(self, flight: PartInTransit, waits: bool = True) -> None:
        """Waits for it, so that no name stays in flight; what has come is going to be used."""
        if flight.await_all(waits):
            self._settle(flight.part, used=True)

    def _advance(self, flight: PartInTransit) -> None:
        """The common copy of a part that has come."""
        for leg in flight.legs:
            copy = self._common.copies.get(leg.name)
            if copy is None:
                continue
            if copy.shared.role is Role.PARAMETER:
                advance(copy.common, leg.change, self._outer, copy.velocity)
            else:
                copy.common = leg.change
        self._period.count_round()
        self._session.context.count("synchronisations")

    def _merge(self, flight: PartInTransit, leg: Leg, copy: Copy) -> None:
        """A tensor of a part that has come."""
        shared, merge = copy.shared, self._fragments.merge
        if shared.role is not Role.PARAMETER or (merge == "additive" and flight.left == self._period.steps):
            shared.write(copy.common)
        else:
            values = shared.read()
            shared.write(merged(values, values if leg.sent is None else leg.sent, copy.common, merge))

    def _sent(self, copy: Copy, factor: float) -> tuple[np.ndarray, dict[str, Any]]:
        values = copy.shared.read()
        if copy.shared.role is Role.COUNTER:
            return values.copy(), {"reduction": "max"}
        if not factor:  # whatever lies there
            return np.zeros_like(copy.common), self._how(copy)
        if copy.shared.role is Role.PARAMETER:
            sent = np.subtract(copy.shared.held(copy.common), values)  # from what this worker has begun with
        else:  # the values: a forward pass may have changed them before there was a common copy
            sent = values.copy()
        if factor != 1.0:
            np.multiply(sent, sent.dtype.type(factor), out=sent)
        return sent, self._how(copy)

    def _how(self, copy: Copy) -> dict[str, Any]:
        compressed = copy.shared.role is Role.PARAMETER
        return {"reduction": "average", "compression": self._compression if compressed else "none"}

    def _settle(self, part: int, used: bool) -> None:
        if self.keeps_residuals:
            residuals.settle(self._session, self._prefix_of(part), used)

    # ---- what compression has lost ----

    @property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the changes before."""
        return self._compression in tables.WITHOUT_FEEDBACK
