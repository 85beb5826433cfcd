"""What averaging in parameter space goes with, and how it chooses the cadence."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.averaging.host.coordinator import Limits
from elche_jax.averaging.program import other_bytes
from elche_jax.averaging.rules import Averaging, DiLoCo, ParameterAveraging
from elche_jax.averaging.wire import wire_bytes
from elche_jax.cadence import Cadence, ElChe, FixedTotal
from elche_jax.cadence.guards import Guard
from elche_jax.config import DDPConfig
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection
from elche_jax.train.options import Options
from elche_jax.train.pipeline import IN_FLIGHT

WHERE = "build_train_step"

MEASURED_FIRST = 6
"""Windows at the start of a run whose exchange does not overlap, so that it is measured."""

MEASURE_EVERY = 6
"""With `delay=1` every so many windows do not overlap, so that speeds stay known."""


def check_averaging(
    averaging: Averaging | None,
    *,
    guard: Guard | None,
    cadence: Cadence[Any] | None,
    config: DDPConfig,
    nonfinite: str,
    dynamic_scale: bool,
) -> None:
    """Checks that what was asked for goes together.

    Raises:
        TypeError: `averaging` is no rule, or `guard` no guard.
        ValueError: Something contradicts it.
    """
    if guard is not None and (isinstance(guard, type) or not isinstance(guard, Guard)):
        rule, todo = "be a guard such as TrendGuard()", "It needs a method verdict(history)."
        raise TypeError(check.message(WHERE, "guard", rule, check.describe(guard), todo))
    if averaging is None:
        if guard is not None:
            rule = "be None without averaging, as replicas that are alike do not drift apart"
            raise ValueError(check.message(WHERE, "guard", rule, type(guard).__name__))
        if config.policy == "async":
            rule = "be 'auto', 'sync' or 'cadence' without averaging: gradients are never late"
            todo = "Pass averaging=ParameterAveraging(optimizer_state='keep'), say."
            raise ValueError(check.message("DDPConfig", "policy", rule, "'async'", todo))
        if config.exchange == "host":
            rule = "be 'device' without averaging: gradients stay on the devices"
            todo = "Pass averaging=ParameterAveraging(), say."
            raise ValueError(check.message("DDPConfig", "exchange", rule, "'host'", todo))
        return
    if not isinstance(averaging, ParameterAveraging | DiLoCo):
        rule = "be ParameterAveraging(...), DiLoCo(...) or None"
        got = check.describe(averaging)
        raise TypeError(check.message(WHERE, "averaging", rule, got))
    name = type(averaging).__name__
    _check_exponent(name, averaging.exponent)
    if config.exchange == "host":
        _check_on_host(name, averaging, config)
    if nonfinite == "ignore":
        rule = f"be 'raise' or 'skip' with averaging={name}, which leaves such devices out"
        raise ValueError(check.message(WHERE, "nonfinite", rule, repr(nonfinite)))
    if dynamic_scale:
        rule = f"be a number with averaging={name}, whose devices step on their own"
        raise ValueError(check.message(WHERE, "loss_scale", rule, "a DynamicScale"))
    if config.exchange_dtype != "float32":
        rule = f"be 'float32' with averaging={name}"
        todo = "Pass averaging=DiLoCo(..., compression='bfloat16')."
        got = repr(config.exchange_dtype)
        raise ValueError(check.message("DDPConfig", "exchange_dtype", rule, got, todo))
    chosen = free_knobs(config) if cadence is None else [type(cadence).__name__]
    if averaging.inner_steps is not None and chosen:
        rule = f"be None where the cadence is chosen ({', '.join(chosen)})"
        got, todo = averaging.inner_steps, "Leave out one of the two."
        raise ValueError(check.message("DiLoCo", "inner_steps", rule, got, todo))


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


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _check_on_host(name: str, averaging: Averaging, config: DDPConfig) -> None:
    host, ahead = "exchange='host'", "exchange='host' and policy='async'"
    needed: dict[str, tuple[Any, str]] = {
        "delay": (0, host),
        "fragments": (1, host),
        "compression": (None, host),
    }
    if config.policy == "async":
        needed["optimizer_state"] = ("keep", ahead)
    for knob, (value, where) in needed.items():
        got = getattr(averaging, knob)
        if got != value:
            rule, todo = f"be {value!r} with {where}", "Or exchange on the devices."
            raise ValueError(check.message(name, knob, rule, repr(got), todo))


def resolve_averaging(averaging: Averaging | None, config: DDPConfig) -> Averaging | None:
    """The rule under a policy: `"async"` makes exchanges late.

    Raises:
        ValueError: The rule cannot be late, see `ParameterAveraging`.
    """
    if averaging is None or config.policy != "async" or config.exchange == "host":
        return averaging
    name, where = type(averaging).__name__, "policy='async', which takes averages up late"
    for knob, value in (("optimizer_state", "keep"), ("fragments", 1)):
        got = getattr(averaging, knob)
        if got != value:
            rule = f"be {value!r} with {where}"
            raise ValueError(check.message(name, knob, rule, repr(got)))
    return replace(averaging, delay=1)


def host_limits(config: DDPConfig, world_size: int) -> Limits | None:
    """How an exchange on the host waits; None where there is none."""
    if config.exchange != "host" or world_size == 1:
        return None
    ahead = config.policy == "async"
    most = config.max_batch_diff if ahead else None
    return Limits(config.exchange_timeout, ahead, config.max_overshoot, most)


def in_flight(options: Options) -> int:
    """Windows that may be dispatched and not over."""
    return IN_FLIGHT if options.host is None else options.host.in_flight


def check_merge(options: Options, rules: MergeRules) -> None:
    """Raises where a rule for model state cannot be followed one window late."""
    averaging, host = options.averaging, options.host
    late = (averaging is not None and averaging.delay) or (host is not None and host.ahead)
    if late and "first" in rules.rules:
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
    averaging: Averaging, cadence: Cadence[Any] | None, config: DDPConfig, world_size: int
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


def overlaps(averaging: Averaging | None, world_size: int, windows: int) -> bool:
    """Whether the exchange of the window before goes on during the next window's steps.

    In such a window nobody knows when a device was done with its own steps, so that some
    are left out.

    Args:
        averaging: The rule.
        world_size: Number of devices.
        windows: Windows of the run so far.
    """
    if averaging is None or not averaging.delay or world_size == 1:
        return False
    return windows >= MEASURED_FIRST and windows % MEASURE_EVERY > 0


def sent_bytes(
    averaging: Averaging, selection: Selection, merge: MergeRules, state: TrainState
) -> int:
    """Bytes that a device puts in for a window, with fragments on average.

    Args:
        averaging: The rule.
        selection: Which parameters are trained.
        merge: How model state is merged.
        state: Shapes of the state of one device, of several.
    """
    leaves = jax.tree.leaves(selection.split(state.params)[0])
    parameters = wire_bytes(leaves, averaging.compression) // averaging.fragments
    return parameters + other_bytes(averaging, merge, state, 2)
