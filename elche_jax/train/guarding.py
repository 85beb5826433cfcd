"""The guard at work: reads how far the devices drifted apart, and tells the cadence."""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from elche_jax.averaging.rules import Averaging
from elche_jax.cadence import STABLE, Verdict
from elche_jax.cadence.guards import HISTORY, Divergence, Guard, judge
from elche_jax.train.pace import Measured

logger = logging.getLogger("elche_jax")

OWNS = 0.9
"""Share of the average above which one device owns it."""


class GuardWatch:
    """Keeps the divergence of the last windows, and asks the guard.

    Args:
        guard: The guard.
        devices: The devices, in rank order.
        late: Whether a window's metrics are those of the window before.
    """

    def __init__(self, guard: Guard, devices: Sequence[jax.Device], late: bool):
        self._lock = threading.Lock()  # a watching thread writes, the user reads
        self._late = late
        self._before: tuple[int, tuple[int, ...]] | None = None
        self._guard, self._devices = guard, devices
        self._history: deque[Divergence] = deque(maxlen=HISTORY)
        self._warned = len(devices) < 2

    @property
    def history(self) -> list[Divergence]:
        """The last windows, oldest first."""
        with self._lock:
            return list(self._history)

    def to_dict(self) -> dict[str, Any]:
        """What it knows, as plain numbers, which `restore` takes."""
        return {"divergence": [asdict(seen) for seen in self.history], "unread": self._before}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on after windows of an earlier process."""
        unread = saved.get("unread")
        self._before = None if unread is None else (unread[0], tuple(unread[1]))
        with self._lock:
            self._history = deque(map(_divergence, saved["divergence"]), maxlen=HISTORY)

    def see(self, measured: Measured, metrics: Mapping[str, Any]) -> Verdict:
        """Takes note of a window that is over; gives what the cadence is to be told."""
        window: tuple[int, tuple[int, ...]] | None = (measured.window, measured.counts)
        if self._late:
            self._before, window = window, self._before
        if window is None:  # the first window has none before it
            return STABLE

        def read(name: str) -> tuple[float, ...]:
            return tuple(np.asarray(metrics[name]).tolist())

        seen = Divergence(
            *window, read("distance"), read("update_norm"), read("cosine"), read("share")
        )
        with self._lock:
            self._history.append(seen)
        self._warn(seen)
        return judge(self._guard, self.history)

    def _warn(self, seen: Divergence) -> None:
        largest = max(seen.share)
        others = sum(count > 0 for count in seen.counts) - 1  # or one has nobody beside it
        if self._warned or largest <= OWNS or not others:
            return
        self._warned = True
        rank = seen.share.index(largest)
        logger.warning(
            "elche: device %d (%s) has a share of %.0f %% in the average of window %d; the others' "
            "steps hardly count. A lower exponent gives them more.",
            rank,
            self._devices[rank],
            100 * largest,
            seen.window,
        )


def guard_watch(
    guard: Guard | None, averaging: Averaging | None, devices: Sequence[jax.Device]
) -> GuardWatch | None:
    """The guard at work; None in gradient mode."""
    if averaging is None or guard is None:
        return None
    return GuardWatch(guard, devices, late=bool(averaging.delay))


def _divergence(saved: Mapping[str, Any]) -> Divergence:
    values: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return Divergence(**values)
