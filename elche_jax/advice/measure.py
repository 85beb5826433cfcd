"""`advise`: measure each device alone and all together, with the user's own training step."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any, TypeVar

import jax
import optax

from elche_jax import _check as check
from elche_jax.advice.advice import OUTER, Advice, make_advice
from elche_jax.advice.predict import Forecast, Speeds
from elche_jax.averaging.rules import AveragingRule, DiLoCo
from elche_jax.cadence import Cadence, ElChe, EveryBatch, FixedTotal, WindowRecord, WindowTime
from elche_jax.cadence.window_time import MAX_COUNT
from elche_jax.config import CADENCE_KNOBS, DDPConfig
from elche_jax.data.source import IterableSource, as_source
from elche_jax.engine.devices import apart, names_of, select_job
from elche_jax.engine.job import Job
from elche_jax.engine.lane import kinds_of
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.talk import Talk
from elche_jax.observe.report import ms_per_batch
from elche_jax.train.build import build_train_step
from elche_jax.train.microbatch_split import checked_split

PyTree = Any

_T = TypeVar("_T")

WINDOWS = 20
"""Approximate number of windows per measurement."""

WARM = 3
"""Number of initial steady windows to ignore, while threads and caches warm up."""

GROWTH = 8
"""Factor by which windows that were too short grow."""

LEAST = 5
"""Smallest number of windows per measurement, however long they take."""


def advise(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    data: Any,
    batch_size: int | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    model_state: PyTree = None,
    rng: Any = 0,
    has_aux: bool = False,
    seconds: float = 2.0,
    anchor: int = 10,
    overhead_target: float = 0.10,
    total: int | None = None,
    emulate: LoopHook | None = None,
    **options: Any,
) -> Advice:
    """Measure the devices with your training step and predict the throughput of the cadences.

    The step really trains, on copies: first on all devices together, in windows of about a
    twentieth of `seconds`, then on each device alone, half of the time in windows of one
    microbatch and half in windows as long as those of all devices. The latter are repeated with
    longer windows if the optimizer takes nearly all of that time. Windows that waited for a
    compilation are ignored. The medians of the others give `together_ms[d]`, milliseconds per
    microbatch of device `d` while all work, and `sync_ms`, the cost of a synchronisation. For
    device `d` alone, with `w[n]` milliseconds for a window of `n` microbatches,

        solo_ms[d] = (w[n] - w[1]) / (n - 1)
        step_ms[d] = w[1] - solo_ms[d]

    Smaller windows at the end of an epoch are ignored, too. The cadences are then updated with
    simulated windows at these speeds until their counts settle:

        window_ms = max over d of counts[d] * ms[d] + sync_ms
        examples_per_s = 1000 * batch_size * sum(counts) / window_ms
        limit_share = sum(counts) / (window_ms * sum over d of 1 / ms[d])
        gain[d] = examples_per_s of all devices / examples_per_s without d - 1

    with `ms = together_ms` if all `n` devices work, and for `k` of the devices

        ms[d] = solo_ms[d] + (together_ms[d] - solo_ms[d]) * (k - 1) / (n - 1)

    If the number of microbatches in an epoch is known, the rates are those of an epoch: no
    window exceeds it, and its last window may be smaller.

    Virtual CPU devices, which share the host's cores, are slower together than alone: the
    sum of the solo speeds is then out of reach, and the advice says so. Two things are
    assumed, not measured: this linear interpolation, and that synchronising fewer devices
    costs as much as synchronising all. For a single device `step_ms` replaces `sync_ms`, and the
    device is assumed to step as infrequently as under `ElChe`. The advice considers all devices,
    all but one, and the `k` fastest, but not every subset.

    Args:
        loss_fn: As in `build_train_step`.
        optimizer: As in `build_train_step`.
        params: As in `TrainStep.init`.
        data: As in `TrainStep.windows`, but not an iterator, as it is read several times. At
            least one microbatch per device, preferably hundreds.
        batch_size: Examples per microbatch; None for an iterable of microbatches.
        devices: The devices; None for all devices of all processes.
        model_state: As in `TrainStep.init`.
        rng: As in `TrainStep.init`.
        has_aux: As in `build_train_step`.
        seconds: Length of each measurement in seconds, above 0, excluding compilation. There is
            one measurement per device and one of all devices together.
        anchor: Anchor of the `ElChe` to compute with, at least 1.
        overhead_target: Overhead target of the `ElChe` to compute with, 0.01 to 0.5.
        total: Microbatches per window of the `FixedTotal` to compute with, at least 1; None
            for as many as a window of `ElChe` has.
        emulate: A hook that slows devices down on purpose, see `elche_jax.lab`.
        **options: Further arguments of `build_train_step`, such as `trainable` or `config`,
            except `cadence`, `averaging`, `guard`, `exchange` and `timeline`, as the advice is
            about exchanges of gradients on the devices. The cadence and the timeline of a `config`
            are ignored: the advice is about which cadence to use, and nothing is recorded.

    Returns:
        The advice; `print` shows it as a table.

    Raises:
        TypeError: If `data` is an iterator, or an argument is of the wrong type.
        ValueError: If there is too little data to give every device some, an argument is out
            of range, or `cadence`, `averaging`, `guard`, `exchange`, `timeline` or a `config` with
            `policy="async"` or `exchange="host"` is given.
        NonFiniteError: If the loss is not finite.
        RuntimeError: If another process of the job raised an error.

    Examples:
        >>> import jax, numpy as np, optax
        >>> from elche_jax.advice import advise
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] @ params["w"]) ** 2).mean()
        >>> data = {"x": np.ones((4096, 3), "float32")}
        >>> params = {"w": np.zeros(3, "float32")}
        >>> advice = advise(
        ...     loss_fn, optax.sgd(0.1), params, data, batch_size=8,
        ...     devices=jax.devices()[:2], seconds=0.05,
        ... )
        >>> len(advice.devices), advice.elche.limit_share <= 1
        (2, True)
    """
    seconds = check.real("advise", "seconds", seconds, above=0)
    cadence = ElChe(anchor=anchor, overhead_target=overhead_target)
    if total is not None:
        total = FixedTotal(total).total
    if isinstance(data, Iterator):
        rule, got = "be readable several times", f"an iterator ({type(data).__name__})"
        todo = "Pass an object whose __iter__ starts anew."
        raise TypeError(check.message("advise", "data", rule, got, todo))
    chosen = select_job(devices, "advise")
    options = _measurable(options)

    # least=1: by default a device of 200 ms would make windows of 800 ms, only two of them in 2 s
    window = WindowTime(1e3 * seconds / WINDOWS, least=1)

    def run(
        devices: Sequence[jax.Device],
        cadence: Cadence[Any],
        hook: LoopHook | None,
        seconds: float,
        averaging: AveragingRule | None = None,
        options: dict[str, Any] = options,
    ) -> list[WindowRecord]:
        """Train for some seconds and return the steady windows after the warm-up."""
        train = build_train_step(
            loss_fn, optimizer, devices=devices, cadence=cadence, has_aux=has_aux, emulate=hook,
            averaging=averaging, **options,
        )  # fmt: skip
        state = train.init(params, model_state=model_state, rng=rng)
        job, ended = Job(tuple(devices)), list[WindowRecord]()
        # the first windows, in which programs are compiled, do not count towards `seconds`
        more, left = WARM + LEAST, math.inf
        while more:
            begun = time.perf_counter()
            with train.windows(data, batch_size, epochs=None) as windows:
                for window in islice(windows, more):
                    state, _ = train(state, window)
            # all windows have ended: every process has the same records and measures equally long
            took = max(job.exchange(time.perf_counter() - begun))
            job.check_all()
            ended = [record for record in train.records if record.steady][WARM:]
            left = seconds if math.isinf(left) else left - took
            # about as many as are still missing to reach `LEAST` and `seconds`
            more = max(0, LEAST - len(ended), math.ceil(left / (took / more)))
        return ended

    def alone(rank: int) -> tuple[float, float, int]:
        """Return the milliseconds of `alone_ms`, and the examples per microbatch."""
        hook = None if emulate is None else emulate.of_rank(rank)
        own = _of_one(options, chosen, rank)
        measured = partial(run, [chosen[rank]], hook=hook, seconds=seconds / 2, options=own)
        short = measured(EveryBatch())
        # windows as long as those of all devices; one microbatch has been measured already
        count = max(2, min(MAX_COUNT, round(window.window_ms / _full_windows(short)[1])))
        while not _separable(short, long := measured(FixedTotal(count)), count):
            count *= GROWTH
        return *alone_ms(short, long), round(short[0].examples / sum(short[0].counts))

    together = team_ms(run(chosen, window, emulate, seconds)) if len(chosen) > 1 else None
    solo_ms, step_ms, examples = zip(*_in_turns(Job(chosen), alone), strict=True)
    speeds = Speeds(solo_ms, *(together or (solo_ms, 0.0)), step_ms)
    size, source = batch_size or examples[0], as_source(data)
    epoch = None if isinstance(source, IterableSource) else source.size // size
    forecast = Forecast(speeds, size, epoch)
    advice = make_advice(names_of(chosen), forecast, cadence, total)
    if Job(chosen).one_process or advice.sync_share <= overhead_target:
        return advice
    rule = DiLoCo(outer=optax.sgd(**OUTER), compression="int8")
    rare = Speeds(solo_ms, *team_ms(run(chosen, window, emulate, seconds, rule)))
    local_steps = replace(forecast, speeds=rare).plan("DiLoCo, int8", cadence)
    return replace(advice, local_steps=local_steps)


def _in_turns(job: Job, alone: Callable[[int], _T]) -> list[_T]:
    """Measure each device alone in its process, one after the other: processes may share a host.

    Args:
        job: The devices.
        alone: Measures the device of a rank.

    Returns:
        The measurements of each device, in rank order; the same in every process.
    """
    found: dict[int, _T] = {}
    with Talk(job, "advise") as talk, apart():
        for ranks in job.ranks_of.values():
            mine = {rank: alone(rank) for rank in ranks if rank in job.ranks}
            for told in talk.tell(mine):
                found |= told
            job.check_all()
    return [found[rank] for rank in range(job.world_size)]


def alone_ms(short: Sequence[WindowRecord], long: Sequence[WindowRecord]) -> tuple[float, float]:
    """Return milliseconds per microbatch and per optimizer step of a device alone.

    With `w[n]` the median over the full windows, of `n` microbatches each,

        ms = (w[n] - w[1]) / (n - 1)        step_ms = w[1] - ms

    unless noise makes one of them negative. In any case `ms + step_ms` is the measured time
    of a window of one microbatch.

    Args:
        short: Steady windows of one microbatch.
        long: Steady windows of more microbatches, if an epoch has more than one.

    Examples:
        >>> from elche_jax.advice.measure import alone_ms
        >>> from elche_jax.cadence import WindowRecord
        >>> wall = {1: (8.0,), 4: (20.0, 22.0, 20.0), 2: (50.0,)}  # 2: the end of an epoch
        >>> one, four, rest = (
        ...     [WindowRecord(0, 0, (n,), n, (), ms, 0.0, 0.0, True) for ms in wall[n]]
        ...     for n in wall
        ... )
        >>> alone_ms(one, [*four, *rest])
        (4.0, 4.0)
    """
    _, one = _full_windows(short)
    count, many = _full_windows(long)
    if count == 1:  # an epoch has only one microbatch
        return one, 0.0
    ms = (many - one) / (count - 1)
    ms = min(one, ms if ms > 0 else many / count)
    return ms, one - ms


def _full_windows(records: Sequence[WindowRecord]) -> tuple[int, float]:
    """Return the microbatches of one device's full windows, and their median milliseconds."""
    full = max(record.counts[0] for record in records)
    return full, median(record.wall_ms for record in records if record.counts[0] == full)


