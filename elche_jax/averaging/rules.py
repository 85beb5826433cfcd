"""Averaging rules: what a window does to the parameters, as chosen by the user."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import numpy as np
import optax

from elche_jax import _check as check

Exponent = float | Callable[[Any], Any]
"""A number, or an optax schedule of the window number."""

OptimizerState = Literal["average", "keep", "reset"]
Compression = Literal["bfloat16", "int8"]
OPTIMIZER_STATES = ("average", "keep", "reset")
COMPRESSIONS = (None, "bfloat16", "int8")
MOST = 64
"""Largest number of pending windows; each takes one more copy of the parameters."""


@dataclass(frozen=True)
class DeviceWork:
    """Work of the devices between two exchanges, the argument of `weigh`; arrays `(devices,)`.

    Attributes:
        steps: Optimizer steps, float32.
        loss: Mean loss of the window, float32; 0 for a device without work. With fragments,
            the steps since the last exchange of a fragment are those of several windows: a device
            that had no work in the last of them gets the mean loss of the other devices.
        worked: Whether the device is part of the mean: it had work and its result is finite.
        window: Number of the window.
        xp: Array module: `jax.numpy`, or `numpy` on the host.
    """

    steps: Any
    loss: Any
    worked: Any
    window: Any
    xp: ModuleType


Weigh = Callable[[DeviceWork], Any]
"""Returns the weights of the devices, at least 0, which are normalised to shares."""


class AveragingRule:
    """Base class of the rules with local steps; a custom rule overrides `weigh`.

    The class attributes are the defaults of a rule that does not set them.

    Attributes:
        outer: Optimizer that takes the averaged difference as its gradient, or None.
        inner_steps: Steps of the slowest device between two exchanges, or None.
        fragments: Number of parts of the parameters, exchanged in turn.
        exponent: See `ParameterAveraging`.
        optimizer_state: See `ParameterAveraging`.
        compression: See `ParameterAveraging`.
        delay: See `ParameterAveraging`.

    Examples:
        Weight the devices by the inverse of their loss:

        >>> from dataclasses import dataclass
        >>> import elche_jax as elche
        >>> @dataclass(frozen=True)
        ... class InverseLoss(elche.ParameterAveraging):
        ...     def weigh(self, work):
        ...         return 1 / work.xp.maximum(work.loss, 1e-6)
        >>> InverseLoss(optimizer_state="keep").delay
        0
    """

    outer: optax.GradientTransformation | None = None
    inner_steps: int | None = None
    fragments: int = 1
    exponent: Exponent = 1.0
    optimizer_state: OptimizerState = "average"
    compression: Compression | None = None
    delay: int = 0

    def weigh(self, work: DeviceWork) -> Any:
        """Return the weights of the devices, an array `(devices,)`, at least 0 and not all 0.

        A device's share is its weight divided by the sum of the weights, and 0 if it did not
        work. With an exchange on the devices the function is traced, like an optax schedule;
        on the host it gets NumPy arrays. The default is `steps ** exponent`.

        Args:
            work: Work of the devices.
        """
        xp, power = work.xp, self.exponent
        if callable(power):
            power = _scheduled(power, work)
        elif power in (0.0, 1.0):
            # exact, while logarithms round
            return work.steps if power else xp.ones_like(work.steps)
        # in logarithms, as a power of a count may overflow a float
        logs = xp.where(work.worked, power * xp.log(xp.maximum(work.steps, 1.0)), -xp.inf)
        highest = logs.max()
        # `highest` is -inf if no device worked; the last term is NaN for an infinite power, so
        # that the window is not finite
        return xp.exp(logs - xp.where(xp.isfinite(highest), highest, 0)) + 0 * power


def _scheduled(exponent: Callable[[Any], Any], work: DeviceWork) -> Any:
    if work.xp is not np:
        return exponent(work.window)
    power = float(exponent(work.window))
    if not np.isfinite(power):
        rule, todo = "return finite numbers", "Check the schedule."
        name = f"exponent({work.window})"
        raise ValueError(check.message("averaging", name, rule, power, todo))
    return power


@dataclass(frozen=True)
class ParameterAveraging(AveragingRule):
    """Local SGD: each device takes its own optimizer steps, then the parameters are averaged.

    In a window, device `d` takes `counts[d]` steps, one per microbatch, from the common
    parameters `x` to its own `y[d]`. Then, on every device,

        w[d] = counts[d] ** exponent / sum over devices of counts ** exponent
        x    = x - sum over d of w[d] * (x - y[d])        (= sum of w[d] * y[d])

    (Stich 2019, arXiv:1805.09767, with weights). Model state is merged by the rules of
    `merge` with the same weights. A device whose parameters are not finite is left out.

    Attributes:
        exponent: Emphasis on devices with more steps, finite; 0 is the plain mean. Or an optax
            schedule of the window number: a high exponent converges faster early, a low one
            reaches a lower loss.
        optimizer_state: `"average"` averages it like the parameters (leaves that are not
            floats, such as step counters, take the maximum), `"keep"` leaves each device its
            own, `"reset"` initialises it after every window.
        compression: Type in which differences are sent: `"bfloat16"`, `"int8"` (see
            `DiLoCo`), or None for float32 (float64 for float64 parameters).
        delay: Number of windows that may be pending. 0: devices wait for the exchange at the
            end of a window. `k`, at most 64: the exchange of a window overlaps with the steps
            of later windows, and its result is applied at the end of the `k`-th as a
            correction, see `elche_jax.engine.local`; requires `optimizer_state="keep"`. The
            metrics are then those of `k` windows ago. Each pending window takes one more
            copy of the parameters.

    Raises:
        TypeError: If `exponent` is neither a number nor callable, or `delay` is not an integer.
        ValueError: If `exponent` is not finite, `optimizer_state` or `compression` is not one
            of the words above, or `delay` is out of range.

    Examples:
        >>> import optax
        >>> from elche_jax import ParameterAveraging
        >>> ParameterAveraging(exponent=optax.linear_schedule(2.0, 0.0, 100)).exponent(50)
        Array(1., dtype=float32, weak_type=True)
    """

    exponent: Exponent = 1.0
    optimizer_state: OptimizerState = "average"
    delay: int = 0
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_rule(self)


@dataclass(frozen=True)
class DiLoCo(check.CheckedFields, AveragingRule):
    """Local steps whose averaged difference is the gradient of an outer optimizer.

    With `x`, `y[d]` and `w[d]` as in `ParameterAveraging`,

        delta = sum over d of w[d] * (x - y[d])
        x     = x + outer's update for the gradient delta

    (Douillard et al. 2023, arXiv:2311.08105, with Nesterov momentum 0.9 and learning rate
    0.7). With `outer=optax.sgd(1.0)` it equals `ParameterAveraging` with the same
    `optimizer_state`, bit for bit.

    **Fragments**: with `fragments=P` each window exchanges one of `P` parts of the
    parameters, in turn: each part is exchanged every `P` windows, and a window sends a
    `P`-th of the bytes (Douillard et al. 2025, arXiv:2501.18512). The weights of a
    part count the steps since its last exchange. Between two exchanges the devices' copies
    of a part differ; `TrainStep.average` returns one set of parameters.

    **Compression** applies to the differences. `"bfloat16"` rounds `w[d] * (x - y[d])` and
    the sum. `"int8"` sends `round(127 * v / max|v|)` for every array `v = x - y[d] + e[d]`
    and keeps the rounding error `e[d]` for the next exchange (error feedback, Seide et al.
    2014).

    Attributes:
        outer: The outer optax optimizer. Its state is part of the training state.
        inner_steps: Steps of the slowest device between two exchanges of the same
            parameters, at least 1 and a multiple of `fragments`; faster devices take more.
            None: the cadence sizes the windows.
        exponent: See `ParameterAveraging`.
        optimizer_state: See `ParameterAveraging`.
        fragments: Number of parts of the parameters, at least 1 and at most the number of
            trained arrays; above 1 only with `optimizer_state="keep"`.
        compression: `"bfloat16"`, `"int8"`, or None, see `ParameterAveraging`.
        delay: See `ParameterAveraging`; only with `optimizer_state="keep"` and one fragment.

    Raises:
        TypeError: If `outer` is not an optax optimizer, or a number has the wrong type.
        ValueError: If a value is out of range or conflicts with another value.

    Examples:
        >>> import optax
        >>> from elche_jax import DiLoCo
        >>> rule = DiLoCo(outer=optax.sgd(0.7, momentum=0.9, nesterov=True), inner_steps=50)
        >>> rule.inner_steps, rule.optimizer_state
        (50, 'keep')
    """

    outer: optax.GradientTransformation  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    inner_steps: int | None = field(default=None, metadata={"low": 1})
    exponent: Exponent = 1.0
    optimizer_state: OptimizerState = "keep"
    fragments: int = field(default=1, metadata={"low": 1})
    compression: Compression | None = None
    delay: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        rule, todo = "be an optax optimizer", "Pass optax.sgd(0.7, momentum=0.9), say."
        check.instance(where, "outer", self.outer, optax.GradientTransformation, rule, todo)
        super().__post_init__()
        check_rule(self)


@dataclass(frozen=True)
class MeanGradient:
    """The rule without local steps: the mean gradient over all the data of a window.

    The default rule: `averaging=None` means `MeanGradient()`.

    Attributes:
        compression: Type in which gradients are sent: `"bfloat16"`, `"int8"` (with error
            feedback, see `DiLoCo`, for the device's own mean gradient of a window), or None
            for float32 (float64 for float64 parameters).
        delay: Number of windows that may be pending. 0: devices wait for the exchange at the
            end of a window. `k`, at most 64: the gradient of a window is exchanged during the
            next windows and applied `k` windows later; the devices' parameters stay equal.
            The last `k` gradients of a run are not applied.

    Raises:
        TypeError: If `delay` is not an integer.
        ValueError: If a value is out of range.

    Examples:
        >>> import elche_jax as elche
        >>> elche.MeanGradient(compression="bfloat16")
        MeanGradient(compression='bfloat16', delay=0)
    """

    compression: Compression | None = None
    delay: int = 0

    def __post_init__(self) -> None:
        _check_exchange(self)


def changed(rule: MeanGradient | AveragingRule, **knobs: Any) -> MeanGradient | AveragingRule:
    """Return a copy of a rule of any class with some attributes changed."""
    # not by `dataclasses.replace`: a user's rule need not be a dataclass
    rule = copy(rule)
    for name, value in knobs.items():
        object.__setattr__(rule, name, value)
    return rule


def _check_exchange(rule: MeanGradient | AveragingRule) -> None:
    check.keep_checked(rule, "delay", check.integer, low=0, high=MOST)
    check.one_of(type(rule).__name__, "compression", rule.compression, COMPRESSIONS)


def check_rule(rule: AveragingRule) -> None:
    """Check the attributes of a rule of any class.

    Raises:
        TypeError, ValueError: See `ParameterAveraging` and `DiLoCo`.
    """
    where = type(rule).__name__
    _check_exchange(rule)
    if not callable(rule.exponent):
        check.keep_checked(rule, "exponent", check.real)
    check.one_of(where, "optimizer_state", rule.optimizer_state, OPTIMIZER_STATES)
    must = "be an optax optimizer or None"
    check.instance(where, "outer", rule.outer, optax.GradientTransformation | None, must)
    check.keep_checked(rule, "fragments", check.integer, low=1)
    if rule.inner_steps is not None:
        check.keep_checked(rule, "inner_steps", check.integer, low=1)
        if rule.inner_steps % rule.fragments:
            must = f"be a multiple of fragments ({rule.fragments})"
            raise ValueError(check.message(where, "inner_steps", must, rule.inner_steps))
    if rule.fragments > 1 and rule.optimizer_state != "keep":
        must = f"be 'keep' with fragments={rule.fragments}, as each window exchanges only one"
        raise ValueError(check.message(where, "optimizer_state", must, repr(rule.optimizer_state)))
    if rule.delay:
        check_late(rule, f"delay={rule.delay}")


LATE: dict[str, tuple[Any, str]] = {
    "optimizer_state": ("keep", "a device updates its moments while parameters are exchanged"),
    "fragments": (1, "pending windows would hold different parts of the parameters"),
}
"""What late averages require of a rule: the value of an attribute, and why."""


def check_late(rule: AveragingRule, how: str) -> None:
    """Raise an error if the averages of a rule cannot be applied late.

    Args:
        rule: The rule.
        how: The setting that makes them late, for the message.
    """
    for knob, (value, why) in LATE.items():
        got = getattr(rule, knob)
        if got != value:
            must, todo = f"be {value!r} with {how}, as {why}", f"Pass {knob}={value!r}."
            raise ValueError(check.message(type(rule).__name__, knob, must, repr(got), todo))
