"""`advise`: what it makes of records, what it builds, and a real run."""

from itertools import groupby

import jax
import numpy as np
import optax
import pytest

from elche_jax import DDPConfig, DiLoCo, HostExchange, NoGuard, Timeline, build_train_step
from elche_jax.advice import advise, measure
from elche_jax.advice.measure import LEAST, WARM, alone_ms, team_ms
from elche_jax.cadence import EveryBatch, FixedTotal, WindowTime
from elche_jax.cadence.window import WindowRecord
from elche_jax.lab import EmulatedSpeeds, ExtraWork

DATA = {"x": np.ones((512, 3), "float32")}
PARAMS = {"w": np.zeros(3, "float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"] - 1) ** 2).mean()


def record(counts, busy_ms, wall_ms, sync_ms=1.0, steady=True):
    return WindowRecord(0, 0, counts, 8 * sum(counts), busy_ms, wall_ms, sync_ms, 0.0, steady)


def job(**changes):
    arguments = {"data": DATA, "batch_size": 8, "devices": jax.devices()[:2], "seconds": 0.05}
    return advise(loss_fn, optax.sgd(0.1), PARAMS, **(arguments | changes))


def of_one(*walls):
    return [record((count,), (), wall) for count, wall in walls]


def test_alone_the_full_windows_count():
    short = of_one((1, 9.0), (1, 90.0), (1, 8.0))
    long = of_one((4, 20.0), (4, 24.0), (4, 60.0), (3, 90.0), (1, 900.0))
    assert alone_ms(short, long) == (5.0, 4.0)


@pytest.mark.parametrize(
    ("one", "four", "expected"),
    [
        (8.0, 40.0, (8.0, 0.0)),  # no step costs less than nothing
        (8.0, 8.0, (2.0, 6.0)),  # nor a microbatch
        (8.0, 6.0, (1.5, 6.5)),
    ],
)
def test_alone_noise_gives_no_times_below_zero(one, four, expected):
    assert alone_ms(of_one((1, one)), of_one((4, four))) == expected


def test_alone_with_one_microbatch_the_step_cannot_be_told():
    assert alone_ms(of_one((1, 8.0)), of_one((1, 9.0))) == (8.0, 0.0)


def test_together_windows_of_half_the_size_and_more_count():
    records = [
        record((4, 2), (20.0, 30.0), 31.0, 1.0),
        record((4, 2), (24.0, 32.0), 33.0, 3.0),
        record((2, 1), (14.0, 17.0), 18.0, 2.0),
        record((1, 1), (100.0, 100.0), 101.0, 50.0),
    ]
    assert team_ms(records) == ((6.0, 16.0), 2.0)


def test_together_a_device_may_be_idle_at_the_end_of_an_epoch():
    records = [record((4, 2), (20.0, 30.0), 31.0), record((3, 0), (18.0, 0.0), 19.0)]
    assert team_ms(records) == ((5.5, 15.0), 1.0)


class Built:
    """Stands for a training step, with the records it would have measured."""

    def __init__(self, devices, cadence, emulate, records):
        self.devices, self.cadence, self.emulate = devices, cadence, emulate
        self.counts, self._to_come, self.records = (6, 2), iter(records), []

    def init(self, params, *, model_state, rng):
        assert (params is PARAMS, model_state, rng) == (True, "state", 7)

    def windows(self, data, batch_size, epochs):
        assert (data is DATA, batch_size, epochs) == (True, 8, None)
        return self

    def __enter__(self):
        return self._to_come

    def __exit__(self, *exception):
        return None

    def __call__(self, state, window):
        self.records.append(window)
        return state, {}


def lasts_s(hook):
    """What a microbatch of the first device lasts."""
    return hook.on_host()(0, 0, 1)


