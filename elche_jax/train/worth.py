"""Says which lanes may rest, and reports lanes that cost more than they contribute."""

from collections import deque
from statistics import median
from typing import Any

from elche_jax._log import logger
from elche_jax.cadence import Cadence, Rest, RestState, WindowRecord
from elche_jax.engine.lane import Fleet, Lanes, kinds_of

WINDOWS = 20
"""Steady windows on which the log line is based."""


def rest_of(fleet: Fleet, cadence: Cadence[Any]) -> Rest | None:
    """Return what decides which lanes rest; None if none may rest."""
    if not (isinstance(fleet, Lanes) and cadence.rests and fleet.job.one_process):
        return None
    return Rest(fleet.ranks)


class LaneWorth:
    """Logs one line for a lane that rests, or should be left out.

    If lanes may rest, the line says when one begins to rest and when it works again. If none may,
    it names a lane whose share of the work is below the cost of the exchange: without that lane,
    the job loses its share of the microbatches, and saves at most the exchange. It compares

        share = median over windows of the lane's microbatches / all microbatches
        cost  = median over windows of sync_ms / wall_ms

    Args:
        fleet: The devices.
        rest: What decides which lanes rest; or None.
    """

    def __init__(self, fleet: Fleet, rest: Rest | None = None):
        kinds = kinds_of(fleet.devices)
        lanes = fleet.in_lanes() if len(set(kinds)) > 1 and fleet.job.one_process else ()
        self._lanes = {lane.ranks: kinds[lane.ranks[0]] for lane in lanes}
        self._kinds, self._rest = kinds, rest
        self._records: deque[WindowRecord] = deque(maxlen=WINDOWS)

    def changed(self, before: RestState, after: RestState) -> None:
        """Log what a trial has changed."""
        assert self._rest is not None and after.gain is not None
        for ranks, rested, rests, pause in zip(
            self._rest.groups, before.resting, after.resting, after.pauses, strict=True
        ):
            if rests and not rested:
                logger.warning(
                    "elche: %s rests: the other devices train %.1f %% faster without it. It is "
                    "tried again after %d windows.",
                    _described(self._kinds[ranks[0]], ranks), 100 * (after.gain - 1), pause,
                )  # fmt: skip
            if rested and not rests:
                logger.warning(
                    "elche: %s works again: the job is %.1f %% faster with it.",
                    # if it works in place of others, the gain is theirs
                    _described(self._kinds[ranks[0]], ranks),
                    100 * (max(after.gain, 1 / after.gain) - 1),
                )  # fmt: skip

    def observe(self, record: WindowRecord) -> None:
        """Note a completed window; log if enough are known and no lane may rest."""
        if self._rest is not None or not self._lanes:
            return
        if not record.steady or record.cold or record.wall_ms <= 0:
            return
        self._records.append(record)
        if len(self._records) < WINDOWS:
            return
        cost = median(one.sync_ms / one.wall_ms for one in self._records)
        shares = {ranks: self._share(ranks) for ranks in self._lanes}
        # not the one that does most: without it, the others have no one to exchange with
        most = max(shares, key=shares.__getitem__)
        for ranks, share in shares.items():
            if ranks != most and 0 < share < cost:
                logger.warning(
                    "elche: %s does %.1f %% of the work and the exchange takes %.1f %% "
                    "of a window: the others are probably faster without it. Leave it out of "
                    "devices, or make windows longer.",
                    _described(self._lanes.pop(ranks), ranks), 100 * share, 100 * cost,
                )  # fmt: skip

    def _share(self, ranks: tuple[int, ...]) -> float:
        return median(
            sum(one.counts[rank] for rank in ranks) / sum(one.counts) for one in self._records
        )


def _described(kind: str, ranks: tuple[int, ...]) -> str:
    """Return a kind of devices with their ranks, for messages."""
    return f"{kind} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
