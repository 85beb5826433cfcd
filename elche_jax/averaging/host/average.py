"""The average of what devices have delivered, on the host, in NumPy float32.

With `g[d]` the progress of device `d` in a window (its parameters at the beginning less
those at the end), and `w[d]` its share,

    delta = sum over d of w[d] * g[d]

is what the devices then make the new parameters of.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.averaging.rules import Exponent
from elche_jax.engine.loss import SMALLEST_WEIGHT
from elche_jax.engine.merge import MergeRules

Arrays = list[np.ndarray]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Delivery:
    """What a device delivers at the end of a window.

    Attributes:
        progress: What its steps have taken off every array that is trained, float32.
        steps: Optimizer steps it is of, float32.
        own: Whether what it has done in the window is finite; else that is left out.
        sums: Sums over its microbatches, see `elche_jax.averaging.program.seen`.
        model_state: Its model state, the leaves that are merged.
        opt_state: Its optimizer state, where that is averaged; else nothing.
        size: Sum of squares of the parameters it knows the average to be.
        product: Their product with its progress.
        fine: Whether the parameters made of the last average it has taken up were finite.
    """

    progress: list[Any]
    steps: Any
    own: Any
    sums: dict[str, Any]
    model_state: list[Any]
    opt_state: list[Any]
    size: Any
    product: Any
    fine: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AverageUpdate:
    """What the devices are told of an average.

    Attributes:
        delta: The average progress, float32.
        model_state: The merged model state, leaves that are merged.
        opt_state: The averaged optimizer state, or nothing.
        good: Whether any device had a part in it.
    """

    delta: list[Any]
    model_state: list[Any]
    opt_state: list[Any]
    good: Any


@dataclass(frozen=True)
class Average:
    """The average of a window, and what there is to report of it.

    Attributes:
        update: For the devices.
        metrics: Metrics of the window; those of devices have shape `(devices,)`.
        own: For every device whether what it delivered was finite; True where it
            delivered nothing.
    """

    update: AverageUpdate
    metrics: dict[str, Any]
    own: np.ndarray


@dataclass(frozen=True)
class HostAverage:
    """Averages deliveries.

    Attributes:
        exponent: See `ParameterAveraging`.
        model_state: How the leaves of model state are merged.
        opt_state: The same of the optimizer state, where that is averaged.
        metrics: Names of the user's metrics.
        sent: Bytes that a device delivers.
    """

    exponent: Exponent
    model_state: MergeRules
    opt_state: MergeRules
    metrics: tuple[str, ...]
    sent: int

    def __call__(self, deliveries: Sequence[Delivery | None], window: int) -> Average:
        """Averages those of one window.

        Args:
            deliveries: By rank; None of a device that is late. At least one is there.
            window: Number of the window, for an exponent that is a schedule.
        """
        there = [d for d in deliveries if d is not None]
        own = np.array([d is None or bool(d.own) for d in deliveries])
        steps = np.array([0.0 if d is None else float(d.steps) for d in deliveries])
        shares = shares_of(steps, self.exponent, window)
        parts = [(d, w) for d, w in zip(deliveries, shares, strict=True) if d is not None and w > 0]
        update = AverageUpdate(
            mean_of([d.progress for d, _ in parts], [w for _, w in parts])
            if parts
            else [np.zeros_like(x) for x in there[0].progress],
            merge(self.model_state, [(d.model_state, w) for d, w in parts], there[0].model_state),
            merge(self.opt_state, [(d.opt_state, w) for d, w in parts], there[0].opt_state),
            np.bool_(bool(parts)),
        )
        metrics = _means([d.sums for d in there], self.metrics)
        counted = not 0 < metrics["weight"] < SMALLEST_WEIGHT
        metrics["finite"] = np.bool_(own.all() and all(d.fine for d in there) and counted)
        metrics |= _distances(deliveries, update.delta, shares, own)
        metrics["share"] = shares
        metrics["workers"] = np.float32(1 / (shares**2).sum() if parts else 1.0)
        metrics["exchange_bytes"] = np.float32(self.sent)
        return Average(update, metrics, own)


def shares_of(steps: np.ndarray, exponent: Exponent, window: int) -> np.ndarray:
    """Shares in proportion to `steps ** exponent`, float32; all 0 where nobody has worked."""
    worked = steps > 0
    if not worked.any():
        return np.zeros(len(steps), np.float32)
    if callable(exponent):
        with _on_cpu():
            exponent = float(exponent(window))
        if not np.isfinite(exponent):
            rule, todo = "give finite numbers", "Look at the schedule."
            name = f"exponent({window})"
            raise ValueError(check.message("averaging", name, rule, exponent, todo))
    logs = exponent * np.log(np.where(worked, steps, 1.0))
    raw = np.where(worked, np.exp(logs - logs[worked].max()), 0.0)
    return (raw / raw.sum()).astype(np.float32)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Where a device may hang the host's own arithmetic must not be on one."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # this process was told to have none
        return contextlib.nullcontext()


def mean_of(rows: Sequence[Arrays], shares: Sequence[float]) -> Arrays:
    """`sum over d of shares[d] * rows[d]`, array by array, float32."""
    total = [np.array(x, np.float32) for x in rows[0]]
    for mine, *others in zip(total, *rows[1:], strict=True):
        mine *= shares[0]
        for x, share in zip(others, shares[1:], strict=True):
            mine += np.asarray(x, np.float32) * share
    return total


def merge(rules: MergeRules, parts: Sequence[tuple[Arrays, float]], otherwise: Arrays) -> Arrays:
    """State of several devices as one, leaf by leaf, see `elche_jax.engine.merge`.

    Args:
        rules: A rule per leaf, none of them `"keep"`.
        parts: Leaves and share of every device that has a part in it, in rank order.
        otherwise: What it is where there is none.
    """
    if not parts:
        return otherwise
    merged: Arrays = []
    for i, rule in enumerate(rules.rules):
        column = [leaves[i] for leaves, _ in parts]
        if rule == "first":
            merged.append(column[0])
        elif rule == "max":
            merged.append(np.maximum.reduce(column))
        else:
            merged.append(_mean(column, [share for _, share in parts]))
    for i, mean in enumerate(rules.mean_of):
        if mean is not None:
            middle, dtype = merged[mean].astype(np.float32), merged[i].dtype
            apart = [[(leaves[mean].astype(np.float32) - middle) ** 2] for leaves, _ in parts]
            wider = mean_of(apart, [share for _, share in parts])[0]
            merged[i] = (merged[i].astype(np.float32) + wider).astype(dtype)
    return merged


def _mean(column: Arrays, shares: Sequence[float]) -> np.ndarray:
    """Counted from the first one, so that what is alike stays as it is bit for bit."""
    first = column[0].astype(np.float32)
    start = np.where(np.isfinite(first), first, np.float32(0))
    moves = mean_of([[x.astype(np.float32) - start] for x in column], shares)[0]
    return (start + moves).astype(column[0].dtype)


def _means(sums: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """The window's metrics of the sums of its devices."""
    weight = np.float32(sum(s["weight"] for s in sums))
    scale = np.float32(1 / weight) if weight > 0 else np.float32(0)
    metrics = {name: np.float32(sum(s["metrics"][name] for s in sums)) * scale for name in names}
    loss = np.float32(sum(s["loss"] for s in sums)) * scale
    return metrics | {"loss": loss if weight > 0 else np.float32("nan"), "weight": weight}


