"""Programs that are compiled at the same time, for the first window and on the host."""

import threading

import jax
import numpy as np
import optax
import pytest
from reference import data, loss_fn, params

import elche_jax as elche
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.mapped import Mapped
from elche_jax.engine.runner import TOGETHER, Program, compiled

PATIENCE = 60
"""Seconds after which programs count as compiled in turn; a good run waits for none."""


class Function:
    """In place of a mapped function: its program is its name, and `meanwhile` its compiling."""

    def __init__(self, name, meanwhile=lambda: None):
        self.name, self.meanwhile, self.traced_in = name, meanwhile, []

    def lower(self, *args):
        self.traced_in.append(threading.current_thread())
        return self.name, *args

    def finish(self, lowered):
        self.meanwhile()
        return lowered


def programs_of(functions):
    return [Program(one.name, one, lambda: ("shapes",)) for one in functions]


def test_they_are_compiled_at_the_same_time():
    meet = threading.Barrier(3, timeout=PATIENCE)
    functions, cache = [Function(name, meet.wait) for name in "abc"], CompileCache()
    made = compiled(programs_of(functions), cache)
    assert made == [("a", "shapes"), ("b", "shapes"), ("c", "shapes")]
    # tracing in several threads would take as long as in one
    assert [one.traced_in for one in functions] == [[threading.current_thread()]] * 3
    assert cache.misses == 3


def test_no_more_than_some_are_compiled_at_once():
    lock, now, most = threading.Lock(), [0], [0]
    full = threading.Barrier(TOGETHER, timeout=PATIENCE)

    def meanwhile():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        full.wait()  # so that as many as are begun are counted
        with lock:
            now[0] -= 1

    functions = [Function(str(at), meanwhile) for at in range(2 * TOGETHER)]
    assert len(compiled(programs_of(functions), CompileCache())) == 2 * TOGETHER
    assert most == [TOGETHER]


def test_what_is_there_is_not_traced_again():
    functions, cache = [Function("a"), Function("b")], CompileCache()
    first = compiled(programs_of(functions[:1]), cache)
    assert compiled(programs_of(functions), cache) == [*first, ("b", "shapes")]
    assert [len(one.traced_in) for one in functions] == [1, 1]
    assert cache.misses == 2 and cache.stats.hits == 1


def test_an_error_is_raised_and_the_others_are_there():
    def fail():
        raise RuntimeError("no memory")

    times = []
    functions = [Function("a", fail), Function("b", lambda: times.append("b"))]
    cache = CompileCache()
    with pytest.raises(RuntimeError, match="no memory"):
        compiled(programs_of(functions), cache)
    cache.wait()
    assert compiled(programs_of(functions[1:]), cache) == [("b", "shapes")]
    assert times == ["b"]


def test_on_the_host_the_first_device_comes_first(monkeypatch):
    """JAX's persistent cache then has its programs for GPUs of its kind."""
    made, finish = [], Mapped.finish

    def finished(self, lowered):
        program = finish(self, lowered)
        made.append(jax.tree.leaves(program.input_shardings[0])[0].device_set.pop())
        return program

    monkeypatch.setattr(Mapped, "finish", finished)
    devices = jax.devices()[:3]
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=devices, averaging=elche.ParameterAveraging(),
        exchange=elche.HostExchange(),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(data(24), 4, epochs=1) as windows:
        state, metrics = train(state, next(windows))
        assert np.isfinite(metrics["loss"])
    each = len(made) // 3
    assert each > 2 and made[:each] == each * devices[:1]
    assert sorted(made, key=devices.index) == [d for d in devices for _ in range(each)]
