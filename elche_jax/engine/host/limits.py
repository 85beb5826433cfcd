"""How long an exchange on the host waits, and how far devices may run ahead of it."""

from collections.abc import Sequence
from dataclasses import dataclass

Counts = tuple[int, ...]
"""Microbatches by device."""


@dataclass(frozen=True)
class Limits:
    """How long to wait, and how far a device may run ahead.

    Attributes:
        timeout_s: Seconds, from the first delivery of a window, after which a device is late.
        ahead: Whether devices continue while a window is averaged.
        delay: Number of windows after which a mean is applied, if devices run ahead; None to
            apply it as soon as it is known.
        max_overshoot: Microbatches that a device may begin beyond the oldest window that
            is not closed; None for no bound.
        max_batch_diff: Microbatches that a device may begin beyond the oldest window that some
            device, other than a late one, has not delivered; None for no bound.
    """

    timeout_s: float
    ahead: bool = False
    delay: int | None = None
    max_overshoot: int | None = None
    max_batch_diff: int | None = None

    @property
    def in_flight(self) -> int:
        """Largest number of windows that may be dispatched and not yet over."""
        return max(2 if self.max_overshoot is None else 4, (self.delay or 0) + 1)

    def too_far(self, pending: Sequence[Counts], counts: Counts) -> bool:
        """Return whether a window must wait for the mean of the oldest pending window.

        Args:
            pending: Microbatches of the windows whose mean is not applied yet, oldest first.
            counts: Microbatches of the window.
        """
        bounds = (self.max_overshoot, self.max_batch_diff)
        return len(pending) >= self.in_flight or any(
            most is not None and beyond(pending, counts) > most for most in bounds
        )


def beyond(windows: Sequence[Counts], counts: Counts) -> int:
    """Return the most microbatches that a device would have begun beyond the oldest window.

    This is 0 if there are no windows.

    Args:
        windows: Microbatches of the windows that have begun, oldest first.
        counts: Microbatches of the window about to begin.

    Examples:
        >>> beyond([(9, 9), (3, 1)], (1, 4))
        5
    """
    later = [*windows[1:], counts] if windows else [(0,)]
    return max(map(sum, zip(*later, strict=True)))
