"""Microbatches that run in parts: the same training as with whole ones."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from marks import slow
from parted import (
    BATCH,
    COUNTS,
    MIXES,
    PARAMS,
    RAGGED,
    SIZE,
    data,
    devices_of,
    errors,
    masked,
    normalized,
    refused,
    scalar,
    train_on,
    vector,
    weighted,
)  # fmt: skip

import elche_jax as elche
from elche_jax.train import microbatch_split as splitting


def with_metrics(loss):
    def fn(params, batch, rng):
        error = errors(params, batch)
        return loss(params, batch, rng), {
            "error": jnp.abs(error),
            "norm": params["w"] @ params["w"],
        }

    return fn


FORMS = {
    "scalar": (scalar, {}),
    "vector": (vector, {}),
    "weighted": (weighted, {}),
    "ragged vector": (vector, {"drop_last": False}),
    "ragged scalar": (masked, RAGGED),
    "ragged weighted": (weighted, RAGGED),
}


def assert_same(got, want, rtol=1e-5, atol=1e-6):
    assert len(got[0]) == len(want[0]) >= 2
    for mine, whole in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert mine.keys() == whole.keys()
        for name, value in whole.items():
            np.testing.assert_allclose(mine[name], value, rtol=rtol, atol=atol, err_msg=name)
    moved = np.abs(want[0][-1]["w"] - PARAMS["w"]).max()
    assert moved > 20 * atol, "the tolerance must be small beside what training moves"


SPLITS = [  # a vector is split in parts by kind below
    ("ragged scalar", 2),
    slow("ragged weighted", 4),  # test_a_microbatch_is_one_local_step has weights
    slow("scalar", 4),
    slow("vector", 2),
    slow("weighted", 2),
    slow("ragged vector", 4),
]


@pytest.mark.parametrize(("form", "split"), SPLITS)
def test_parts_give_what_the_whole_gives(form, split):
    loss, how = FORMS[form]
    has_aux = "weighted" not in form  # its weights do not count the examples of a metric
    options = {"loss": with_metrics(loss) if has_aux else loss, "how": how, "has_aux": has_aux}
    want = train_on(devices_of("one"), **options)
    assert_same(train_on(devices_of("one"), split=split, **options), want)


@pytest.mark.slow  # test_with_a_loss_scale, and test_a_microbatch_is_one_local_step
@pytest.mark.parametrize("form", ["scalar", "ragged scalar", "weighted"])
def test_on_a_lane(form):
    loss, how = FORMS[form]
    want = train_on(devices_of("lane"), loss, how=how)
    assert_same(train_on(devices_of("lane"), loss, {"cpu": 2}, how=how), want)


@pytest.mark.parametrize("split", [slow({"cpu": 4}), {"cpu": 2, "twin": 4}, slow(2)])
@pytest.mark.parametrize("form", ["ragged vector", slow("ragged weighted")])
def test_each_kind_has_its_own_parts(form, split, twins):
    loss, how = FORMS[form]
    devices = devices_of("three", twins)
    want = train_on(devices_of("one"), loss, how=how)
    assert_same(train_on(devices, loss, split, how=how), want)


@pytest.mark.slow  # test_a_microbatch_is_one_local_step; test_each_kind_has_its_own_parts
@pytest.mark.parametrize("placement", ["stream", "resident"])
@pytest.mark.parametrize("averaging", [elche.MeanGradient(delay=1), elche.ParameterAveraging()])
def test_rules_over_two_kinds(averaging, placement, twins):
    devices, how = devices_of("lanes", twins), {"placement": placement}
    options = {"averaging": averaging, "max_grad_norm": 0.3, "how": how}
    want = train_on(devices, vector, **options)
    assert_same(train_on(devices, vector, {"cpu": 4}, **options), want)


@pytest.mark.slow  # parts are summed on a device before anything is exchanged
@pytest.mark.parametrize("averaging", [None, elche.ParameterAveraging()])
def test_with_an_exchange_on_the_host(averaging):
    options = {"averaging": averaging, "exchange": elche.HostExchange(), "loss": masked}
    options |= {"how": RAGGED}
    want = train_on(devices_of("lane"), **options)
    assert_same(train_on(devices_of("lane"), split=4, **options), want)


@pytest.mark.parametrize("form", [slow("scalar"), slow("ragged scalar"), "weighted"])
def test_a_microbatch_is_one_local_step(form):
    loss, how = FORMS[form]
    options = {"averaging": elche.ParameterAveraging(), "how": how}
    want = train_on(devices_of("lane"), loss, **options)
    assert_same(train_on(devices_of("lane"), loss, 4, **options), want)


@pytest.mark.parametrize("scale", [slow(128.0), DynamicScale(scale=256.0)])
def test_with_a_loss_scale(scale):
    want = train_on(devices_of("one"), loss_scale=scale)
    assert_same(train_on(devices_of("lane"), split=4, loss_scale=scale), want)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_with_a_smaller_dtype(dtype):
    options = {"compute_dtype": dtype, "loss": vector}
    want = train_on(devices_of("one"), **options)
    assert_same(train_on(devices_of("one"), split=4, **options), want, rtol=2e-2, atol=2e-2)


class Dataset:
    """A map-style dataset of the same examples."""

    def __len__(self):
        return SIZE

    def __getitem__(self, number):
        return {name: leaf[number] for name, leaf in data().items()}


def test_other_forms_of_data():
    want = train_on(devices_of("one"), vector)
    assert_same(train_on(devices_of("one"), vector, 4, rows=Dataset()), want)
    train = elche.build_train_step(
        normalized, optax.sgd(0.1), devices=devices_of("one"), microbatch_split=2
    )
    train.init(PARAMS)
    rows = iter([jax.tree.map(lambda x: x[:BATCH], data())])
    with pytest.raises(ValueError, match=r"must treat every example of a microbatch by itself"):
        train.windows(rows)


def test_a_model_state_that_stays_is_no_obstacle():
    @jax.jit
    def loss(params, model_state, batch, rng):
        return scalar(params, batch, rng) * model_state["scale"], model_state

    def run(split):
        train = elche.build_train_step(
            loss, optax.sgd(0.5), devices=jax.devices()[:1], microbatch_split=split
        )
        state = train.init(PARAMS, model_state={"scale": np.float32(2)})
        for window in train.windows(data(), BATCH, shuffle=False):
            state, _ = train(state, window)
        return jax.device_get(elche.unreplicate((state.params, state.model_state)))

    (whole, kept), (parts, same) = run(None), run(4)
    np.testing.assert_allclose(parts["w"], whole["w"], rtol=1e-5)
    assert same == kept == {"scale": 2}


def test_a_poisoned_part_makes_its_window_not_finite():
    rows = data()
    rows["x"][4 * BATCH + 1, 0] = np.nan
    _, metrics = train_on(devices_of("one"), vector, 4, rows=rows, nonfinite="skip")
    assert [bool(said["finite"]) for said in metrics] == [True, False, True]


def test_the_split_is_no_part_of_the_state():
    def build(split):
        return elche.build_train_step(
            vector, optax.sgd(0.5), devices=jax.devices()[:1], microbatch_split=split
        )

    whole, parts = build(None), build(4)
    state = whole.init(PARAMS)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), parts.init(PARAMS))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
    # a state goes on in another training step
    for train in (whole, parts):
        for window in train.windows(data(), BATCH):
            state, _ = train(state, window)
    assert int(elche.unreplicate(state.step)) == 18


# -- auto -------------------------------------------------------------------------------


WIDE = 512


def wide(params, batch, rng):
    """Its activations take most of the memory."""
    hidden = batch["x"][:, :1] * jnp.arange(WIDE, dtype=jnp.float32) / WIDE
    for _ in range(3):
        hidden = jnp.tanh(hidden + params["b"])
    return jnp.mean((hidden.mean(1) * params["w"][0] - batch["y"]) ** 2)


def auto(devices, caplog, monkeypatch, free, loss=wide, split="auto", trains=False):
    """The splits of the lanes, and what was logged."""
    monkeypatch.setattr(splitting, "free_bytes", lambda devices: free(devices))
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=devices, microbatch_split=split,
        cadence=elche.Replay(COUNTS[len(devices)]),
    )  # fmt: skip
    state, chosen = train.init(PARAMS), []
    of_lanes = splitting.Splitter.of_lanes

    def noted(self, *args):
        chosen.append(of_lanes(self, *args))
        return chosen[-1]

    monkeypatch.setattr(splitting.Splitter, "of_lanes", noted)
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="elche_jax"),
        train.windows(data(), BATCH, shuffle=False) as windows,
    ):
        if trains:
            train(state, next(windows))
        train.windows(data(), BATCH).close()  # asks again, and says nothing more
    said = [record.getMessage() for record in caplog.records]
    return set(chosen), [line for line in said if "part" in line or "split" in line]


def test_auto_takes_the_smallest_number_of_parts_that_fits(caplog, monkeypatch):
    devices = devices_of("lane")
    plenty = auto(devices, caplog, monkeypatch, lambda _: 2**30)
    assert plenty == ({(1,)}, [])
    splits, said = auto(devices, caplog, monkeypatch, lambda _: 40_000, trains=True)
    ((split,),) = splits
    assert split in (2, 4)
    assert len(said) == 1
    assert re.fullmatch(
        rf"elche: cpu runs a microbatch in {split} parts, which need \S+ GiB \(whole \S+ GiB\) of "
        r"3.73e-05 GiB free\.",
        said[0],
    )


@pytest.mark.slow  # test_auto_by_kind has a lane where nothing does
def test_auto_where_nothing_fits(caplog, monkeypatch):
    splits, said = auto(devices_of("lane"), caplog, monkeypatch, lambda _: 10)
    assert splits == {(8,)}
    assert [line.split(",")[0] for line in said] == ["elche: cpu runs a microbatch in 8 parts"]


def test_auto_where_the_memory_is_not_known(caplog, monkeypatch):
    splits, said = auto(devices_of("lane"), caplog, monkeypatch, lambda _: None)
    assert splits == {(1,)}
    assert said == [
        "elche: microbatch_split='auto' leaves microbatches whole on cpu, as its memory is not "
        "known."
    ]


def test_auto_by_kind(caplog, monkeypatch, twins):
    cpu = jax.devices("cpu")[0]

    def free(devices):
        return 10 if devices == [cpu] else 2**30

    devices = devices_of("lanes", twins)
    splits, _ = auto(devices, caplog, monkeypatch, free)
    assert splits == {(8, 1)}
    splits, said = auto(devices, caplog, monkeypatch, free, split={"twin": "auto"})
    assert splits == {(1, 1)} and said == []


def test_auto_refuses_like_a_number(monkeypatch):
    monkeypatch.setattr(splitting, "free_bytes", lambda devices: 10)
    refused(MIXES.replace("of 4", "of 2"), normalized, split="auto")
    monkeypatch.setattr(splitting, "free_bytes", lambda devices: 2**30)
    train = elche.build_train_step(
        normalized, optax.sgd(0.1), devices=devices_of("lane"), microbatch_split="auto"
    )
    train.init(PARAMS)
    train.windows(data(), BATCH).close()
