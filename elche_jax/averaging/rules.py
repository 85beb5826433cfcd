"""What happens to parameters that the devices have trained apart: the user's choice."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import optax

from elche_jax import _check as check

Exponent = float | Callable[[Any], Any]
"""A number, or an optax schedule of the number of the window."""

OptimizerState = Literal["average", "keep", "reset"]
Compression = Literal["bfloat16", "int8"]
OPTIMIZER_STATES = ("average", "keep", "reset")
COMPRESSIONS = (None, "bfloat16", "int8")
MOST = 64
"""Windows that may be pending: each is one more copy of the parameters."""


@dataclass(frozen=True)
class DeviceWork:
    """What devices did between two exchanges, for whoever weighs them; arrays `(devices,)`.

    Attributes:
        steps: Optimizer steps, float32.
        loss: Mean loss of the window, float32; 0 of a device without work.
        worked: Whether the device has a part in the mean: it had work, and is finite.
        window: Number of the window.
        xp: The module that the arrays are of: `jax.numpy`, or `numpy` on the host.
    """

    steps: Any
    loss: Any
    worked: Any
    window: Any
    xp: ModuleType


Weigh = Callable[[DeviceWork], Any]
"""Weights of the devices, at least 0; they are normalised to shares."""


class AveragingRule:
    """Base of the rules for local steps; a rule of your own overrides `weigh`.

    What is set here is what a rule has that says nothing else.

    Attributes:
        outer: Optimizer that gets the averaged difference as a gradient, or None.
        inner_steps: Steps of the slowest device between two exchanges, or None.
        fragments: Parts that parameters are exchanged in, in turn.
        exponent: See `ParameterAveraging`.
        optimizer_state: See `ParameterAveraging`.
        compression: See `ParameterAveraging`.
        delay: See `ParameterAveraging`.

    Examples:
        Devices count by the inverse of their loss:

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
        """Weights of the devices, an array `(devices,)` of numbers of at least 0, not all 0.

        A device's share is its weight over the sum of them, and 0 if it has not worked. With
        an exchange on the devices it is traced, like an optax schedule; on the host it gets
        NumPy arrays. Here `steps ** exponent`.

        Args:
            work: What the devices did.
        """
        xp, power = work.xp, self.exponent
        if callable(power):
            power = _scheduled(power, work)
        elif power in (0.0, 1.0):
            return work.steps if power else xp.ones_like(work.steps)
        # by logarithms, as a power of a count may be too large for a float
        logs = xp.where(work.worked, power * xp.log(xp.maximum(work.steps, 1.0)), -xp.inf)
        highest = logs.max()
        return xp.exp(logs - xp.where(xp.isfinite(highest), highest, 0)) + 0 * power


def _scheduled(exponent: Callable[[Any], Any], work: DeviceWork) -> Any:
    if work.xp is not np:
        return exponent(work.window)
    power = float(exponent(work.window))
    if not np.isfinite(power):
        rule, todo = "give finite numbers", "Look at the schedule."
        name = f"exponent({work.window})"
        raise ValueError(check.message("averaging", name, rule, power, todo))
    return power


