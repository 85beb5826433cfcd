"""The programs of a device whose windows are averaged on the host, without collectives.

A window is three programs on every device: `accumulate` runs its microbatches, `deliver` ends
its part of the window, `apply` applies the mean that the host computes from the deliveries.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.reduce import Contribution, Mean
from elche_jax.engine.rule import Ended
from elche_jax.engine.state import PendingUpdate, TrainState, with_averaging


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Delivery:
    """A device's delivery to the host at the end of a window.

    Attributes:
        contribution: Its contribution to the mean.
        finite: Whether its state stayed finite in all means applied since its last delivery.
    """

    contribution: Contribution
    finite: Any


@dataclass(frozen=True)
class HostProgram(CollectiveProgram):
    """The functions of a window, compiled for each device on its own.

    `accumulate` is inherited. The other two take states without frozen parameters and the key.
    """

    def deliver(
        self, part: int, state: TrainState, carried: Any, catch_up: Any, finite: Any
    ) -> tuple[tuple[TrainState, PendingUpdate, Delivery], None]:
        """End the device's part of a window.

        Args:
            part: Index of the part of the parameters that is exchanged.
            state: The state at the start of the window, with trained parameters only.
            carried: The carry after its microbatches.
            catch_up: Whether to include the device's work in earlier windows that the host has
                never averaged.
            finite: The last result of `apply`; it is passed on.

        Returns:
            Its state, its update, and the delivery. Updates that are not finite are left out
            of all three.
        """
        after, done = self.rule.thin.finish(state, carried.own, catch_up)
        sums = self.rule.sums_of(carried.own)
        contribution, error = self.rule.thin.contribute(Ended(state, after, done, part), sums)
        if not self.rule.late:  # implied by the states before and after
            done = replace(done, progress=[], model_state=[])
        elif self.rule.takes_agreed:  # its parameters do not depend on its own update
            done = replace(done, progress=[])
        after = self.advanced(with_averaging(after, error=error), carried)
        return (after, done, Delivery(contribution, finite)), None

    def apply(self, ended: Ended, mean: Mean, finite: Any) -> tuple[tuple[TrainState, Any], None]:
        """Apply the mean of a window.

        Args:
            ended: The window; its states have trained parameters only.
            mean: The mean.
            finite: The last result of `apply` since the last delivery.

        Returns:
            Its state, and whether it stayed finite since the last delivery. An update that is
            not finite is not applied.
        """
        state, well = self.rule.thin.apply(ended, mean)
        return (state, finite & well), None