def _distances(
    deliveries: Sequence[Delivery | None], delta: Arrays, shares: np.ndarray, own: np.ndarray
) -> dict[str, np.ndarray]:
    """How far the devices were from their average, before any outer optimizer.

    With `x` the parameters of before and `a = x - delta` the average,

        distance    = |g - delta| / |a|
        update_norm = |g|
        cosine      = g . delta / (|g| |delta|)      0 where one of them is 0

    and NaN of a device that is late or was not finite.
    """
    mean, product = _dot(delta, delta), 0.0
    for delivery, share in zip(deliveries, shares, strict=True):
        if delivery is not None and share > 0:
            product += float(share) * float(delivery.product)
    rows = np.full((3, len(deliveries)), np.nan, np.float32)
    for rank, delivery in enumerate(deliveries):
        if delivery is None or not own[rank]:
            continue
        g = delivery.progress
        apart = [x - y for x, y in zip(g, delta, strict=True)]
        length = np.sqrt(_dot(g, g))
        scale = length * np.sqrt(mean)
        size = float(delivery.size) - 2 * product + mean  # of a
        rows[0, rank] = np.sqrt(_dot(apart, apart) / size) if size > 0 else np.nan
        rows[1, rank] = length
        rows[2, rank] = _dot(g, delta) / scale if scale > 0 else 0.0
    return dict(zip(("distance", "update_norm", "cosine"), rows, strict=True))


def _dot(a: Arrays, b: Arrays) -> float:
    return float(sum(np.vdot(x, y) for x, y in zip(a, b, strict=True)))
