"""WindowTime: windows that take a given time on every device."""

from dataclasses import dataclass, field

import numpy as np

from elche_jax.cadence.apportion import densest
from elche_jax.cadence.base import CheckedCadence, Verdict, WindowReport
from elche_jax.cadence.estimate import Times, as_times, update_ms
from elche_jax.cadence.state import State

MAX_COUNT = 4096
"""Largest count of a device: very short times must not use up all the data."""


@dataclass(frozen=True)
class WindowTimeState(State):
    """State of `WindowTime`: plain numbers.

    Attributes:
        counts: Microbatches per device in the next window.
        ms_per_batch: Smoothed milliseconds per microbatch, ``None`` if never measured.
    """

    counts: tuple[int, ...]
    ms_per_batch: Times


@dataclass(frozen=True)
class WindowTime(CheckedCadence[WindowTimeState]):
    """Cadence whose windows take a given time on every device, for work without an exchange.

    The slowest device gets ``anchor = max(least, round(window_ms / max(ms)))`` microbatches
    and the others what `ElChe` would give them. No device gets more than 4096: the anchor is
    lowered, but not below ``least``, so that counts stay in proportion. In the first window
    every device gets one microbatch, as does any device that was never measured.
    Without an exchange there is no synchronisation to pay for; a window only has to be long
    enough for the host to prepare the next one, and for counts to match the speeds.

    Attributes:
        window_ms: Target length of a window in milliseconds, above 0.
        least: Smallest count of the slowest device, 1 to 4096: larger counts fit the speeds
            better.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> cadence = WindowTime(window_ms=100)
        >>> state = cadence.init(2)
        >>> cadence.update(state, WindowReport((20.0, 5.0), (1, 1), 0.0)).counts
        (5, 20)
    """

    state_type = WindowTimeState

    window_ms: float = field(default=100.0, metadata={"above": 0})
    # with 1, a device 1.3 times as fast as the slowest would get no more than it
    least: int = field(default=4, metadata={"low": 1, "high": MAX_COUNT})

    def _first(self, world_size: int) -> WindowTimeState:
        return WindowTimeState((1,) * world_size, (None,) * world_size)

    def _next(
        self, state: WindowTimeState, report: WindowReport, verdict: Verdict
    ) -> WindowTimeState:
        ms = update_ms(state.ms_per_batch, report)
        known = ~np.isnan(ms)
        counts = np.ones(len(ms), dtype=np.int64)
        if known.any():
            slowest = float(ms[known].max())
            most = MAX_COUNT * (float(ms[known].min()) / slowest)
            anchor = max(self.least, round(min(self.window_ms / slowest, most)))
            counts[known] = np.minimum(densest(anchor, ms[known]), MAX_COUNT)
        return WindowTimeState(tuple(counts.tolist()), as_times(ms))
