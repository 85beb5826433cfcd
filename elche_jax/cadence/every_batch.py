"""EveryBatch: one microbatch per device and window, as in classic data parallelism."""

from dataclasses import dataclass

from elche_jax.cadence.base import CheckedCadence, Verdict, WindowReport
from elche_jax.cadence.state import State


@dataclass(frozen=True)
class EveryBatchState(State):
    """State of `EveryBatch`.

    Attributes:
        counts: 1 for every device.
    """

    counts: tuple[int, ...]


@dataclass(frozen=True)
class EveryBatch(CheckedCadence[EveryBatchState]):
    """Cadence that gives every device one microbatch per window, whatever its speed.

    Reports and verdicts have no effect: windows cannot get shorter.

    Examples:
        >>> EveryBatch().init(4).counts
        (1, 1, 1, 1)
    """

    adaptive = False
    state_type = EveryBatchState

    def _first(self, world_size: int) -> EveryBatchState:
        return EveryBatchState((1,) * world_size)

    def _next(
        self, state: EveryBatchState, report: WindowReport, verdict: Verdict
    ) -> EveryBatchState:
        return state
