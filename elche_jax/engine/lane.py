"""A lane: devices of one kind, served by one mapped program. A single device is a lane, too.

All differences between one device and several are here: how a function is compiled, how arrays
are placed, and how windows are timed. Code above a lane has no such cases, except for
the few that `tests/test_layers.py` lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Sharding

from elche_jax.engine.mapped import Mapped, PerDevice, stacked_sharding
from elche_jax.engine.timing import Clock, Done, Failed, LoopClock, Stopwatch


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
        """Whether it has a single device, whose work and synchronization need no separate times."""
        return len(self.devices) == 1

    @property
    def sharding(self) -> Sharding:
        """The sharding of arrays with one entry per device."""
        return stacked_sharding(self.devices)

    def mapped(self, fn: PerDevice, donate: tuple[int, ...] = ()) -> Mapped:
        """Map a function of per-device values over the devices, see `Mapped`."""
        return Mapped(fn, self.devices, donate)

    def clock(self, done: Done, failed: Failed) -> Clock:
        """Return a clock for the windows of a run: threads, or for one device the loop itself.

        Args:
            done: Called with the times of every finished window, in order.
            failed: Called with an exception raised in a thread.
        """
        return LoopClock(done) if self.alone else Stopwatch(self.world_size, done, failed)


def lanes_of(devices: Sequence[jax.Device]) -> list[Lane]:
    """Group devices by platform and kind, in the order of their first rank."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        # by platform, too: `pmap` refuses devices of several platforms
        ranks.setdefault((device.platform, device.device_kind), []).append(rank)
    return [Lane(tuple(devices[r] for r in rs), tuple(rs)) for rs in ranks.values()]
