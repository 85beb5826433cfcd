"""`advise`: times every device alone and all together, on the user's own step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import optax

from elche_jax import _check as check
from elche_jax.advice.advice import Advice, make_advice
from elche_jax.advice.predict import Speeds
from elche_jax.cadence import Cadence, ElChe, FixedTotal, WindowTime
from elche_jax.engine.devices import check_one_kind, select_devices
from elche_jax.engine.loop import Body, LoopHook, Seconds
from elche_jax.observe.records import WindowRecord
from elche_jax.observe.report import ms_per_batch
from elche_jax.train.build import build_train_step
from elche_jax.train.step import TrainStep

PyTree = Any

WINDOWS = 20
"""Windows that the time of a measurement is cut into."""

WARM = 3
"""First windows without a compile that are left out: threads and caches warm up."""

LEAST = 5
"""Fewest windows of a measurement, whatever they take."""


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
    """Measures the devices on your step, and computes what the cadences would give.

    The step really trains, on copies: first on all devices together, then on each alone,
    in windows of about a twentieth of `seconds`. Of window records that waited for no
    compile it takes medians: `solo_ms[d]` and `together_ms[d]`, milliseconds per
    microbatch of device `d` alone and while all work, and `sync_ms`, the cost of a
    synchronisation. Windows at the end of an epoch, which are smaller, do not count. The
    cadence objects are then told of windows of these speeds until their counts settle:

        window_ms = max over d of counts[d] * ms[d] + sync_ms
        examples_per_s = 1000 * batch_size * sum(counts) / window_ms
        limit_share = sum(counts) / (window_ms * sum over d of 1 / ms[d])
        gain[d] = examples_per_s of all devices / examples_per_s without d - 1

    with `ms = together_ms` where all `n` devices work, and for `k` of them

        ms[d] = solo_ms[d] + (together_ms[d] - solo_ms[d]) * (k - 1) / (n - 1)

    Virtual CPU devices, which share the host's cores, are slower together than alone:
    the sum of solo speeds is then out of reach, and the advice says so. What is assumed
    and not measured: that straight line, and that fewer devices synchronise at the cost of
    all. Looked at are all devices, all but one, and the `k` fastest; not every set.

    Args:
        loss_fn: As in `build_train_step`.
        optimizer: As in `build_train_step`.
        params: As in `TrainStep.init`.
        data: As in `TrainStep.windows`, but no iterator: it is read several times. At
            least one microbatch per device, better some hundreds.
        batch_size: Examples per microbatch; for an iterable of microbatches, None.
        devices: The devices; None for all local ones.
        model_state: As in `TrainStep.init`.
        rng: As in `TrainStep.init`.
        has_aux: As in `build_train_step`.
        seconds: How long each measurement lasts, above 0; there is one per device, and
            one of all of them. Compiling comes on top.
        anchor: Of the `ElChe` to compute with, at least 1.
        overhead_target: Of the `ElChe` to compute with, 0.01 to 0.5.
        total: Microbatches per window of the `FixedTotal` to compute with, at least 1;
            None: as many as a window of `ElChe` has.
        emulate: Makes devices slower on purpose, see `elche_jax.lab`.
        **options: Further ones of `build_train_step`, such as `trainable` or `config`.

    Returns:
        The advice: `print` shows it as a table.

    Raises:
        TypeError: `data` is an iterator; an argument is of the wrong type.
        ValueError: Too few data for every device to get some; devices of several kinds; an
            argument out of range.
        NonFiniteError: The loss is not finite.

    Example:
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
    chosen = select_devices(devices, "advise")
    check_one_kind("advise", chosen)

    def build(own: Sequence[jax.Device], cadence: Cadence[Any], hook: LoopHook | None) -> TrainStep:
        return build_train_step(
            loss_fn, optimizer, devices=own, cadence=cadence, has_aux=has_aux, emulate=hook,
            **options,
        )  # fmt: skip

    def run(train: TrainStep) -> list[WindowRecord]:
        return _run(train, params, data, batch_size, model_state, rng, seconds)

    window = WindowTime(window_ms=1e3 * seconds / WINDOWS, least=1)
    everyone = build(chosen, window, emulate)
    together = run(everyone)
    size = batch_size or _examples(together)
    names = [str(device) for device in chosen]
    if len(chosen) == 1:
        alone = solo_ms(together)
        return make_advice(names, Speeds((alone,), (alone,), 0.0), size, cadence, total)
    together_ms, sync_ms = team_ms(together)
    solo = [
        solo_ms(run(build([device], FixedTotal(count), _of_rank(emulate, rank))))
        for rank, (device, count) in enumerate(zip(chosen, everyone.counts, strict=True))
    ]
    return make_advice(names, Speeds(tuple(solo), together_ms, sync_ms), size, cadence, total)


