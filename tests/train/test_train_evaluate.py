"""Evaluation: exact metrics however the data are shared out; nothing is left behind."""

import functools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from marks import slow
from models import Script
from small import threads
from sweeping import SIZES, Batches, MapStyle, cases, examples, in_form

import elche_jax as elche
from elche_jax.cadence import WindowTime
from elche_jax.cadence.window import WindowRecord
from elche_jax.engine.replicas import replicate_over
from elche_jax.lab import EmulatedSpeeds, ExtraWork

DEVICES = jax.devices()
GIVE_UP = 60  # seconds after which a hang is a failure; never waited for in a good run
PARAMS = {"w": np.float32(1.5)}
WIDTH = max(SIZES)


def metric_fn(params, batch):
    index, value = batch["index"], batch["x"] * params["w"]
    tokens = index % 3
    found = {
        "seen": jax.nn.one_hot(index, WIDTH),
        "value": value,
        "above": value > 1,
        "digit": index % 7,
        "powers": jnp.stack([jnp.stack([value, value**2], 1)] * 3, 2),
        "tokens": elche.Weighted(jnp.where(tokens > 0, value, jnp.nan), tokens),
    }
    if "mask" in batch:
        mask, tokens = batch["mask"], jnp.where(batch["mask"], tokens, 0)
        found["mean"] = jnp.where(mask, value, 0).sum() / mask.sum()
        # 0 / 0 where there is no token at all
        found["token mean"] = elche.Weighted((value * tokens).sum() / tokens.sum(), tokens.sum())
    return found


def wanted(data, mask_key, w=1.5):
    """What the metrics must be, by NumPy in float64, over all examples at once."""
    index, value = data["index"], data["x"].astype(np.float64) * w
    tokens, size = index % 3, len(index)
    with np.errstate(invalid="ignore"):
        token_mean = (value * tokens).sum() / np.float64(tokens.sum())
    powers = [[value.mean()] * 3, [(value**2).mean()] * 3]
    found = {
        "seen": np.where(np.arange(WIDTH) < size, 1 / size, 0),
        "value": value.mean(),
        "above": (value > 1).mean(),
        "digit": (index % 7).mean(),
        "powers": np.array(powers),
        "tokens": token_mean,
    }
    return found | ({"mean": value.mean(), "token mean": token_mean} if mask_key else {})


