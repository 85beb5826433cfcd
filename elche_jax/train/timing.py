"""The choice of which windows are timed.

A timed window is two programs, because a device's own time ends where the exchange begins. An
untimed one is one program fewer to dispatch, and its exchange may overlap with its microbatches.
So the first windows are timed, and later only every few, as long as windows take about as long
as the last timed window with the same counts.
"""

from collections.abc import Sequence

from elche_jax.cadence import WindowRecord

FIRST = 20
"""Windows timed at the start of a run, while speeds are unknown and it is not clear that the run
is long enough to pay for compiling another program."""

EVERY = 6
"""Later, one window in this many is timed, to keep the speeds up to date."""

AFTER_A_SURPRISE = 4
"""Windows timed after one that took longer or shorter than expected: enough to confirm a change
of speed and to react to it."""

EXPECTED = (0.8, 1.25)
"""Range of an untimed window's duration, relative to the last timed one, that is as expected."""


class Timing:
    """Decides for each window whether it is timed.

    Args:
        always: Time every window, for a recording.
    """

    def __init__(self, always: bool):
        self._always = always
        self._expected: tuple[tuple[int, ...], float] | None = None
        self._surprised = 0

    def timed(self, window: int, counts: Sequence[int]) -> bool:
        """Return whether to time a window; called once per window, before its dispatch.

        Args:
            window: Number of windows of the run before this one.
            counts: Microbatches per device.
        """
        if self._surprised:
            self._surprised -= 1
            return True
        known = self._expected is not None and self._expected[0] == tuple(counts)
        return self._always or window < FIRST or window % EVERY == 0 or not known

    @property
    def surprised(self) -> bool:
        """Whether plans should wait for the times of the previous windows."""
        return self._surprised > 0

    def observe(self, record: WindowRecord, timed: bool) -> None:
        """Update the expected duration from a completed window.

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
