"""Contributions of devices to a window, and their reduction to one mean.

With `p[d]` the payload of device `d` and `a[d]` its amount of work,

    mean gradient    mean = sum over d of p[d] / sum over d of a[d]
    local steps      mean = sum over d of w[d] * p[d]      with shares w computed from a

Every formula is written once, for reductions on the devices and on the host, see
`elche_jax.engine.axis`.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from elche_jax.averaging.rules import Compression, DeviceWork, Weigh
from elche_jax.engine.axis import Axis, PerDevice
from elche_jax.engine.exchange import Packing
from elche_jax.engine.loss import SMALLEST_WEIGHT
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.wire import Encoded, Leaves, decoded


class Row(NamedTuple):
    """Numbers about a device's window; scalars, or arrays over devices.

    Attributes:
        amount: Amount of work: sum of weights, or number of optimizer steps.
        own: Whether the device's result is finite, 1 or 0.
        loss: Mean loss.
        weight: Sum of the weights that the loss is a mean over.
        size: Squared norm of the parameters of the last exchange after subtracting the payload.
        steps: Amount of work of the window alone; the `amount` of a fragment covers several
            windows.
    """

    amount: Any
    own: Any
    loss: Any
    weight: Any
    size: Any
    steps: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Contribution:
    """A device's contribution to the mean of a window.

    Attributes:
        payload: The arrays to average, encoded for the wire.
        row: A `Row`, float32, shape `(6,)`.
        sums: Sums over its microbatches: weighted `loss` and `metrics`, `weight`, and `bad`,
            which is 1 if the device's result is not finite.
        state: For every leaf of model state that is merged, its change if the rule is a mean,
            otherwise its value.
    """

    payload: Encoded
    row: Any
    sums: dict[str, Any]
    state: Leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """The result of a reduction, from which devices compute their new state.

    Attributes:
        payload: The mean.
        state: For every leaf of model state that is merged, the mean change or the value.
        spread: For every pooled variance, the variance of the devices' means.
        good: Whether any device contributed.
        finite: Whether all contributions are finite.
        sound: Whether the devices' weights are finite, nonnegative and not all 0.
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
    """Reduces the contributions to a window to one mean.

    Attributes:
        merge: The rules of the leaves that are merged; none is `"keep"`.
        weigh: Weights the devices; None for the mean over all their work.
        compression: Type of the payload on the wire.
        device_loss: Whether the metrics hold each device's own loss.
        pending: Whether the payload is of an earlier window, while the sums are of the last ones.
            After a return to a copy of an older state, the payload's amount of work differs from
            that of the sums.
        spans: Whether the payload may cover several windows, while model state covers the last.
    """

    merge: MergeRules
    weigh: Weigh | None = None
    compression: Compression | None = None
    device_loss: bool = False
    pending: bool = False
    spans: bool = False

    def __call__(
        self, axis: Axis, contributions: PerDevice, window: Any
    ) -> tuple[Mean, dict[str, Any]]:
        """Return the mean and the metrics of the window.

        Args:
            axis: The devices.
            contributions: Their `Contribution`s.
            window: Index of the window.

        Returns:
            The mean, and the metrics; per-device metrics have shape `(devices,)`.
        """
        xp = axis.xp
        payload, sums, state = (
            axis.each(lambda one, name=name: getattr(one, name), contributions)
            for name in ("payload", "sums", "state")
        )
        if self.weigh is None:
            weight = axis.each(lambda one: one.row[0], contributions)
            if self.pending:
                sums = axis.each(lambda one: one.sums | {"amount": one.row[0]}, contributions)
            totals, moved, total = self._sums(axis, payload, sums, state, weight, None)
            metrics = _metrics(totals, xp) | self._by_device(axis, sums)
            amount = totals["amount" if self.pending else "weight"]
            by = _divisor(amount, xp)
            merged, spread = self._merged(axis, state, _over(moved, by), weight)
            mean = Mean(
                _over(total, by), merged, _over(spread, by),
                amount > 0, metrics["finite"], xp.bool_(True), metrics["loss"],
            )  # fmt: skip
            return mean, metrics | _known(totals, metrics, xp)
        rows = Row(*axis.rows(axis.each(lambda one: one.row, contributions)).T)
        shares, sound = self._shares(rows, rows.amount, window, xp)
        share = last = axis.mine(shares)
        shares, idle = shares.astype(xp.float32), False
        if self.spans:
            by_steps, _ = self._shares(rows, rows.steps, window, xp)
            last, idle = axis.mine(by_steps), ~(by_steps > 0).any()
        totals, moved, total = self._sums(axis, payload, sums, state, last, share)
        metrics = _metrics(totals, xp) | self._by_device(axis, sums)
        metrics |= _known(totals, metrics, xp)
        metrics["finite"] &= sound
        metrics |= {"share": shares, "exchange_bytes": self._bytes(axis, contributions)}
        metrics["workers"] = 1 / xp.where((shares > 0).any(), (shares**2).sum(), 1)
        metrics |= _distances(axis, payload, total, rows, shares)
        merged, spread = self._merged(axis, state, moved, last, idle)
        good = (shares > 0).any() & sound
        mean = Mean(total, merged, spread, good, metrics["finite"], sound, metrics["loss"])
        return mean, metrics

    def _shares(self, rows: Row, amount: Any, window: Any, xp: ModuleType) -> tuple[Any, Any]:
        """Return the devices' shares by an amount of work, see `shares_of`."""
        assert self.weigh is not None
        worked = (rows.own > 0) & (amount > 0)
        work = DeviceWork(amount, _losses(rows, worked, xp), worked, window, xp)
        return shares_of(self.weigh, work)

    @property
    def plain(self) -> bool:
        """Whether payloads are summed as they are, so that partial sums may be formed first."""
        return self.weigh is None and self.compression is None

    def _by_device(self, axis: Axis, sums: PerDevice) -> dict[str, Any]:
        """Return each device's mean loss over its own microbatches; NaN for one without work."""
        if not self.device_loss:
            return {}
        xp = axis.xp
        rows = axis.rows(axis.each(lambda one: xp.stack([one["loss"], one["weight"]]), sums))
        loss, weight = rows.T
        worked = weight > 0
        return {"device_loss": xp.where(worked, loss / xp.where(worked, weight, 1), xp.nan)}

    def _sums(
        self, axis: Axis, payload: PerDevice, sums: PerDevice, state: PerDevice,
        weight: PerDevice, factor: PerDevice | None,
    ) -> tuple[dict[str, Any], Leaves, Leaves]:  # fmt: skip
        """Sum over devices, in one collective if the payload is not compressed."""
        moves = axis.each(lambda leaves: [leaves[i] for i in self.merge.means], state)
        if self.compression is None:
            arrays = axis.each(lambda sent: sent.arrays, payload)
            totals, moved, total = axis.sums((sums, None), (moves, weight), (arrays, factor))
            return totals, moved, total
        totals, moved = axis.sums((sums, None), (moves, weight))
        return totals, moved, axis.decoded_sum(payload, factor)

    def _merged(
        self, axis: Axis, state: PerDevice, moved: Leaves, weight: PerDevice, idle: Any = False
    ) -> tuple[Leaves, Leaves]:
        """Merge model state leaf by leaf; also return what to add to pooled variances.

        If `idle`, no device has worked in the window, but the mean counts, as it covers earlier
        windows, too. Model state is then the value that all devices have.
        """
        move = dict(zip(self.merge.means, moved, strict=True))
        means = [mean for mean in self.merge.mean_of if mean is not None]
        spread: Leaves = []
        if means:
            # relative to the merged mean: a difference of squares would cancel for means that
            # are far from 0
            apart = axis.each(lambda own: [(own[mean] - move[mean]) ** 2 for mean in means], state)
            (spread,) = axis.sums((apart, weight))
        worked = axis.each(lambda one: (one > 0) | idle, weight)
        take = {"max": axis.largest, "first": axis.first}
        merged = [
            move[i] if i in move else take[rule](axis.each(lambda own: own[i], state), worked)  # noqa: B023  # called at once
            for i, rule in enumerate(self.merge.rules)
        ]
        return merged, spread

    def _bytes(self, axis: Axis, contributions: PerDevice) -> Any:
        """Return the largest number of bytes that a device contributes."""
        if axis.size == 1:
            return axis.xp.float32(0)
        return axis.xp.float32(np.max(axis.each(self.bytes_of, contributions)))

    def bytes_of(self, contribution: Contribution) -> int:
        """Return the bytes of a contribution, given as arrays or shapes.

        This includes the spread of pooled variances, which takes a second exchange.
        """
        state = contribution.state
        pooled = [state[i] for i, mean in enumerate(self.merge.mean_of) if mean is not None]
        sent = sum(leaf.size * leaf.dtype.itemsize for leaf in [*state, *pooled])
        return contribution.payload.bytes + sent


