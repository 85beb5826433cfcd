"""The mean of what devices have delivered, on the host, in NumPy float32."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from elche_jax.engine.axis import HostAxis
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.reduce import Mean, Reduction


@dataclass(frozen=True)
class Average:
    """The mean of a window, and what there is to report of it.

    Attributes:
        mean: For the devices.
        metrics: Metrics of the window; those of devices have shape `(devices,)`.
        own: For every device whether what it delivered was finite; True where it
            delivered nothing.
    """

    mean: Mean
    metrics: dict[str, Any]
    own: np.ndarray


@dataclass(frozen=True)
class HostAverage:
    """Averages deliveries.

    Attributes:
        reduction: How contributions become a mean.
    """

    reduction: Reduction

    def __call__(self, deliveries: Sequence[Delivery | None], window: int) -> Average:
        """Averages those of one window.

        Args:
            deliveries: By rank; None of a device that is late. At least one is there.
            window: Number of the window, for an exponent that is a schedule.
        """
        there = {rank: one for rank, one in enumerate(deliveries) if one is not None}
        axis = HostAxis(len(deliveries), tuple(there))
        brought = [one.brought for one in there.values()]
        # numbers that are none are found, and said, by what follows
        with _on_cpu(), np.errstate(all="ignore"):
            mean, metrics = self.reduction(axis, brought, window)
        own = np.array([one is None or bool(one.brought.row[1]) for one in deliveries])
        metrics["finite"] = np.bool_(metrics["finite"] and all(one.fine for one in there.values()))
        return Average(mean, metrics, own)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Where a device may hang, a schedule's arithmetic must not be on one."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # this process was told to have none
        return contextlib.nullcontext()
