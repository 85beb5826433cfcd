"""What is known of a window once it is over. Plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """One window, measured.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        counts: Microbatches per device.
        examples: Valid examples of all devices.
        busy_ms: Busy time per device, data delivery included; empty with one device,
            whose time is `wall_ms`.
        wall_ms: From the end of the window before to the end of this one. Time that the
            loop spends on its own things before it asks for the window is left out; time
            it waits for the window's data is not.
        sync_ms: Cost of the synchronisation, the least wait over the devices.
        skew_ms: How far the devices' arrivals at the synchronisation lay apart.
        steady: False where the window waited for a compile; such windows are not
            reported to the cadence.
    """

    window: int
    epoch: int
    counts: tuple[int, ...]
    examples: int
    busy_ms: tuple[float, ...]
    wall_ms: float
    sync_ms: float
    skew_ms: float
    steady: bool

    @property
    def busy_share(self) -> tuple[float, ...]:
        """Share of the window in which each device worked, 0 to 1; 0 without a time."""
        if not self.busy_ms:
            return (1.0,)
        if self.wall_ms <= 0:
            return (0.0,) * len(self.busy_ms)
        return tuple(min(1.0, busy / self.wall_ms) for busy in self.busy_ms)
