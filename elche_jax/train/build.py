"""`build_train_step`: the functional interface of the library."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from numpy.typing import DTypeLike

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient
from elche_jax.cadence import Cadence, EveryBatch
from elche_jax.cadence.guards import Guard, NoGuard, TrendGuard
from elche_jax.config import DDPConfig, Recorder, check_arguments, dtype_name
from elche_jax.engine.devices import LaneChoice, fleet_of, select_job, summary_of
from elche_jax.engine.digests import settings_of
from elche_jax.engine.job import Job
from elche_jax.engine.lane import kinds_of
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.loss import LossFn
from elche_jax.engine.merge import Merge
from elche_jax.engine.precision import Precision, first_scale
from elche_jax.engine.trainable import Trainable
from elche_jax.train.averaging import cadence_of, check_averaging, check_together
from elche_jax.train.finite import MAX_SKIPS, FinitePolicy
from elche_jax.train.microbatch_split import MicrobatchSplit, checked_split
from elche_jax.train.options import Options
from elche_jax.train.outside import check_debug, check_outside
from elche_jax.train.parts import cadence_for, check_emulation, checked_optimizer
from elche_jax.train.recording import EpochRecorder
from elche_jax.train.step import TrainStep


def build_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    devices: Sequence[jax.Device] | None = None,
    lanes: LaneChoice | None = None,
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
    exchange: HostExchange | None = None,
    max_grad_norm: float | None = None,
    compute_dtype: DTypeLike | None = None,
    microbatch_split: MicrobatchSplit | None = None,
    device_loss: bool = False,
    verify_every: int | None = None,
    timeline: Recorder | None = None,
    emulate: LoopHook | None = None,
) -> TrainStep:
    """Build a training step over the devices of a job.

    In a window, device `d` runs `counts[d]` microbatches on its own. The gradients are then
    combined, and every device takes the same optimizer step with

        g = sum_d sum_i weight[d, i] * grad(loss[d, i]) / sum_d sum_i weight[d, i]

    Args:
        loss_fn: `loss_fn(params, batch, rng)`, where `batch` is one microbatch with
            leaves `(batch_size, ...)` and `rng` the microbatch's own key. Returns a float
            scalar (the mean over the microbatch), a float vector `(batch_size,)` of
            per-example losses, or `Weighted(loss, weight)`. With `has_aux` it returns
            `(loss, aux)`. With model state (see `TrainStep.init`) it is
            `loss_fn(params, model_state, batch, rng)` and returns `(loss, model_state)`, or
            `(loss, (model_state, aux))` with `has_aux`. As under `jax.jit`, other values that
            it reads must not change.
        optimizer: An optax optimizer. `TrainStep.init` traces its update, so values that the
            update reads besides its arguments must not change later.
        devices: The devices, in any order, of one or several kinds and backends
            (`jax.devices("cuda") + jax.devices("cpu")`); None for all devices of the
            default backend.
        lanes: Which devices share a program and a collective; the lanes' results are then
            combined on one device. Ranks by lane, such as `((0, 1), (2,))`, or a function that
            takes a device and returns the name of its lane. None: one lane per kind.
        cadence: Decides how many microbatches each device gets; None: as `config` says.
        config: A flat bundle of settings; None for `DDPConfig()`. Each can also be set on an
            object or as an argument here, see `DDPConfig`.
        has_aux: Whether `loss_fn` also returns a dict of metrics, each a scalar or one value
            per example; a window reports their means, weighted like the gradient. A name that
            the window itself reports raises an error.
        nonfinite: What to do if a window's gradient is not finite. `"raise"` drops its
            update on all devices and raises `NonFiniteError` from the loop; `"skip"` drops
            it and continues (see `metrics["finite"]` and `train.skipped`); `"ignore"`
            applies it.
        max_skips: Under `"skip"`, raise `NonFiniteError` after this many dropped windows in
            a row, at least 1; None for never.
        trainable: Which parameters are trained: a function `(path, leaf) -> bool` of paths
            such as `"['body']['w']"`, or bools in the structure of the parameters, where one
            bool may cover a subtree; None for all. Frozen parameters have no gradient
            and no optimizer state, and are not exchanged.
        merge: How the devices' model states are merged: `"mean"` by weight, `"pooled"`
            for pairs of leaves `mean` and `var`, `"max"`, `"first"`, and with `averaging`
            also `"keep"`. One rule for all leaves, a function `(path, leaf) -> rule`, or
            rules in the structure of the model state. None: the mean of floats, the maximum
            of other types.
        loss_scale: Factor by which the loss is multiplied and the gradient divided again: a
            number, or a `flax.training.dynamic_scale.DynamicScale`. With a dynamic scale, a
            non-finite window lowers it and is dropped, as under `"skip"`. For float16.
        averaging: None or `MeanGradient(...)`: gradients are combined, as above.
            `ParameterAveraging(...)` or `DiLoCo(...)`: device `d` takes `counts[d]` optimizer
            steps of its own, one per microbatch, then the parameters are averaged.
        guard: With `averaging`, tells the cadence if the devices drift too far apart:
            `TrendGuard`, `LevelGuard`, `NoGuard`, or an object with a method
            `verdict(history)`. None: `TrendGuard()`, or `NoGuard()` if `inner_steps` fixes
            the windows.
        exchange: None: devices compute the mean in a collective. `HostExchange(...)`: the
            host computes it, no device waits in a collective, and late devices are left out.
        max_grad_norm: Global norm, above 0, to which each device's mean gradient is clipped
            before the exchange; with local steps, each step's gradient. None: no clipping.
            (To clip the combined gradient, put `optax.clip_by_global_norm` into the optimizer.)
        compute_dtype: bfloat16 or float16 (`jnp.bfloat16` or `"bfloat16"`): `loss_fn` gets the
            float leaves of the parameters and of the batch in this dtype, while parameters,
            gradient sums and optimizer state keep their own. None: no conversion.
        microbatch_split: Number of equal parts in which a device runs a microbatch, one after the
            other, for microbatches that do not fit a device's memory. A number for all devices;
            `"auto"`, the smallest power of two that fits; or either by kind of device, such as
            `{"cpu": 4}`, where other kinds run it whole. The result equals that of the whole
            microbatch, up to the order of sums. `windows` raises an error if it would not:
            if the loss changes the model state (BatchNorm), uses `rng` (dropout), or mixes
            examples. The last is detected by comparing gradients of a few examples, which
            compiles one more program. None: whole microbatches.
        device_loss: Whether `metrics["device_loss"]` is the mean loss of each device over its
            own microbatches, `(world_size,)`, NaN for a device without work. This costs one
            more small exchange.
        verify_every: Compare the replicas bit by bit after every N-th window, N at least 1.
            None: never in one process; every 100th window in a job of several processes, whose
            optimizers may differ by mistake.
        timeline: A `Timeline` that records the run; None: nothing is recorded. With a timeline
            every window is timed, so no exchange on the devices overlaps with the next window.
        emulate: Slows devices down on purpose, see `elche_jax.lab`.

    Returns:
        The training step.

    Raises:
        TypeError: If `devices` are not devices, or `loss_fn` is not callable.
        ValueError: If `devices` is empty, has duplicates, or has none of some process; if an
            option that must agree differs between processes, or works in one process only; if
            `lanes` is not a partition of the devices; if an option is also set in `config`; if an
            option is out of range; if this is called inside `jit`, or under `jax_disable_jit`,
            `jax_debug_nans` or `jax_debug_infs`.

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
    check_debug("build_train_step")
    check.instance("build_train_step", "loss_fn", loss_fn, Callable, "be callable", brief=True)
    check.instance("build_train_step", "has_aux", has_aux, bool)
    check.instance("build_train_step", "device_loss", device_loss, bool)
    tx = checked_optimizer(optimizer)
    config = DDPConfig() if config is None else config
    check.instance("build_train_step", "config", config, DDPConfig, "be a DDPConfig", brief=True)
    given = config.or_given(
        max_grad_norm=max_grad_norm, compute_dtype=dtype_name(compute_dtype),
        verify_every=verify_every, timeline=timeline,
    )  # fmt: skip
    check_arguments("build_train_step", **given)
    scale, dynamic = first_scale(loss_scale)
    if dynamic is not None:
        nonfinite = _with_dynamic_scale(nonfinite)
    finite = FinitePolicy(nonfinite, max_skips)
    devices = select_job(devices)
    fleet, kinds = fleet_of("build_train_step", devices, lanes), kinds_of(devices)
    config = config.for_kinds(kinds)
    cadence = cadence_for("build_train_step", cadence, kinds)
    check_emulation("build_train_step", emulate, len(devices))
    check_averaging(averaging, guard)
    exchange = _exchange(exchange, config)
    rule = config.rule(averaging, run_ahead=exchange is not None and exchange.run_ahead)
    chosen = _chosen(cadence, config)
    job = fleet.job
    if isinstance(rule, AveragingRule):
        cadence = cadence_of(rule, cadence, config, len(devices))
        # fixed windows cannot grow, and only a guard that the user passes may shorten them
        guard = guard or (TrendGuard() if rule.inner_steps is None else NoGuard())
    # before the default is filled in: no hint if the user chose the cadence
    first = job.at == 0  # the process that records and logs
    records = first or isinstance(given["timeline"], EpochRecorder)
    hint = first and cadence is None and config.policy == "auto"
    options = Options(
        given["max_grad_norm"], finite, trainable, merge, Precision(given["compute_dtype"], scale),
        dynamic, rule, len(devices), guard, given["verify_every"],
        given["timeline"] if records else None, hint=hint, emulate=emulate,
        exchange=exchange,
        split=checked_split("build_train_step", microbatch_split, kinds), device_loss=device_loss,
    )  # fmt: skip
    check_together(options, chosen)
    cadence = cadence or config.cadence_for(len(devices), kinds=len(set(kinds)))
    _warn_of_knobs(config, cadence, len(devices))
    job.check_same("build_train_step", cadence=settings_of(cadence), **options.shared())
    if exchange is not None:
        _check_exchange(exchange, job, kinds, lanes)
    if first:
        logger.info(summary_of(fleet))
    return TrainStep(LossFn(loss_fn, has_aux=has_aux), tx, fleet, cadence, options)


