"""Inference: outputs in the order of the data, programs kept from call to call."""

import functools
import gc
import weakref
from dataclasses import dataclass, field

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from marks import slow
from models import Script
from sweeping import Batches, cases, examples, in_form
from test_contract_no_stall import CompileCount

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds, ExtraWork
from elche_jax.train.evaluate import _kept_sweep, _same, _same_function, clear_predict_cache

DEVICES = jax.devices()
PARAMS = {"w": np.float32(1.5)}
SCRIPTS = {world: Script([(1,) * world]) for world in range(1, 5)}


def apply_fn(params, batch):
    x = batch["x"]
    outputs = {
        "float": params["w"] * x,
        "several": (batch["index"], x > 1, x.astype(jnp.bfloat16)),
        "axes": [x[:, None, None] * jnp.ones((2, 3)), jnp.zeros((len(x), 2, 0), jnp.int8)],
        "nothing": None,
    }
    if "mask" in batch:
        mask = batch["mask"]
        outputs |= {"mask": (mask, jnp.full(len(x), mask.sum()))}
    return outputs


def assert_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is np.ndarray
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())


@settings(max_examples=settings.default.max_examples // 3)  # 6 in `make test`
@given(cases())
@example(
    {
        "world": 4, "size": 1, "batch_size": 4, "script": [(0, 0, 3, 1)], "form": "map",
        "placement": "stream", "window_bytes": 32, "mask_key": "mask",
    }
)  # fmt: skip
def test_outputs_come_in_the_order_of_the_data(case):
    world, data = case["world"], examples(case["size"])
    SCRIPTS[world].script = case["script"]
    form, batch_size = in_form(case["form"], data, case["batch_size"])
    options = {name: case[name] for name in ("placement", "window_bytes", "mask_key")}
    got = elche.predict(
        apply_fn, PARAMS, form, batch_size, devices=DEVICES[:world], cadence=SCRIPTS[world],
        **options,
    )  # fmt: skip
    if case["mask_key"]:
        mask, valid = got.pop("mask")
        batches = [batch["x"] for batch in Batches(data, case["batch_size"])]
        assert_bits(mask, np.ones(case["size"], bool))
        assert valid.tolist() == [len(batch) for batch in batches for _ in batch]
    assert_bits(got, jax.device_get(apply_fn(PARAMS, data)))


class Model(nn.Module):
    """BatchNorm as in inference: running statistics as model state."""

    widths: tuple[int, ...] = (16, 10)

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.BatchNorm(use_running_average=True)(nn.relu(nn.Dense(width)(x)))
        return x


def inputs(size):
    return np.random.default_rng(0).normal(size=(size, 8)).astype("float32")


@pytest.mark.parametrize("cadence", [None, slow(elche.FixedTotal(5)), slow(elche.EveryBatch())])
def test_a_model_with_state(cadence):
    x, model = inputs(37), Model()
    variables = jax.device_get(jax.jit(model.init)(jax.random.key(0), x))
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}

    def apply_fn(params, model_state, x):
        return model.apply({"params": params, **model_state}, x)

    got = elche.predict(
        apply_fn, params, x, 4, model_state=stats, devices=DEVICES[:3], cadence=cadence
    )
    assert got.shape == (37, 10) and got.std() > 0.1
    want = jax.jit(model.apply)(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [slow(1), 2])
def test_a_training_state(world):
    def loss_fn(params, model_state, batch, rng):
        return ((batch["x"] * params["w"] - 1) ** 2).mean(), model_state

    def apply_fn(params, model_state, batch):
        return batch["x"] * params["w"] + model_state["shift"]

    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=DEVICES[:world])
    state = train.init(PARAMS, model_state={"shift": np.float32(3)})
    data = examples(11)
    for window in train.windows(data, 4):
        state, _ = train(state, window)
        got = elche.predict(apply_fn, state, data, 3, devices=train.devices)
        w = np.float32(elche.unreplicate(state.params)["w"])
        np.testing.assert_allclose(got, data["x"] * w + 3, rtol=1e-6)
    other = DEVICES[: world + 1]
    with pytest.raises(ValueError, match=r"^predict: a TrainState must be on the devices of the"):
        elche.predict(apply_fn, state, data, 3, devices=other)
    with pytest.raises(ValueError, match=r"^predict: model_state must be left out with a TrainS"):
        elche.predict(apply_fn, state, data, 3, devices=train.devices, model_state={})