def solo_ms(records: Sequence[WindowRecord]) -> float:
    """Milliseconds per microbatch of one device: the median over its full windows.

    Args:
        records: Steady windows of one device.

    Example:
        >>> from elche_jax.advice.measure import solo_ms
        >>> from elche_jax.observe.records import WindowRecord
        >>> wall = {4: (20.0, 22.0, 40.0), 1: (50.0,)}  # the last is the end of an epoch
        >>> solo_ms([
        ...     WindowRecord(0, 0, (n,), n, (), ms, 0.0, 0.0, True) for n in wall for ms in wall[n]
        ... ])
        5.5
    """
    full = max(record.counts[0] for record in records)
    return median(record.wall_ms / full for record in records if record.counts[0] == full)


def team_ms(records: Sequence[WindowRecord]) -> tuple[tuple[float, ...], float]:
    """What devices need together: milliseconds per microbatch of each, and the `sync_ms`.

    Medians over the windows that are at least half as large as the largest.

    Args:
        records: Steady windows of several devices.

    Raises:
        ValueError: A device had no work in any of them.

    Example:
        >>> from elche_jax.advice.measure import team_ms
        >>> from elche_jax.observe.records import WindowRecord
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


def _run(
    train: TrainStep,
    params: PyTree,
    data: Any,
    batch_size: int | None,
    model_state: PyTree,
    rng: Any,
    seconds: float,
) -> list[WindowRecord]:
    """Trains for some seconds; gives the windows that say something."""
    state = train.init(params, model_state=model_state, rng=rng)
    with train.windows(data, batch_size, epochs=None) as windows:
        begun = None
        for window in windows:
            state, _ = train(state, window)
            steady = sum(record.steady for record in train.records)
            if begun is None and steady >= WARM:
                begun = time.perf_counter()
            if begun is None or steady < WARM + LEAST:
                continue
            if time.perf_counter() - begun >= seconds:
                break
    return [record for record in train.records if record.steady][WARM:]


def _examples(records: Sequence[WindowRecord]) -> int:
    """Examples per microbatch, where the data say it."""
    return round(records[0].examples / sum(records[0].counts))


def _of_rank(emulate: LoopHook | None, rank: int) -> LoopHook | None:
    return None if emulate is None else OfRank(emulate, rank)


@dataclass(frozen=True)
class OfRank:
    """Emulation that lets a device which works alone be as slow as it is in the team.

    Attributes:
        hook: The emulation of all devices.
        rank: The device's rank among them.
    """

    hook: LoopHook
    rank: int

    def check(self, world_size: int) -> None:
        """Nothing: all devices were checked together."""

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Before the loop."""
        return self.hook.begin(device + self.rank, step, fresh)

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Runs one microbatch."""
        return self.hook.around(body, device + self.rank, i, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """After the loop."""
        return self.hook.end(device + self.rank, count, carry)

    def on_host(self) -> Seconds | None:
        """How long microbatches last."""
        seconds = self.hook.on_host()
        if seconds is None:
            return None
        return lambda window, device, count: seconds(window, device + self.rank, count)

    def settle(self) -> None:
        """After the dispatch."""
        self.hook.settle()
