"""Replay: the counts of a recorded run, window by window."""

from collections.abc import Sequence
from dataclasses import dataclass

from elche_jax import _check as check
from elche_jax.cadence.base import MAX_TOTAL, CheckedCadence, Verdict, WindowReport
from elche_jax.cadence.state import State


def _exhausted(windows: int, window: int) -> ValueError:
    return ValueError(
        f"Replay: the recording has {windows} windows, but the data asks for window "
        f"{window} (counted from 0); record a longer run or replay less data."
    )


@dataclass(frozen=True)
class ReplayState(State):
    """State of `Replay`.

    Attributes:
        next_counts: Counts of the next window, empty after the last one.
        window: Index of the next window, from 0.
        world_size: Number of devices.
    """

    next_counts: tuple[int, ...]
    window: int
    world_size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device in the next window.

        Raises:
            ValueError: After the last recorded window. A run may end there; only planning
                another window is an error.
        """
        if not self.next_counts:
            raise _exhausted(self.window, self.window)
        return self.next_counts


@dataclass(frozen=True)
class Replay(CheckedCadence[ReplayState]):
    """Cadence that repeats recorded counts, whatever is measured.

    Each report advances the recording by one window; its times and the verdict have no
    effect. A loop that plans windows ahead of their reports, or does not report every window,
    gets the counts of a window by its index from `counts_at`.

    Attributes:
        counts_per_window: Counts of each window, one entry per device, not negative. A device
            may have 0, but not all devices in the same window. The recording may be of one
            device. It must have every window, including those that the loop left out.

    Raises:
        TypeError: If a count is not an integer.
        ValueError: If there is no window, a window has no microbatch, a count is
            out of range, or windows differ in their number of devices.

    Examples:
        >>> cadence = Replay([(4, 4), (2, 6)])
        >>> state = cadence.init(2)
        >>> state.counts
        (4, 4)
        >>> state = cadence.update(state, WindowReport((9.0, 3.0), (4, 4), 0.1))
        >>> state.counts
        (2, 6)
        >>> state = cadence.update(state, WindowReport((5.0, 5.0), (2, 6), 0.1))
        >>> state.counts  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: Replay: the recording has 2 windows, but the data asks for ...
    """

    adaptive = False
    scripted = True
    state_type = ReplayState

    counts_per_window: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        name = "counts_per_window"
        recording: list[tuple[int, ...]] = []
        for window in check.items("Replay", name, self.counts_per_window, "windows"):
            argument = f"{name}[{len(recording)}]"
            counts = check.integers("Replay", argument, window, low=0, high=MAX_TOTAL)
            if not any(counts):
                rule = "have a count above 0"
                raise ValueError(check.message("Replay", argument, rule, counts))
            recording.append(counts)
            check.per_device("Replay", argument, len(counts), len(recording[0]))
        if not recording:
            rule = "have at least one window"
            raise ValueError(check.message("Replay", name, rule, "none"))
        object.__setattr__(self, name, tuple(recording))

    def counts_at(self, window: int) -> tuple[int, ...]:
        """Return the recorded counts of a window.

        Args:
            window: Index of the window, counted from 0.

        Returns:
            Microbatches per device.

        Raises:
            TypeError: If ``window`` is not an integer.
            ValueError: If it is negative or beyond the recording.

        Examples:
            >>> Replay([(4, 4), (2, 6)]).counts_at(1)
            (2, 6)
        """
        window = check.integer("Replay.counts_at", "window", window, low=0)
        if window >= len(self.counts_per_window):
            raise _exhausted(len(self.counts_per_window), window)
        return tuple(self.counts_per_window[window])

    @property
    def largest_count(self) -> int:
        """The largest recorded count."""
        return max(map(max, self.counts_per_window))

    def _first(self, world_size: int) -> ReplayState:
        recorded = len(self.counts_per_window[0])
        if recorded != world_size:
            rule = f"be that of the recording ({recorded})"
            todo = "Replay on as many devices as were recorded."
            raise ValueError(check.message("Replay.init", "world_size", rule, world_size, todo))
        return ReplayState(self.counts_at(0), 0, world_size)

    def _next(self, state: ReplayState, report: WindowReport, verdict: Verdict) -> ReplayState:
        window = state.window + 1
        # empty at the end, which is an error only if another window is planned
        counts = self.counts_at(window) if window < len(self.counts_per_window) else ()
        return ReplayState(counts, window, state.world_size)
