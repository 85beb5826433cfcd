"""How far the devices drifted apart in a window, read from its metrics."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elche_jax.cadence import Divergence, WindowPlan
from elche_jax.train.options import Options

logger = logging.getLogger("elche_jax")

OWNS = 0.9
"""Share of the average above which one device owns it."""


class DivergenceReader:
    """Reads the divergence of every window that is over.

    Attributes:
        unread: Number and counts of the windows whose metrics come with later ones', oldest
            first; plain numbers for a checkpoint.

    Args:
        devices: The devices, in rank order.
        pending: How many windows before a window's metrics are of.
    """

    def __init__(self, devices: Sequence[jax.Device], pending: int):
        self.unread: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self._pending, self._devices = pending, devices
        self._warned = len(devices) < 2
        self._ended = False

    def end(self) -> None:
        """Another run begins: windows that are over now have nothing to tell."""
        self._ended = True

    def restore(self, unread: Sequence[Any]) -> None:
        """Goes on with windows whose metrics are to come, as far as any are."""
        known = tuple((window, tuple(counts)) for window, counts in unread)
        self.unread = known[len(known) - self._pending :] if self._pending else ()

    def read(self, plan: WindowPlan, metrics: Mapping[str, Any]) -> Divergence | None:
        """The divergence that a window's metrics tell of; None before the first."""
        # never changed in place: a checkpoint that is being written has the one of its window
        self.unread = (*self.unread, (plan.window, plan.counts))
        if len(self.unread) <= self._pending:
            return None
        window, *rest = self.unread
        self.unread = tuple(rest)
        if self._ended:
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


def divergence_reader(options: Options, devices: Sequence[jax.Device]) -> DivergenceReader | None:
    """What reads the divergence; None of replicas that are alike, which do not drift apart."""
    return None if options.averaging is None else DivergenceReader(devices, options.pending)


def divergence_of(saved: Mapping[str, Any]) -> Divergence:
    """A divergence of the plain numbers that `dataclasses.asdict` gave."""
    values: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return Divergence(**values)
