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
    done = []

    class Noted(CompileCache):
        def begin(self, key, build):
            done.append(("begin", key))
            super().begin(key, build)

        def get(self, key, build):
            done.append(("get", key))
            return super().get(key, build)

    names = [str(at) for at in range(TOGETHER + 2)]
    assert len(compiled(programs_of(map(Function, names)), Noted())) == TOGETHER + 2
    groups = names[:TOGETHER], names[TOGETHER:]
    assert done == [(what, name) for some in groups for what in ("begin", "get") for name in some]


def test_what_is_there_is_not_traced_again():
    functions, cache = [Function("a"), Function("b")], CompileCache()
    first = compiled(programs_of(functions[:1]), cache)
    assert compiled(programs_of(functions), cache) == [*first, ("b", "shapes")]
    assert [len(one.traced_in) for one in functions] == [1, 1]
    assert cache.misses == 2 and cache.stats.hits == 1


def test_one_that_several_calls_share_is_traced_once():
    function, cache = Function("a"), CompileCache()
    assert compiled(2 * programs_of([function]), cache) == 2 * [("a", "shapes")]
    assert len(function.traced_in) == 1 and cache.misses == 1


def test_errors_are_raised_and_forgotten():
    broken = [True]

    def fail():
        if broken:
            raise RuntimeError("no memory")

    programs, cache = programs_of([Function(name, fail) for name in "abc"]), CompileCache()
    with pytest.raises(RuntimeError, match="no memory"):
        compiled(programs, cache)
    cache.wait()
    broken.clear()
    assert compiled(programs, cache) == [("a", "shapes"), ("b", "shapes"), ("c", "shapes")]


def test_what_is_compiled_is_there_though_another_fails():
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
    for batch_size, programs in ((4, 3), (2, 1)):  # other data need another program for them
        made.clear()
        with train.windows(data(24), batch_size, epochs=1) as windows:
            state, metrics = train(state, next(windows))
            assert np.isfinite(metrics["loss"])
        assert made[:programs] == programs * devices[:1]
        assert sorted(made, key=devices.index) == [d for d in devices for _ in range(programs)]
