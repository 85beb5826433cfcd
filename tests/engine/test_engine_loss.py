"""The forms of a loss function: what a microbatch adds, and what is no form at all."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.loss import (
    LossFn,
    LossForm,
    Weighted,
    batch_size_of,
    describe,
    inspect_loss,
    microbatch_terms,
)
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import Microbatches
from elche_jax.engine.state import TrainState

RNG = np.random.default_rng(0)
SIZE = 5
X, Y = RNG.normal(size=(SIZE, 3)), RNG.normal(size=SIZE)
W = RNG.normal(size=3)
BATCH = {"x": jnp.asarray(X, jnp.float32), "y": jnp.asarray(Y, jnp.float32)}
PARAMS = {"w": jnp.asarray(W, jnp.float32)}
KEY = jax.random.key(0)
SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, BATCH))


def errors(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def gradient(examples):
    """Gradient of the summed squared errors of some examples, in float64."""
    return 2 * X[examples].T @ (X[examples] @ W - Y[examples])


def squares(examples=slice(None)):
    return (X[examples] @ W - Y[examples]) ** 2


def terms(fn, form, valid=SIZE, model_state=None, **how):
    """Terms of the microbatch as they are added up: loss and gradient times weight."""

    def term(params):
        return microbatch_terms(
            LossFn(fn, **how), form, params, model_state, BATCH, jnp.int32(valid), KEY
        )

    (mean, (weight, metrics, state)), grads = jax.value_and_grad(term, has_aux=True)(PARAMS)
    for scalar in (mean, weight, *metrics.values()):
        assert (scalar.shape, scalar.dtype) == ((), jnp.float32)
    return mean * weight, weight, metrics, state, grads["w"] * weight


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_scalar_counts_as_one_microbatch():
    total, weight, metrics, _, grads = terms(
        lambda params, batch, rng: errors(params, batch).mean(), "scalar"
    )
    assert_close(total, squares().mean())
    assert weight == 1
    assert metrics == {}
    assert_close(grads, gradient(slice(None)) / SIZE)


@pytest.mark.parametrize("valid", [1, 3, SIZE])
def test_a_scalar_with_a_mask_counts_as_its_valid_share(valid):
    def loss_fn(params, batch, rng):
        mask = batch["mask"]
        count = mask.astype(jnp.float32).sum()
        return jnp.where(mask, errors(params, batch), 0).sum() / count

    total, weight, _, _, grads = terms(loss_fn, "scalar", valid, mask_key="mask")
    share = valid / SIZE
    assert_close(weight, share)
    assert_close(total, squares(slice(valid)).mean() * share)
    assert_close(grads, gradient(slice(valid)) / SIZE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_weight_that_rounds_counts_is_refused(dtype):
    def loss_fn(params, batch, rng):
        return Weighted(errors(params, batch).mean(), jnp.ones(SIZE, dtype).sum())

    with pytest.raises(
        TypeError,
        match=rf"^loss_fn: Weighted\.weight must be an integer, a bool or a float of at least 32 "
        rf"bits, as {dtype} rounds counts, got an array of shape \(\) and dtype {dtype}\. Sum ",
    ):
        inspect(loss_fn)


@pytest.mark.parametrize("valid", [1, 3, SIZE])
def test_a_vector_counts_as_its_valid_examples(valid):
    def loss_fn(params, batch, rng):
        loss = errors(params, batch)
        return loss, {"worst": loss.max(), "loss_again": loss}

    total, weight, metrics, _, grads = terms(loss_fn, "vector", valid, has_aux=True)
    assert weight == valid
    assert_close(total, squares(slice(valid)).sum())
    assert_close(grads, gradient(slice(valid)))
    assert_close(metrics["worst"], squares().max() * valid)  # the user's own scalar
    assert_close(metrics["loss_again"], squares(slice(valid)).sum())


def test_rows_that_are_not_valid_add_nothing_even_where_they_are_not_numbers():
    def loss_fn(params, batch, rng):
        hole = jnp.where(jnp.arange(SIZE) < 2, 0, jnp.nan)
        return errors(params, batch) + hole, {"x": hole}

    total, _, metrics, _, grads = terms(loss_fn, "vector", 2, has_aux=True)
    assert_close(total, squares(slice(2)).sum())
    assert_close(grads, gradient(slice(2)))
    assert metrics["x"] == 0


def test_weighted_counts_as_it_says():
    def loss_fn(params, batch, rng):
        return Weighted(errors(params, batch).mean(), jnp.int32(7)), {"acc": jnp.float32(0.5)}

    total, weight, metrics, _, grads = terms(loss_fn, "weighted", has_aux=True)
    assert weight == 7
    assert_close(total, 7 * squares().mean())
    assert_close(grads, 7 * gradient(slice(None)) / SIZE)
    assert metrics["acc"] == 3.5


def test_the_weight_is_a_constant_to_the_gradient():
    def loss_fn(params, batch, rng):
        return Weighted(errors(params, batch).mean(), jnp.sum(params["w"] ** 2))

    _, weight, _, _, grads = terms(loss_fn, "weighted")
    assert_close(weight, (W**2).sum())
    assert_close(grads, (W**2).sum() * gradient(slice(None)) / SIZE)


def test_losses_and_metrics_of_narrow_types_are_summed_in_float32():
    losses = jnp.array([256, 1, 1, 1, 0], jnp.bfloat16)  # 259 is no bfloat16

    def loss_fn(params, batch, rng):
        return losses, {"same": losses, "right": losses > 0, "n": jnp.int32(3)}

    total, _, metrics, _, _ = terms(loss_fn, "vector", has_aux=True)
    assert float(total) == 259
    assert {name: float(value) for name, value in metrics.items()} == {
        "same": pytest.approx(259), "right": pytest.approx(4), "n": 15,
    }  # fmt: skip


def test_model_state_is_handed_on():
    def loss_fn(params, model_state, batch, rng):
        return errors(params, batch).mean(), (
            {"seen": model_state["seen"] + 1},
            {"k": 2.0},
        )

    *_, metrics, state, _ = terms(
        loss_fn, "scalar", model_state={"seen": 4}, has_aux=True, has_model_state=True
    )
    assert state == {"seen": 5}
    assert metrics["k"] == 2

    def without_aux(params, model_state, batch, rng):
        return errors(params, batch).mean(), model_state + 1

    *_, metrics, state, _ = terms(without_aux, "scalar", model_state=4, has_model_state=True)
    assert (state, metrics) == (5, {})


def accumulate(loss_fn, numbers, has_aux=False):
    """Sums of a program over microbatches of one example each, on one device."""
    metrics = ("acc",) if has_aux else ()
    work = Microbatches(LossFn(loss_fn, has_aux=has_aux), "weighted", metrics, "threefry2x32")
    program = CollectiveProgram(GradientRule(work, optax.sgd(0.1), 1, MergeRules((), ())))
    params = {"w": jnp.float32(3)}
    zero = jnp.int32(0)
    state = TrainState(params, (), None, jax.random.key_data(KEY), zero, zero, zero)
    rows = jnp.array(numbers, jnp.float32)[:, None]
    pieces = Pieces(({"x": rows[:2]}, {"x": rows[2:]}))
    call_args = CallArgs(jnp.array([3, 0, 1, -1, 0, 3, 3, 0, 0, 3], jnp.int32))
    (sums, _), _ = jax.jit(program.accumulate)(state, program.zeros(state), pieces, call_args)
    return sums


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_weight_zero_contributes_nothing_even_where_nothing_is_a_number(how):
    # w * x / tokens with no token: 0 / 0 in the loss, or only in its gradient
    def loss_fn(params, batch, rng):
        tokens = (batch["x"] != 0).astype(jnp.float32).sum()
        if how == "loss":
            loss = (params["w"] * batch["x"]).sum() / tokens
        else:
            loss = jnp.sqrt((params["w"] * batch["x"]).sum() ** 2)
        return Weighted(loss, tokens), {"acc": loss}

    sums = accumulate(loss_fn, [2.0, 0.0, 5.0], has_aux=True)
    sums = sums.own
    assert float(sums.grads[0]) == 7
    assert float(sums.loss) == 21
    assert float(sums.weight) == 2
    assert float(sums.metrics["acc"]) == 21


def inspect(fn, model_state=None, **how):
    params, batch = SHAPES
    return inspect_loss(LossFn(fn, **how), params, model_state, batch, KEY)


@pytest.mark.parametrize(
    ("form", "loss_fn"),
    [
        ("scalar", lambda p, b, r: errors(p, b).mean()),
        ("vector", lambda p, b, r: errors(p, b)),
        ("weighted", lambda p, b, r: Weighted(errors(p, b).mean(), b["y"].sum())),
        ("scalar", lambda p, b, r: errors(p, b).mean().astype(jnp.bfloat16)),
        ("weighted", lambda p, b, r: Weighted(errors(p, b).mean(), 3)),
    ],
)
def test_the_form_is_recognised_from_shapes_alone(form, loss_fn):
    assert inspect(loss_fn) == LossForm(form, {})


def test_metrics_are_recognised():
    form = inspect(
        lambda p, b, r: (errors(p, b), {"a": errors(p, b), "b": errors(p, b).max()}),
        has_aux=True,
    )
    assert {name: value.shape for name, value in form.aux.items()} == {
        "a": (SIZE,),
        "b": (),
    }


def test_the_mask_is_a_bool_per_example():
    seen = []

    def loss_fn(params, batch, rng):
        seen.append((batch["valid"].shape, batch["valid"].dtype))
        return errors(params, batch).mean()

    inspect(loss_fn, mask_key="valid")
    assert seen == [((SIZE,), np.dtype(bool))]


LOSS = (
    r"loss_fn: the loss must be a float scalar, a float vector of one loss per example "
    r"\(5\), or Weighted\(loss, weight\), got "
)
FORMS = [
    (
        lambda p, b, r: b["x"],
        {},
        LOSS + r"an array of shape \(5, 3\) and dtype float32\.",
    ),
    (
        lambda p, b, r: b["x"].sum(0),
        {},
        LOSS + r"an array of shape \(3,\) and dtype float32\.",
    ),
    (
        lambda p, b, r: jnp.int32(1),
        {},
        LOSS + r"an array of shape \(\) and dtype int32\.",
    ),
    (lambda p, b, r: None, {}, LOSS + r"a NoneType\."),
    (lambda p, b, r: {"loss": b["y"]}, {}, LOSS + r"a dict\."),
    (
        lambda p, b, r: (b["y"].sum(), {}),
        {},
        LOSS + r"a tuple of 2\. If the second element is a dict of metrics, pass "
        r"has_aux=True\.",
    ),
    (
        lambda p, b, r: Weighted(b["y"], 1.0),
        {},
        r"loss_fn: Weighted.loss must be a scalar, got an array of shape \(5,\) and dtype "
        r"float32\.",
    ),
    (
        lambda p, b, r: Weighted(b["y"].sum(), b["y"]),
        {},
        r"loss_fn: Weighted.weight must be a scalar, got an array of shape \(5,\) and dtype "
        r"float32\.",
    ),
    (
        lambda p, b, r: Weighted(b["y"].sum(), None),
        {},
        r"loss_fn: Weighted.weight must be a scalar, got a NoneType\.",
    ),
    (
        lambda p, b, r: Weighted(jnp.int32(1), 1.0),
        {},
        r"loss_fn: Weighted.loss must be a float, got an array of shape \(\) and dtype int32\.",
    ),
    (
        lambda p, b, r: b["y"].sum(),
        {"has_aux": True},
        r"loss_fn: must return \(loss, aux\), got an array of shape \(\) and dtype float32\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {}, {}),
        {"has_aux": True},
        r"loss_fn: must return \(loss, aux\), got a tuple of 3\.",
    ),
    (
        lambda p, s, b, r: b["y"].sum(),
        {"has_model_state": True},
        r"loss_fn: must return \(loss, model_state\), got an array of shape \(\) and dtype "
        r"float32\.",
    ),
    (
        lambda p, s, b, r: (b["y"].sum(), {}),
        {"has_model_state": True, "has_aux": True},
        r"loss_fn: must return \(loss, \(model_state, aux\)\), got a second element of a "
        r"dict\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), b["y"].sum()),
        {"has_aux": True},
        r"loss_fn: aux must be a dict of metrics \(name to scalar or to one value per "
        r"example\), got an array of shape \(\) and dtype float32\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"loss": b["y"].sum()}),
        {"has_aux": True},
        r"loss_fn: aux must not use the name 'loss', which every window reports already\. "
        r"Choose another name\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {1: b["y"].sum()}),
        {"has_aux": True},
        r"loss_fn: names of metrics must be strings, got 1 \(int\)\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {1: b["y"].sum(), "acc": b["y"].sum()}),
        {"has_aux": True},
        r"loss_fn: dicts in what it returns must have keys of one type, as JAX sorts them, got "
        r"several \('<' not supported between instances of 'str' and 'int'\)\. Use strings\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"acc": "high"}),
        {"has_aux": True},
        r"loss_fn: must return only arrays and numbers, got 'high' \(str\)\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"acc": b["x"]}),
        {"has_aux": True},
        r"loss_fn: aux\['acc'\] must be a scalar or one value per example \(5\), got an "
        r"array of shape \(5, 3\) and dtype float32\.",
    ),
    (
        lambda p, b, r: (jnp.ones(()), {"acc": Weighted(jnp.ones(()), 3)}),
        {"has_aux": True},
        r"loss_fn: aux\['acc'\] must be a scalar .* got a Weighted\. Return its mean: a scalar "
        r"weighs as much as the loss\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"acc": {"top1": b["y"].sum()}}),
        {"has_aux": True},
        r"loss_fn: aux\['acc'\] must be a scalar or one value per example \(5\), got a dict\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"acc": b["y"] * 1j}),
        {"has_aux": True},
        r"loss_fn: aux\['acc'\] must be of real numbers or bools, got an array of shape \(5,\) "
        r"and dtype complex64\. Take the real and imaginary parts or the magnitude of complex "
        r"numbers\.",
    ),
    (
        lambda p, b, r: (b["y"].sum(), {"acc": r}),
        {"has_aux": True},
        r"loss_fn: aux\['acc'\] must be of real numbers or bools, got .* dtype key<fry>\. Take .*",
    ),
    (
        lambda p, b, r: Weighted(b["y"].sum(), 1j),
        {},
        r"loss_fn: Weighted.weight must be a real number or a bool, got an array of shape \(\) "
        r"and dtype complex64\.",
    ),
]


@pytest.mark.parametrize(
    ("loss_fn", "how", "message"), FORMS, ids=[f"form{n}" for n in range(len(FORMS))]
)
def test_what_is_no_form_is_an_error(loss_fn, how, message):
    with pytest.raises(TypeError, match=rf"^{message}(\n|$)"):  # JAX may add a note
        inspect(loss_fn, **how)


def test_a_named_axis_is_an_error():
    """As of Flax's `BatchNorm(axis_name=...)` in a loop with pmap."""
    norm = nn.BatchNorm(use_running_average=False, axis_name="batch")
    stats = jax.eval_shape(norm.init, jax.random.key(0), BATCH["x"])

    def loss_fn(params, model_state, batch, rng):
        x, new = norm.apply(model_state, batch["x"], mutable=["batch_stats"])
        return x.mean(), {**model_state, **new}

    with pytest.raises(
        ValueError,
        match=r"^loss_fn: must use no named axis, as devices meet at the end of a window only, got "
        r"'batch'\. Leave out axis_name \(BatchNorm\), psum and pmean: .* as merge= says\.$",
    ):
        inspect(loss_fn, stats, has_model_state=True)


MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
SHARDED = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("data"))
WHOLE = jax.sharding.PartitionSpec()


@pytest.mark.parametrize(
    ("over_devices", "got"),
    [
        (lambda x: jax.lax.with_sharding_constraint(x, SHARDED), "sharding_constraint over 2"),
        (
            jax.shard_map(lambda x: x, mesh=MESH, in_specs=WHOLE, out_specs=WHOLE),
            "shard_map over 2",
        ),
        (lambda x: jax.pmap(lambda x: x, devices=jax.devices()[:2])(x[:2]), "shard_map over 2"),
        # in a loop, as in a layer that is scanned
        (
            lambda x: jax.lax.fori_loop(
                0, 3, lambda _, x: jax.lax.with_sharding_constraint(x, SHARDED), x
            ),
            "sharding_constraint over 2",
        ),
        (lambda x: jax.jit(lambda x: x, out_shardings=SHARDED)(x[:2]), "jit over 2"),
        (lambda x: jax.device_put(x[:2], SHARDED), "device_put over 2"),
    ],
    ids=["constraint", "shard_map", "pmap", "loop", "jit", "device_put"],
)
def test_a_loss_over_several_devices_is_an_error(over_devices, got):
    with pytest.raises(
        ValueError,
        match=rf"^loss_fn: must compute on one device, got a {got}\. Leave it out: every device "
        r"has a copy of the parameters, and runs whole microbatches\.$",
    ):
        inspect(lambda p, b, rng: over_devices(b["x"]).mean())


