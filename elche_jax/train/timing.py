"""Which windows are timed.

A window that is timed is two programs, as a device's own time ends where the exchange begins;
one that is not is a program less for the thread that dispatches, and an exchange may go on
beside its microbatches. So the first windows are timed, and then one in a few, as long as a
window takes what the last timed one of these counts took.
"""

from collections.abc import Sequence

from elche_jax.cadence import WindowRecord

FIRST = 20
"""Windows at the start of a run that are timed: while speeds are new, and before one knows that the
run is worth another program."""

EVERY = 6
"""Of the later ones every so many, so that speeds stay known."""

AFTER_A_SURPRISE = 4
"""Windows that are timed after one that took longer, or less long, than expected: enough for a
change of speed to be confirmed and answered."""

EXPECTED = (0.8, 1.25)
"""What a window may take of what it took when it was timed."""


class Timing:
    """Decides for every window whether it is timed.

    Args:
        always: Whether all are, as they are recorded.
    """

    def __init__(self, always: bool):
        self._always = always
        self._expected: tuple[tuple[int, ...], float] | None = None
        self._surprised = 0

    def timed(self, window: int, counts: Sequence[int]) -> bool:
        """Whether a window is to be timed; the loop asks before it dispatches one.

        Args:
            window: Windows of the run before it.
            counts: Its microbatches per device.
        """
        if self._surprised:
            self._surprised -= 1
            return True
        known = self._expected is not None and self._expected[0] == tuple(counts)
        return self._always or window < FIRST or window % EVERY == 0 or not known

    @property
    def surprised(self) -> bool:
        """Whether plans are to wait for the times of the windows before."""
        return self._surprised > 0

    def over(self, record: WindowRecord, timed: bool) -> None:
        """Takes a window that is over.

        Args:
            record: The window.
            timed: Whether it was timed.
        """
        if timed:
            if record.steady and not record.cold:
                self._expected = record.counts, record.wall_ms
        elif self._expected is not None and self._expected[0] == record.counts:
            low, high = EXPECTED
            share = record.wall_ms / self._expected[1]
            if not low <= share <= high:
                self._surprised, self._expected = AFTER_A_SURPRISE, None
