"""Checks during a run that the replicas are still equal."""

from collections.abc import Callable

from elche_jax.engine.checksum import checksums
from elche_jax.engine.lane import Fleet
from elche_jax.engine.laned import StackedArray
from elche_jax.engine.state import TrainState

EVERY_IN_JOB = 100
"""Windows between two checks in a job of several processes, unless a user says otherwise."""


class ReplicaCheck:
    """Launches checksums of the replicas from time to time.

    Each process of a job has an optimizer of its own: another learning rate in one of them would
    train processes apart without any other sign, so a job is always checked. What a check finds
    is told in the exchange of the next window.

    Args:
        fleet: The devices.
        every: Windows between two checks; None for no checks in one process, and for
            `EVERY_IN_JOB` in several.
    """

    def __init__(self, fleet: Fleet, every: int | None):
        if every is None and not fleet.job.one_process:
            every = EVERY_IN_JOB
        self._fleet, self._every, self._launched = fleet, every, False

    def launch(
        self, window: int, state: TrainState, replicated: Callable[[TrainState], TrainState]
    ) -> StackedArray | None:
        """Launch checksums of a state if they are due; does not wait for them.

        They are due every `every` windows, and at the first window seen, so that nothing is
        compiled later.

        Args:
            window: Number of the window.
            state: The state after it.
            replicated: Selects the part of a state that must be equal on all devices.
        """
        if self._every is None or (self._launched and window % self._every):
            return None
        self._launched = True
        return checksums(replicated(state), self._fleet)