def test_outputs_without_elements():
    got = elche.predict(lambda _, x: jnp.zeros((len(x), 0)), None, inputs(5), 2)
    assert got.shape == (5, 0) and got.dtype == np.float32


def test_outputs_larger_than_the_data_are_cut_into_calls():
    """100 bytes per example; no call may give more than three microbatches of them."""
    seen = set()

    def wide(_, x):
        seen.add(x.shape)
        return x[:, None] * jnp.ones(25)

    x = np.arange(40, dtype="float32")
    options = {"devices": DEVICES[:2], "cadence": elche.Replay([(13, 7)]), "window_bytes": 600}
    got = elche.predict(wide, None, x, 2, **options)
    np.testing.assert_array_equal(got, np.repeat(x[:, None], 25, axis=1))
    ((program, runner),) = sweep_of(wide, **options)._runners.values()
    assert program.fn.outputs.size * 4 == 200 and seen == {(2,)}
    assert list(runner.capacities.values()) == [{3}]


# -- what is kept


def sweep_of(apply_fn, devices, cadence=None, emulate=None, **_):
    """The kept sweep of earlier calls with these arguments; fails where there is none."""
    before = _kept_sweep.cache_info().misses
    sweep = _kept_sweep(_same_function(apply_fn), tuple(devices), _same(cadence), _same(emulate))
    assert _kept_sweep.cache_info().misses == before, "it was not kept"
    return sweep


def fresh():
    """A function of its own, which no other test has compiled."""
    return lambda params, x: x + 1


OPTIONS = {"devices": DEVICES[:2], "cadence": elche.FixedTotal(4)}


def test_a_second_call_compiles_nothing_and_another_function_does():
    x, first, second = inputs(24), fresh(), fresh()
    with CompileCount() as compiles:
        elche.predict(first, None, x, 2, **OPTIONS)
        assert compiles.count >= 1, "the listener must see the first compile"
        before = compiles.count
        for size in (24, 22, 4):
            got = elche.predict(first, None, x[:size], 2, **OPTIONS)
            np.testing.assert_array_equal(got, x[:size] + 1)
        assert compiles.count == before
        elche.predict(second, None, x, 2, **OPTIONS)
        assert compiles.count > before
    assert sweep_of(first, **OPTIONS) is not sweep_of(second, **OPTIONS)


@dataclass
class Unhashable:
    """A model that has no hash, as of a dataclass that may change."""

    shift: float

    def apply(self, params, x):
        return x + self.shift

    def __call__(self, params, x):
        return self.apply(params, x)


@pytest.mark.parametrize("make", [fresh, lambda: Unhashable(1.0)])
def test_the_same_function_is_kept(make):
    x, fn = inputs(6), make()
    for _ in range(3):
        np.testing.assert_array_equal(elche.predict(fn, None, x, 2, **OPTIONS), x + 1)
    assert sweep_of(fn, **OPTIONS).report().compile_misses == 1


SCALE = 2.0
"""Read by a function below, and changed by its test."""


def scaled(params, x):
    return x * SCALE


class Shifted:
    """A model that may change, in each of the ways in which functions come."""

    def __init__(self, shift):
        self.shift, self.array = shift, np.full(8, shift, "float32")

    def __call__(self, params, x):
        return x + self.shift

    def method(self, params, x):
        return x + self.shift

    def set(self, shift):
        self.shift = shift
        self.array[:] = shift  # in place


