"""`build_train_step`: the functional front of the library."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import optax

from elche_jax import _check as check
from elche_jax.averaging.rules import AveragingRule, MeanGradient
from elche_jax.cadence import Cadence, EveryBatch
from elche_jax.cadence.guards import Guard, NoGuard, TrendGuard
from elche_jax.config import DDPConfig
from elche_jax.engine.devices import check_one_kind, select_devices
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.loss import LossFn
from elche_jax.engine.merge import Merge
from elche_jax.engine.precision import Precision, first_scale
from elche_jax.engine.trainable import Trainable
from elche_jax.train.averaging import (
    cadence_of,
    check_exchange,
    free_knobs,
    host_limits,
)
from elche_jax.train.finite import MAX_SKIPS, FinitePolicy
from elche_jax.train.options import Options
from elche_jax.train.outside import check_outside
from elche_jax.train.parts import check_parts
from elche_jax.train.step import TrainStep

logger = logging.getLogger("elche_jax")


class StepOptions(TypedDict, total=False):
    """The arguments of `build_train_step` apart from loss, optimizer and config; see there."""

    devices: Sequence[jax.Device] | None
    cadence: Cadence[Any] | None
    has_aux: bool
    nonfinite: str
    max_skips: int | None
    trainable: Trainable | None
    merge: Merge | None
    loss_scale: Any
    averaging: AveragingRule | MeanGradient | None
    guard: Guard | None
    emulate: LoopHook | None


def build_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    devices: Sequence[jax.Device] | None = None,
    cadence: Cadence[Any] | None = None,
    config: DDPConfig | None = None,
    has_aux: bool = False,
    nonfinite: str = "raise",
    max_skips: int | None = MAX_SKIPS,
    trainable: Trainable | None = None,
    merge: Merge | None = None,
    loss_scale: Any = None,
    averaging: AveragingRule | MeanGradient | None = None,
    guard: Guard | None = None,
    emulate: LoopHook | None = None,
) -> TrainStep:
    """Builds a training step over the devices of this machine.

    In a window device `d` runs `counts[d]` microbatches on its own; then the gradients
    are combined and one optimizer step is taken, alike on every device:

        g = sum_d sum_i weight[d, i] * grad(loss[d, i]) / sum_d sum_i weight[d, i]

    Args:
        loss_fn: `loss_fn(params, batch, rng)`, where `batch` is one microbatch with
            leaves `(batch_size, ...)` and `rng` a key of its own. Returns a float
            scalar (the mean over the microbatch), a float vector `(batch_size,)` of
            per-example losses, or `Weighted(loss, weight)`. With `has_aux` it returns
            `(loss, aux)`. With model state (see `TrainStep.init`) it is
            `loss_fn(params, model_state, batch, rng)` and returns `(loss, model_state)`,
            with `has_aux` `(loss, (model_state, aux))`.
            What it reads besides its arguments must stay as it is, as with `jax.jit`.
        optimizer: An optax optimizer.
        devices: The devices; None for all local ones.
        cadence: How many microbatches each device gets; None: what `config` says.
        config: The knobs as a flat bundle; None for `DDPConfig()`.
        has_aux: `loss_fn` also returns a dict of metrics, each a scalar or one value
            per example; a window reports their mean, weighted like the gradient.
        nonfinite: What happens when a window's gradient is not finite. `"raise"` drops
            its update on all devices and raises `NonFiniteError` from the loop; `"skip"`
            drops it and goes on (`metrics["finite"]` tells, `train.skipped` counts);
            `"ignore"` applies it.
        max_skips: Under `"skip"`, raise `NonFiniteError` after so many dropped windows in
            a row, at least 1; None for never.
        trainable: Which parameters are trained: a function `(path, leaf) -> bool` of paths
            such as `"['body']['w']"`, or
            bools in the structure of the parameters, one for a whole subtree where that
            is enough; None for all. Frozen ones have no gradient, no sums, no optimizer
            state, and are not exchanged.
        merge: How the devices' model states become one: `"mean"` by weight, `"pooled"`
            for pairs of leaves `mean` and `var`, `"max"`, `"first"`, with `averaging` also
            `"keep"`; one for all, or a
            function `(path, leaf) -> rule`, or rules in the structure of the model
            state. None: the mean of floats, the maximum of the rest.
        loss_scale: What the loss is multiplied by before the gradient, and the gradient
            divided by: a number, or a `flax.training.dynamic_scale.DynamicScale`, which
            a window that is not finite lowers; such a window is dropped as under
            `"skip"`. For float16.
        averaging: None, or `MeanGradient(...)`: gradients are combined, as above.
            `ParameterAveraging(...)` or `DiLoCo(...)`: every device takes `counts[d]`
            optimizer steps of its own, one per microbatch, then parameters are joined.
        guard: Tells the cadence, with `averaging`, where the devices drift too far apart:
            `TrendGuard`, `LevelGuard`, `NoGuard`, or an object with a method
            `verdict(history)`. None: `TrendGuard()`, and `NoGuard()` where `inner_steps`
            fixes the windows.
        emulate: Makes devices slower on purpose, see `elche_jax.lab`.

    Returns:
        The training step.

    Raises:
        TypeError: `devices` are no devices, `loss_fn` is not callable.
        ValueError: No device, one twice, several kinds; several processes; both `cadence` and a
            `config` with knobs for a cadence; an option out of range; a call inside of `jit`
            or under `jax_disable_jit`.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np, optax
        >>> import elche_jax as elche
        >>> def loss_fn(params, batch, rng):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], "float32")}
        >>> train = elche.build_train_step(
        ...     loss_fn, optax.adam(0.1), devices=jax.devices()[:1]
        ... )
        >>> state = train.init({"w": np.zeros(3, "float32")})
        >>> for window in train.windows(data, batch_size=16, epochs=10):
        ...     state, metrics = train(state, window)
        >>> elche.unreplicate(state.params)["w"].round(1).tolist()
        [1.0, -2.0, 3.0]
    """
    check_outside("build_train_step")
    if not callable(loss_fn):
        raise TypeError(
            f"build_train_step: loss_fn must be callable, got {type(loss_fn).__name__}."
        )
    check.instance("build_train_step", "has_aux", has_aux, bool)
    check_parts("build_train_step", optimizer=optimizer, cadence=cadence, emulate=emulate)
    if config is not None and not isinstance(config, DDPConfig):
        raise TypeError(
            f"build_train_step: config must be a DDPConfig, got {type(config).__name__}."
        )
    scale, dynamic = first_scale(loss_scale)
    if dynamic is not None:
        nonfinite = _with_dynamic_scale(nonfinite)
    finite = FinitePolicy(nonfinite, max_skips)
    chosen = select_devices(devices)
    check_one_kind("build_train_step", chosen)
    knobs: list[str] = []
    if config is not None:
        knobs = free_knobs(config)
    if cadence is not None and knobs:
        raise ValueError(
            "build_train_step: cadence and config must not both choose the cadence, got "
            f"{type(cadence).__name__} and {', '.join(knobs)}. Leave out one."
        )
    if emulate is not None:
        emulate.check(len(chosen))
    config = config or DDPConfig()
    exchange = check_exchange(
        averaging, guard=guard, cadence=cadence, config=config, nonfinite=nonfinite,
        dynamic_scale=dynamic is not None,
    )  # fmt: skip
    local = exchange.averaging
    if local is not None:
        cadence = cadence_of(local, cadence, config, len(chosen))
    if local is not None and guard is None:
        guard = TrendGuard() if local.inner_steps is None else NoGuard()
    rule = cadence or config.cadence_for(len(chosen), kinds=1)
    unused = [knob for knob in config.cadence_knobs() if not knob.startswith("policy")]
    if unused and len(chosen) > 1 and isinstance(rule, EveryBatch):
        logger.warning(
            "elche: %s has no effect: under policy=%r these devices, which are alike, run one "
            "microbatch per window; policy='cadence' would use it.",
            ", ".join(unused),
            config.policy,
        )
    if config.total is not None and len(chosen) == 1:
        logger.warning(
            "elche: total=%d has no effect on one device, where every microbatch is a step; "
            "cadence=FixedTotal(%d) would use it.",
            config.total,
            config.total,
        )
    options = Options(
        config.max_grad_norm, finite, trainable, merge, Precision(config.compute_dtype, scale),
        dynamic, exchange.compression, exchange.delay, exchange.ahead, len(chosen), local, guard,
        config.verify_every, config.timeline, hint=cadence is None and config.policy == "auto",
        emulate=emulate, host=host_limits(config, exchange, len(chosen)),
    )  # fmt: skip
    return TrainStep(LossFn(loss_fn, has_aux=has_aux), optimizer, chosen, rule, options)


def _with_dynamic_scale(nonfinite: str) -> str:
    """A scale is found by going too far: what it drops is no error."""
    if nonfinite == "ignore":
        raise ValueError(
            "build_train_step: nonfinite must be 'raise' or 'skip' with a dynamic loss_scale, "
            "which is lowered by the windows that are dropped, got 'ignore'."
        )
    return "skip" if nonfinite == "raise" else nonfinite
