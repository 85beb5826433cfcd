"""What averaging in parameter space goes with, and how it chooses the cadence."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.averaging.rules import (
    AveragingRule,
    Compression,
    DeviceWork,
    MeanGradient,
    check_late,
    check_rule,
)
from elche_jax.cadence import Cadence, ElChe, FixedTotal
from elche_jax.cadence.guards import Guard
from elche_jax.config import DDPConfig
from elche_jax.engine.host.coordinator import Limits
from elche_jax.engine.merge import MergeRules
from elche_jax.train.options import Options
from elche_jax.train.pipeline import IN_FLIGHT

WHERE = "build_train_step"


@dataclass(frozen=True)
class Exchange:
    """What is exchanged, and how.

    Attributes:
        averaging: How the devices' own steps are joined; None for gradients.
        compression: Type on the wire.
        delay: Windows that may be pending.
        ahead: Whether nobody waits for a mean, however late it is.
    """

    averaging: AveragingRule | None
    compression: Compression | None
    delay: int
    ahead: bool


def check_exchange(
    rule: MeanGradient | AveragingRule | None,
    *,
    guard: Guard | None,
    cadence: Cadence[Any] | None,
    config: DDPConfig,
    nonfinite: str,
    dynamic_scale: bool,
) -> Exchange:
    """Checks that what was asked for goes together, and brings it to one form.

    Raises:
        TypeError: `averaging` is no rule, or `guard` no guard.
        ValueError: Something contradicts it.
    """
    if guard is not None and (isinstance(guard, type) or not isinstance(guard, Guard)):
        must, todo = "be a guard such as TrendGuard()", "It needs a method verdict(history)."
        raise TypeError(check.message(WHERE, "guard", must, check.describe(guard), todo))
    rule = MeanGradient() if rule is None else rule
    if not isinstance(rule, MeanGradient | AveragingRule):
        must = "be ParameterAveraging(...), DiLoCo(...), MeanGradient(...) or None"
        raise TypeError(check.message(WHERE, "averaging", must, check.describe(rule)))
    if isinstance(rule, MeanGradient):
        if guard is not None:
            must = "be None without averaging, as replicas that are alike do not drift apart"
            raise ValueError(check.message(WHERE, "guard", must, type(guard).__name__))
    else:
        _check_local(rule, cadence, config, nonfinite, dynamic_scale)
    if nonfinite == "ignore" and rule.compression == "int8":
        must = "be None or 'bfloat16' with nonfinite='ignore', as int8 has no number for NaN"
        raise ValueError(check.message(type(rule).__name__, "compression", must, "'int8'"))
    local = rule if isinstance(rule, AveragingRule) else None
    ahead = config.policy == "async" and config.exchange == "host"
    return Exchange(local, _compression(rule, config), _delay(rule, config), ahead)


def _check_local(
    rule: AveragingRule,
    cadence: Cadence[Any] | None,
    config: DDPConfig,
    nonfinite: str,
    dynamic_scale: bool,
) -> None:
    name = type(rule).__name__
    check_rule(rule)
    _check_exponent(name, rule.exponent)
    _check_weigh(name, rule)
    if nonfinite == "ignore":
        must = f"be 'raise' or 'skip' with averaging={name}, which leaves such devices out"
        raise ValueError(check.message(WHERE, "nonfinite", must, repr(nonfinite)))
    if dynamic_scale:
        must = f"be a number with averaging={name}, whose devices step on their own"
        raise ValueError(check.message(WHERE, "loss_scale", must, "a DynamicScale"))
    chosen = free_knobs(config) if cadence is None else [type(cadence).__name__]
    if rule.inner_steps is not None and chosen:
        must = f"be None where the cadence is chosen ({', '.join(chosen)})"
        got, todo = rule.inner_steps, "Leave out one of the two."
        raise ValueError(check.message(name, "inner_steps", must, got, todo))


def _compression(rule: MeanGradient | AveragingRule, config: DDPConfig) -> Compression | None:
    """The type on the wire, which the config may say, too."""
    if config.exchange_dtype == "float32" or rule.compression == config.exchange_dtype:
        return rule.compression
    if rule.compression is not None:
        must = f"be left out with {type(rule).__name__}(compression={rule.compression!r})"
        got = repr(config.exchange_dtype)
        raise ValueError(check.message("DDPConfig", "exchange_dtype", must, got))
    return "bfloat16"


def _delay(rule: MeanGradient | AveragingRule, config: DDPConfig) -> int:
    """Windows that may be pending: under the policy `"async"` one, but on the host, where its
    limits say how many, none in particular."""
    if config.policy != "async":
        return rule.delay
    if isinstance(rule, AveragingRule):
        check_late(rule, "policy='async'")
    if config.exchange != "host":
        return max(1, rule.delay)
    if rule.delay:
        must = "be 0 with policy='async' and exchange='host', where max_overshoot says how late"
        raise ValueError(check.message(type(rule).__name__, "delay", must, rule.delay))
    return 0


def _check_exponent(name: str, exponent: Any) -> None:
    """Raises where a schedule is none: it is traced like those of optax."""
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


def _check_weigh(name: str, rule: AveragingRule) -> None:
    """Raises where the weights of a rule of one's own are none: they are traced as well."""
    rows = jax.ShapeDtypeStruct((2,), jnp.float32)
    must = "give one number per device, an array (devices,), made of work.xp"

    def weights(steps: Any, loss: Any, window: Any) -> Any:
        return rule.weigh(DeviceWork(steps, loss, steps > 0, window, jnp))

    try:
        value: Any = jax.eval_shape(weights, rows, rows, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        got = f"one that raises {type(error).__name__}: {str(error).splitlines()[0]}"
        raise TypeError(check.message(name, "weigh", must, got)) from error
    if getattr(value, "shape", None) != (2,) or not _is_number(value.dtype):
        got = f"{value} for two devices"
        raise TypeError(check.message(name, "weigh", must, got))


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def host_limits(config: DDPConfig, exchange: Exchange, world_size: int) -> Limits | None:
    """How an exchange on the host waits; None where there is none."""
    if config.exchange != "host" or world_size == 1:
        return None
    delay = exchange.delay or None
    most = config.max_batch_diff if exchange.ahead else None
    ahead = exchange.ahead or delay is not None
    return Limits(config.exchange_timeout, ahead, delay, config.max_overshoot, most)


def in_flight(options: Options) -> int:
    """Windows that may be dispatched and not over."""
    return IN_FLIGHT if options.host is None else options.host.in_flight


def check_merge(options: Options, rules: MergeRules) -> None:
    """Raises where a rule for model state cannot be followed one window late."""
    if options.late and "first" in rules.rules:
        rule = "be 'mean', 'pooled', 'max' or 'keep' where exchanges are late"
        todo = "What is the first device's cannot be corrected later; 'keep' leaves each its own."
        raise ValueError(check.message("TrainStep.init", "merge", rule, "'first'", todo))


def free_knobs(config: DDPConfig) -> list[str]:
    """The knobs of a configuration that choose the cadence, where averages are taken: not
    those that say how late an average is taken up."""
    late = ["policy='async'"]
    if config.exchange == "host" and config.policy == "async":
        late.append(f"max_batch_diff={config.max_batch_diff!r}")
    return [knob for knob in config.cadence_knobs() if knob not in late]


def cadence_of(
    averaging: AveragingRule, cadence: Cadence[Any] | None, config: DDPConfig, world_size: int
) -> Cadence[Any] | None:
    """The cadence that a rule asks for; None where the config's own is to be used.

    Args:
        averaging: The rule.
        cadence: The user's own, or None.
        config: The knobs.
        world_size: Number of devices.
    """
    if cadence is not None:
        if world_size == 1 and averaging.outer is not None and isinstance(cadence, ElChe):
            return FixedTotal(cadence.anchor)  # an outer optimizer needs windows to step after
        return cadence
    if averaging.inner_steps is not None:
        anchor = averaging.inner_steps // averaging.fragments
        return ElChe(anchor, max_anchor=anchor) if world_size > 1 else FixedTotal(anchor)
    if config.max_anchor == 0:
        return None
    if world_size == 1:  # an outer optimizer needs windows to step after
        steps = averaging.outer is not None and config.policy != "sync"
        return FixedTotal(config.anchor) if steps else None
    return config.elche() if config.policy == "auto" else None
