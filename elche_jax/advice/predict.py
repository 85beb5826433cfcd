"""Predictions for a cadence at measured speeds, in plain arithmetic without JAX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elche_jax import _check as check
from elche_jax.cadence import (
    Cadence,
    Controller,
    ElChe,
    EveryBatch,
    FixedTotal,
    WindowPlan,
    clamp_counts,
)

SIGNIFICANT = 0.02
"""Relative difference in throughput below which short measurements are not conclusive."""

SETTLE = 100
"""Number of windows after which a cadence's counts have settled; `ElChe` needs only a few."""


@dataclass(frozen=True)
class Speeds(check.CheckedFields):
    """Measured speeds of devices, alone and together.

    Attributes:
        solo_ms: Milliseconds per microbatch of each device while the others are idle, without
            optimizer steps, above 0.
        together_ms: The same while all devices work.
        sync_ms: Cost of a synchronisation of all devices, including the optimizer step, in
            milliseconds, at least 0.
        step_ms: Cost of an optimizer step on each device alone, including the host's work for
            a window, in milliseconds, at least 0; None if it costs nothing on any device.

    Raises:
        TypeError: If an entry is not a number.
        ValueError: If a number is out of range, or the sequences differ in length or are
            empty.

    Examples:
        >>> from elche_jax.advice import Speeds
        >>> Speeds((5.0, 20.0), (5.0, 21.0), sync_ms=1.0, step_ms=(0.5, 0.75)).step_ms
        (0.5, 0.75)
    """

    solo_ms: tuple[float, ...] = field(metadata={"above": 0})
    together_ms: tuple[float, ...] = field(metadata={"above": 0})
    sync_ms: float = field(metadata={"low": 0})
    step_ms: tuple[float, ...] | None = field(default=None, metadata={"low": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.solo_ms:
            rule = "have one entry per device"
            raise ValueError(check.message("Speeds", "solo_ms", rule, "none"))
        check.per_device("Speeds", "together_ms", len(self.together_ms), len(self.solo_ms))
        if self.step_ms is not None:
            check.per_device("Speeds", "step_ms", len(self.step_ms), len(self.solo_ms))

    def step_of(self, rank: int) -> float:
        """Return the cost of an optimizer step on a device alone, in milliseconds."""
        return 0.0 if self.step_ms is None else self.step_ms[rank]

    def of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Return milliseconds per microbatch of some devices while only these work.

        Devices that compete for some resource (the host's cores, a bus) are slower the more
        of them work. Only two cases are measured, one of the `n` devices alone and all of them;
        the others are interpolated linearly:

            ms[d] = solo_ms[d] + (together_ms[d] - solo_ms[d]) * (len(ranks) - 1) / (n - 1)

        Examples:
            >>> from elche_jax.advice import Speeds
            >>> Speeds((2.0, 2.0, 4.0), (3.0, 3.0, 6.0), 1.0).of((0, 2))
            (2.5, 5.0)
        """
        others = len(self.solo_ms) - 1
        share = (len(ranks) - 1) / others if others else 0.0
        return tuple(
            self.solo_ms[rank] + (self.together_ms[rank] - self.solo_ms[rank]) * share
            for rank in ranks
        )


@dataclass(frozen=True)
class Plan:
    """Predicted windows of some devices under a cadence.

    Attributes:
        name: Name of the cadence.
        ranks: Ranks of the devices that work.
        counts: Microbatches of each of these devices in a window, which is at most a whole
            epoch.
        anchor: The smallest count, which the slowest device has.
        window_ms: Length of a window in milliseconds, including the synchronisation.
        examples_per_s: Examples per second of all of these devices.
        limit_share: Share of the limit, the sum of the devices' speeds while they work
            together.
    """

    name: str
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    anchor: int
    window_ms: float
    examples_per_s: float
    limit_share: float


@dataclass(frozen=True)
class Forecast:
    """Predicts the windows of a run from the speeds of its devices.

    Attributes:
        speeds: The measured speeds.
        batch_size: Examples per microbatch.
        epoch: Microbatches of an epoch, at least 1; None if unknown.
    """

    speeds: Speeds
    batch_size: int
    epoch: int | None = None

    def plan(self, name: str, cadence: Cadence[Any], ranks: Sequence[int] | None = None) -> Plan:
        """Predict the windows of some devices under a cadence.

        The cadence's controller observes windows of these speeds until its counts have settled.
        Then

            window_ms = max over d of counts[d] * ms[d] + sync_ms
            examples_per_s = 1000 * batch_size * sum(counts) / window_ms
            limit_share = sum(counts) / (window_ms * sum over d of 1 / ms[d])

        with `ms` from `Speeds.of`, and the `sync_ms` of all devices even if fewer work. If the
        size of an epoch is known, the epoch consists of full windows and a smaller one for the
        rest; the two rates are then those of an epoch.

        For a single device `sync_ms` is its own `step_ms`, and `ElChe`, which has nothing to
        balance, is replaced by the cadence from `one_device`.

        Args:
            name: Name of the plan.
            cadence: The cadence.
            ranks: Ranks of the devices that work; None for all.

        Returns:
            The plan.

        Examples:
            >>> from elche_jax.advice.predict import Forecast, Speeds
            >>> from elche_jax.cadence import ElChe
            >>> forecast = Forecast(Speeds((5.0, 20.0), (5.0, 20.0), 2.0), batch_size=8)
            >>> forecast.plan("ElChe", ElChe(anchor=4)).counts
            (16, 4)
        """
        speeds, epoch = self.speeds, self.epoch
        ranks = tuple(range(len(speeds.solo_ms)) if ranks is None else ranks)
        ms, sync_ms = speeds.of(ranks), speeds.sync_ms
        if len(ranks) == 1:
            sync_ms = speeds.step_of(ranks[0])
            if isinstance(cadence, ElChe):
                cadence = one_device(cadence, ms[0], sync_ms)
        # simulated, not computed by a formula, so that dead zones and rounding match those of a run
        counts = settled(cadence, ms, sync_ms)
        if epoch is not None:
            # no window crosses the end of an epoch
            counts = clamp_counts(counts, epoch)
        window_ms = _busy_ms(counts, ms) + sync_ms
        done, taken = sum(counts), window_ms
        if epoch is not None:
            windows, rest = divmod(epoch, done)
            done, taken = epoch, windows * window_ms
            if rest:
                taken += _busy_ms(clamp_counts(counts, rest), ms) + sync_ms
        return Plan(
            name=name,
            ranks=ranks,
            counts=counts,
            anchor=min(counts),
            window_ms=window_ms,
            examples_per_s=1e3 * self.batch_size * done / taken,
            limit_share=done / (taken * sum(1 / each for each in ms)),
        )

    def best_plan(self, name: str, cadence: Cadence[Any], all_devices: Plan) -> Plan:
        """Return the plan with the most examples per second over promising sets of devices.

        These sets are all devices, all but one, and the `k` fastest for every `k`.

        Args:
            name: Name of the plan.
            cadence: The cadence.
            all_devices: The plan with all devices.

        Examples:
            An exchange that costs more than the slow device adds:

            >>> from elche_jax.advice.predict import Forecast, Speeds
            >>> from elche_jax.cadence import ElChe
            >>> forecast = Forecast(Speeds((5.0, 80.0), (5.0, 80.0), 100.0), batch_size=8)
            >>> both = forecast.plan("ElChe", ElChe())
            >>> forecast.best_plan("ElChe", ElChe(), both).ranks
            (0,)
        """
        solo_ms = self.speeds.solo_ms
        world = range(len(solo_ms))
        fastest = sorted(world, key=lambda rank: solo_ms[rank])
        fewer = {tuple(sorted(fastest[:size])) for size in world if size}
        if len(world) > 1:
            fewer |= {tuple(other for other in world if other != rank) for rank in world}
        # sorted, as a set has no order; of equal plans `max` returns the first one, so no device is
        # left out without a gain
        plans = [self.plan(name, cadence, ranks) for ranks in sorted(fewer)]
        return max([all_devices, *plans], key=lambda plan: plan.examples_per_s)


def _busy_ms(counts: Sequence[int], ms: Sequence[float]) -> float:
    """Return the milliseconds until the last device has finished."""
    return max(count * each for count, each in zip(counts, ms, strict=True))


def one_device(cadence: ElChe, ms: float, step_ms: float) -> EveryBatch | FixedTotal:
    """Return the cadence that replaces `ElChe` on one device, for a fair comparison with several.

    Several devices take one optimizer step per window, so a single device may do the same
    under `FixedTotal(n)`, with the anchor `n` that `ElChe` would choose:

        n = min(max_anchor, max(anchor, ceil(step_ms / (overhead_target * ms))))

    If that is not more than 2 % faster, the replacement is `EveryBatch`.

    Examples:
        >>> from elche_jax.advice.predict import one_device
        >>> from elche_jax.cadence import ElChe
        >>> one_device(ElChe(), ms=5.0, step_ms=0.01)
        EveryBatch()
        >>> one_device(ElChe(), ms=5.0, step_ms=10.0)
        FixedTotal(total=20)
    """
    wanted = max(cadence.anchor, math.ceil(step_ms / (cadence.overhead_target * ms)))
    total = min(wanted, cadence.max_anchor)
    faster = (ms + step_ms) / (ms + step_ms / total) - 1
    return FixedTotal(total) if faster > SIGNIFICANT else EveryBatch()


def settled(cadence: Cadence[Any], ms: Sequence[float], sync_ms: float) -> tuple[int, ...]:
    """Return the counts that a cadence settles on if the devices' speeds are constant.

    Examples:
        >>> from elche_jax.advice.predict import settled
        >>> from elche_jax.cadence import FixedTotal
        >>> settled(FixedTotal(8), (30.0, 30.0, 10.0), sync_ms=1.0)
        (2, 1, 5)
    """
    controller = Controller(cadence)
    state = controller.init(len(ms))
    for window in range(SETTLE):
        plan = WindowPlan(window, 0, controller.plan(state, window), examples=0)
        busy = tuple(count * each for count, each in zip(plan.counts, ms, strict=True))
        last = max(busy)
        record = plan.measured(busy, last + sync_ms, sync_ms, last - min(busy), steady=True)
        state = controller.observe(state, record)
    return controller.plan(state, SETTLE)
