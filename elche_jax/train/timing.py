"""The choice of which windows are timed.

A timed window is two programs, because a device's own time ends where the exchange begins. An
untimed one needs one program fewer, and its exchange may overlap with its microbatches. So the
first windows are timed, and later only some, as long as windows take about as long as recent ones
with the same counts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from elche_jax.cadence import WindowRecord
from elche_jax.config import Recorder
from elche_jax.train.recording import EpochRecorder

FIRST = 20
"""Windows timed at the start of a run, while speeds are unknown and it is not clear that the run
is long enough to pay for compiling another program."""

EVERY = 6
"""Later, one window in this many is timed, to keep the speeds up to date."""

AFTER_A_SURPRISE = 4
"""Windows timed after one that took longer or shorter than expected: enough to confirm a change
of speed and to react to it."""

LEAST, MOST = 0.25, 1.5
"""Bounds of the relative deviation from the expected duration above which an untimed window is a
surprise. A deviation above the second bound is a surprise on any machine."""

DEVIATIONS = 4
"""Between these bounds, this many mean deviations of the windows so far are a surprise."""

SMOOTHING = 0.1
"""Weight of a window in the mean deviation."""


def timing_for(recorder: Recorder | None) -> "Timing":
    """Return the choice of timed windows for a run with this recorder, or without one.

    For a timeline all windows are timed, as it shows each of them. An epoch recorder may show sums
    alone.
    """
    if recorder is None:
        return Timing()
    if isinstance(recorder, EpochRecorder):
        return Timing(recorder.shows_windows, epochs=True)
    return Timing(lambda: True)


class Timing:
    """Decides for each window whether it is timed.

    Args:
        always: Returns whether every window is timed, for a recording.
        epochs: Time the first window of every epoch, for a summary of each.
    """

    def __init__(self, always: Callable[[], bool] = lambda: False, epochs: bool = False):
        self._always, self._epochs = always, epochs
        self._epoch = 0
        self._counts: tuple[int, ...] = ()
        self._walls: deque[float] = deque(maxlen=8)  # milliseconds of windows of these counts
        self._deviation = 0.0
        self._surprised = 0

    def timed(self, window: int, counts: Sequence[int], epoch: int = 0) -> bool:
        """Return whether to time a window; called once per window, before its dispatch.

        Args:
            window: Number of windows of the run before this one.
            counts: Microbatches per device.
            epoch: Its epoch.
        """
        begins, self._epoch = self._epochs and epoch != self._epoch, epoch
        if self._surprised:
            self._surprised -= 1
            return True
        known = self._walls and self._counts == tuple(counts)
        due = window < FIRST or window % EVERY == 0 or begins or not known
        return due or self._always()

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
        # records of untimed windows are never steady, whether or not something was compiled
        if (timed and (record.cold or not record.steady)) or record.wall_ms <= 0:
            return  # a duration of 0 is not a measurement, and nothing can be compared with it
        if record.counts != self._counts:
            if not timed:
                return
            self._counts, self._walls = record.counts, deque(maxlen=8)
        expected = median(self._walls) if self._walls else record.wall_ms
        ratio = record.wall_ms / expected
        away = max(ratio, 1 / ratio) - 1
        limit = min(max(LEAST, DEVIATIONS * self._deviation), MOST)
        # short windows on a busy machine vary anyway
        self._deviation += SMOOTHING * (min(away, 1.0) - self._deviation)
        if not timed and away > limit:
            self._surprised = AFTER_A_SURPRISE
            self._walls.clear()  # the windows that follow may all take as long
        else:
            self._walls.append(record.wall_ms)
