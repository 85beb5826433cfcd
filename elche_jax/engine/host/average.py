"""The mean of the devices' deliveries, computed on the host in NumPy."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from elche_jax._processes import ExchangeLost
from elche_jax.engine.axis import HostAxis, HostProcessAxis
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.job import Job, Measured
from elche_jax.engine.reduce import Mean, Reduction
from elche_jax.engine.survey import Survey


@dataclass(frozen=True)
class Average:
    """The mean of a window and its metrics.

    Attributes:
        mean: The mean to send to the devices.
        metrics: Metrics of the window; per-device ones have shape `(devices,)`.
        own: For every device, whether its delivery was finite; True if it delivered nothing.
    """

    mean: Mean
    metrics: dict[str, Any]
    own: np.ndarray


@dataclass(frozen=True)
class HostAverage:
    """Averages the deliveries of a window.

    Attributes:
        reduction: The reduction of contributions to a mean.
        job: The processes, which average the same windows in the same order; None for a single
            process.
    """

    reduction: Reduction
    job: Job | None = None

    def __call__(
        self, deliveries: Sequence[Delivery | None], window: int, survey: Survey | None = None
    ) -> Average:
        """Average the deliveries of one window.

        Args:
            deliveries: The deliveries of this process by rank, at least one; None for a device that
                is late.
            window: Index of the window, for an exponent that is a schedule.
            survey: What processes tell each other, measured in this one; None for a single process.

        Raises:
            ExchangeLost: In all live processes, if another process has ended since the window was
                dispatched: its deliveries may be in some of the sums.
        """
        self._check_members(survey)  # an earlier exchange found a process gone, in all processes
        there = {rank: one for rank, one in enumerate(deliveries) if one is not None}
        # NumPy, as a program of the CPU backend waits for those dispatched to its device earlier:
        # the average of a window would wait for the next window's steps
        axis = self._axis(len(deliveries), tuple(there))
        contributions = [one.contribution for one in there.values()]
        # values that are not finite are detected and reported later
        with _on_cpu(), np.errstate(all="ignore"):
            mean, metrics = self.reduction(axis, contributions, window)
        own = np.array([one is None or bool(one.contribution.row[1]) for one in deliveries])
        lost = axis.rows([not one.finite for one in there.values()])
        metrics["finite"] = np.bool_(metrics["finite"] and not lost.any())
        if self.job is not None and survey is not None:
            Measured(*survey.rows.T).own[:] = own
            found = self.job.gather_rows(survey.rows)
            self._check_members(survey)
            survey.found = found
        return Average(mean, metrics, own)

    def _check_members(self, survey: Survey | None) -> None:
        if self.job is not None and survey is not None and self.job.members.lost != survey.lost:
            raise ExchangeLost

    def _axis(self, devices: int, there: tuple[int, ...]) -> HostAxis:
        if self.job is None:
            return HostAxis(devices, there)
        ranks = tuple(self.job.ranks[at] for at in there)
        return HostProcessAxis(self.job.world_size, ranks, self.job)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Keep a schedule's arithmetic off the devices, as one of them may hang."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves out the CPU
        return contextlib.nullcontext()
