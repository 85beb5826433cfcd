"""The first window is timed: the second plan follows from it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from waits import eventually

import elche_jax as elche
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.lab import EmulatedSpeeds

MS = (6.0, 6.0, 24.0)
DATA = {"x": np.random.default_rng(0).normal(size=(3000, 3)).astype("float32")}
KEEP = elche.ParameterAveraging(optimizer_state="keep")
WAYS = {
    "gradient": {},
    "averaging": {"averaging": elche.ParameterAveraging()},
    "delay": {"averaging": elche.ParameterAveraging(optimizer_state="keep", delay=1)},
    "host": {"averaging": KEEP, "config": elche.DDPConfig(exchange="host", policy="cadence")},
    "async": {"averaging": KEEP, "config": elche.DDPConfig(exchange="host", policy="async")},
}


def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]) ** 2


def build(**options):
    return elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:3], emulate=EmulatedSpeeds(MS), **options
    )


def trained(windows=2, **options):
    """A training step that has done some windows of devices of 6, 6 and 24 ms."""
    train = build(**options)
    state = train.init({"w": np.ones(3, "float32")})
    with train.windows(DATA, 4) as iterator:
        for window in iterator:
            state, _ = train(state, window)
            if window.index == windows - 1:
                break
    return train


@cache
def known():
    """One that knows its devices, for tests that only look at it."""
    return trained(cadence=elche.ElChe(anchor=10))


def assert_balanced(counts):
    fast, alike, slowest = counts
    assert min(fast, alike) > 1.5 * slowest, counts  # 4 on a quiet machine


@pytest.mark.parametrize("way", ["gradient", "async", *map(slow, ("averaging", "delay", "host"))])
def test_without_a_hint_the_second_plan_is_balanced(way):
    options = WAYS[way]
    if "config" not in options:
        options = options | {"cadence": elche.ElChe(anchor=10)}
    train = known() if way == "gradient" else trained(**options)
    first, second = train.counts_history[:2]
    assert first == (10, 10, 10)
    assert_balanced(second)
    assert train.records[0].steady and train.records[0].cold
    assert train.report().compile_misses > 0


@pytest.mark.slow  # test_without_a_hint_the_second_plan_is_balanced, whatever the first was
@pytest.mark.parametrize("hint", [(2, 1.0), (1, 3.0)])
def test_a_wrong_hint_is_corrected_by_the_second_plan(hint):
    train = trained(cadence=elche.ElChe(anchor=6, speed_hint=hint))
    assert_balanced(train.counts_history[1])


def test_the_time_of_the_first_window_is_without_compiling():
    """Busy times are those of the work, and a window lasts as long as its slowest device."""
    train = known()
    (first, *_), waited = train.records, 1e3 * train._cache.stats.waited_s
    assert first.steady and first.busy_ms[2] >= 10 * MS[2]
    assert first.wall_ms < first.busy_ms[2] + waited / 2


def test_what_is_known_is_not_waited_for():
    """Speeds that were restored: the second window is planned while the first one runs."""
    train = known()
    again = build(cadence=elche.ElChe(anchor=10))
    assert not again._scheduler.knows()
    again.cadence_state = again.cadence_state
    assert not again._scheduler.knows(), "nothing was measured"
    again.cadence_state = train.cadence_state
    assert again._scheduler.knows() and again.counts == train.counts
    state = again.init({"w": np.ones(3, "float32")})
    with again.windows(DATA, 4) as windows:
        pipeline = again.pipeline_of(first := next(windows), "test")
        eventually(lambda: len(pipeline._open) == 2)
        again(state, first)


@pytest.mark.parametrize("way", [slow("gradient"), "averaging", slow("delay")])
def test_a_cold_synchronisation_does_not_raise_the_anchor(way):
    """Of arrays of a real size it costs several times what it will."""
    shape = (256, 256)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype("float32") / 16 for name in ("a", "b")}
    data = {"x": rng.normal(size=(2400, 256)).astype("float32")}

    def loss_fn(params, batch, rng):
        return ((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2).mean(1)

    guard = None if way == "gradient" else elche.NoGuard()
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-3), devices=jax.devices()[:3], emulate=EmulatedSpeeds([1.0] * 3),
        cadence=elche.ElChe(anchor=10, overhead_target=0.01), guard=guard, **WAYS[way],
    )  # fmt: skip
    state, counts = train.init(params), []
    for window in train.windows(data, 4):
        state, _ = train(state, window)
        counts.append(window.counts[0])
        if max(counts[2:], default=0) > 10 and len(train.records) > 1:
            break
    first, second = train.records[:2]
    assert first.cold and first.steady and not second.cold
    assert first.sync_ms > 0.01 * max(first.busy_ms), "it would have been raised"
    assert min(second.counts) <= 10 < max(counts[2:])


def test_a_first_compile_that_fails_may_be_tried_again(monkeypatch):
    """The window is cold when it runs at last, and its time is without the compile."""
    train = build(cadence=elche.ElChe(anchor=10))
    state = train.init({"w": np.ones(3, "float32")})
    get, failed = CompileCache.get, []

    def out_of_memory(self, key, build):
        if key[0] == "combine" and not failed:
            failed.append(key)
            raise MemoryError("no more")
        return get(self, key, build)

    monkeypatch.setattr(CompileCache, "get", out_of_memory)
    with train.windows(DATA, 4) as windows:
        for window in windows:
            if not window.index:
                with pytest.raises(MemoryError, match="no more"):
                    train(state, window)
            state, _ = train(state, window)
            if window.index == 3:
                break
    assert failed and train.records[0].steady and train.records[0].cold
    assert_balanced(train.counts_history[1])
