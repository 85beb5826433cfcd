"""C5: counts change, and nothing waits for a compile."""

import threading

import jax
import numpy as np
import optax
import pytest
from marks import slow
from models import Cnn, Script, digits, host, run, scalar_loss, variables

import elche_jax as elche
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.lab import EmulatedSpeeds

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCount:
    """Counts the compiles of the backend while it is open."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def _note(self, event, seconds, **_):
        self.count += event == COMPILE_EVENT

    def __exit__(self, *exception):
        jax.monitoring.unregister_event_duration_listener(self._note)


def test_no_compile_after_the_first_window_while_counts_change(devices4):
    rng = np.random.default_rng(0)
    first = (12, 12, 12, 12)
    rows = [first] + [tuple(int(c) for c in rng.integers(0, 12, 4)) for _ in range(50)]
    assert len(set(rows)) > 45 and all(map(any, rows))
    model = Cnn()
    train = elche.build_train_step(
        scalar_loss(model), optax.adam(1e-3), devices=devices4, cadence=Script(rows)
    )
    state = train.init(variables(model)["params"])
    with CompileCount() as compiles, train.windows(digits(), 1, epochs=None) as windows:
        state, metrics = train(state, next(windows))
        jax.block_until_ready(metrics)
        assert compiles.count >= 2, "the listener must see the first compiles"
        before = compiles.count
        for _ in range(50):
            state, metrics = train(state, next(windows))
        jax.block_until_ready(metrics)
        assert compiles.count == before
    assert train.report().compile_misses == 2
    assert train.counts_history[1:51] == rows[1:51]


@pytest.mark.parametrize("world", [slow(1), 2])
def test_shipped_cadences_wait_for_no_compile_in_later_calls_of_windows(devices4, world):
    """Counts that adapt (two devices) or are cut short (one), over two calls of windows."""
    model = Cnn()
    cadence = elche.FixedTotal(6) if world == 1 else elche.ElChe(anchor=2, max_anchor=2)
    emulate = EmulatedSpeeds([5.0] * (world - 1) + [15.0])
    train = elche.build_train_step(
        scalar_loss(model), optax.adam(1e-3), devices=devices4[:world],
        cadence=cadence, emulate=emulate,
    )  # fmt: skip
    state = train.init(variables(model)["params"])
    data = jax.tree.map(lambda leaf: leaf[:160], digits())
    with CompileCount() as compiles:
        state, used = run(train, state, data, 4)
        assert compiles.count >= 1
        before = compiles.count
        state, more = run(train, state, data, 4, seed=1)
        jax.block_until_ready(state)
        assert compiles.count == before
    assert len({window.counts for window in used + more}) >= 2
    assert train.report().compile_misses == (1 if world == 1 else 2)


def test_a_larger_capacity_is_compiled_in_the_background(devices4):
    """Counts beyond the capacity run in several calls until the larger one is there."""
    rows = [(2, 2), (7, 3), (7, 3), (7, 3)]
    model = Cnn()
    params = variables(model)["params"]

    def trained(release: threading.Event):
        train = elche.build_train_step(
            scalar_loss(model), optax.sgd(0.1), devices=devices4[:2], cadence=Script(rows)
        )
        cache: CompileCache = train._cache
        fill = cache._fill
        started = threading.Event()

        def held_back(key, entry, build, ahead=0):
            if ahead:
                started.set()
                release.wait(timeout=60)
            fill(key, entry, build, ahead)

        cache._fill = held_back
        state, used = run(train, train.init(params), digits(), 4, windows=3)
        assert started.wait(timeout=60)
        calls = [len(window.calls) for window in used]
        release.set()
        cache.wait()
        state, used = run(train, state, digits(), 4, windows=3)
        return host(state.params), calls, [len(window.calls) for window in used], train

    first, calls, later, train = trained(threading.Event())
    assert calls == [1, 3, 3] and later == [1, 1, 1]
    report = train.report()
    assert (report.compile_misses, report.compiled_ahead) == (2, 1)
    # the same run without the delay gives the same bits: capacity is not arithmetic
    release = threading.Event()
    release.set()
    second, *_ = trained(release)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_recording_compiles_nothing_for_larger_windows_than_it_has(devices4):
    """Six microbatches nearly fill the capacity of seven, but none has more."""
    train = elche.build_train_step(
        lambda params, batch, rng: (params["w"] * batch["x"]).mean(), optax.sgd(0.1),
        devices=devices4[:2], cadence=elche.Replay([(6, 5)] * 3),
    )  # fmt: skip
    state = train.init({"w": np.ones(3, np.float32)})
    run(train, state, {"x": np.ones((33, 3), np.float32)}, 1)
    train._cache.wait()
    report = train.report()
    assert (report.compile_misses, report.compiled_ahead) == (2, 0)


def test_the_persistent_compilation_cache_is_honoured(tmp_path, devices4):
    from jax.experimental.compilation_cache import compilation_cache

    model = Cnn()
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    written = []
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        for _ in range(2):
            train = elche.build_train_step(
                scalar_loss(model),
                optax.adam(1e-3),
                devices=devices4,
                cadence=Script([(2, 1, 1, 1)]),
            )
            run(train, train.init(variables(model)["params"]), digits(), 4, windows=2)
            written.append({path.name for path in tmp_path.glob("*-cache")})
        assert len(written[0]) >= 2, "accumulate and combine"
        assert written[1] == written[0], "the second run compiled nothing new"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
