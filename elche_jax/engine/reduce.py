"""What devices bring to the end of a window, and how it becomes one mean.

With `p[d]` what device `d` brings and `a[d]` what it did for it,

    mean gradient    mean = sum over d of p[d] / sum over d of a[d]
    local steps      mean = sum over d of w[d] * p[d]      with w the shares a rule makes of a

Every formula stands here once, for devices among themselves and for the host alike, see
`elche_jax.engine.axis`.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from elche_jax.averaging.rules import Compression, DeviceWork, Weigh
from elche_jax.engine.axis import Axis, PerDevice
from elche_jax.engine.loss import SMALLEST_WEIGHT
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.wire import Encoded, decoded

PyTree = Any
Leaves = list[Any]


class Row(NamedTuple):
    """What is known of every device at the end of a window; scalars, or rows over devices.

    Attributes:
        amount: What the device did: its weight, or its optimizer steps.
        own: Whether what it did is finite, 1 or 0.
        loss: Its mean loss.
        size: Sum of squares of the parameters that it started from.
        product: Their product with what it brings.
    """

    amount: Any
    own: Any
    loss: Any
    size: Any
    product: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contribution:
    """What a device brings.

    Attributes:
        payload: What is averaged, as it travels.
        row: A `Row`, float32, shape `(5,)`.
        sums: Sums over its microbatches: `loss`, `weight` and `metrics` times their weights,
            and `bad`, 1 if the device was not finite.
        state: Of every leaf that is merged its change where the rule is a mean, else its
            value.
    """

    payload: Encoded
    row: Any
    sums: dict[str, Any]
    state: Leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """What the devices make their new state of.

    Attributes:
        payload: The mean, float32.
        state: Of every leaf that is merged the mean change, or the value.
        spread: Of every pooled variance how far the devices' means lie apart, squared, on average.
        good: Whether any device had a part in it.
        finite: Whether all that devices brought is finite.
        sound: Whether the weights of devices are numbers of at least 0, not all of them 0.
        loss: Mean loss over all devices.
    """

    payload: Leaves
    state: Leaves
    spread: Leaves
    good: Any
    finite: Any
    sound: Any
    loss: Any


@dataclass(frozen=True)
class Reduction:
    """Makes one mean of the contributions of a window.

    Attributes:
        merge: A rule for every leaf that is merged, none of them `"keep"`.
        weigh: The weights of devices; None for the mean over all that they did.
        compression: Type of the payload on the wire.
    """

    merge: MergeRules
    weigh: Weigh | None = None
    compression: Compression | None = None

    def __call__(
        self, axis: Axis, contributions: PerDevice, window: Any
    ) -> tuple[Mean, dict[str, Any]]:
        """The mean and the metrics of the window, those of devices of shape `(devices,)`.

        Args:
            axis: The devices.
            contributions: What they bring, a `Contribution` each.
            window: Number of the window.
        """
        xp = axis.xp
        payload, sums, state = (
            axis.each(lambda one, name=name: getattr(one, name), contributions)
            for name in ("payload", "sums", "state")
        )
        if self.weigh is None:
            weight = axis.each(lambda one: one.row[0], contributions)
            totals, moved, total = self._sums(axis, payload, sums, state, weight, None)
            metrics, scale = _metrics(totals, xp)
            merged, spread = self._merged(axis, state, [x * scale for x in moved], weight)
            mean = Mean(
                [x * scale for x in total], merged, [x * scale for x in spread],
                totals["weight"] > 0, metrics["finite"], xp.bool_(True), metrics["loss"],
            )  # fmt: skip
            return mean, metrics
        rows = Row(*axis.rows(axis.each(lambda one: one.row, contributions)).T)
        worked = (rows.own > 0) & (rows.amount > 0)
        work = DeviceWork(rows.amount, rows.loss, worked, window, xp)
        shares, sound = shares_of(self.weigh, work)
        share = axis.mine(shares)
        totals, moved, total = self._sums(axis, payload, sums, state, share, share)
        metrics, _ = _metrics(totals, xp)
        metrics["loss"] = xp.where(totals["weight"] > 0, metrics["loss"], xp.nan)
        metrics["finite"] &= sound
        metrics |= {"share": shares, "exchange_bytes": self._bytes(axis, contributions)}
        metrics["workers"] = 1 / xp.where((shares > 0).any(), (shares**2).sum(), 1)
        metrics |= _distances(axis, payload, total, rows, shares)
        merged, spread = self._merged(axis, state, moved, share)
        good = (shares > 0).any() & sound
        mean = Mean(total, merged, spread, good, metrics["finite"], sound, metrics["loss"])
        return mean, metrics

    def _sums(
        self, axis: Axis, payload: PerDevice, sums: PerDevice, state: PerDevice,
        weight: PerDevice, factor: PerDevice | None,
    ) -> tuple[dict[str, Any], Leaves, Leaves]:  # fmt: skip
        """Sums over devices, in one exchange where the payload travels as it is."""
        moves = axis.each(lambda leaves: [leaves[i] for i in self.merge.means], state)
        if self.compression is None:
            arrays = axis.each(lambda sent: sent.arrays, payload)
            totals, moved, total = axis.sums((sums, None), (moves, weight), (arrays, factor))
            return totals, moved, total
        totals, moved = axis.sums((sums, None), (moves, weight))
        return totals, moved, axis.decoded_sum(payload, factor)

    def _merged(
        self, axis: Axis, state: PerDevice, moved: Leaves, weight: PerDevice
    ) -> tuple[Leaves, Leaves]:
        """State of several devices as one, leaf by leaf, see `elche_jax.engine.merge`; and what
        pooled variances have to be added to."""
        move = dict(zip(self.merge.means, moved, strict=True))
        means = [mean for mean in self.merge.mean_of if mean is not None]
        spread: Leaves = []
        if means:
            # around the merged mean: as a difference of squares it would be lost in the
            # rounding of a mean that is far from 0
            apart = axis.each(lambda own: [(own[mean] - move[mean]) ** 2 for mean in means], state)
            (spread,) = axis.sums((apart, weight))
        worked = axis.each(lambda one: one > 0, weight)
        take = {"max": axis.largest, "first": axis.first}
        merged = [
            move[i] if i in move else take[rule](axis.each(lambda own: own[i], state), worked)  # noqa: B023  # called at once
            for i, rule in enumerate(self.merge.rules)
        ]
        return merged, spread

    def _bytes(self, axis: Axis, contributions: PerDevice) -> Any:
        """Bytes that a device puts in."""
        if axis.size == 1:
            return axis.xp.float32(0)
        return axis.xp.float32(np.max(axis.each(self.bytes_of, contributions)))

    def bytes_of(self, contribution: Contribution) -> int:
        """Bytes of a contribution, or of its shapes; the spread of a pooled variance is
        exchanged after its mean, and counts."""
        state = contribution.state
        pooled = [state[i].size for i, mean in enumerate(self.merge.mean_of) if mean is not None]
        return contribution.payload.bytes + 4 * (sum(leaf.size for leaf in state) + sum(pooled))


def shares_of(weigh: Weigh, work: DeviceWork) -> tuple[Any, Any]:
    """Shares of the devices, float32, all 0 where nobody has worked; and whether the weights are
    numbers of at least 0, not all of them 0."""
    xp = work.xp
    weights = xp.where(work.worked, weigh(work), 0).astype(xp.float32)
    sound = (xp.isfinite(weights) & (weights >= 0)).all()
    weights = xp.where(sound, weights, 0)
    total = weights.sum()
    sound &= (total > 0) | ~work.worked.any()
    return weights / xp.where(total > 0, total, 1), sound


def _metrics(totals: dict[str, Any], xp: ModuleType) -> tuple[dict[str, Any], Any]:
    """Means by weight over all devices, and what one divides sums by."""
    weight = totals["weight"]
    counted = weight > 0
    scale = xp.where(counted, 1 / xp.where(counted, weight, 1), 0).astype(xp.float32)
    metrics = {name: value * scale for name, value in totals["metrics"].items()}
    finite = (totals["bad"] == 0) & xp.isfinite(totals["loss"]) & xp.isfinite(weight)
    finite &= ~counted | (weight >= SMALLEST_WEIGHT)
    return metrics | {"loss": totals["loss"] * scale, "weight": weight, "finite": finite}, scale


def _distances(
    axis: Axis, payload: PerDevice, mean: Leaves, rows: Row, shares: Any
) -> dict[str, Any]:
    """How far the devices were from their average, before any outer optimizer.

    With `x` the parameters of before, `g` what a device has taken off them, `m` the mean of
    these and `a = x - m` the average,

        distance    = |g - m| / |a|       how far the device has to move
        update_norm = |g|                 how far it had gone on its own
        cosine      = g . m / (|g| |m|)   0 where one of them is 0

    and NaN of a device that is late or was not finite.
    """
    xp = axis.xp

    def numbers(sent: Encoded) -> Any:
        g = decoded(sent)
        apart = [x - y for x, y in zip(g, mean, strict=True)]
        return xp.stack([_dot(apart, apart, xp), _dot(g, g, xp), _dot(g, mean, xp)])

    apart, own, along = axis.rows(axis.each(numbers, payload)).T
    length, product = _dot(mean, mean, xp), xp.where(shares > 0, shares * rows.product, 0).sum()
    size = rows.size - 2 * product + length  # of a
    scale = xp.sqrt(own) * xp.sqrt(length)
    there = rows.own > 0
    far = xp.sqrt(apart) / xp.sqrt(xp.where(size > 0, size, xp.nan))
    cosine = xp.where(scale > 0, along / xp.where(scale > 0, scale, 1), 0)
    each = {"distance": far, "update_norm": xp.sqrt(own), "cosine": cosine}
    return {name: xp.where(there, row, xp.nan) for name, row in each.items()}


def _dot(a: Leaves, b: Leaves, xp: ModuleType) -> Any:
    return sum((xp.vdot(x, y) for x, y in zip(a, b, strict=True)), xp.float32(0))
