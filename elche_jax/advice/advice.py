"""`Advice`: predicted throughput of measured devices, and which devices are worth using."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elche_jax.advice.predict import SIGNIFICANT, Forecast, Plan
from elche_jax.cadence import ElChe, EveryBatch, FixedTotal
from elche_jax.observe.report import counted

ADDITIVE = 0.95
"""Share of the sum of the solo speeds below which devices compete for some resource."""

OUTER: dict[str, Any] = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
"""The outer optimizer of `DiLoCo`, as in the paper."""


@dataclass(frozen=True)
class DeviceAdvice:
    """Measurements and predictions for one device.

    Attributes:
        name: Name of the device.
        solo_ms: Milliseconds per microbatch while the other devices are idle, without
            optimizer steps.
        step_ms: Milliseconds per optimizer step on this device alone, including the host's
            work for a window.
        together_ms: Milliseconds per microbatch while all devices work.
        examples_per_s: Examples per second of this device alone, with optimizer steps as
            infrequent as under `ElChe`.
        gain: Throughput of all devices divided by that of the other devices, minus 1: 0.04 for
            4 %, negative if the device costs more than it adds. None for a single device.
    """

    name: str
    solo_ms: float
    step_ms: float
    together_ms: float
    examples_per_s: float
    gain: float | None

    @property
    def verdict(self) -> str:
        """The gain as text."""
        if self.gain is None:
            return "the only one"
        if self.gain >= SIGNIFICANT:
            return f"adds {100 * self.gain:.0f} %"
        return "adds nothing" if self.gain > -SIGNIFICANT else f"costs {-100 * self.gain:.0f} %"


@dataclass(frozen=True)
class Advice:
    """Predicted throughput of a machine's devices, returned by `advise`; `print` shows a table.

    Attributes:
        batch_size: Examples per microbatch.
        devices: One entry per device, in rank order.
        sync_ms: Milliseconds per synchronisation of all devices, including the optimizer step.
        plain: All devices under plain `pmap`: one microbatch each, then all wait.
        fixed_total: All devices under `FixedTotal`.
        elche: All devices under `ElChe`; for a single device, see `cadence`.
        best: The best set of devices found, under `ElChe`: all devices, unless fewer are more
            than 2 % faster.
        limit_examples_per_s: The sum of the devices' speeds while all work.
        additive: The ratio of that sum to the sum of the solo speeds; below 1 if devices
            compete for some resource.
        epoch: Microbatches per epoch, which no window exceeds; None if unknown.
        local_steps: All devices under `ElChe` and `DiLoCo` with int8, for a job with a slow link;
            None if the link is not slow, or there is none.
    """

    batch_size: int
    devices: tuple[DeviceAdvice, ...]
    sync_ms: float
    plain: Plan
    fixed_total: Plan
    elche: Plan
    best: Plan
    limit_examples_per_s: float
    additive: float
    epoch: int | None = None
    local_steps: Plan | None = None

    @property
    def sync_share(self) -> float:
        """Share of a window of `ElChe` that the synchronisation takes."""
        return self.sync_ms / self.elche.window_ms

    @property
    def recommended(self) -> Plan:
        """The fastest plan: `best`, or `local_steps` if that is more than 2 % faster."""
        local = self.local_steps
        if local is None or local.examples_per_s < (1 + SIGNIFICANT) * self.best.examples_per_s:
            return self.best
        return local

    @property
    def cadence(self) -> str:
        """Source code of the cadence for the recommended plan, to paste into a script.

        The cadence starts with the plan's counts. A single device gets `EveryBatch` or, if
        optimizer steps cost more than 2 % of the throughput, `FixedTotal` with as many
        microbatches per step as `ElChe` would choose.
        """
        # not a tuple: two ints would mean (slow_rank, ratio)
        counts = list(self.recommended.counts)
        if counts == [1]:
            return "elche.EveryBatch()"
        if len(counts) == 1:
            return f"elche.FixedTotal({counts[0]})"
        return f"elche.ElChe(anchor={self.recommended.anchor}, speed_hint={counts})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, `cadence` and the verdicts as a dict that `json.dumps` accepts."""
        values: dict[str, Any] = asdict(self) | {"cadence": self.cadence}
        for row, device in zip(values["devices"], self.devices, strict=True):
            row["verdict"] = device.verdict
        return values

    def __str__(self) -> str:
        return "\n".join([*self._device_rows(), "", *self._plan_rows(), "", *self._summary()])

    def _device_rows(self) -> list[str]:
        width = max(18, *(len(device.name) + 2 for device in self.devices))
        title = f"{'device':<{width}}{'ms/microbatch':>14}{'with all':>10}{'ms/step':>9}"
        return [f"{title}{'examples/s':>12}  in the team"] + [
            f"{device.name:<{width}}{device.solo_ms:>14.2f}{device.together_ms:>10.2f}"
            f"{device.step_ms:>9.2f}{device.examples_per_s:>12,.0f}  {device.verdict}"
            for device in self.devices
        ]

    def _plan_rows(self) -> list[str]:
        plans = [self.plain]
        for more in (self.fixed_total, self.elche):
            # on one device, cadences may lead to the same plan, which is shown once
            if len(self.devices) > 1 or more.counts not in [other.counts for other in plans]:
                plans.append(more)
        if self.best.ranks != self.elche.ranks:
            plans.append(self.best)
        if self.local_steps is not None:
            plans.append(self.local_steps)
        title = f"{'predicted':<18}{'window':>14}{'':>10}{'examples/s':>12}{'of the limit':>14}"
        return [f"{title}  counts"] + [
            f"{plan.name:<18}{plan.window_ms:>11.1f} ms{'':>10}{plan.examples_per_s:>12,.0f}"
            f"{plan.limit_share:>14.1%}  {_joined(plan.counts)}"
            for plan in plans
        ]

    def _summary(self) -> list[str]:
        if len(self.devices) == 1:
            return [*self._summary_of_one(), *self._epoch_note(), f"cadence={self.cadence}"]
        alone = max(device.examples_per_s for device in self.devices)
        rows = [
            f"{len(self.devices)} devices with ElChe: "
            f"{self.elche.examples_per_s / self.plain.examples_per_s:.2f} times plain pmap, "
            f"{self.elche.examples_per_s / alone:.2f} times the fastest device alone.",
            f"A synchronisation costs {self.sync_ms:.2f} ms.",
            f"An update is made of {sum(self.elche.counts)} microbatches, with plain pmap of "
            f"{len(self.devices)}: look at the learning rate.",
        ]
        if self.additive < ADDITIVE:
            rows.append(
                f"Together the devices reach {self.additive:.0%} of the sum of their speeds "
                "alone: they share something\n(cores, a bus, power)."
            )
        left = [rank for rank in self.elche.ranks if rank not in self.recommended.ranks]
        if left:
            costs, gives = (
                ("it costs", "it gives") if len(left) == 1 else ("they cost", "they give")
            )
            rows.append(
                f"Leave device{'s' if len(left) > 1 else ''} {_joined(left)} out: {costs} more "
                f"(exchange, speed of the others) than {gives}."
            )
        return [*rows, *self._link_note(), *self._epoch_note(), f"cadence={self.cadence}"]

    def _link_note(self) -> list[str]:
        if self.local_steps is None:
            return []
        rows = [f"The link is slow: exchanges take {self.sync_share:.0%} of the windows of ElChe."]
        more = self.local_steps.examples_per_s / self.elche.examples_per_s
        if self.recommended is not self.local_steps:
            return rows
        outer = ", ".join(f"{name}={value}" for name, value in OUTER.items())
        return [
            *rows,
            f"DiLoCo with int8, whose devices step between exchanges, is {more:.2f} times as fast:",
            f'averaging=elche.DiLoCo(outer=optax.sgd({outer}), compression="int8")',
        ]

    def _summary_of_one(self) -> list[str]:
        rows = ["One device: nothing to exchange, nothing to share out."]
        count, step_ms = self.elche.counts[0], self.devices[0].step_ms
        if count > 1:
            rows += [
                f"An optimizer step costs {step_ms:.2f} ms, with the host's part in it.",
                f"An update is made of {count} microbatches, with plain pmap of 1: look at the "
                "learning rate.",
            ]
        return rows

    def _epoch_note(self) -> list[str]:
        if self.epoch is None or sum(self.best.counts) < self.epoch:
            return []
        epoch = counted(self.epoch, "microbatch", "microbatches")
        return [f"A window is a whole epoch, which has no more than {epoch}."]


