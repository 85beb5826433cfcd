"""What one process asks of all; it travels in a window's exchange, like other numbers."""

from collections.abc import Sequence

import numpy as np

NAMES: tuple[str, ...] = (
    "save", "wrote", "lost", "failed", "max_seconds", "callback", "stop", "interrupt", "exit",
    "again",
)  # fmt: skip
"""What a process may ask all to do: save a checkpoint; note that the last one was written, or was
not; raise what a process has raised; stop, for one of several reasons; and end, so that the job can
restart."""


class Wishes:
    """What processes ask of each other in the windows of a run.

    A process that acted at once would leave the others waiting in the next exchange. So a wish
    counts only once every process has seen it, which is at the same window everywhere.

    Args:
        one_process: Whether the job has a single process.
        in_flight: Windows that may be dispatched and not yet complete.

    Attributes:
        own: This process's wishes as one number, a bit for each name.
        dispatches: Windows dispatched so far, which is the number of the last one.

    Examples:
        >>> wishes = Wishes(one_process=False, in_flight=2)
        >>> wishes.add("stop")
        >>> wishes.found(1, [wishes.own, 0.0])  # the devices told it in the first dispatch
        >>> wishes.dispatches = 2
        >>> wishes.agreed
        frozenset()
        >>> wishes.dispatches = 3
        >>> wishes.agreed
        frozenset({'stop'})
    """

    def __init__(self, one_process: bool, in_flight: int):
        self._one_process, self._in_flight = one_process, in_flight
        self.own, self.dispatches = 0, 0
        self._found: dict[str, int] = {}  # the dispatch in which a wish was told first
        self._since = dict.fromkeys(NAMES, 0)

    def add(self, name: str) -> None:
        """Ask for something; called by the loop."""
        self.own |= 1 << NAMES.index(name)

    def clear(self, name: str) -> None:
        """Forget a wish of any process up to now; all must do so after the same window."""
        self.own &= ~(1 << NAMES.index(name))
        self._since[name] = self.dispatches
        self._found.pop(name, None)

    def found(self, number: int, told: Sequence[float] | np.ndarray) -> None:
        """Note what the devices of all processes told in a dispatch; called by a watcher."""
        every = int(np.bitwise_or.reduce(np.asarray(told, np.int64)))
        for at, name in enumerate(NAMES):
            if every >> at & 1 and number > self._since[name]:
                self._found.setdefault(name, number)

    @property
    def agreed(self) -> frozenset[str]:
        """The wishes that all processes know by now."""
        if self._one_process:
            return frozenset(name for at, name in enumerate(NAMES) if self.own >> at & 1)
        last = self.dispatches - self._in_flight
        return frozenset(name for name in NAMES if self._found.get(name, last + 1) <= last)
