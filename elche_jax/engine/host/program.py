"""What a device computes in a window whose mean is made on the host; no collective in it.

A window is three programs on every device: `accumulate` runs its microbatches, `deliver` ends
its part of the window, `apply` takes up what the host has made of the deliveries.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from elche_jax.engine.collective import CollectiveProgram, with_averaging
from elche_jax.engine.reduce import Contribution, Mean
from elche_jax.engine.rule import Ended, Rule
from elche_jax.engine.state import PendingUpdate, TrainState
from elche_jax.engine.trainable import Selection

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Delivery:
    """What a device delivers at the end of a window.

    Attributes:
        brought: What the mean is made of.
        fine: Whether what it made of the last mean it has taken up was finite.
    """

    brought: Contribution
    fine: Any


@dataclass(frozen=True)
class HostProgram(CollectiveProgram):
    """The functions of a window, each for one device by itself.

    `accumulate` is that of devices which exchange among themselves. The other two get states
    without frozen parameters, and without the key.
    """

    @property
    def thin(self) -> Rule:
        """The rule of such states."""
        return replace(self.rule, work=replace(self.rule.work, selection=Selection()))

    def deliver(
        self, part: int, state: TrainState, carried: Any, anew: Any, fine: Any
    ) -> tuple[tuple[TrainState, PendingUpdate, Delivery], None]:
        """Ends the device's part of a window.

        Args:
            part: The part of the parameters that is exchanged.
            state: The state it began with, `params` being those that are trained.
            carried: Where its microbatches have led.
            anew: Whether the host knows nothing of windows before: then what the device
                has done in them, and is not averaged, goes with it.
            fine: What `apply` has said last; passed on.

        Returns:
            Its state, what it has done, and the delivery. What is not finite is in none.
        """
        after, done = self.thin.finish(state, carried.own, anew)
        sums = self.rule.sums_of(carried.own)
        brought, error = self.thin.contribute(Ended(state, after, done, part), sums)
        if not self.rule.late:  # its state tells
            done = replace(done, progress=[], model_state=[])
        after = with_averaging(after, error=error).replace(
            microbatches=state.microbatches + carried.work[0],
            examples=state.examples + carried.work[1],
            step=state.step + 1,
        )
        return (after, done, Delivery(brought, fine)), None

    def apply(
        self,
        part: int,
        before: TrainState,
        after: TrainState,
        mean: Mean,
        done: PendingUpdate,
        later: list[PendingUpdate],
        fine: Any,
    ) -> tuple[tuple[TrainState, Any], None]:
        """Takes up the mean of a window.

        Args:
            part: The part of the parameters that was exchanged.
            before: The state that window began with, where none came after it.
            after: The device's state, `params` being those that are trained.
            mean: The mean.
            done: What the device did in that window.
            later: What it has done in windows after it, oldest first.
            fine: What `apply` has said before, since the last delivery.

        Returns:
            Its state, and whether all that was made of means was finite: else the old stays.
        """
        state, well = self.thin.apply(Ended(before, after, done, part, later), mean)
        return (state, fine & well), None