def make_advice(
    names: Sequence[str], forecast: Forecast, cadence: ElChe, total: int | None = None
) -> Advice:
    """Compute the advice from measured speeds.

    Args:
        names: Names of the devices.
        forecast: The measured speeds, the batch size and the length of an epoch.
        cadence: The `ElChe` to compute with.
        total: Microbatches per window of the `FixedTotal` to compute with; None for as many
            as a window of `ElChe` has.

    Returns:
        The advice.

    Examples:
        >>> from elche_jax.advice import Speeds
        >>> from elche_jax.advice.advice import make_advice
        >>> from elche_jax.advice.predict import Forecast
        >>> from elche_jax.cadence import ElChe
        >>> speeds = Speeds((5.0, 5.0, 20.0), (5.0, 5.0, 20.0), sync_ms=1.0)
        >>> forecast = Forecast(speeds, batch_size=8)
        >>> advice = make_advice(["a", "b", "c"], forecast, ElChe(anchor=4))
        >>> advice.elche.counts, [device.verdict for device in advice.devices]
        ((16, 16, 4), ['adds 80 %', 'adds 80 %', 'adds 17 %'])
    """
    speeds, planned = forecast.speeds, forecast.plan
    elche = planned("ElChe", cadence)
    total = sum(elche.counts) if total is None else total
    fixed_total = planned(f"FixedTotal({total})", FixedTotal(total))
    if len(names) == 1:  # `plan` has replaced `ElChe`, see `one_device`
        elche = replace(elche, name=f"FixedTotal({elche.counts[0]})")
    best = forecast.best_plan("the best devices", cadence, elche)
    # a gain within the noise is no reason to leave a device out
    if best.examples_per_s < (1 + SIGNIFICANT) * elche.examples_per_s:
        best = elche

    def gain(rank: int) -> float | None:
        others = [other for other in elche.ranks if other != rank]
        if not others:
            return None
        without = planned("the others", cadence, ranks=others)
        return elche.examples_per_s / without.examples_per_s - 1

    rates = [1 / ms for ms in speeds.together_ms]
    return Advice(
        batch_size=forecast.batch_size,
        devices=tuple(
            DeviceAdvice(
                name=name,
                solo_ms=speeds.solo_ms[rank],
                step_ms=speeds.step_of(rank),
                together_ms=speeds.together_ms[rank],
                examples_per_s=planned("alone", cadence, ranks=[rank]).examples_per_s,
                gain=gain(rank),
            )
            for rank, name in enumerate(names)
        ),
        sync_ms=speeds.sync_ms,
        plain=planned("plain pmap", EveryBatch()),
        fixed_total=fixed_total,
        elche=elche,
        best=best,
        limit_examples_per_s=1e3 * forecast.batch_size * sum(rates),
        additive=sum(rates) / sum(1 / ms for ms in speeds.solo_ms),
        epoch=forecast.epoch,
    )


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