CHANGING = {
    "an object": lambda model: model,
    "a method": lambda model: model.method,
    "a closure": lambda model: lambda params, x: x + model.shift,
    "a partial": lambda model: functools.partial(lambda shift, params, x: x + shift, model.array),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_function_that_has_changed_is_compiled_anew(name):
    """Never the first call's result again; and once for each change, whatever the capacity."""
    x, model = inputs(24), Shifted(1.0)
    fn = CHANGING[name](model)
    with CompileCount() as compiles:
        for shift, first in ((1.0, True), (5.0, True), (5.0, False), (1.0, True)):
            model.set(shift)
            before = compiles.count
            got = elche.predict(fn, None, x, 2, **OPTIONS)
            np.testing.assert_array_equal(got, x + np.float32(shift))
            assert (compiles.count > before) == first
    assert len(sweep_of(fn, **OPTIONS)._runners) == 1  # the ones before are let go


def test_a_global_that_has_changed(monkeypatch):
    x = inputs(6)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        np.testing.assert_array_equal(elche.predict(scaled, None, x, 2, **OPTIONS), x * scale)


def test_a_module_whose_weights_have_changed():
    x, net = inputs(6), nnx.Linear(8, 3, rngs=nnx.Rngs(0))

    def apply_fn(params, x):
        return net(x)

    for _ in range(2):
        np.testing.assert_allclose(
            elche.predict(apply_fn, None, x, 2, **OPTIONS), net(x), rtol=1e-5, atol=1e-6
        )
        net.kernel[...] = 2 * net.kernel[...]


def test_a_function_that_changes_between_shapes():
    """What was compiled before, for other shapes, is not used either."""
    x, model = inputs(6), Shifted(1.0)
    for shift, columns in ((1.0, 8), (2.0, 4), (2.0, 8), (3.0, 4)):
        model.set(shift)
        got = elche.predict(model, None, x[:, :columns], 2, **OPTIONS)
        np.testing.assert_array_equal(got, x[:, :columns] + np.float32(shift))


def double(params, x):
    return x * params


def test_what_is_kept_can_be_let_go():
    clear_predict_cache()
    elche.predict(double, np.float32(2), jnp.arange(8.0), 4, devices=DEVICES[:2])
    kept = weakref.ref(sweep_of(double, DEVICES[:2]))
    gc.collect()
    assert kept() is not None
    clear_predict_cache()
    gc.collect()
    assert kept() is None


def test_data_are_not_kept_on_the_devices():
    x = jnp.arange(2.0**12 + 4)
    before = {id(array) for array in jax.live_arrays()}
    for _ in range(2):
        rows = elche.predict(
            double, np.float32(2), x, 4, devices=jax.devices()[:2], placement="resident"
        )
    np.testing.assert_array_equal(rows, 2 * np.asarray(x))
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert max((array.size for array in new), default=0) < x.size


def test_an_iterator_that_was_read_is_let_go():
    class Microbatches:
        def __iter__(self):
            return iter([np.ones(4, "f"), np.ones(4, "f")])

    source = Microbatches()
    gone = weakref.ref(source)
    iterator = iter(source)
    elche.predict(double, np.float32(2), source, devices=jax.devices()[:2])
    elche.predict(double, np.float32(2), iterator, devices=jax.devices()[:2])
    del source, iterator
    gc.collect()
    assert gone() is None


@dataclass(frozen=True)
class Table:
    """A model that leaves its array out of comparisons, as `==` of arrays is no bool."""

    array: np.ndarray = field(compare=False)

    def __call__(self, params, x):
        return x + self.array

    def method(self, params, x):
        return x + self.array


def test_functions_that_are_alike_and_not_the_same():
    """Equal by value, but they may change: each is its own."""
    x, one, two = inputs(6), Unhashable(1.0), Unhashable(1.0)
    elche.predict(one, None, x, 2, **OPTIONS)
    two.shift = 5.0
    np.testing.assert_array_equal(elche.predict(two, None, x, 2, **OPTIONS), x + 5)


@pytest.mark.parametrize("fn", [lambda model: model, lambda model: model.method])
def test_functions_that_compare_equal_and_compute_other_things(fn):
    x, models = inputs(6), [Table(np.float32(shift)) for shift in (1, 5)]
    assert models[0] == models[1] and hash(models[0]) == hash(models[1])
    for model in models:
        got = elche.predict(fn(model), None, x, 2, **OPTIONS)
        np.testing.assert_array_equal(got, x + model.array)


@pytest.mark.parametrize("model", [Model(), slow(Model([16, 10])), Unhashable(1.0)])
def test_a_method_is_the_same_in_every_call(model):
    """`model.apply` makes a new object whenever it is asked for."""
    assert model.apply is not model.apply
    x = inputs(12)
    params = jax.jit(model.init)(jax.random.key(0), x) if isinstance(model, Model) else None
    want = jax.jit(model.apply)(params, x)
    for _ in range(3):
        got = elche.predict(model.apply, params, x, 2, **OPTIONS)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert sweep_of(model.apply, **OPTIONS).report().compile_misses == 1


@pytest.mark.parametrize("make", [lambda: EmulatedSpeeds([0.0, 0.0]), lambda: ExtraWork([1, 2])])
def test_an_emulation_without_a_hash_is_kept(make):
    x, fn, emulate = inputs(12), fresh(), make()
    with pytest.raises(TypeError, match="unhashable"):
        hash(emulate)
    for _ in range(2):
        got = elche.predict(fn, None, x, 2, emulate=emulate, **OPTIONS)
        np.testing.assert_array_equal(got, x + 1)
    sweep = sweep_of(fn, emulate=emulate, **OPTIONS)
    assert sweep.report().compile_misses == 1
    another = make()
    elche.predict(fn, None, x, 2, emulate=another, **OPTIONS)
    assert sweep_of(fn, emulate=another, **OPTIONS) is not sweep


def test_speeds_stay_known():
    x, fn = inputs(256), fresh()  # some windows: one that compiles tells no speed
    options = {"devices": DEVICES[:2], "emulate": EmulatedSpeeds((0.5, 15.0))}
    elche.predict(fn, None, x, 1, **options)
    fast, late = sweep_of(fn, **options).scheduler.counts
    assert fast > late
    elche.predict(fn, None, x, 1, **options)
    first = sweep_of(fn, **options).scheduler.records[0]
    assert first.counts == elche.clamp_counts((fast, late), 256)


def test_other_devices_have_programs_of_their_own():
    x, fn = inputs(12), fresh()
    for devices in (DEVICES[:2], DEVICES[2:4], DEVICES[1:2]):
        np.testing.assert_array_equal(elche.predict(fn, None, x, 2, devices=devices), x + 1)
        assert sweep_of(fn, devices).devices == tuple(devices)
    all_of_them = elche.predict(fn, None, x, 2)
    np.testing.assert_array_equal(all_of_them, x + 1)
    assert sweep_of(fn, DEVICES).devices == tuple(DEVICES)


def test_parameters_and_shapes_may_change_from_call_to_call():
    fn = functools.partial(lambda params, x: x * params["w"])
    for w, x in ((2.0, inputs(5)), (3.0, inputs(5)), (4.0, inputs(7)[:, :3])):
        got = elche.predict(fn, {"w": np.float32(w)}, x, 2, **OPTIONS)
        np.testing.assert_array_equal(got, x * np.float32(w))
    assert sweep_of(fn, **OPTIONS).report().compile_misses == 2


def test_an_iterator_that_a_failed_call_has_looked_into():
    """The first microbatch is not lost where the arguments were wrong."""
    data, fn = examples(7), fresh()
    iterator = (batch["x"] for batch in Batches(data, 3))
    with pytest.raises(ValueError, match="batch_size must be that of the iterator's"):
        elche.predict(fn, None, iterator, 2, **OPTIONS)
    np.testing.assert_array_equal(elche.predict(fn, None, iterator, **OPTIONS), data["x"] + 1)
