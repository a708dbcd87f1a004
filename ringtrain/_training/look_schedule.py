"""In which steps of a world ranks look at the parameters; in memory that operations of a graph read as well.

A graph takes a step by an operation of our library, without a call of the host: ``native/tables/look_schedule.h`` has the same
fields, and the same ``take``.
"""

import ctypes


class LookSchedule(ctypes.Structure):
    """Counts the steps of one rank.

    Attributes:
        steps: taken in this world.
        first_look: the number of the step that asks for the first look.
        due_from: the number of the first step that a look may be due in.
        due: when the next one is, in seconds of ``time.monotonic``.
        asked: whether the next step shall ask for one.
        muted: whether nothing is compared.
    """

    steps: int
    first_look: int
    due_from: int
    due: float
    asked: int
    muted: int

    _fields_ = [
        ("steps", ctypes.c_int64), ("first_look", ctypes.c_int64), ("due_from", ctypes.c_int64),
        ("due", ctypes.c_double), ("asked", ctypes.c_int32), ("muted", ctypes.c_int32),
    ]  # fmt: skip

    @property
    def address(self) -> int:
        """Of the first field."""
        return ctypes.addressof(self)

    def plan(self, due: float, in_each_step: bool) -> None:
        """Says when the next look is due; before the first one only ``in_each_step``: compiling brings no look forward."""
        self.due, self.due_from = due, 0 if in_each_step else self.first_look + 1

    def take(self, now: float) -> tuple[bool, bool]:
        """Takes a step: whether what it says of its settings counts, and whether it asks for a look."""
        step, is_due = self.steps, self.steps >= self.due_from and now >= self.due
        asks = bool(self.asked) or step == self.first_look or is_due
        self.steps, self.asked = step + 1, 0
        counts = step > 0  # they may be broadcast after the first step
        return counts and not self.muted, asks and not self.muted