def _exchange(exchange: HostExchange | None, config: DDPConfig) -> HostExchange | None:
    """Return the exchange on the host, given as an argument or in `config`."""
    if exchange is None:
        return config.host_exchange()
    rule = "be a HostExchange or None"
    todo = "Pass elche_jax.HostExchange(), or nothing for an exchange on the devices."
    check.instance("build_train_step", "exchange", exchange, HostExchange, rule, todo)
    if config.exchange == "host":
        rule = "be left out where config sets it (exchange='host')"
        raise ValueError(check.message("build_train_step", "exchange", rule, exchange))
    return exchange


def _check_exchange(
    exchange: HostExchange, job: Job, kinds: Sequence[str], lanes: LaneChoice | None
) -> None:
    """Raise if devices would apply the host's mean with different bits; all processes call it."""
    if lanes is not None:
        rule, todo = "be None with an exchange on the host, where no devices meet", "Leave it out."
        raise ValueError(check.message("build_train_step", "lanes", rule, lanes, todo))
    if len(set(kinds)) > 1:
        rule = "be None where devices are of several kinds"
        got = f"{exchange} and {', '.join(dict.fromkeys(kinds))}"
        todo = "Every device would apply the mean by itself, and kinds round differently."
    elif not job.alike:
        rule, got = "be None where the processes' devices do not compute the same bits", exchange
        todo = (
            "Each would apply the mean by itself, and GPUs or unlike processors round differently."
        )
    else:
        return
    raise ValueError(check.message("build_train_step", "exchange", rule, got, todo))


