"""Checks during a run that the replicas are still equal."""

from collections.abc import Callable, Sequence

import jax

from elche_jax.engine.checksum import checksums
from elche_jax.engine.state import TrainState


class ReplicaCheck:
    """Launches checksums of the replicas from time to time.

    Args:
        devices: The devices, in rank order.
        every: Windows between two checks; None for no checks.
    """

    def __init__(self, devices: Sequence[jax.Device], every: int | None):
        self._devices, self._every, self._launched = devices, every, False

    def launch(
        self, window: int, state: TrainState, replicated: Callable[[TrainState], TrainState]
    ) -> jax.Array | None:
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
        return checksums(replicated(state), self._devices)