def test_an_error_of_tracing_names_the_arguments():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"batch\['x'\]"):
        inspect(lambda p, b, rng: b["x"].sum() if b["x"][0, 0] > 0 else 0.0)


def test_a_mesh_of_one_device_is_none():
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    alone = jax.sharding.NamedSharding(one, SHARDED.spec)
    constrain = jax.lax.with_sharding_constraint
    assert inspect(lambda p, b, rng: constrain(b["x"], alone).mean()).form == "scalar"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            {"mean": jnp.zeros(3), "more": jnp.zeros(3)},
            r"structure PyTreeDef\({'mean': \*, 'more': \*}\) instead of "
            r"PyTreeDef\({'mean': \*}\)",
        ),
        (
            {"mean": jnp.zeros(4)},
            r"leaf \['mean'\] is float32\[4\] instead of float32\[3\]",
        ),
        (
            {"mean": jnp.zeros(3, jnp.bfloat16)},
            r"leaf \['mean'\] is bfloat16\[3\] instead of float32\[3\]",
        ),
    ],
)
def test_another_model_state_is_an_error(new, message):
    old = {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}
    text = (
        r"loss_fn: the new model_state must have the structure, shapes and dtypes of the old one, "
        rf"got another: {message}\."
    )
    with pytest.raises(TypeError, match=f"^{text}$"):
        inspect(lambda p, s, b, r: (b["y"].sum(), new), old, has_model_state=True)


