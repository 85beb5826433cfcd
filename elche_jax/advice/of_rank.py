"""Emulation for a device that is measured alone."""

from dataclasses import dataclass
from typing import Any

from elche_jax.engine.loop import Body, LoopHook, Seconds

PyTree = Any


@dataclass(frozen=True)
class OfRank:
    """Emulation that makes a device alone as slow as it is among the others.

    Attributes:
        hook: The emulation of all devices.
        rank: The device's rank among them.
    """

    hook: LoopHook
    rank: int

    def check(self, world_size: int) -> None:
        """Checks nothing: all devices were checked together."""

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Before the loop."""
        return self.hook.begin(device + self.rank, step, fresh)

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Runs one microbatch."""
        return self.hook.around(body, device + self.rank, i, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """After the loop."""
        return self.hook.end(device + self.rank, count, carry)

    def on_host(self) -> Seconds | None:
        """How long microbatches last."""
        seconds = self.hook.on_host()
        if seconds is None:
            return None
        return lambda window, device, count: seconds(window, device + self.rank, count)

    def settle(self) -> None:
        """After the dispatch."""
        self.hook.settle()
