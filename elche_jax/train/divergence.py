"""Divergence of the devices' parameters in a window, read from its metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elche_jax._log import logger
from elche_jax.cadence import Divergence, WindowPlan
from elche_jax.train.options import Options

OWNS = 0.9
"""Share above which one device dominates the average."""


class DivergenceReader:
    """Reads the divergence of every completed window.

    Attributes:
        unread: Number and counts of each window whose metrics arrive with a later window,
            oldest first; plain numbers, for a checkpoint.

    Args:
        devices: The devices, in rank order.
        pending: How many windows late the metrics arrive.
    """

    def __init__(self, devices: Sequence[jax.Device], pending: int):
        self.unread: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self._pending, self._devices = pending, devices
        # one device always has the whole share
        self._warned = len(devices) < 2
        self._ended = False

    def end(self) -> None:
        """Ignore windows that complete from now on, as a new run begins."""
        self._ended = True

    def restore(self, unread: Sequence[Any]) -> None:
        """Resume with windows whose metrics are still to arrive.

        Args:
            unread: Number and counts of each window, oldest first. Only the last `pending`
                are kept: a run with fewer pending windows never sees the metrics of the rest.
        """
        known = tuple((window, tuple(counts)) for window, counts in unread)
        self.unread = known[-self._pending :] if self._pending else ()

    def read(self, plan: WindowPlan, metrics: Mapping[str, Any]) -> Divergence | None:
        """Return the divergence in a window's metrics; None if they belong to no window yet."""
        # replaced, never changed in place: a checkpoint thread may be writing the old tuple
        self.unread = (*self.unread, (plan.window, plan.counts))
        if len(self.unread) <= self._pending:
            return None
        window, *rest = self.unread
        self.unread = tuple(rest)
        # this window is of the previous run, whose windows in flight complete after `init`
        if self._ended:
            return None

        def row(name: str) -> tuple[float, ...]:
            return tuple(np.asarray(metrics[name]).tolist())

        seen = Divergence(*window, row("distance"), row("update_norm"), row("cosine"), row("share"))
        self._warn(seen)
        return seen

    def _warn(self, seen: Divergence) -> None:
        largest = max(seen.share)
        others = sum(count > 0 for count in seen.counts) - 1  # a lone worker has the whole share
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
    """Return a reader of the divergence; None in gradient mode, where replicas stay equal."""
    return None if options.averaging is None else DivergenceReader(devices, options.pending)


def divergence_of(saved: Mapping[str, Any]) -> Divergence:
    """Rebuild a divergence from the plain numbers of `dataclasses.asdict`."""
    values: Any = {name: x if name == "window" else tuple(x) for name, x in saved.items()}
    return Divergence(**values)