def test_metrics_beside_the_model_state_without_has_aux():
    old = {"mean": jax.ShapeDtypeStruct((3,), jnp.float32)}
    new = {"mean": jnp.zeros(3)}, {"accuracy": jnp.zeros(())}
    hint = r" If its second element is a dict of metrics, pass has_aux=True\."
    with pytest.raises(TypeError, match=rf"got another: structure .*\.{hint}$"):
        inspect(lambda p, s, b, r: (b["y"].sum(), new), old, has_model_state=True)


def test_a_mask_needs_a_dict_and_a_name_of_its_own():
    params, batch = SHAPES
    masked = LossFn(lambda p, b, r: b[0].sum(), mask_key="y")
    with pytest.raises(
        TypeError,
        match=r"^data: mask_key needs microbatches that are dicts, got a tuple of 2\.$",
    ):
        inspect_loss(masked, params, None, (batch["x"], batch["y"]), KEY)
    with pytest.raises(
        ValueError,
        match=r"^data: mask_key must be a name of its own, got 'y', an entry of data\. "
        r"Choose another name\.$",
    ):
        inspect_loss(masked, params, None, batch, KEY)


def test_the_words_for_a_value():
    assert describe(np.zeros((2, 3), np.int8)) == "an array of shape (2, 3) and dtype int8"
    assert describe((1, 2)) == "a tuple of 2"
    assert describe("x") == "a str"
    assert batch_size_of(BATCH) == SIZE
