"""EveryBatch: one microbatch per device, then synchronise. Classic data parallel."""

from dataclasses import dataclass
from typing import ClassVar

from elche_jax import _check as check
from elche_jax.cadence.base import (
    STABLE,
    Cadence,
    State,
    Verdict,
    WindowReport,
    check_update,
)


@dataclass(frozen=True)
class EveryBatchState(State):
    """State of `EveryBatch`.

    Attributes:
        counts: 1 for every device.
    """

    counts: tuple[int, ...]


@dataclass(frozen=True)
class EveryBatch(Cadence[EveryBatchState]):
    """Cadence that gives every device one microbatch per window, whatever it takes.

    Reports and verdicts change nothing: windows cannot get shorter.

    Examples:
        >>> EveryBatch().init(4).counts
        (1, 1, 1, 1)
    """

    adaptive: ClassVar[bool] = False
    state_type: ClassVar[type[State] | None] = EveryBatchState

    def init(self, world_size: int) -> EveryBatchState:
        """Return the state, the same before every window.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            The state.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1.

        Examples:
            >>> EveryBatch().init(1).counts
            (1,)
        """
        where = "EveryBatch.init"
        world_size = check.integer(where, "world_size", world_size, low=1)
        return EveryBatchState((1,) * world_size)

    def update(
        self, state: EveryBatchState, report: WindowReport, verdict: Verdict = STABLE
    ) -> EveryBatchState:
        """Return ``state``.

        Args:
            state: The state.
            report: What was measured; checked, not used.
            verdict: The guard's opinion; checked, not used.

        Returns:
            The same state.

        Raises:
            TypeError: If the report or the verdict is of another class.
            ValueError: If the report has another number of devices.

        Examples:
            >>> cadence = EveryBatch()
            >>> report = WindowReport((9.0, 3.0), (1, 1), 0.5)
            >>> cadence.update(cadence.init(2), report).counts
            (1, 1)
        """
        check_update("EveryBatch.update", len(state.counts), report, verdict)
        return state
