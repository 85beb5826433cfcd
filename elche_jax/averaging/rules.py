"""What happens to parameters that the devices have trained apart: the user's choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import optax

from elche_jax import _check as check

Exponent = float | Callable[[Any], Any]
"""A number, or an optax schedule of the number of the window."""

OptimizerState = Literal["average", "keep", "reset"]
Compression = Literal["bfloat16", "int8"]
OPTIMIZER_STATES = ("average", "keep", "reset")
COMPRESSIONS = (None, "bfloat16", "int8")


@dataclass(frozen=True)
class ParameterAveraging:
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
        delay: 0: devices wait for the exchange at the end of a window. 1: the exchange of
            a window goes on during the next one's steps, and its result is applied at the
            end of that one as a correction, see `elche_jax.averaging.delayed`; only with
            `optimizer_state="keep"`. Metrics are then those of the window before.

    Raises:
        TypeError: `exponent` is neither a number nor callable.
        ValueError: `exponent` is not finite, `optimizer_state` another word, `delay` not
            0 or 1.

    Examples:
        >>> import optax
        >>> from elche_jax import ParameterAveraging
        >>> ParameterAveraging(exponent=optax.linear_schedule(2.0, 0.0, 100)).exponent(50)
        Array(1., dtype=float32, weak_type=True)
    """

    outer: ClassVar[None] = None
    inner_steps: ClassVar[None] = None
    fragments: ClassVar[int] = 1
    compression: ClassVar[None] = None

    exponent: Exponent = 1.0
    optimizer_state: OptimizerState = "average"
    delay: int = 0

    def __post_init__(self) -> None:
        _check_common(type(self).__name__, self)


@dataclass(frozen=True)
class DiLoCo:
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
        delay: See `ParameterAveraging`; only with one fragment.

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

    outer: optax.GradientTransformation
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
        _check_common(where, self)
        fragments = check.integer(where, "fragments", self.fragments, low=1)
        object.__setattr__(self, "fragments", fragments)
        if self.compression not in COMPRESSIONS:
            rule = f"be one of {', '.join(map(repr, COMPRESSIONS))}"
            raise ValueError(check.message(where, "compression", rule, repr(self.compression)))
        if self.inner_steps is not None:
            steps = check.integer(where, "inner_steps", self.inner_steps, low=1)
            if steps % fragments:
                rule = f"be a multiple of fragments ({fragments})"
                raise ValueError(check.message(where, "inner_steps", rule, steps))
            object.__setattr__(self, "inner_steps", steps)
        if fragments > 1 and self.optimizer_state != "keep":
            rule = f"be 'keep' with fragments={fragments}, whose exchanges lie apart"
            got = repr(self.optimizer_state)
            raise ValueError(check.message(where, "optimizer_state", rule, got))


Averaging = ParameterAveraging | DiLoCo


def _check_common(where: str, rule: Averaging) -> None:
    if not callable(rule.exponent):
        object.__setattr__(rule, "exponent", check.real(where, "exponent", rule.exponent))
    object.__setattr__(rule, "delay", check.integer(where, "delay", rule.delay, low=0, high=1))
    if rule.optimizer_state not in OPTIMIZER_STATES:
        must = f"be one of {', '.join(map(repr, OPTIMIZER_STATES))}"
        raise ValueError(check.message(where, "optimizer_state", must, repr(rule.optimizer_state)))
    if rule.delay and rule.optimizer_state != "keep":
        must = "be 'keep' with delay=1, whose exchange is of parameters only"
        raise ValueError(check.message(where, "optimizer_state", must, repr(rule.optimizer_state)))
    if rule.delay and rule.fragments > 1:
        must, todo = "be 1 with delay=1", "Choose one of the two."
        raise ValueError(check.message(where, "fragments", must, rule.fragments, todo))
