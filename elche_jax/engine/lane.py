"""A lane: devices of one kind, served by one mapped program. One device alone is a lane, too.

Here is all that differs between one device and several: how a function is compiled for them,
where their arrays lie, and who waits for them. Code above asks for neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from elche_jax.engine.mapped import Mapped, stacked_sharding
from elche_jax.engine.timing import Clock, Done, Failed, LoopClock, Stopwatch

PyTree = Any


@dataclass(frozen=True)
class Lane:
    """Devices of one kind, served by one mapped program.

    Attributes:
        devices: The devices in rank order.
        ranks: Their ranks in the job.
    """

    devices: tuple[jax.Device, ...]
    ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of devices of the lane."""
        return len(self.devices)

    @property
    def alone(self) -> bool:
        """Whether it is one device, which waits for nobody: nothing of it is timed apart."""
        return len(self.devices) == 1

    @property
    def sharding(self) -> Sharding:
        """That of arrays with one entry per device."""
        return stacked_sharding(self.devices)

    def mapped(
        self, fn: Callable[..., tuple[PyTree, PyTree]], donate: tuple[int, ...] = ()
    ) -> Mapped:
        """A function of per-device values for the devices, see `Mapped`."""
        return Mapped(fn, self.devices, donate)

    def clock(self, done: Done, failed: Failed) -> Clock:
        """What times the windows of a run: threads, or of one device the loop itself.

        Args:
            done: Told of every window that is over, in order.
            failed: Told of an exception in a thread.
        """
        return LoopClock(done) if self.alone else Stopwatch(self.world_size, done, failed)


def lanes_of(devices: Sequence[jax.Device]) -> list[Lane]:
    """Devices by platform and kind, in the order of their first rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault((device.platform, device.device_kind), []).append(rank)
    return [Lane(tuple(devices[r] for r in rs), tuple(rs)) for rs in ranks.values()]