def _chosen(cadence: Cadence[Any] | None, config: DDPConfig) -> list[str]:
    """Return the settings that select the cadence, for messages; none if all are defaults."""
    knobs = config.cadence_knobs()
    if cadence is None:
        return knobs
    if knobs:
        raise ValueError(
            "build_train_step: cadence and config must not both choose the cadence, got "
            f"{type(cadence).__name__} and {', '.join(knobs)}. Leave out one."
        )
    return [type(cadence).__name__]


def _warn_of_knobs(config: DDPConfig, cadence: Cadence[Any], world_size: int) -> None:
    """Log a warning if settings have no effect on these devices."""
    unused = [knob for knob in config.cadence_knobs() if not knob.startswith("policy")]
    if unused and world_size > 1 and isinstance(cadence, EveryBatch):
        logger.warning(
            "elche: %s has no effect: under policy=%r these devices, which are alike, run one "
            "microbatch per window; policy='cadence' would use it.",
            ", ".join(unused),
            config.policy,
        )
    if config.total is not None and world_size == 1:
        logger.warning(
            "elche: total=%d has no effect on one device, where every microbatch is a step; "
            "cadence=FixedTotal(%d) would use it.",
            config.total,
            config.total,
        )


def _with_dynamic_scale(nonfinite: str) -> str:
    """Return the policy for a dynamic scale, under which a dropped window is not an error."""
    if nonfinite == "ignore":
        raise ValueError(
            "build_train_step: nonfinite must be 'raise' or 'skip' with a dynamic loss_scale, "
            "which is lowered by the windows that are dropped, got 'ignore'."
        )
    # the scale is found by overflowing, so only many dropped windows in a row are an error
    return "skip" if nonfinite == "raise" else nonfinite