@dataclass(frozen=True)
class ParameterAveraging(AveragingRule):
    """Local SGD: every device takes its own optimizer steps, then parameters are averaged.

    In a window device `d` takes `counts[d]` steps, one per microbatch, from the common
    parameters `x` to its own `y[d]`. Then, on all devices alike,

        w[d] = counts[d] ** exponent / sum over devices of counts ** exponent
        x    = x - sum over d of w[d] * (x - y[d])        (= sum of w[d] * y[d])

    (Stich 2019, arXiv:1805.09767, with weights.) Model state is merged by the rules of
    `merge` with the same weights. A device whose parameters are not finite is left out.

    Attributes:
        exponent: How much more a device that did more counts, finite; 0 is the plain
            mean. Or an optax schedule of the number of the window: a high exponent
            converges faster early, a low one ends lower.
        optimizer_state: `"average"` joins it like the parameters (numbers that are no
            floats, step counters say, take the maximum), `"keep"` leaves each device its
            own, `"reset"` begins anew after every window.
        compression: Type in which differences travel: `"bfloat16"`, `"int8"` (see
            `DiLoCo`), or None for float32.
        delay: Windows that may be pending. 0: devices wait for the exchange at the end of a
            window. `k`, at most 64: the exchange of a window goes on during later ones' steps,
            and its result is applied at the end of the `k`-th as a correction, see
            `elche_jax.engine.local`; only with `optimizer_state="keep"`. Metrics are then
            those of `k` windows before. Each takes one more copy of the parameters.

    Raises:
        TypeError: `exponent` is neither a number nor callable.
        ValueError: `exponent` is not finite, `optimizer_state` or `compression` another
            word, `delay` below 0.

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
class DiLoCo(AveragingRule):
    """The averaged difference is a gradient for an outer optimizer.

    With `x`, `y[d]` and `w[d]` as in `ParameterAveraging`,

        delta = sum over d of w[d] * (x - y[d])
        x     = x + outer's update for the gradient delta

    (Douillard et al. 2023, arXiv:2311.08105; they use Nesterov's momentum of 0.9 with a
    learning rate of 0.7.) With `outer=optax.sgd(1.0)` it is `ParameterAveraging` with the
    same `optimizer_state`, bit for bit.

    **Fragments**: with `fragments=P` a window exchanges one of `P` parts of the
    parameters, in turn, so that each part is exchanged every `P` windows and a window
    carries a `P`-th of the bytes (Douillard et al. 2025, arXiv:2501.18512). A part's
    weights are of the steps since its last exchange. Between two exchanges the devices'
    copies of a part differ; `TrainStep.average` gives one set of parameters.

    **Compression** is of the differences. `"bfloat16"` rounds `w[d] * (x - y[d])`, and
    the sum. `"int8"` sends `round(127 * v / max|v|)` of every array `v = x - y[d] + e[d]`,
    and keeps what was rounded off, `e[d]`, for the next exchange (error feedback, Seide
    et al. 2014).

    Attributes:
        outer: The outer optax optimizer. Its state is part of the training state.
        inner_steps: Steps of the slowest device between two exchanges of the same
            parameters, a multiple of `fragments`, at least 1; faster devices take more.
            None: the cadence sizes the windows.
        exponent: See `ParameterAveraging`.
        optimizer_state: See `ParameterAveraging`.
        fragments: Parts of the parameters, at least 1 and at most the number of arrays
            that are trained; above 1 only with `optimizer_state="keep"`.
        compression: `"bfloat16"`, `"int8"`, or None for float32.
        delay: See `ParameterAveraging`; only with `optimizer_state="keep"` and one fragment.

    Raises:
        TypeError: `outer` is no optax optimizer, or a number is of another type.
        ValueError: A value is out of range, or contradicts another one.

    Examples:
        >>> import optax
        >>> from elche_jax import DiLoCo
        >>> rule = DiLoCo(outer=optax.sgd(0.7, momentum=0.9, nesterov=True), inner_steps=50)
        >>> rule.inner_steps, rule.optimizer_state
        (50, 'keep')
    """

    outer: optax.GradientTransformation  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    inner_steps: int | None = None
    exponent: Exponent = 1.0
    optimizer_state: OptimizerState = "keep"
    fragments: int = 1
    compression: Compression | None = None
    delay: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        if not isinstance(self.outer, optax.GradientTransformation):
            rule, todo = "be an optax optimizer", "Pass optax.sgd(0.7, momentum=0.9), say."
            raise TypeError(check.message(where, "outer", rule, check.describe(self.outer), todo))
        check_rule(self)
        fragments = check.integer(where, "fragments", self.fragments, low=1)
        object.__setattr__(self, "fragments", fragments)
        if self.inner_steps is not None:
            steps = check.integer(where, "inner_steps", self.inner_steps, low=1)
            if steps % fragments:
                rule = f"be a multiple of fragments ({fragments})"
                raise ValueError(check.message(where, "inner_steps", rule, steps))
            object.__setattr__(self, "inner_steps", steps)


@dataclass(frozen=True)
class MeanGradient:
    """The rule without local steps: the mean gradient over all the data of a window.

    It is what `averaging=None` stands for, with everything at its default.

    Attributes:
        compression: Type in which gradients travel; they are summed in float32 either way.
            `"bfloat16"`, `"int8"` (with error feedback, see `DiLoCo`), or None for float32.
        delay: Windows that may be pending. 0: devices wait for the exchange at the end of a
            window. `k`, at most 64: the gradient of a window is applied `k` windows later,
            and its exchange goes on in the meantime; the devices' parameters stay alike. The
            last `k` gradients of a run are not applied.

    Raises:
        TypeError: `delay` is no integer.
        ValueError: A value is out of range.

    Examples:
        >>> import elche_jax as elche
        >>> elche.MeanGradient(compression="bfloat16")
        MeanGradient(compression='bfloat16', delay=0)
    """

    compression: Compression | None = None
    delay: int = 0

    def __post_init__(self) -> None:
        _check_exchange(type(self).__name__, self)


def changed(rule: MeanGradient | AveragingRule, **knobs: Any) -> MeanGradient | AveragingRule:
    """A copy of a rule, whatever class it is of, with some knobs changed."""
    rule = copy(rule)
    for name, value in knobs.items():
        object.__setattr__(rule, name, value)
    return rule


def _check_exchange(where: str, rule: MeanGradient | AveragingRule) -> None:
    object.__setattr__(rule, "delay", check.integer(where, "delay", rule.delay, low=0, high=MOST))
    if rule.compression not in COMPRESSIONS:
        must = f"be one of {', '.join(map(repr, COMPRESSIONS))}"
        raise ValueError(check.message(where, "compression", must, repr(rule.compression)))


def check_rule(rule: AveragingRule) -> None:
    """Checks what a rule says of itself, whatever class it is of.

    Raises:
        TypeError, ValueError: See `ParameterAveraging` and `DiLoCo`.
    """
    where = type(rule).__name__
    _check_exchange(where, rule)
    if not callable(rule.exponent):
        object.__setattr__(rule, "exponent", check.real(where, "exponent", rule.exponent))
    if rule.optimizer_state not in OPTIMIZER_STATES:
        must = f"be one of {', '.join(map(repr, OPTIMIZER_STATES))}"
        raise ValueError(check.message(where, "optimizer_state", must, repr(rule.optimizer_state)))
    if rule.fragments > 1 and rule.optimizer_state != "keep":
        must = f"be 'keep' with fragments={rule.fragments}, whose exchanges lie apart"
        raise ValueError(check.message(where, "optimizer_state", must, repr(rule.optimizer_state)))
    if rule.delay:
        check_late(rule, f"delay={rule.delay}")


LATE: dict[str, tuple[Any, str]] = {
    "optimizer_state": ("keep", "a device's moments go on while parameters are exchanged"),
    "fragments": (1, "the windows that are pending would hold other parts of the parameters"),
}
"""What an average that is taken up late does not go with: what must be, and why."""


def check_late(rule: AveragingRule, how: str) -> None:
    """Raises where the averages of a rule cannot be taken up late.

    Args:
        rule: The rule.
        how: What makes them late, for the message.
    """
    for knob, (value, why) in LATE.items():
        got = getattr(rule, knob)
        if got != value:
            must, todo = f"be {value!r} with {how}, as {why}", f"Pass {knob}={value!r}."
            raise ValueError(check.message(type(rule).__name__, knob, must, repr(got), todo))
