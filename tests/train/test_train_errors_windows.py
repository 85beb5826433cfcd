"""Bad input of windows, loss functions among it: a clear error before anything is compiled."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import DATA, PARAMS, build, windows

import elche_jax as elche


def test_windows_before_init():
    with pytest.raises(RuntimeError, match=r"init must be called first"):
        build().windows(DATA, 4)


class Nothing:
    """A dataset that forgot to return its examples."""

    def __len__(self):
        return 20

    def __getitem__(self, number):
        pass


@pytest.mark.parametrize(
    ("data", "batch_size", "error", "message"),
    [
        ({"x": np.ones((0, 3))}, 4, ValueError, r"at least one example, got 0"),
        (
            {"x": np.ones((4, 3)), "y": np.ones(5)}, 2, ValueError,
            r"same number of examples, got \{\"\['x'\]\": 4, \"\['y'\]\": 5\}",
        ),
        ({"x": np.float32(1)}, 2, ValueError, r"leading axis of examples, but leaf \['x'\] is a s"),
        ([1, 2, 3], 2, TypeError, r"got a list with leaves of type int"),
        (7, 2, TypeError, r"map-style dataset .* got int"),
        (DATA, 0, ValueError, r"batch_size must be at least 1, got 0"),
        (DATA, None, TypeError, r"batch_size must be an integer, got None"),
        (DATA, 2.0, TypeError, r"batch_size must be an integer, got 2\.0"),
        (DATA, 21, ValueError, r"at most the number of examples \(20\) with drop_last=True, got 2"),
        (
            {"x": np.array(["a"] * 20)}, 4, TypeError,
            r"array of numbers, but leaf \['x'\] is of dtype <U1\. Encode it first",
        ),
        (np.array([None] * 20), 4, TypeError, r"leaf data is of dtype object"),
        (np.zeros(20, "m8[s]"), 4, TypeError, r"leaf data is of dtype timedelta64\[s\]\. Encode"),
        (np.zeros(20, np.longdouble), 4, TypeError, r"leaf data is of dtype float128\. Encode"),
        (
            {"x": np.ones((20, 3), ">f4")}, 4, TypeError,
            r"machine's byte order, but leaf \['x'\] is of dtype >f4\. Convert it",
        ),
        ([DATA, DATA], None, TypeError, r"got None \(NoneType\)\. A list is a pytree; .* iter"),
        (
            [DATA, {"x": np.ones((4, 3))}], 4, ValueError,
            r"same number of examples, got .*\. A list is a pytree; to use it as microb",
        ),
        (
            [DATA, DATA], 4, TypeError,  # raised by the loss
            r"^list indices must (.|\n)*\ndata: A list is a pytree; to use it as microbatches, p",
        ),
        (jax.random.split(jax.random.key(0), 20), 4, TypeError, r"leaf data is of dtype key<fry>"),
        (
            {"x": np.ones((20, 3), "float32"), "id": np.full(20, 2**31)}, 4, ValueError,
            r"data: integers must fit int32, to which JAX converts int64, got 2147483648\. Encode",
        ),
        (Nothing(), 4, ValueError, r"data: every example must hold at least one array, got None"),
        (iter([{}]), None, ValueError, r"leading axis, but microbatch 0 has shapes \{\}"),
        (iter([]), None, ValueError, r"at least one microbatch, but the iterator is empty"),
    ],
)  # fmt: skip
def test_data(data, batch_size, error, message):
    with pytest.raises(error, match=message):
        windows(data=data, batch_size=batch_size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, r"epochs must be at least 1, got 0"),
        ({"seed": -1}, ValueError, r"seed must be at least 0, got -1"),
        ({"placement": "gpu"}, ValueError, r"placement must be one of 'auto', 'resident', "),
        ({"window_bytes": 0}, ValueError, r"window_bytes must be at least 1, got 0"),
        (
            {"window_bytes": 47, "placement": "stream"}, ValueError,
            r"window_bytes must hold at least one microbatch \(48 bytes\), got 47\. Raise",
        ),
        ({"shuffle": "no"}, TypeError, r"windows: shuffle must be of type bool, got 'no'"),
        ({"drop_last": 0}, TypeError, r"windows: drop_last must be of type bool, got 0"),
        ({"mask_key": 3}, TypeError, r"mask_key must be a string, got int"),
        (
            {"cursor": elche.Cursor(epoch=2), "epochs": 2}, ValueError,
            r"cursor\.epoch must be below epochs \(2, .*\), got 2\. Raise epochs to go on",
        ),
    ],
)  # fmt: skip
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        windows(**options)


def place(**options):
    """The place after one window of data that are read so."""
    options = {"batch_size": 4, "seed": 3, "epochs": 2} | options
    with windows(**options) as found:
        return next(found).cursor


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 2}, r"batch_size .* \(4\), got 2"),
        ({"seed": 4}, r"seed .* \(3\), got 4"),
        ({"shuffle": False}, r"shuffle .* \(True\), got False"),
        ({"data": {"x": np.ones((16, 3), "float32")}}, r"the number of examples .* \(20\), got 16"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_a_cursor_of_data_that_were_read_otherwise(changed, message, stored):
    cursor = place()
    if stored:
        cursor = elche.Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    asked = {"batch_size": 4, "seed": 3, "epochs": 2, "cursor": cursor}
    with pytest.raises(
        ValueError, match=rf"^windows: {message}\. Pass that value, or start without the cursor"
    ):
        windows(**asked | changed)
    windows(**asked).close()
    old = {name: value for name, value in cursor.to_dict().items() if name != "reading"}
    windows(**asked | changed | {"cursor": elche.Cursor.from_dict(old)}).close()  # nobody knows


def test_a_cursor_of_data_that_were_not_shuffled():
    cursor = place(shuffle=False)
    windows(batch_size=4, seed=9, shuffle=False, epochs=2, cursor=cursor).close()
    with pytest.raises(ValueError, match=r"^windows: shuffle .* \(False\), got True\. Pass that"):
        windows(batch_size=4, seed=3, epochs=2, cursor=cursor)


def test_resident_needs_arrays():
    with pytest.raises(ValueError, match=r"placement='resident' needs .* got a MapSource"):
        windows(data=Rows(), placement="resident")


class Rows:
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"x": np.ones(3, "float32")}


def test_an_iterator_has_one_epoch():
    with pytest.raises(ValueError, match=r"iterator can be used for one epoch only, got epochs=2"):
        windows(data=iter([{"x": np.ones((4, 3))}]), batch_size=None, epochs=2)


def test_batch_size_of_an_iterator():
    with pytest.raises(ValueError, match=r"that of the iterator's microbatches \(4\), got 8"):
        windows(data=iter([{"x": np.ones((4, 3))}]), batch_size=8)


def test_ragged_end_needs_losses_per_example_or_a_mask():
    with pytest.raises(ValueError, match=r"drop_last=False the loss must be a vector .* scalar"):
        windows(batch_size=8, drop_last=False)
    windows(batch_size=5, drop_last=False).close()  # nothing is ragged here


def test_mask_needs_a_dict():
    def loss(params, batch, rng):
        return jnp.mean(batch @ params["w"])

    with pytest.raises(TypeError, match=r"mask_key needs microbatches that are dicts, got an arr"):
        windows(loss, data=DATA["x"], mask_key="mask")


def returns(value):
    return lambda params, batch, rng: value(params, batch)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda p, b: b["x"],
            r"float vector .*\(4\).* got an array of shape \(4, 3\) and ",
        ),
        (lambda p, b: jnp.int32(1), r"must be a float scalar.* shape \(\) and dtype int32"),
        (lambda p, b: jnp.ones(3), r"got an array of shape \(3,\) and dtype float32"),
        (lambda p, b: (jnp.float32(1), {}), r"got a tuple of 2\..*pass has_aux=True"),
        (lambda p, b: {"loss": jnp.float32(1)}, r"got a dict"),
        (lambda p, b: elche.Weighted(b["x"], jnp.float32(1)), r"Weighted\.loss must be a scalar"),
        (lambda p, b: elche.Weighted(jnp.float32(1), b["x"]), r"Weighted\.weight must be a scalar"),
        (
            lambda p, b: elche.Weighted(jnp.int32(1), jnp.int32(1)),
            r"\.loss must be a float",
        ),
    ],
)
def test_what_a_loss_returns(value, message):
    with pytest.raises(TypeError, match=message):
        windows(returns(value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda p, b: jnp.float32(1), r"must return \(loss, aux\), got an array of shape \(\)"),
        (lambda p, b: (jnp.float32(1), 3.0), r"aux must be a dict of metrics"),
        (lambda p, b: (jnp.float32(1), {"loss": 1.0}), r"must not use the name 'loss'"),
        (lambda p, b: (jnp.float32(1), {"m": b["x"]}), r"aux\['m'\] must be a scalar .* \(4, 3\)"),
    ],
)
def test_aux(value, message):
    with pytest.raises(TypeError, match=message):
        windows(returns(value), build_options={"has_aux": True})


AVERAGED = {"cosine", "distance", "exchange_bytes", "share", "update_norm", "workers"}


@pytest.mark.parametrize("name", sorted(AVERAGED))
def test_metrics_named_like_those_of_averaging(name):
    loss = returns(lambda params, batch: (jnp.float32(1), {name: 1.0}))
    windows(loss, build_options={"has_aux": True}).close()  # the mean gradient reports none
    message = f"aux must not use the name '{name}', which every window reports already where pa"
    with pytest.raises(TypeError, match=f"^loss_fn: {message}"):
        windows(loss, build_options={"has_aux": True, "averaging": elche.ParameterAveraging()})


def test_these_are_the_names_that_averaging_reports():
    train = build(averaging=elche.ParameterAveraging())
    state = train.init(PARAMS)
    with train.windows(DATA, 4) as run:
        _, metrics = train(state, next(run))
    assert metrics.keys() - {"finite", "loss", "weight"} == AVERAGED


@pytest.mark.parametrize(
    ("value", "has_aux", "message"),
    [
        (lambda s: jnp.float32(1), False, r"must return \(loss, model_state\), got an array"),
        (lambda s: (jnp.float32(1), {"other": s["m"]}), False, r"old one, got another: structure"),
        (
            lambda s: (jnp.float32(1), {"m": jnp.ones(2)}),
            False,
            r"got another: leaf \['m'\] is float32\[2\] instead of",
        ),
        (lambda s: (jnp.float32(1), s), True, r"\(loss, \(model_state, aux\)\), got a second ele"),
    ],
)
def test_model_state(value, has_aux, message):
    def loss(params, model_state, batch, rng):
        return value(model_state)

    with pytest.raises(TypeError, match=message):
        windows(loss, model_state={"m": np.zeros(3, "float32")}, build_options={"has_aux": has_aux})


def test_arrays_with_a_mask():
    masked = np.ma.masked_array(PARAMS["w"], mask=[True, False, True])
    with pytest.raises(
        TypeError, match=r"^data: every leaf must be a plain array, but leaf \['x'\] is"
    ):
        windows(data={"x": np.ma.masked_array(DATA["x"])})
    for argument in ("params", "model_state"):
        given = {"params": PARAMS} | {argument: {"w": masked}}
        with pytest.raises(
            TypeError,
            match=rf"^TrainStep\.init: {argument}: every leaf must be a plain array, but",
        ):
            build().init(**given)
    with pytest.raises(
        TypeError, match=r"^predict: params: every leaf must be a plain array, but leaf "
    ):
        elche.predict(lambda params, batch: batch["x"], {"w": masked}, DATA, 4)


def test_the_users_own_error_comes_through():
    """A shape error inside the model surfaces as it is, at the call of windows."""

    def loss(params, batch, rng):
        return nn.Dense(3).apply({"params": params}, batch["nothing"]).mean()

    with pytest.raises(KeyError, match="nothing"):
        windows(loss)
