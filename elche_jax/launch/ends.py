"""The order in which ends of processes count: one whose error ended others comes first."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import NamedTuple


class End(NamedTuple):
    """The end of a process.

    Attributes:
        number: Its number in the job.
        code: Its exit code, or 128 plus the number of the signal that ended it.
        because: The process that caused this end, as it noted: itself if its own error ends
            others; None if it noted nothing.
    """

    number: int
    code: int
    because: int | None = None


@dataclass
class Ends:
    """Holds ends back until the process that caused them has ended, too.

    A process that has told the others about its error may still be closing its files when the
    first of them has ended.

    Attributes:
        patience: The longest time to hold an end back, in seconds.
        due: When all ends held back are overdue; infinity if there are none.

    Examples:
        >>> ends = Ends(patience=10.0)
        >>> ends.after(End(0, code=1, because=2), alive=[1, 2], now=0.0)
        []
        >>> [end.number for end in ends.after(End(2, code=3, because=2), alive=[1], now=0.1)]
        [2, 0]
    """

    patience: float

    def __post_init__(self) -> None:
        self._held: dict[int, End] = {}
        self.due = inf

    def after(self, end: End, alive: Collection[int], now: float) -> list[End]:
        """Return the ends that count now that another process has ended.

        Args:
            end: Its end.
            alive: The live processes, by number.
            now: The time in seconds, by any clock.
        """
        if self._root(end) not in alive:
            return self._released(end)
        self.due = min(self.due, now + self.patience)
        self._held[end.number] = end
        return []

    def overdue(self, now: float) -> list[End]:
        """Return all ends held back if they are overdue."""
        if now < self.due:
            return []
        held, self._held, self.due = [*self._held.values()], {}, inf
        return held

    def __bool__(self) -> bool:
        return bool(self._held)

    def _root(self, end: End) -> int | None:
        """Return the process that first caused it: one that is alive, or whose end counts."""
        at = end.because
        while at in self._held:
            at = self._held[at].because
        return at

    def _released(self, end: End) -> list[End]:
        found = [end]
        for one in found:
            waiting = [held for held in self._held.values() if held.because == one.number]
            for held in waiting:
                del self._held[held.number]
            found += waiting
        if not self._held:
            self.due = inf
        return found