def assert_metrics(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        if np.ndim(value) == 0:
            assert type(got[name]) is float, name
        else:
            assert got[name].dtype == np.float64 and got[name].shape == value.shape, name
        # seen: to the bit, as sums of ones are
        rtol = 0 if name == "seen" else 1e-6
        np.testing.assert_allclose(got[name], value, rtol=rtol, err_msg=name)


@functools.cache
def evaluator(world):
    """One evaluation for all cases, so that programs are compiled once; and its script."""
    script = Script([(1,) * world])
    return elche.build_eval_step(metric_fn, devices=DEVICES[:world], cadence=script), script


def build(world=2, metric=metric_fn, **options):
    return elche.build_eval_step(metric, devices=DEVICES[:world], **options)


# -- exact


@settings(max_examples=settings.default.max_examples // 3)  # 6 in `make test`
@given(cases())
@example(
    {
        "world": 4, "size": 1, "batch_size": 4, "script": [(0, 0, 3, 1)], "form": "map",
        "placement": "stream", "window_bytes": 32, "mask_key": "mask",
    }
)  # fmt: skip
def test_every_example_counts_once(case):
    evaluate, script = evaluator(case["world"])
    script.script = case["script"]
    data = examples(case["size"])
    form, batch_size = in_form(case["form"], data, case["batch_size"])
    options = {name: case[name] for name in ("placement", "window_bytes", "mask_key")}
    got = evaluate(PARAMS, form, batch_size, **options)
    assert_metrics(got, wanted(data, case["mask_key"]))
    records = evaluate.records
    assert sum(record.examples for record in records) == case["size"]
    microbatches = -(-case["size"] // case["batch_size"])
    assert sum(sum(record.counts) for record in records) == microbatches
    assert records[0].counts == elche.clamp_counts(case["script"][0], microbatches)


CADENCES = {
    "none": None,
    "window time": WindowTime(1.0, least=2),
    "every batch": elche.EveryBatch(),
    "fixed total": elche.FixedTotal(7),
    "scarce": elche.FixedTotal(1),
    "balanced": elche.Balanced(8, calibration_windows=1),
    "elche": elche.ElChe(anchor=2),
    "replay": elche.Replay([(3, 0, 1), (0, 5, 0), (1, 1, 7)]),
}


# test_counts_follow_the_speeds_from_call_to_call has none
@pytest.mark.parametrize("name", [*map(slow, list(CADENCES)[:-1]), "replay"])
def test_any_cadence(name):
    evaluate, data = build(3, cadence=CADENCES[name]), examples(47)
    for batch_size in (4, 5):
        assert_metrics(evaluate(PARAMS, data, batch_size), wanted(data, None))


def test_a_window_of_several_calls():
    """One microbatch per call: the sums of all calls of all windows are put together."""
    evaluate, data = build(2, cadence=elche.Replay([(5, 2), (3, 2)])), examples(48)
    got = evaluate(PARAMS, data, 4, window_bytes=32, placement="stream")
    assert_metrics(got, wanted(data, None))
    assert [record.counts for record in evaluate.records] == [(5, 2), (3, 2)]
    # as bytes may be counted with NumPy
    again = evaluate(PARAMS, data, 4, window_bytes=np.int64(32), placement="stream")
    assert again.keys() == got.keys()


@pytest.mark.parametrize("world", [1, 3])
def test_scalars_are_means_over_their_microbatch(world):
    def means(params, batch):
        tokens = batch["index"] % 3
        mean = (batch["x"] * tokens).sum() / tokens.sum()
        return {"mean": batch["x"].mean(), "tokens": elche.Weighted(mean, tokens.sum()), "two": 2}

    data = examples(48)
    got = build(world, means)(None, data, 4)
    x, tokens = data["x"].astype(np.float64), data["index"] % 3
    assert got["mean"] == pytest.approx(x.mean(), rel=1e-6)
    assert got["tokens"] == pytest.approx((x * tokens).sum() / tokens.sum(), rel=1e-6)
    assert got["two"] == 2.0


@pytest.mark.parametrize("x64", [False, True])
def test_no_dtype_is_promoted_silently(x64):
    def metrics(params, batch):
        x, index = batch["x"], batch["index"]
        return {"x": x, "weighted": elche.Weighted(x, index)}

    data = examples(47)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        got = build(metric=metrics)(None, data, 4)
    x, index = data["x"].astype(np.float64), data["index"]
    assert got["x"] == pytest.approx(x.mean(), rel=1e-6)
    assert got["weighted"] == pytest.approx(np.average(x, weights=index), rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_weights(world):
    """None at all: not a number. One below 0: not a number, and not a little less."""

    def weighted(params, batch):
        x = batch["x"]
        none = elche.Weighted(x * jnp.nan, jnp.zeros(len(x)))
        return {
            "none": none,
            "below": elche.Weighted(x, jnp.where(batch["index"] == 5, -1, 1)),
            "fine": elche.Weighted(x, jnp.full(len(x), 1e-3)),
        }

    data = examples(11)
    got = build(world, weighted)(None, data, 3)
    assert np.isnan(got["none"]) and np.isnan(got["below"])
    assert got["fine"] == pytest.approx(data["x"].mean(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_model_state(world):
    def shifted(params, model_state, batch):
        return {"value": batch["x"] * params["w"] + model_state["shift"]}

    data, shift = examples(11), {"shift": np.float32(3)}
    got = build(world, shifted)(PARAMS, data, 4, model_state=shift)
    assert got["value"] == pytest.approx(wanted(data, None)["value"] + 3, rel=1e-6)


def test_data_of_other_shapes():
    """Means of as many axes as the data have, by one evaluation."""
    evaluate = build(2, lambda params, x: {"mean": x})
    for shape in ((9, 3), (9, 5), (9,), (8, 2, 2)):
        x = np.random.default_rng(0).uniform(1, 2, shape).astype("float32")
        got = evaluate(None, x, 3)["mean"]
        np.testing.assert_allclose(got, x.mean(axis=0, dtype=np.float64), rtol=1e-6)


def test_all_devices_where_none_are_named():
    evaluate, data = elche.build_eval_step(metric_fn), examples(24)
    assert evaluate.devices == tuple(DEVICES)
    assert_metrics(evaluate(PARAMS, data, 2), wanted(data, None))


def test_emulation_changes_nothing():
    data = examples(48)
    for emulate in (ExtraWork((1, 3)), EmulatedSpeeds([0.1, 0.2])):
        got = build(2, cadence=elche.FixedTotal(5), emulate=emulate)(PARAMS, data, 4)
        assert_metrics(got, wanted(data, None))


class Callable:
    """A function that has no hash."""

    def __eq__(self, other):
        return self is other

    __hash__ = None

    def __call__(self, params, batch):
        return {"value": batch["x"]}


def test_a_function_that_has_changed_since_the_last_call():
    """As one that reads a threshold that is found in between."""
    threshold, data = {"at": 1.0}, examples(24)

    def above(params, batch):
        return {"above": batch["x"] > threshold["at"]}

    evaluate = build(metric=above)
    for at in (1.0, 1.6, 1.6):
        threshold["at"] = at
        misses = evaluate.report().compile_misses
        assert evaluate(PARAMS, data, 4) == {"above": (data["x"] > at).mean()}
    assert evaluate.report().compile_misses == misses


def test_an_array_of_the_function_that_was_donated_since():
    """As a teacher's parameters, which a jitted average updates in place."""
    update = jax.jit(lambda teacher: {"at": teacher["at"] * 2}, donate_argnums=0)
    teacher, data = {"at": jnp.full((), 0.5)}, examples(24)

    def above(params, batch):
        return {"above": batch["x"] > teacher["at"]}

    evaluate = build(metric=above)
    for at in (0.5, 1.0):
        assert evaluate(PARAMS, data, 4) == {"above": (data["x"] > at).mean()}
        before, teacher = teacher, update(teacher)
        assert before["at"].is_deleted()


def test_weights_too_small_for_a_mean_say_so():
    def tiny(params, batch):
        return {
            "tiny": elche.Weighted(batch["x"] / 100, jnp.full(len(batch["x"]), 1e-37)),
            "among": elche.Weighted(batch["x"], jnp.where(batch["index"] > 0, 1e-37, 1.0)),
        }

    found, data = build(metric=tiny)(PARAMS, examples(8), 4), examples(8)
    assert np.isnan(found["tiny"]) and found["among"] == data["x"][0]


def test_a_function_without_a_hash():
    evaluate, data = build(2, Callable()), examples(8)
    for _ in range(2):
        got = evaluate(None, data, 4)
        assert got["value"] == pytest.approx(data["x"].mean(dtype=np.float64), rel=1e-6)
    assert evaluate.report().compile_misses == 1


# -- of a training state


def loss_fn(params, model_state, batch, rng):
    loss = ((batch["x"] * params["w"] - 1 + model_state["shift"]) ** 2).mean()
    return loss, {"shift": model_state["shift"] + 0.25}


def state_metrics(params, model_state, batch):
    return {"value": batch["x"] * params["w"] + model_state["shift"]}


def training(world, **options):
    train = elche.build_train_step(loss_fn, optax.adam(0.1), devices=DEVICES[:world], **options)
    return train, train.init(PARAMS, model_state={"shift": np.float32(0)})


def value_of(state, data):
    """The metric by NumPy, from the first replica."""
    host = jax.device_get(elche.unreplicate((state.params, state.model_state)))
    value = data["x"].astype(np.float64) * host[0]["w"] + host[1]["shift"]
    return value.mean()


@pytest.mark.parametrize("world", [slow(1), 3])
def test_a_training_state_between_windows(world, monkeypatch):
    train, state = training(world)
    evaluate = elche.build_eval_step(state_metrics, devices=train.devices)

    def copied(*_):
        raise AssertionError("the replicas are there already")

    monkeypatch.setattr("elche_jax.train.sweep.replicate_over", copied)
    data, seen = examples(23), []
    for window in train.windows(examples(48), 4, placement="stream"):
        state, _ = train(state, window)
        seen.append(evaluate(state, data, 5)["value"])
        assert seen[-1] == pytest.approx(value_of(state, data), rel=1e-6)
    assert len(set(seen)) == len(seen) > 3
    elche.check_replicas(state)


def test_windows_in_flight_are_waited_for_and_training_goes_on():
    """A window that cannot end before the evaluation has begun; the same bits after it."""
    gate = threading.Event()
    data, over = examples(16), []

    def schedule(window, rank, microbatch):
        if window == 2:
            assert gate.wait(GIVE_UP)
        return 0.0

    class Opens(MapStyle):
        def __getitem__(self, i):
            if i == 1 and not gate.is_set():  # 0 is looked at before the evaluation begins
                over.append(len(train.records))
                gate.set()
            return super().__getitem__(i)

    train, state = training(2, emulate=EmulatedSpeeds(schedule))
    evaluate = elche.build_eval_step(state_metrics, devices=train.devices)

    def trained(evaluates, state):
        for window in train.windows(examples(48), 4, placement="stream"):
            state, _ = train(state, window)
            if evaluates and window.index >= 2:
                got = evaluate(state, Opens(data), 4)
                assert got["value"] == pytest.approx(value_of(state, data), rel=1e-6)
        return jax.device_get(elche.unreplicate(state))

    with_evaluation = trained(True, state)
    assert len(over) == 1 and over[0] < 3, "the third window was still running"
    state = train.init(PARAMS, model_state={"shift": np.float32(0)})
    without = trained(False, state)
    for a, b in zip(jax.tree.leaves(with_evaluation), jax.tree.leaves(without), strict=True):
        assert a.tobytes() == b.tobytes()


def test_training_states_that_do_not_fit():
    train, state = training(2)
    data = examples(8)
    evaluate = elche.build_eval_step(state_metrics, devices=train.devices)
    with pytest.raises(
        ValueError,
        match=r"^build_eval_step: model_state must be left out with a TrainState, which has its "
        r"own, got a dict\.$",
    ):
        evaluate(state, data, 4, model_state={"shift": np.float32(0)})
    held = ", ".join(map(str, train.devices))
    for devices in (DEVICES[:3], DEVICES[1::-1]):
        other = elche.build_eval_step(state_metrics, devices=devices)
        names = ", ".join(map(str, devices))
        with pytest.raises(
            ValueError,
            match=rf"^build_eval_step: a TrainState must be on the devices of the evaluation "
            rf"\({names}\), got one on {held}\. Pass devices=train\.devices, or unreplicate",
        ):
            other(state, data, 4)
    with pytest.raises(
        ValueError,
        match=r"^build_eval_step: a TrainState must be replicated over the devices, got one copy\."
        r" Pass its params, and its model_state\.$",
    ):
        evaluate(elche.unreplicate(state), data, 4)
    with pytest.raises(
        TypeError, match=r"state must be a TrainState on the devices .* is on the host, "
    ):
        evaluate(jax.device_get(state), data, 4)
    for window in train.windows(examples(8), 4):
        before, (state, _) = state, train(state, window)
    with pytest.raises(ValueError, match=r"got leaf \.params\['w'\] whose buffer was given up"):
        evaluate(before, data, 4)
    assert evaluate(state, data, 4)["value"] == pytest.approx(value_of(state, data), rel=1e-6)


# -- what it learns


def measured(evaluate, ms):
    """Tells the cadence of a window of one microbatch each."""
    record = WindowRecord(0, 0, (1,) * len(ms), len(ms), ms, max(ms), 0.0, 0.0, True)
    evaluate._sweep.scheduler.observe(record)


def test_counts_follow_the_speeds_from_call_to_call():
    evaluate, data = build(2), examples(48)
    assert evaluate.devices == tuple(DEVICES[:2])
    assert evaluate.counts == (1, 1)
    measured(evaluate, (20.0, 60.0))  # 3 * the four that the slower one gets at least
    assert evaluate.counts == (12, 4)
    assert_metrics(evaluate(PARAMS, data, 3), wanted(data, None))
    assert [record.counts for record in evaluate.records] == [(12, 4)]
    # to begin with what was known, in another process too
    other = build(2)
    measured(evaluate, (20.0, 60.0))
    saved = json.loads(json.dumps(evaluate.cadence_state.to_dict()))
    other.cadence_state = saved
    assert other.cadence_state == evaluate.cadence_state and other.counts == evaluate.counts
    other.cadence_state = evaluate.cadence_state
    assert other.counts == evaluate.counts
    with pytest.raises(TypeError, match=r"^EvalStep\.cadence_state: the value .* got int"):
        other.cadence_state = 3
    with pytest.raises(ValueError, match=r"counts must have one entry per device \(3\), got 2"):
        build(3).cadence_state = saved


def test_real_times_are_measured():
    """A device forty times as fast, as much as a busy machine may hide; nothing is known."""
    evaluate, data = build(2, emulate=EmulatedSpeeds([0.5, 20.0])), examples(48)
    evaluate(PARAMS, data, 1)
    fast, slow = evaluate.counts
    assert fast > slow
    report = evaluate.report()
    assert report.compile_misses == 1 and str(DEVICES[1]) in str(report)
    evaluate(PARAMS, data, 1)
    assert evaluate.records[0].counts == elche.clamp_counts((fast, slow), 48)
    assert evaluate.report().compile_misses == 1


def test_one_device_has_windows_of_many():
    evaluate, data = build(1), examples(48)
    assert_metrics(evaluate(PARAMS, data, 1), wanted(data, None))
    assert [record.counts for record in evaluate.records] == [(16,)] * 3


def test_resident_data_are_placed_once(monkeypatch):
    placed = []

    def watched(fleet, tree):
        placed.append(tree)
        return replicate_over(fleet, tree)

    monkeypatch.setattr("elche_jax.train.loading.replicate_over", watched)
    evaluate, data = build(2), jax.tree.map(jnp.asarray, examples(48))
    for _ in range(2):
        got = evaluate(PARAMS, data, 4, placement="resident")
        assert_metrics(got, wanted(examples(48), None))
    assert len(placed) == 1


def test_a_window_is_placed_while_another_runs():
    """Data that come one by one: an iterator is read by one thread, in order."""
    readers = []

    class Watched(Batches):
        def __iter__(self):
            for batch in super().__iter__():
                readers.append(threading.current_thread().name)
                yield batch

    data = examples(11)
    assert_metrics(build(2)(PARAMS, Watched(data, 3)), wanted(data, None))
    assert readers == ["MainThread"] + ["elche-prefetch"] * 3 and threads() == []