def _losses(rows: Row, worked: Any, xp: ModuleType) -> Any:
    """Return the devices' losses; the others' mean if a device's work is of earlier windows."""
    measured = worked & (rows.weight > 0)
    number = xp.maximum(measured.sum(), 1).astype(np.float32)
    mean = xp.where(measured, rows.loss, 0).sum() / number
    return xp.where(measured, rows.loss, xp.where(worked, mean, 0))


def shares_of(weigh: Weigh, work: DeviceWork) -> tuple[Any, Any]:
    """Normalize the devices' weights.

    Returns:
        The shares, in JAX's widest float, all 0 if no device worked; and whether the weights are
        finite, nonnegative and not all 0.
    """
    xp = work.xp
    weights = xp.where(work.worked, weigh(work), 0).astype(xp.float32)
    sound = (xp.isfinite(weights) & (weights >= 0)).all()
    weights = xp.where(sound, weights, 0)
    # exact, and keeps the sum of large weights finite
    weights = weights * xp.where(weights.max() > 2.0**64, 2.0**-64, 1).astype(xp.float32)
    # so that the mean of float64 parameters keeps their precision
    weights = weights.astype(jax.dtypes.canonicalize_dtype(np.float64))
    total = weights.sum()
    sound &= (total > 0) | ~work.worked.any()
    return weights / xp.where(total > 0, total, 1), sound


