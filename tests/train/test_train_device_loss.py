"""`device_loss`: each device's own loss, against NumPy."""

import jax
import numpy as np
import optax
import pytest
from marks import slow
from test_train_lanes import BATCH, COUNTS, PARAMS, all_bytes, data, plain_loss, run

import elche_jax as elche

STILL = optax.sgd(0.0)
"""Parameters stay, so that the loss of any example is known."""


def loss_of(x, y):
    """The mean loss, in float64."""
    params = {name: leaf.astype("float64") for name, leaf in PARAMS.items()}
    return np.mean((np.tanh(x.astype("float64") @ params["a"]) @ params["b"] - y) ** 2)


def expected(counts):
    """The loss of every device in every window: microbatches are dealt out in rank order."""
    rows, first, losses = data(), 0, []
    for row in counts:
        losses.append([])
        for count in row:
            mine = slice(first * BATCH, (first + count) * BATCH)
            losses[-1].append(loss_of(rows["x"][mine], rows["y"][mine]) if count else np.nan)
            first += count
    return losses


@pytest.fixture
def devices(request):
    cpus = jax.devices("cpu")[:3]
    if request.param == "mixed":
        cpus[1] = request.getfixturevalue("twins")[0]
    return {"devices": cpus, "lanes": ((0, 2), (1,)) if request.param == "lanes" else None}


DEVICES = ["alike", "mixed", "lanes"]


def on(quick):
    """On all of these devices; `make test` takes one, as other tests take the others."""
    rows = [name if name == quick else slow(name) for name in DEVICES]
    return pytest.mark.parametrize("devices", rows, indirect=True)


def losses(said):
    return [metrics["device_loss"] for metrics in said]


def train(devices, counts=COUNTS, **options):
    standard = {"loss": plain_loss, "tx": STILL, "averaging": None, "device_loss": True}
    options = standard | {"shuffle": False} | options
    return run(counts=counts, **devices, **options)


@pytest.mark.parametrize(
    ("averaging", "devices"),
    [
        (None, "alike"),
        (elche.ParameterAveraging(), "mixed"),
        *(slow(None, name) for name in ("mixed", "lanes")),
        *(slow(elche.ParameterAveraging(), name) for name in ("alike", "lanes")),
        *(slow(elche.MeanGradient(compression="int8"), name) for name in DEVICES),
        *(slow(elche.DiLoCo(optax.sgd(0.7)), name) for name in DEVICES),
    ],
    indirect=["devices"],
)
def test_the_loss_of_each_device(averaging, devices):
    _, said, _ = train(devices, averaging=averaging)
    np.testing.assert_allclose(losses(said), expected(COUNTS), rtol=1e-5)
    assert np.isnan(losses(said)[2][0]) and np.isnan(losses(said)[3][1]), "no work, no loss"
    if averaging is None:  # their mean over the work is the loss
        for metrics, row in zip(said, COUNTS, strict=True):
            mine = np.nansum(metrics["device_loss"] * np.array(row)) / sum(row)
            np.testing.assert_allclose(metrics["loss"], mine, rtol=1e-6)


@on("mixed")
@pytest.mark.parametrize(
    "averaging",
    [slow(elche.MeanGradient(delay=2)), elche.ParameterAveraging(optimizer_state="keep", delay=1)],
)
def test_with_windows_pending_it_is_that_of_the_window_reported(averaging, devices):
    _, said, _ = train(devices, averaging=averaging)
    late = averaging.delay
    assert np.isnan(losses(said)[:late]).all()
    np.testing.assert_allclose(losses(said)[late:], expected(COUNTS)[:-late], rtol=1e-5)


@pytest.mark.parametrize("averaging", [slow(None), elche.ParameterAveraging()])
def test_over_the_host(averaging):
    devices = {"devices": jax.devices("cpu")[:3]}
    _, said, _ = train(devices, averaging=averaging, exchange=elche.HostExchange())
    np.testing.assert_allclose(losses(said), expected(COUNTS), rtol=1e-5)


def test_one_device():
    counts = [(sum(row),) for row in COUNTS]
    _, said, _ = train({"devices": jax.devices("cpu")[:1]}, counts)
    np.testing.assert_allclose(losses(said), expected(counts), rtol=1e-5)


RESTS = [(2, 1, 1), *[(2, 0, 1)] * 3]
"""The second device rests."""


def rested(devices, rows):
    rows = {name: leaf[: 13 * BATCH] for name, leaf in rows.items()}
    return train(devices, RESTS, rows=rows, nonfinite="skip", again=True)[1]


@on("mixed")
def test_of_a_lane_at_rest(devices):
    said = rested(devices, data())
    np.testing.assert_allclose(losses(said), expected(RESTS), rtol=1e-5)


@on("alike")
def test_it_changes_nothing_else(devices):
    options = {"tx": optax.adam(0.1)}
    state, said, _ = train(devices, **options)
    other, others, _ = train(devices, device_loss=False, **options)
    assert all_bytes(state) == all_bytes(other)
    assert all(metrics.keys() - others[0].keys() == {"device_loss"} for metrics in said)


@on("mixed")
def test_a_device_whose_loss_is_not_finite_is_seen(devices):
    rows = data()
    rows["x"][0] = np.nan  # of the first device
    said = rested(devices, rows)
    assert np.isfinite(losses(said)[0]).tolist() == [False, True, True]


def test_a_metric_of_that_name_is_refused():
    def loss(params, batch, rng):
        return plain_loss(params, batch, rng), {"device_loss": 0.0}

    message = "aux must not use the name 'device_loss', which every window reports already with"
    train = elche.build_train_step(
        loss, STILL, devices=jax.devices("cpu")[:2], has_aux=True, device_loss=True
    )
    train.init(PARAMS)
    with pytest.raises(TypeError, match=message):
        train.windows(data(), BATCH)
    with pytest.raises(
        TypeError, match="build_train_step: device_loss must be of type bool, got 1"
    ):
        elche.build_train_step(loss, STILL, device_loss=1)