def test_records_become_advice(monkeypatch):
    """Windows that compiled and the first steady ones say nothing; medians of the others."""
    odd = 1e9
    first = [record((1, 1), (odd, odd), odd, odd, steady=False)]
    team = first + WARM * [record((6, 2), (odd, odd), odd, odd)]
    around = range(-2, 3)  # five windows, whose median is not that of eight with odd ones
    team += [record((6, 2), (33.0 + d, 44.0 + d), 47.0, 3.0 + d) for d in around]
    # device 0: 5 ms and a step of 3; device 1: 4 ms and one of 12, which swamps two microbatches
    walls = {(0, 1): 8.0, (0, 2): 13.0, (1, 1): 16.0, (1, 2): 20.0, (1, 16): 76.0}
    built = []

    def build(loss, optimizer, *, devices, cadence, has_aux, emulate, averaging, merge):
        assert (loss is loss_fn, has_aux, averaging, merge) == (True, True, None, "mean")
        everyone = len(devices) == 2
        if everyone:
            records = team
        else:
            count = getattr(cadence, "total", 1)
            wall = walls[jax.devices().index(devices[0]), count]
            records = WARM * of_one((count, odd)) + of_one(*((count, wall + d) for d in around))
        built.append(Built(devices, cadence, emulate, records))
        return built[-1]

    monkeypatch.setattr(measure, "build_train_step", build)
    hook = EmulatedSpeeds([5, 20])
    advice = job(
        model_state="state", rng=7, has_aux=True, seconds=1e-9, anchor=2, total=5, emulate=hook,
        merge="mean",
    )  # fmt: skip
    assert [device.solo_ms for device in advice.devices] == [5.0, 4.0]
    assert [device.step_ms for device in advice.devices] == [3.0, 12.0]
    assert [device.together_ms for device in advice.devices] == [5.5, 22.0]
    assert (advice.sync_ms, advice.batch_size) == (3.0, 8)
    assert (advice.elche.counts, advice.fixed_total.counts) == ((8, 2), (4, 1))
    first, second = jax.devices()[:2]
    assert built[0].devices == (first, second) and isinstance(built[0].cadence, WindowTime)
    assert [(*step.devices, step.cadence, lasts_s(step.emulate)) for step in built[1:]] == [
        (first, EveryBatch(), 0.005),
        (first, FixedTotal(2), 0.005),
        (second, EveryBatch(), 0.020),
        (second, FixedTotal(2), 0.020),
        (second, FixedTotal(16), 0.020),
    ]
    assert built[0].emulate == hook
    assert [len(step.records) for step in built] == [1 + WARM + LEAST, *5 * [WARM + LEAST]]


def test_a_real_run_lets_each_device_be_as_slow_alone_as_together():
    ranks = []

    def schedule(window, rank, microbatch):
        ranks.append(rank)
        return (0.2, 0.6)[rank]

    advice = job(emulate=EmulatedSpeeds(schedule), seconds=1e-9)
    last = [(rank, len(list(run))) for rank, run in groupby(ranks)][-2:]
    devices = advice.devices
    assert [rank for rank, _ in last] == [0, 1]
    assert min(length for _, length in last) >= WARM + LEAST
    # no device is faster than it is made
    assert devices[0].solo_ms + devices[0].step_ms >= 0.2
    assert devices[1].solo_ms + devices[1].step_ms >= 0.6
    assert [device.name for device in devices] == [str(d) for d in jax.devices()[:2]]
    assert advice.epoch == 64
    assert len(advice.elche.counts) == 2


def test_work_that_is_emulated_is_that_of_the_rank():
    """The loop around a microbatch: device 1 computes it three times, to the same result."""
    hook = ExtraWork((1, 3)).of_rank(1)
    hook.check(1)
    hook.settle()
    assert hook.on_host() is None
    ran = []

    def run(x):
        def body(i, carry):
            jax.debug.callback(lambda: ran.append(1))
            return carry + i

        carry = hook.around(body, 0, 5, x + hook.begin(0, 0, True))
        return carry + hook.end(0, 1, carry)

    assert jax.jit(run)(2.0) == 7.0
    jax.effects_barrier()
    assert len(ran) == 3


def test_waits_on_the_host_are_those_of_the_rank():
    seconds = EmulatedSpeeds([5, 20]).of_rank(1).on_host()
    assert seconds(0, 0, 3) == pytest.approx(0.060)


def test_a_schedule_that_is_wrong_is_said_with_the_rank_among_all():
    seconds = EmulatedSpeeds(lambda window, rank, _: -window * rank).of_rank(1).on_host()
    assert seconds(0, 0, 3) == 0
    with pytest.raises(ValueError, match=r"schedule\(2, 1, 0\) must be at least 0, got -2\."):
        seconds(2, 0, 1)


def test_one_device(monkeypatch):
    def build(loss, optimizer, *, devices, cadence, emulate, **options):
        count = getattr(cadence, "total", 1)
        return Built(devices, cadence, emulate, (WARM + LEAST) * of_one((count, 3 + 5.0 * count)))

    monkeypatch.setattr(measure, "build_train_step", build)
    one = {"model_state": "state", "rng": 7, "seconds": 1e-9}
    advice = job(devices=jax.devices()[:1], **one)
    assert advice.devices[0].gain is None
    assert advice.sync_ms == 0


