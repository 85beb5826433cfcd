"""Tells if a lane costs more than it gives."""

import logging
from collections import deque
from statistics import median

from elche_jax.cadence import WindowRecord
from elche_jax.engine.lane import Fleet, kinds_of

logger = logging.getLogger("elche_jax")

WINDOWS = 20
"""Steady windows on which the line is based."""


class LaneWorth:
    """Logs one line for a lane whose share of the work is below what the exchange costs.

    With one lane less, the others lose its share of the microbatches, and save at most the
    exchange. The comparison is between

        share = median over windows of the lane's microbatches / all microbatches
        cost  = median over windows of sync_ms / wall_ms

    Nothing is left out by itself: whoever chose the devices decides.

    Args:
        fleet: The devices.
    """

    def __init__(self, fleet: Fleet):
        kinds = kinds_of(fleet.devices)
        lanes = fleet.in_lanes() if len(set(kinds)) > 1 else ()
        self._lanes = {lane.ranks: kinds[lane.ranks[0]] for lane in lanes}
        self._records: deque[WindowRecord] = deque(maxlen=WINDOWS)

    def observe(self, record: WindowRecord) -> None:
        """Note a completed window; log if enough are known."""
        if not self._lanes or not record.steady or record.cold or record.wall_ms <= 0:
            return
        self._records.append(record)
        if len(self._records) < WINDOWS:
            return
        cost = median(one.sync_ms / one.wall_ms for one in self._records)
        shares = {ranks: self._share(ranks) for ranks in self._lanes}
        # the others have nobody to exchange with without the one that does most
        most = max(shares, key=shares.__getitem__)
        for ranks, share in shares.items():
            if ranks != most and share < cost:
                logger.warning(
                    "elche: %s (rank%s %s) does %.1f %% of the work and the exchange takes %.1f %% "
                    "of a window: the others are probably faster without it. Leave it out of "
                    "devices, or make windows longer.",
                    self._lanes.pop(ranks),
                    "s" if len(ranks) > 1 else "",
                    ", ".join(map(str, ranks)),
                    100 * share,
                    100 * cost,
                )

    def _share(self, ranks: tuple[int, ...]) -> float:
        return median(
            sum(one.counts[rank] for rank in ranks) / sum(one.counts) for one in self._records
        )
