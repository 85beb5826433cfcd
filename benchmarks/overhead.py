"""The cases of `mixed_speeds.py` in which devices really compute."""

import time
from statistics import median

import jax
import numpy as np
from baselines import (
    OPTIMIZER,
    PlainJit,
    PlainPmap,
    examples,
    mlp_loss,
    mlp_params,
    surrogate_loss,
    surrogate_params,
)
from loops import Loop, Meter, apart, steps_rate
from measure import Rates, Result, against_control, interleave, ratios, result, with_control

import elche_jax as elche
from elche_jax.lab import ExtraWork

TURN_S = 0.8


def case_b(repeats: int) -> list[Result]:
    """Measure real compute, where one of two devices does three times the work."""
    params, work, counts = surrogate_params(), ExtraWork((1, 3)), (240, 80)
    devices = jax.devices()[:2]
    train = elche.build_train_step(
        surrogate_loss, OPTIMIZER, devices=devices, emulate=work, cadence=elche.ElChe(anchor=80)
    )
    ours = Loop(train, params, examples(65536), 1, placement="resident")
    ours.warm(12)
    control = apart(params, devices, counts, 1, work, loss=surrogate_loss)
    measures = {
        "ours": lambda: ours.rate(TURN_S),
        "fast": lambda: control.alone(0, TURN_S),
        "slow": lambda: control.alone(1, TURN_S),
    }
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), 2 * repeats)
    of = median(a + b for a, b in zip(rates["fast"], rates["slow"], strict=True))
    return [
        against_control("b", "real compute 1:3, ElChe", rates, "ours", of, least=0.95),
    ]


def case_c(repeats: int) -> list[Result]:
    """Measure two equal devices, and one, against hand-written steps; resident, streamed data."""
    params, batch = mlp_params(width=256, depth=3), 64
    count = _count_for_ms(params, batch, 100.0)
    devices = jax.devices()[:2]

    def loop(world: int, cadence, placement: str) -> Loop:
        train = elche.build_train_step(
            mlp_loss, OPTIMIZER, devices=devices[:world], cadence=cadence
        )
        data = examples(world * count * batch)  # one window, as in the hand-written steps
        ours = Loop(train, params, data, batch, placement=placement)
        ours.warm(4)
        return ours

    def turns(world: int, plain, cadence) -> tuple[Rates, ...]:
        counts = (count,) * world
        resident, streamed = (loop(world, cadence, where) for where in ("resident", "stream"))
        control = apart(params, devices[:world], counts, batch)
        measures = {
            "resident": lambda: resident.rate(TURN_S),
            "stream": lambda: streamed.rate(TURN_S),
            "by hand": lambda: steps_rate(plain, sum(counts), TURN_S),
        }
        meter = Meter()
        metered = meter.on(with_control(measures, lambda: control.rate(TURN_S)))
        # more, shorter turns: the required values are close to the noise
        return interleave(metered, 3 * repeats), meter.rates()

    def rows(of, hand: str, found: tuple[Rates, ...], **asked):
        for rates, unit in zip(found, ("", ", per processor time"), strict=True):
            for name, what in (("resident", "resident"), ("stream", "stream"), ("by hand", hand)):
                least = {} if unit else asked.get(name, {})
                yield against_control("c", f"{of} x {count}, {what}{unit}", rates, name, **least)

    fused = PlainPmap(params, devices, (count, count), batch)
    two = turns(2, fused, elche.Replay([(count, count)] * 100_000))
    fed = PlainJit(params, devices[0], count, batch, stream=examples(count * batch))
    one = turns(1, fed, elche.FixedTotal(count))

    def of_hand(world: int, name: str, rates, what: str) -> Result:
        """Compare with the hand-written loop that does the same work."""
        values = ratios(rates[name], rates["by hand"])
        return result("c", f"{world} x {count}, {name}, of {what}", values, least=0.98)

    return [
        of_hand(2, "resident", two[0], "a fused pmap step"),
        *rows("2 devices", "fused pmap step", two),
        of_hand(1, "stream", one[0], "a jit loop that streams"),
        *rows("1 device", "streamed by hand", one, resident={"least": 0.99}),
    ]


def _count_for_ms(params, batch: int, ms: float) -> int:
    plain = PlainJit(params, jax.devices()[0], 8, batch)
    return max(1, round(ms * steps_rate(plain, 8, 1.0)))


def case_f(repeats: int) -> list[Result]:
    """Measure the main thread's processor time per window, 8 devices, 50 leaves.

    The comparison is with the dispatch of one hand-written pmap step over the same leaves, on
    this machine at the same time.
    """
    params = {f"w{i:02}": np.zeros(64, "float32") for i in range(50)}

    def loss_fn(params, batch, rng):
        return ((batch["x"] @ sum(params.values()) - batch["y"]) ** 2).mean()

    train = elche.build_train_step(loss_fn, OPTIMIZER, cadence=elche.Replay([(4,) * 8] * 100_000))
    plain = PlainPmap(params, jax.devices(), (4,) * 8, 16, loss=loss_fn)
    state = train.init(params)

    def spent(step, most: int = 40) -> float:
        times = []
        for number in range(most):
            begun = time.thread_time()
            metrics = step()
            if number > 5:
                times.append(1e3 * (time.thread_time() - begun))
            jax.block_until_ready(metrics)
        return median(times)

    def ours() -> float:
        with train.windows(examples(8192), 16, epochs=None) as windows:

            def step():
                nonlocal state
                state, metrics = train(state, next(windows))
                return metrics

            return spent(step)

    # more, short turns: in the first one most windows are timed, as speeds are still unknown
    costs = interleave({"ours": ours, "plain": lambda: spent(plain)}, 3 * repeats)
    what = "main thread per window, 8 devices, 50 leaves"
    return [
        result("f", f"{what}, over pmap by hand", ratios(costs["ours"], costs["plain"]), most=1.3),
        result("f", what, costs["ours"], "ms"),
        result("f", "the same of a hand-written pmap step", costs["plain"], "ms"),
    ]