def _separable(short: Sequence[WindowRecord], long: Sequence[WindowRecord], count: int) -> bool:
    """Return whether microbatches and steps can be told apart in windows of `count` microbatches.

    They cannot if the windows hardly take longer than those of one microbatch: the optimizer
    step then takes nearly all of the time, and the rest is noise.
    """
    full, many = _full_windows(long)
    # the last two: an epoch, or any window, has no more microbatches
    return many >= 1.5 * _full_windows(short)[1] or full < count or count * GROWTH > MAX_COUNT


def _measurable(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for a run that exchanges gradients, under a cadence of `advise`."""
    for name in ("cadence", "averaging", "guard", "exchange", "timeline"):
        if (given := options.pop(name, None)) is not None:
            rule, got = "be left out", check.describe(given)
            todo = "advise measures exchanges of gradients, whatever the cadence."
            raise ValueError(check.message("advise", name, rule, got, todo))
    config = options.get("config")
    if not isinstance(config, DDPConfig):
        return options
    if config.policy == "async" or config.exchange == "host":
        rule = "be for a run that exchanges gradients"
        got = f"policy={config.policy!r}, exchange={config.exchange!r}"
        raise ValueError(check.message("advise", "config", rule, got, "Leave both out."))
    knobs = {name: getattr(DDPConfig, name) for name in CADENCE_KNOBS}
    return options | {"config": replace(config, **knobs, timeline=None)}


def _of_one(options: dict[str, Any], devices: Sequence[jax.Device], rank: int) -> dict[str, Any]:
    """Return the options for a run on one of several devices, which has no lanes and no kinds."""
    if len(devices) == 1:
        return options
    own = {name: value for name, value in options.items() if name != "lanes"}
    if "microbatch_split" in own:
        kinds = kinds_of(devices)
        split = checked_split("advise", own["microbatch_split"], kinds)
        own["microbatch_split"] = split.get(kinds[rank])
    return own


def team_ms(records: Sequence[WindowRecord]) -> tuple[tuple[float, ...], float]:
    """Return milliseconds per microbatch of each device while all work, and `sync_ms`.

    These are medians over the windows that are at least half as large as the largest.

    Args:
        records: Steady windows of several devices.

    Raises:
        ValueError: If a device had no work in any of these windows.

    Examples:
        >>> from elche_jax.advice.measure import team_ms
        >>> from elche_jax.cadence import WindowRecord
        >>> team_ms([WindowRecord(0, 0, (4, 1), 40, (20.0, 21.0), 22.0, 1.0, 0.0, True)])
        ((5.0, 21.0), 1.0)
    """
    half = max(sum(record.counts) for record in records) / 2
    full = [record for record in records if sum(record.counts) >= half]
    known = [ms_per_batch(full, rank) for rank in range(len(full[0].counts))]
    times = tuple(ms for ms in known if ms)
    if len(times) < len(known):
        rule = f"hold at least one microbatch per device ({len(known)})"
        raise ValueError(check.message("advise", "data", rule, sum(full[0].counts)))
    return times, median(record.sync_ms for record in full)