@pytest.mark.slow  # tests/data reads such data, and other tests measure
def test_microbatches_that_come_as_they_are():
    class Stream:
        def __iter__(self):
            return iter([{"x": np.ones((4, 3), "float32")}] * 40)

    advice = job(data=Stream(), batch_size=None)
    assert (advice.batch_size, advice.epoch) == (4, None)


def test_of_a_config_what_chooses_the_cadence_does_not_count(monkeypatch):
    built = []

    def build(loss, optimizer, *, devices, cadence, config, emulate, **options):
        built.append(config)
        count = getattr(cadence, "total", 1)
        alone = record((count,), (), 3 + 5.0 * count)
        one = record((6, 2), (30.0, 40.0), 43.0, 3.0) if len(devices) == 2 else alone
        return Built(devices, cadence, emulate, (WARM + LEAST) * [one])

    monkeypatch.setattr(measure, "build_train_step", build)
    config = DDPConfig(
        policy="cadence", anchor=3, speed_hint=(1, 2), max_grad_norm=0.5, timeline=Timeline()
    )
    advice = job(
        config=config, cadence=None, averaging=None, model_state="state", rng=7, seconds=1e-9
    )
    assert [device.solo_ms for device in advice.devices] == [5.0, 5.0]
    assert built == 5 * [DDPConfig(max_grad_norm=0.5)]


def test_of_a_device_alone_lanes_and_kinds_say_nothing(mixed, monkeypatch):
    """The twin is of a kind of its own beside a CPU only, and lanes hold ranks of all devices."""
    built = []

    def build(loss, optimizer, *, devices, cadence, emulate, averaging, **options):
        built.append((len(devices), cadence, options))
        build_train_step(
            loss, optimizer, devices=devices, cadence=cadence, averaging=averaging, **options
        )
        count = getattr(cadence, "total", 1)
        alone = record((count,), (), 3 + 5.0 * count)
        one = record((6, 2, 2), (30.0, 40.0, 40.0), 43.0, 3.0) if len(devices) == 3 else alone
        return Built(devices, cadence, emulate, (WARM + LEAST) * [one])

    monkeypatch.setattr(measure, "build_train_step", build)
    given = {"lanes": ((0,), (1,), (2,)), "microbatch_split": {"twin": 2}, "has_aux": False}
    job(devices=mixed, model_state="state", rng=7, seconds=1e-9, **given)
    assert [built[0][2], len(built)] == [given, 7]
    alone = [options for count, _, options in built if count == 1]
    parts = [None, None, 2, 2, None, None]
    assert alone == [{"has_aux": False, "microbatch_split": each} for each in parts]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"data": iter([DATA])},
            TypeError,
            r"advise: data must be readable several times, got an iterator \(list_iterator\)\. "
            r"Pass an object whose __iter__ starts anew\.",
        ),
        ({"seconds": 0}, ValueError, r"advise: seconds must be above 0, got 0\."),
        ({"devices": []}, ValueError, r"advise: devices must hold at least one device, got none"),
        ({"anchor": 0}, ValueError, r"ElChe: anchor must be at least 1, got 0\."),
        (
            {"cadence": FixedTotal(3)},
            ValueError,
            r"advise: cadence must be left out, got FixedTotal\(total=3\) \(FixedTotal\)\. advise "
            r"measures exchanges of gradients, whatever the cadence\.",
        ),
        (
            {"averaging": DiLoCo(outer=optax.sgd(0.7), inner_steps=5)},
            ValueError,
            r"advise: averaging must be left out, got DiLoCo",
        ),
        ({"guard": NoGuard()}, ValueError, r"advise: guard must be left out, got NoGuard"),
        ({"exchange": HostExchange()}, ValueError, r"advise: exchange must be left out, got Host"),
        ({"timeline": Timeline()}, ValueError, r"advise: timeline must be left out, got Timel"),
        (
            {"config": DDPConfig(policy="async", exchange="host", max_overshoot=3)},
            ValueError,
            r"advise: config must be for a run that exchanges gradients, got policy='async', "
            r"exchange='host'\. Leave both out\.",
        ),
        ({"config": 3}, TypeError, r"build_train_step: config must be a DDPConfig, got int\."),
        ({"total": 0}, ValueError, r"FixedTotal: total must be at least 1, got 0\."),
        (
            {"data": {"x": np.ones((8, 3), "float32")}},
            ValueError,
            r"advise: data must hold at least one microbatch per device \(2\), got 1\.",
        ),
    ],
)
def test_errors(changes, kind, message):
    with pytest.raises(kind, match=message):
        job(**changes)
