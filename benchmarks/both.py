"""Two devices of different kinds: jobs on both, on either alone, and the control, in turns."""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import jax
from baselines import OPTIMIZER
from loops import Loop, apart, busiest
from measure import Rates, Result, interleave, ratios, result, with_control

import elche_jax as elche


class Both:
    """A model on two devices.

    Attributes:
        counts: Microbatches of each device in a window of the first job. The control and the jobs
            on one device use the same counts.
        alone: The jobs on one device, by the device's name.
        jobs: The jobs on both devices, by name.

    Args:
        params: Initial parameters.
        loss: Loss function of a microbatch.
        data: Examples, kept on the devices.
        batch: Examples per microbatch.
        devices: The two devices, by name.
        jobs: Options of `build_train_step` for each job on both devices, by the job's name.
        warm: Windows before the first turn, enough to know the speeds and whether both devices
            are worth using.
    """

    def __init__(
        self, params, loss, data, batch: int, devices: Mapping[str, jax.Device],
        jobs: Mapping[str, Mapping[str, Any]], warm: int,
    ):  # fmt: skip
        def job(chosen, windows: int, **options) -> Loop:
            train = elche.build_train_step(loss, OPTIMIZER, devices=chosen, **options)
            loop = Loop(train, params, data, batch)
            loop.warm(windows)
            return loop

        chosen = list(devices.values())
        self.jobs = {what: job(chosen, warm, **options) for what, options in jobs.items()}
        self.counts = busiest(next(iter(self.jobs.values())).train)
        self.alone = {
            what: job([device], 3, cadence=elche.FixedTotal(count))
            for (what, device), count in zip(devices.items(), self.counts, strict=True)
        }
        self._control = apart(params, chosen, self.counts, batch, loss=loss, resident=data)

    def rates(self, seconds: float, repeats: int, **others: Callable[[], float]) -> Rates:
        """Return microbatches per ms of all jobs, and of others, with the control."""
        jobs = self.alone | self.jobs
        measures = others | {what: partial(job.rate, seconds) for what, job in jobs.items()}
        control = partial(self._control.rate, seconds)
        return interleave(with_control(measures, control), repeats)

    def results(self, case: str, what: str, rates: Rates, **asked: float) -> list[Result]:
        """Return a job's speed relative to the faster device alone, and its time for exchanges."""
        faster = max((rates[name] for name in self.alone), key=median)
        records = self.jobs[what].train.records
        sync = tuple(one.sync_ms for one in records if one.steady and all(one.counts))
        share = ratios(rates[what], faster)
        return [
            result(case, f"{what}, of the faster alone", share, **asked),
            result(case, f"{what}, sync", sync, "ms"),
        ]
