"""How far the devices drifted apart in a window, read from its metrics."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elche_jax.averaging.rules import Averaging
from elche_jax.cadence import Divergence, WindowPlan

logger = logging.getLogger("elche_jax")

OWNS = 0.9
"""Share of the average above which one device owns it."""


class DivergenceReader:
    """Reads the divergence of every window that is over.

    Attributes:
        unread: Number and counts of the window whose metrics come with the next one's;
            plain numbers for a checkpoint.

    Args:
        devices: The devices, in rank order.
        late: Whether a window's metrics are those of the window before.
    """

    def __init__(self, devices: Sequence[jax.Device], late: bool):
        self.unread: tuple[int, tuple[int, ...]] | None = None
        self._late, self._devices = late, devices
        self._warned = len(devices) < 2
        self._ended = False

    def end(self) -> None:
        """Another run begins: windows that are over now have nothing to tell."""
        self._ended = True

    def read(self, plan: WindowPlan, metrics: Mapping[str, Any]) -> Divergence | None:
        """The divergence that a window's metrics tell of; None before the first."""
        window: tuple[int, tuple[int, ...]] | None = (plan.window, plan.counts)
        if self._late:
            self.unread, window = window, self.unread
        if window is None or self._ended:
            return None

        def row(name: str) -> tuple[float, ...]:
            return tuple(np.asarray(metrics[name]).tolist())

        seen = Divergence(*window, row("distance"), row("update_norm"), row("cosine"), row("share"))
        self._warn(seen)
        return seen

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


def divergence_reader(
    averaging: Averaging | None, devices: Sequence[jax.Device]
) -> DivergenceReader | None:
    """What reads the divergence; None in gradient mode, where there is none."""
    return None if averaging is None else DivergenceReader(devices, bool(averaging.delay))


def divergence_of(saved: Mapping[str, Any]) -> Divergence:
    """A divergence of the plain numbers that `dataclasses.asdict` gave."""
    values: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return Divergence(**values)
