"""Emulation of a device that is measured alone."""

from dataclasses import dataclass
from typing import Any

from elche_jax.engine.loop import Body, LoopHook, Seconds

PyTree = Any


@dataclass(frozen=True)
class OfRank:
    """Emulation hook that makes a single device as slow as it is among all devices.

    Attributes:
        hook: The emulation of all devices.
        rank: The device's rank among all devices.
    """

    hook: LoopHook
    rank: int

    def check(self, world_size: int) -> None:
        """Do nothing, as the emulation of all devices has been checked."""

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Run before the loop over the microbatches."""
        return self.hook.begin(device + self.rank, step, fresh)

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Run one microbatch."""
        return self.hook.around(body, device + self.rank, i, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """Run after the loop over the microbatches."""
        return self.hook.end(device + self.rank, count, carry)

    def on_host(self) -> Seconds | None:
        """Return the function for the seconds that microbatches take, if the host waits."""
        seconds = self.hook.on_host()
        if seconds is None:
            return None
        return lambda window, device, count: seconds(window, device + self.rank, count)

    def settle(self) -> None:
        """Run after the dispatch."""
        self.hook.settle()
