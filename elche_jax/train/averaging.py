"""Checks of the settings that averaging rules combine with, and the cadence they select."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.averaging.rules import (
    AveragingRule,
    DeviceWork,
    MeanGradient,
    check_late,
    check_rule,
)
from elche_jax.cadence import Cadence, ElChe, FixedTotal
from elche_jax.cadence.guards import Guard
from elche_jax.config import DDPConfig
from elche_jax.train.options import Options

WHERE = "build_train_step"


def check_averaging(averaging: Any, guard: Any) -> None:
    """Check the arguments `averaging` and `guard` of `build_train_step`.

    Raises:
        TypeError: If `averaging` is not a rule, or `guard` is not a guard.
        ValueError: If there is a guard without averaging, or the rule contradicts itself.
    """
    if guard is not None:
        must, todo = "be a guard such as TrendGuard()", "It needs a method verdict(history)."
        check.instance(WHERE, "guard", guard, Guard, must, todo, no_class=True)
    must = "be ParameterAveraging(...), DiLoCo(...), MeanGradient(...) or None"
    check.instance(WHERE, "averaging", averaging, MeanGradient | AveragingRule | None, must)
    if isinstance(averaging, AveragingRule):
        check_rule(averaging)
    elif guard is not None:
        must = "be None without averaging, as replicas that are alike do not drift apart"
        raise ValueError(check.message(WHERE, "guard", must, type(guard).__name__))


def check_together(options: Options, chosen: Sequence[str]) -> None:
    """Check that the settings can be combined.

    Args:
        options: The options of the training step.
        chosen: The settings that select the cadence, for messages.

    Raises:
        TypeError: If a schedule, or the weights of a rule, cannot be traced.
        ValueError: If a setting contradicts the rule.
    """
    rule, exchange = options.rule, options.exchange
    name = type(rule).__name__
    if isinstance(rule, AveragingRule):
        _check_local(rule, options, chosen)
    if not options.finite.drops and rule.compression == "int8":
        must = "be None or 'bfloat16' with nonfinite='ignore', as int8 has no number for NaN"
        raise ValueError(check.message(name, "compression", must, "'int8'"))
    if exchange is not None and exchange.run_ahead:
        if isinstance(rule, AveragingRule):
            check_late(rule, "run_ahead=True")
        if rule.delay:
            must = "be 0 where devices run ahead, and max_overshoot says how late a mean may be"
            raise ValueError(check.message(name, "delay", must, rule.delay))


def _check_local(rule: AveragingRule, options: Options, chosen: Sequence[str]) -> None:
    name = type(rule).__name__
    _check_exponent(name, rule.exponent)
    _check_weigh(name, rule, options.world_size)
    if not options.finite.drops:
        must = f"be 'raise' or 'skip' with averaging={name}, which leaves such devices out"
        raise ValueError(check.message(WHERE, "nonfinite", must, repr(options.finite.action)))
    if options.loss_scale is not None:
        must = f"be a number with averaging={name}, whose devices step on their own"
        raise ValueError(check.message(WHERE, "loss_scale", must, "a DynamicScale"))
    if rule.inner_steps is not None and chosen:
        must = f"be None where the cadence is chosen ({', '.join(chosen)})"
        got, todo = rule.inner_steps, "Leave out one of the two."
        raise ValueError(check.message(name, "inner_steps", must, got, todo))


def _check_exponent(name: str, exponent: Any) -> None:
    """Raise if an exponent schedule cannot be traced, or does not return one number."""
    if not callable(exponent):
        return
    rule = "be a number, or a schedule: a function of the window's number, made of jnp or optax"
    try:
        value: Any = jax.eval_shape(exponent, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        got = f"one that raises {type(error).__name__}"
        raise TypeError(check.message(name, "exponent", rule, got)) from error
    if getattr(value, "shape", None) != () or not _is_number(value.dtype):
        raise TypeError(check.message(name, "exponent", rule, f"one that gives {value}"))


def _check_weigh(name: str, rule: AveragingRule, world_size: int) -> None:
    """Raise if a rule's weights cannot be traced, or are not one number per device."""
    rows = jax.ShapeDtypeStruct((world_size,), jnp.float32)
    must = f"return one number per device, an array ({world_size},), made with work.xp"

    def weights(steps: Any, loss: Any, window: Any) -> Any:
        return rule.weigh(DeviceWork(steps, loss, steps > 0, window, jnp))

    try:
        # traced when the step is built: otherwise the first window would raise the error
        value: Any = jax.eval_shape(weights, rows, rows, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        said = str(error).partition("\n")[0].rstrip(".")
        got = f"one that raises {type(error).__name__}" + (f": {said}" if said else "")
        raise TypeError(check.message(name, "weigh", must, got)) from error
    if getattr(value, "shape", None) != (world_size,) or not _is_number(value.dtype):
        raise TypeError(check.message(name, "weigh", must, value))


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def cadence_of(
    averaging: AveragingRule, cadence: Cadence[Any] | None, config: DDPConfig, world_size: int
) -> Cadence[Any] | None:
    """Return the cadence for a rule; None to use that of the configuration.

    Args:
        averaging: The rule.
        cadence: The user's cadence, or None.
        config: The configuration.
        world_size: Number of devices.
    """
    if cadence is not None:
        if world_size == 1 and averaging.outer is not None and isinstance(cadence, ElChe):
            return FixedTotal(cadence.anchor)  # an outer optimizer needs windows to step after
        return cadence
    if averaging.inner_steps is not None:
        # a window exchanges one fragment, so each fragment's turn comes every `fragments` windows
        anchor = averaging.inner_steps // averaging.fragments
        # the anchor must not grow: the slowest device takes this many steps
        return ElChe(anchor, max_anchor=anchor) if world_size > 1 else FixedTotal(anchor)
    if config.max_anchor == 0:
        return None
    if world_size == 1:  # an outer optimizer needs windows to step after
        steps = averaging.outer is not None and config.policy != "sync"
        return FixedTotal(config.anchor) if steps else None
    return config.elche() if config.policy == "auto" else None