def _divisor(weight: Any, xp: ModuleType) -> Any:
    """Return the divisor that turns sums into means; infinite if the weight is 0, for means of 0.

    With a factor instead, the mean of equal values would not be that value, and the inverse of a
    large weight would be flushed to 0.
    """
    return xp.where(weight > 0, weight, xp.inf).astype(xp.float32)


def _over(sums: Leaves, by: Any) -> Leaves:
    return [total / by.astype(total.dtype) for total in sums]


def _metrics(totals: dict[str, Any], xp: ModuleType) -> dict[str, Any]:
    """Return the weighted means over all devices."""
    weight = totals["weight"]
    counted, by = weight > 0, _divisor(weight, xp)
    metrics = {name: value / by for name, value in totals["metrics"].items()}
    finite = (totals["bad"] == 0) & xp.isfinite(totals["loss"]) & xp.isfinite(weight)
    finite &= ~counted | (weight >= SMALLEST_WEIGHT)
    return metrics | {"loss": totals["loss"] / by, "weight": weight, "finite": finite}


def _known(totals: dict[str, Any], metrics: dict[str, Any], xp: ModuleType) -> dict[str, Any]:
    """Return the loss and the user's metrics, NaN if the weight is 0.

    This is also the case in the first windows if metrics are those of an earlier window.
    """
    names = ("loss", *totals["metrics"])
    return {name: xp.where(totals["weight"] > 0, metrics[name], xp.nan) for name in names}


def _distances(
    axis: Axis, payload: PerDevice, mean: Leaves, rows: Row, shares: Any
) -> dict[str, Any]:
    """Measure how far the devices are from their average, before any outer optimizer.

    With `x` the parameters before the window, `x - g` those of a device after it, `m` the mean
    of `g` and `a = x - m` the average,

        distance    = |g - m| / |a|       how far the device has to move
        update_norm = |g|                 how far it moved on its own
        cosine      = g . m / (|g| |m|)   0 if either is 0

    With `w` the shares, `|a|**2 = sum of w * (|x - g|**2 - |g - m|**2)`. It could not be computed
    from `x` itself if the parameters became much smaller. Computed this way, it is less exact for
    devices that are far apart compared with their average. All are NaN for devices that are late
    or not finite.
    """
    xp = axis.xp

    def numbers(sent: Encoded) -> Any:
        g, m = packed(xp, decoded(sent), mean)
        apart = [x - y for x, y in zip(g, m, strict=True)]
        return xp.stack([dot(apart, apart, xp), dot(g, g, xp), dot(g, m, xp)])

    apart, own, along = axis.rows(axis.each(numbers, payload)).T
    (m,) = packed(xp, mean)
    length = dot(m, m, xp)
    size = xp.where(shares > 0, shares * (rows.size - apart), 0).sum()  # |a|**2
    scale = xp.sqrt(own) * xp.sqrt(length)
    there = rows.own > 0
    far = xp.sqrt(apart) / xp.sqrt(xp.where(size > 0, size, xp.nan))
    cosine = xp.where(scale > 0, along / xp.where(scale > 0, scale, 1), 0)
    each = {"distance": far, "update_norm": xp.sqrt(own), "cosine": cosine}
    return {name: xp.where(there, row, xp.nan) for name, row in each.items()}


def packed(xp: ModuleType, *lists: Leaves) -> tuple[Leaves, ...]:
    """Pack lists of arrays, so that there is less to compile; on the host they stay as they are.

    All lists have the shapes of the first one and are packed like it. Arrays that have one dtype in
    the first list have one dtype in every list.
    """
    if xp is np:
        return lists
    packing = Packing.of(lists[0])
    return tuple(map(packing.pack, lists))


def dot(a: Leaves, b: Leaves, xp: ModuleType) -> Any:
    """Return the inner product of two lists of arrays, float32."""
    products = (xp.vdot(x, y).astype(xp.float32) for x, y in zip(a, b, strict=True))
    return sum(products, xp.float32(0))
