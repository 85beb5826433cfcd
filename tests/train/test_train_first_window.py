"""The first window is timed: the second plan follows from it."""

import jax
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

MS = (4.0, 4.0, 16.0)
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


def trained(windows=4, **options):
    """A training step that has done some windows of devices of 4, 4 and 16 ms."""
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:3], emulate=EmulatedSpeeds(MS), **options
    )
    state = train.init({"w": np.ones(3, "float32")})
    with train.windows(DATA, 4) as iterator:
        for window in iterator:
            state, _ = train(state, window)
            if window.index == windows - 1:
                break
    return train


def assert_balanced(counts):
    fast, alike, slowest = counts
    assert slowest < min(fast, alike) and max(fast, alike) > 2.5 * slowest, counts


@pytest.mark.parametrize("way", WAYS)
def test_without_a_hint_the_second_plan_is_balanced(way):
    options = WAYS[way]
    if "config" not in options:
        options = options | {"cadence": elche.ElChe(anchor=10)}
    train = trained(**options)
    first, second = train.counts_history[:2]
    assert first == (10, 10, 10)
    assert_balanced(second)
    assert all(record.steady for record in train.records)
    assert train.report().compile_misses > 0


@pytest.mark.parametrize("hint", [(2, 1.0), slow((1, 3.0))])
def test_a_wrong_hint_is_corrected_by_the_second_plan(hint):
    train = trained(cadence=elche.ElChe(anchor=6, speed_hint=hint))
    assert_balanced(train.counts_history[1])


def test_the_time_of_the_first_window_is_without_compiling():
    """Busy times are those of the work, and a window lasts as long as its slowest device."""
    train = trained(cadence=elche.ElChe(anchor=10))
    (first, *_), waited = train.records, 1e3 * train._cache.stats.waited_s
    assert first.steady and first.busy_ms[2] >= 10 * MS[2]
    assert first.wall_ms < first.busy_ms[2] + waited / 2


def test_what_is_known_is_not_waited_for():
    """Speeds that were restored: the second window is planned while the first one runs."""
    train = trained(cadence=elche.ElChe(anchor=10))
    again = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:3], cadence=elche.ElChe(anchor=10)
    )
    assert not again._scheduler.knows
    again.cadence_state = train.cadence_state
    assert again._scheduler.knows and again.counts == train.counts
