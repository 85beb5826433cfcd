"""What rules accept, what they go with, and laws of shares, fragments and the wire."""

import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from averaged import poisoned
from hypothesis import assume, given, settings, strategies as st
from marks import slow
from reference import BATCH, data, loss_fn, params

import elche_jax as elche
from elche_jax.averaging.fragments import assign_fragments
from elche_jax.engine.axis import DeviceAxis, HostAxis
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.reduce import shares_of
from elche_jax.engine.wire import encode

SGD = optax.sgd(0.1)


def build(averaging=None, world=2, **options):
    return elche.build_train_step(
        loss_fn, SGD, devices=jax.devices()[:world], averaging=averaging, **options
    )


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: elche.ParameterAveraging(float("nan")), ValueError,
         r"ParameterAveraging: exponent must be finite, got nan\.$"),
        (lambda: elche.ParameterAveraging("1"), TypeError,
         r"ParameterAveraging: exponent must be a number, got '1' "),
        (lambda: elche.ParameterAveraging(optimizer_state="drop"), ValueError,
         r"ParameterAveraging: optimizer_state must be one of 'average', 'keep', 'reset', got 'dr"),
        (lambda: elche.ParameterAveraging(optimizer_state="keep", delay=-1), ValueError,
         r"ParameterAveraging: delay must be at least 0, got -1\.$"),
        (lambda: elche.MeanGradient(delay=-1), ValueError,
         r"MeanGradient: delay must be at least 0, got -1\.$"),
        (lambda: elche.MeanGradient(compression="int4"), ValueError,
         r"MeanGradient: compression must be one of None, 'bfloat16', 'int8', got 'int4'\.$"),
        (lambda: elche.ParameterAveraging(delay=1), ValueError,
         r"ParameterAveraging: optimizer_state must be 'keep' with delay=1, .* got 'average'\. P"),
        (lambda: elche.DiLoCo(0.7), TypeError,
         r"DiLoCo: outer must be an optax optimizer, got 0\.7 \(float\)\. Pass optax\.sgd\(0\.7, "),
        (lambda: elche.DiLoCo(SGD, 0), ValueError, r"DiLoCo: inner_steps must be at least 1, got"),
        (lambda: elche.DiLoCo(SGD, exponent=float("inf")), ValueError,
         r"DiLoCo: exponent must be finite, got inf\.$"),
        (lambda: elche.DiLoCo(SGD, fragments=0), ValueError,
         r"DiLoCo: fragments must be at least 1, got 0\.$"),
        (lambda: elche.DiLoCo(SGD, 5, fragments=2), ValueError,
         r"DiLoCo: inner_steps must be a multiple of fragments \(2\), got 5\.$"),
        (lambda: elche.DiLoCo(SGD, fragments=2, optimizer_state="reset"), ValueError,
         r"DiLoCo: optimizer_state must be 'keep' with fragments=2, .* got 'reset'\.$"),
        (lambda: elche.DiLoCo(SGD, fragments=2, delay=1), ValueError,
         r"DiLoCo: fragments must be 1 with delay=1, as pending windows would .*, got 2\. Pass"),
        (lambda: elche.DiLoCo(SGD, compression="int4"), ValueError,
         r"DiLoCo: compression must be one of None, 'bfloat16', 'int8', got 'int4'\.$"),
    ],
)  # fmt: skip
def test_rules_that_are_none(make, kind, message):
    with pytest.raises(kind, match="^" + message):
        make()


RULE = elche.ParameterAveraging()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"averaging": elche.ParameterAveraging}, TypeError,
         r"build_train_step: averaging must be ParameterAveraging\(\.\.\.\), DiLoCo\(\.\.\.\), M"),
        ({"averaging": RULE, "nonfinite": "ignore"}, ValueError,
         r"build_train_step: nonfinite must be 'raise' or 'skip' with averaging=ParameterAverag"),
        ({"averaging": elche.MeanGradient("int8"),
          "config": elche.DDPConfig(exchange_dtype="bfloat16")}, ValueError,
         r"DDPConfig: exchange_dtype must be left out with MeanGradient\(compression='int8'\)"),
        ({"averaging": elche.ParameterAveraging(delay=2, optimizer_state="keep"),
          "exchange": elche.HostExchange(run_ahead=True)}, ValueError,
         r"ParameterAveraging: delay must be 0 where devices run ahead, and max_overshoot says h"),
        ({"averaging": RULE, "exchange": elche.HostExchange(run_ahead=True)}, ValueError,
         r"ParameterAveraging: optimizer_state must be 'keep' with run_ahead=True, as a device"),
        ({"averaging": elche.DiLoCo(SGD, 5), "cadence": elche.FixedTotal(4)}, ValueError,
         r"DiLoCo: inner_steps must be None where the cadence is chosen \(FixedTotal\), got 5\. "),
        ({"averaging": elche.DiLoCo(SGD, 5), "config": elche.DDPConfig(anchor=3)}, ValueError,
         r"DiLoCo: inner_steps must be None where the cadence is chosen \(anchor=3\), got 5\. "),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options, kind, message):
    with pytest.raises(kind, match="^" + message):
        build(**options)


def test_a_scale_that_devices_would_find_apart():
    from flax.training.dynamic_scale import DynamicScale

    with pytest.raises(
        ValueError, match=r"loss_scale must be a number with averaging=DiLoCo, whose devices step"
    ):
        build(elche.DiLoCo(SGD), loss_scale=DynamicScale())


def test_more_fragments_than_arrays():
    with pytest.raises(
        ValueError, match=r"^DiLoCo: fragments must be at most the number of arrays .* \(3\), got 4"
    ):
        build(elche.DiLoCo(SGD, fragments=4)).init(params())


def test_a_state_of_another_rule_is_named():
    state = build(elche.DiLoCo(optax.sgd(0.7))).init(params())
    train = build(elche.DiLoCo(optax.sgd(0.7, momentum=0.9)))
    train.init(params())
    window = next(train.windows(data(), BATCH))
    with pytest.raises(ValueError, match=r"^train: state must have the shapes of the one .* made"):
        train(state, window)


@pytest.mark.parametrize(
    ("attributes", "kind", "message"),
    [
        ({"fragments": 0}, ValueError, r"fragments must be at least 1, got 0\.$"),
        ({"fragments": 2.0}, TypeError, r"fragments must be an integer, got 2\.0 "),
        ({"outer": "sgd"}, TypeError, r"outer must be an optax optimizer or None, got 'sgd' "),
        ({"inner_steps": 2.5}, TypeError, r"inner_steps must be an integer, got 2\.5 "),
        ({"inner_steps": 0}, ValueError, r"inner_steps must be at least 1, got 0\.$"),
        ({"inner_steps": 5, "fragments": 2}, ValueError,
         r"inner_steps must be a multiple of fragments \(2\), got 5\.$"),
    ],
)  # fmt: skip
def test_attributes_of_a_rule_of_ones_own(attributes, kind, message):
    rule = type("Own", (elche.AveragingRule,), {"optimizer_state": "keep"} | attributes)()
    with pytest.raises(kind, match=f"^Own: {message}"):
        build(rule)


def test_attributes_of_a_rule_that_are_properties():
    class Own(elche.AveragingRule):
        exponent = property(lambda self: np.float32(0.5))
        fragments = property(lambda self: self.parts)
        parts = 1

    train = build(rule := Own())
    state = train.init(params())
    _, metrics = train(state, next(train.windows(data(), BATCH)))
    assert metrics["finite"]
    rule.parts = 0
    with pytest.raises(ValueError, match=r"^Own: fragments must be at least 1, got 0\.$"):
        build(rule)


def takes_value(updates, state, params=None, *, value):
    return updates, state


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (optax.GradientTransformationExtraArgs(lambda p: (), takes_value),
         r"the outer optimizer of averaging must work with update\(difference, state, params\), "
         r"got TypeError: .*'value'\.$"),
        (optax.GradientTransformation(lambda p: p["w"], None),
         r"the outer optimizer of averaging must work with .*, got TypeError: .*\.$"),
        (optax.GradientTransformation(lambda p: jnp.int32(0), lambda g, s, p=None: (g, s + 0.5)),
         r"an update of the outer optimizer of averaging must keep the .* dtypes of its state, got "
         r"another: .*float32"),
        (optax.stateless(lambda updates, params: jax.tree.map(jnp.ravel, updates[:1])),
         r"updates of the outer optimizer of averaging must have the structure and shapes of the "
         r"parameters, got others: "),
    ],
)  # fmt: skip
def test_an_outer_optimizer_that_cannot_be_used(outer, message, fragments):
    train = build(elche.DiLoCo(outer, fragments=fragments))
    with pytest.raises(TypeError, match=rf"^TrainStep\.init: {message}"):
        train.init(params())


@pytest.mark.parametrize(
    ("rule", "world", "config", "cadence"),
    [
        (elche.DiLoCo(SGD, 50), 4, None, elche.ElChe(50, max_anchor=50)),
        (elche.DiLoCo(SGD, 50, fragments=5), 4, None, elche.ElChe(10, max_anchor=10)),
        (elche.DiLoCo(SGD, 50), 1, None, elche.FixedTotal(50)),
        (elche.DiLoCo(SGD), 2, None, elche.ElChe()),
        (elche.DiLoCo(SGD), 1, None, elche.FixedTotal(10)),
        (RULE, 2, None, elche.ElChe()),
        (RULE, 1, None, elche.EveryBatch()),
        (RULE, 2, elche.DDPConfig(policy="sync"), elche.EveryBatch()),
        (RULE, 2, elche.DDPConfig(anchor=4), elche.ElChe(4)),
        (RULE, 2, elche.DDPConfig(max_anchor=0, anchor=2),
         elche.Balanced(4, min_ratio=0.05)),
    ],
)  # fmt: skip
def test_the_cadence_of_a_rule(rule, world, config, cadence):
    assert build(rule, world, config=config)._scheduler._controller.cadence == cadence


def test_the_policy_async_makes_exchanges_late():
    config = elche.DDPConfig(policy="async")
    train = build(elche.ParameterAveraging(optimizer_state="keep"), config=config)
    assert train._options.rule.delay == 1 and train._options.late
    assert train._scheduler._controller.cadence == elche.ElChe()
    with pytest.raises(
        ValueError,
        match=r"^ParameterAveraging: optimizer_state must be 'keep' with policy='async', .*",
    ):
        build(RULE, config=config)
    assert build(config=config)._options.rule.delay == 1  # gradients, too
    host = elche.DDPConfig(policy="async", exchange="host")
    with pytest.raises(
        ValueError,
        match=r"^ParameterAveraging: optimizer_state must be 'keep' with policy='async', .*age'",
    ):
        build(RULE, config=host)
    with pytest.raises(ValueError, match=r"^MeanGradient: delay must be 0 where devices run "):
        build(elche.MeanGradient(delay=2), config=host)


# laws


def list_of(values, *sizes):
    """Of a few sizes, as each one is compiled."""
    return st.one_of(*(st.lists(values, min_size=size, max_size=size) for size in sizes))


@given(
    counts=list_of(st.integers(0, 10**6), 1, 3),
    exponent=st.floats(-40, 40) | st.sampled_from([0.0, 1.0]),
    schedule=st.booleans(),
    bad=st.sets(st.integers(0, 2)),
)
@settings(max_examples=25, deadline=None)
def test_shares_are_those_of_float64(counts, exponent, schedule, bad):
    ok = np.array([rank not in bad for rank in range(len(counts))])
    worked = ok & (np.array(counts) > 0)
    power = (lambda window: exponent) if schedule else exponent
    weigh = elche.ParameterAveraging(exponent=power).weigh
    for xp in (np, jnp):
        steps, loss = xp.asarray(counts, xp.float32), xp.zeros(len(counts), xp.float32)
        work = elche.DeviceWork(steps, loss, xp.asarray(worked), 0, xp)
        got, sound = shares_of(weigh, work)
        assert sound and got.dtype == np.float32
        if not worked.any():
            assert got.tolist() == [0.0] * len(counts)
            continue
        logs = np.where(worked, exponent * np.log(np.maximum(counts, 1)), -np.inf)
        raw = np.exp(logs - logs.max())
        np.testing.assert_allclose(got, raw / raw.sum(), rtol=2e-4, atol=1e-30)
        np.testing.assert_allclose(got.sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, np.inf], [1.0, -1.0], [np.nan, 1.0], [0.0, 0.0]])
def test_weights_that_are_none_are_noticed(weights):
    for xp in (np, jnp):
        ones = xp.ones(2, xp.float32)
        work = elche.DeviceWork(ones, ones, ones > 0, 0, xp)
        shares, sound = shares_of(lambda _, xp=xp: xp.asarray(weights), work)
        assert not sound and shares.tolist() == [0.0, 0.0]


def test_shares_of_weights_whose_sum_is_too_large():
    for xp in (np, jnp):
        ones = xp.ones(2, xp.float32)
        work = elche.DeviceWork(ones, ones, ones > 0, 0, xp)
        shares, sound = shares_of(lambda work: work.steps * 0 + 3e38, work)
        assert sound and shares.tolist() == [0.5, 0.5]


@given(st.integers(1, 30), st.data())
def test_fragments_share_the_arrays_out(fragments, chosen):
    sizes = chosen.draw(st.lists(st.integers(0, 1000), min_size=fragments, max_size=30))
    parts = assign_fragments(sizes, fragments)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert all(parts) and len(parts) == fragments
    loads = [sum(sizes[i] for i in part) for part in parts]
    # the bound of the greedy rule: no part is above the mean by more than one array
    assert max(loads) <= sum(sizes) / fragments + max(sizes)


ONE, FIVE = (list_of(st.floats(-1e3, 1e3, width=32), size) for size in (1, 5))


@partial(jax.jit, static_argnums=3)
def sums_of(rows, error, share, compression):
    """On the devices, and what they have sent."""

    def one(x, e, s):
        sent, lost = encode(x, e, s > 0, compression)
        axis = DeviceAxis(len(share))
        if compression is None:
            (total,) = axis.sums((x, s))
        else:
            total = axis.decoded_sum(sent, s)
        return total, lost, sent

    return jax.vmap(one, axis_name=AXIS)(rows, error, share)


def host_sums(sent, share):
    """The same on the host."""
    each = [
        jax.tree.map(lambda leaf, r=rank: np.asarray(leaf[r]), sent) for rank in range(len(share))
    ]
    return HostAxis(len(share), range(len(share))).decoded_sum(each, list(share))


@given(st.tuples(ONE, FIVE), list_of(st.integers(0, 5), 2, 4), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("compression", [None, slow("bfloat16"), "int8"])
def test_the_wire_sums_what_devices_send(compression, leaves, steps, seed):
    assume(sum(steps) > 0)
    rng = np.random.default_rng(seed)
    rows = [np.outer(rng.normal(size=len(steps)), leaf).astype("float32") for leaf in leaves]
    error = [np.zeros_like(row) for row in rows] if compression == "int8" else []
    share = np.float32(steps) / np.float32(sum(steps))
    sums, lost, sent = sums_of(rows, error, share, compression)
    there = host_sums(sent, share)
    for i, row in enumerate(rows):
        exact = share.astype(np.float64) @ row
        largest = np.abs(row).max(axis=1)
        if compression == "int8":  # half a level of each device
            bound = share @ (largest / 127) * 0.51
        elif compression == "bfloat16":  # twice rounded, by 2**-8 of its size
            bound = 2 * 2.0**-8 * (share @ largest)
        else:
            bound = 1e-6 * (share @ largest)
        for rank in range(len(steps)):
            assert (np.abs(np.asarray(sums[i][rank]) - exact) <= bound + 1e-30).all()
            assert (np.abs(there[i] - exact) <= bound + 1e-30).all()
            assert np.asarray(sums[i][rank]).tobytes() == np.asarray(sums[i][0]).tobytes()
        if compression == "int8":
            kept = np.asarray(lost[i])
            for rank, step in enumerate(steps):
                if step == 0:  # nothing was sent, so nothing was lost
                    assert not kept[rank].any()
                else:
                    assert (np.abs(kept[rank]) <= largest[rank] / 127 * 0.51 + 1e-30).all()


def test_what_a_device_that_has_no_share_holds_is_not_read():
    rows = [jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf]])]
    for compression in (None, "int8"):
        error = [jnp.zeros((2, 2))] if compression else []
        share = jnp.array([1.0, 0.0])
        sums, _, sent = sums_of(rows, error, share, compression)
        np.testing.assert_allclose(sums[0], [[1, 2], [1, 2]], rtol=1e-2)
        np.testing.assert_allclose(host_sums(sent, np.asarray(share))[0], [1, 2], rtol=1e-2)


class InverseLoss(elche.DiLoCo):
    """The weighting of `docs/averaging.md`."""

    def weigh(self, work):
        return 1 / work.xp.maximum(work.loss, 1e-6)


@pytest.mark.parametrize("exchange", [None, elche.HostExchange()], ids=["devices", "host"])
def test_a_device_whose_work_is_of_earlier_windows_has_the_loss_of_the_others(exchange):
    losses = np.float32([1, 3])  # by example, which are those of one device each

    def loss(params, batch, rng):
        return batch.mean() + 0 * (params["a"].sum() + params["b"].sum()), {"mine": batch.mean()}

    counts = [(1, 1), (1, 1), (1, 0), (1, 1)]
    train = elche.build_train_step(
        loss, SGD, devices=jax.devices()[:2], has_aux=True, exchange=exchange,
        averaging=InverseLoss(outer=SGD, fragments=2), cadence=elche.Replay(counts),
    )  # fmt: skip
    state, shares = train.init({"a": np.ones(2, "float32"), "b": np.ones(2, "float32")}), []
    for window in train.windows(losses[[0, 1, 0, 1, 0, 0, 1]], 1, shuffle=False):
        state, metrics = train(state, window)
        shares.append(np.asarray(metrics["share"]).tolist())
    np.testing.assert_allclose(shares, [[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.75, 0.25]])


@pytest.mark.parametrize("exchange", [None, slow(elche.HostExchange())], ids=["devices", "host"])
def test_what_was_lost_of_a_long_window_does_not_swamp_a_short_one(exchange):
    """What is sent next is the error of the mean, of whatever windows: at most half a level."""
    gradient = np.float32([1, 0.0123, -0.0567, 0.25])
    counts = [(60, 40), (1, 0), (0, 1), (30, 70), (0, 1)]
    train = elche.build_train_step(
        lambda params, batch, rng: (batch @ params).mean(), optax.sgd(1.0),
        devices=jax.devices()[:2], averaging=elche.MeanGradient("int8"), exchange=exchange,
        cadence=elche.Replay(counts),
    )  # fmt: skip
    state, at = train.init(np.zeros(4, "float32")), [np.zeros(4)]
    for window in train.windows(np.tile(gradient, (sum(map(sum, counts)), 1)), 1, shuffle=False):
        state, _ = train(state, window)
        at.append(np.asarray(elche.unreplicate(state.params)))
    updates = -np.diff(at, axis=0)
    # half a level of this window, and half a level of the one before
    assert np.abs(updates - gradient).max() <= 1.02 / 127


def test_bytes():
    leaves = [jnp.zeros((3, 5)), jnp.zeros(7)]
    for compression, sent in ((None, 88), ("bfloat16", 44), ("int8", 30)):
        encoding = partial(encode, worked=True, compression=compression)
        assert jax.eval_shape(encoding, leaves, leaves)[0].bytes == sent


@pytest.mark.slow  # test_bytes, and test_the_report_says_what_is_sent
def test_bytes_of_all_that_is_exchanged():
    """Parameters, Adam's two moments and its counter, and model state but for what is kept."""

    def loss(p, model_state, batch, rng):
        return loss_fn(p, batch, rng), model_state

    state = {"mean": np.zeros(4, "f"), "steps": np.int32(0), "own": np.zeros(9, "f")}
    for how, sent in (("average", 4 * (6 + 12 + 1 + 4 + 1)), ("keep", 4 * (6 + 4 + 1))):
        train = elche.build_train_step(
            loss, optax.adam(0.1), devices=jax.devices()[:2], cadence=elche.FixedTotal(2),
            averaging=elche.ParameterAveraging(optimizer_state=how),
            merge=lambda path, leaf: "keep" if "own" in path else "auto",
        )  # fmt: skip
        one = train.init(params(), model_state=state)
        for window in train.windows(data(), BATCH):
            _, metrics = train(one, window)
            break
        assert metrics["exchange_bytes"] == sent


@pytest.mark.parametrize(
    ("merge", "exchange"),
    [("pooled", "device"), slow("first", "host"), slow("pooled", "host"), slow("first", "device")],
)
def test_with_fragments_model_state_is_merged_by_the_work_of_the_window(merge, exchange):
    """A fragment's shares are those of the steps since its last exchange."""

    def loss(p, state, batch, rng):
        return loss_fn(p, batch, rng), {"mean": batch["x"].mean(), "var": batch["x"].var()}

    counts, x = [(1, 1), (0, 1), (1, 3), (2, 0), (3, 1)], data()["x"].astype("float64")
    train = elche.build_train_step(
        loss, SGD, devices=jax.devices()[:2], merge=merge, cadence=elche.Replay(counts),
        averaging=elche.DiLoCo(SGD, fragments=2, optimizer_state="keep"),
        config=elche.DDPConfig(exchange=exchange),
    )  # fmt: skip
    state = train.init(params(), model_state={"mean": np.float32(0), "var": np.float32(1)})
    rows, at = {name: leaf[: 13 * BATCH] for name, leaf in data().items()}, 0
    for window in train.windows(rows, BATCH, shuffle=False):
        state, _ = train(state, window)
        one = jax.device_get(elche.unreplicate(state.model_state))
        ends = np.cumsum(counts[window.index])[np.flatnonzero(counts[window.index])]
        last = [x[(at + end - 1) * BATCH : (at + end) * BATCH] for end in ends]
        mean, var = (np.array([kind(each) for each in last]) for kind in (np.mean, np.var))
        share = np.array([count for count in counts[window.index] if count]) / sum(window.counts)
        if merge == "first":
            want = {"mean": mean[0], "var": var[0]}
        else:
            want = {"mean": share @ mean, "var": share @ (var + (mean - share @ mean) ** 2)}
        assert {n: float(value) for n, value in one.items()} == pytest.approx(want, rel=1e-6)
        at += sum(window.counts)
    assert at == 13


@pytest.mark.parametrize("exchange", [None, slow(elche.HostExchange())], ids=["devices", "host"])
def test_with_fragments_a_window_without_weight_changes_no_model_state(exchange):
    """It is exchanged nevertheless, as a fragment's shares are those of earlier windows, too."""

    def loss(p, state, batch, rng):
        losses, weight = loss_fn(p, batch, rng) * batch["own"], batch["own"].sum()
        return elche.Weighted(losses.sum(), weight), {name: x + 1 for name, x in state.items()}

    train = elche.build_train_step(
        loss, SGD, devices=jax.devices()[:2], exchange=exchange,
        averaging=elche.DiLoCo(SGD, fragments=2), cadence=elche.Replay([(2, 2)] * 3),
        merge={"most": "max", "steps": "max", "first": "first", "mean": "mean"},
    )  # fmt: skip
    rows = {name: leaf[: 12 * BATCH] for name, leaf in data().items()}
    rows["own"] = np.repeat(np.float32([1, 0, 1]), 4 * BATCH)  # by window
    begun = {"most": np.float32(0), "steps": np.int32(0), "first": np.float32(5),
             "mean": np.float32(0)}  # fmt: skip
    state, seen = train.init(params(), model_state=begun), []
    for window in train.windows(rows, BATCH, shuffle=False):
        state, metrics = train(state, window)
        assert bool(metrics["finite"])
        seen.append({name: x.tolist() for name, x in jax.device_get(state.model_state).items()})
    at = [{"most": n, "steps": n, "first": 5 + n, "mean": n} for n in (2, 2, 4)]
    assert seen == [{name: [x, x] for name, x in one.items()} for one in at]


@pytest.mark.parametrize("exchange", [None, slow(elche.HostExchange())], ids=["devices", "host"])
def test_an_outer_step_that_overflows_float16_is_not_taken(exchange):
    """It is finite in float32, in which it is computed."""
    train = elche.build_train_step(
        lambda p, batch, rng: -p.astype("float32").sum(), optax.sgd(1000.0), nonfinite="skip",
        devices=jax.devices()[:2], averaging=elche.DiLoCo(optax.sgd(40.0)), exchange=exchange,
        cadence=elche.Replay([(2, 2)]),
    )  # fmt: skip
    state = train.init(np.full(3, 7, "float16"))
    for window in train.windows(np.zeros(16, "f"), 4):
        state, metrics = train(state, window)
    assert not metrics["finite"] and train.skipped == 1
    np.testing.assert_array_equal(state.params, np.full((2, 3), 7))


@pytest.mark.parametrize(
    "averaging, options",
    [(elche.ParameterAveraging(), {}),
     (elche.DiLoCo(optax.sgd(1.0), fragments=2), {}),
     slow(elche.ParameterAveraging(), {"lanes": ((0,), (1,))}),
     slow(elche.ParameterAveraging(optimizer_state="keep", delay=1), {}),
     slow(elche.ParameterAveraging(), {"exchange": elche.HostExchange()})],
    ids=["average", "fragments", "lanes", "late", "host"],
)  # fmt: skip
def test_model_state_that_overflows_float16_only_when_it_is_merged_is_dropped(averaging, options):
    """The variance of the devices' means, 600**2, is no float16."""

    def loss(p, state, batch, rng):
        moved = {"mean": batch.mean().astype("float16"), "var": state["var"] + 1}
        return p["a"] * p["b"], moved

    train = elche.build_train_step(
        loss, optax.sgd(0.125), nonfinite="skip", devices=jax.devices()[:2], averaging=averaging,
        merge="pooled", cadence=elche.Replay([(1, 1)] * 5), **options,
    )  # fmt: skip
    begun = {"mean": np.float16(0), "var": np.float16(1)}
    state = train.init({"a": np.float32(1), "b": np.float32(2)}, model_state=begun)
    rows = np.repeat(np.float32([0, 1200, *4 * [3, 5]][: 10 if averaging.delay else 4]), 4)
    with train.windows(rows, 4, shuffle=False) as windows:
        seen = []
        for window in windows:
            state, metrics = train(state, window)
            seen.append(bool(metrics["finite"]))
    # late: devices continue from their own states, whose distance is halved in each window
    assert seen == ([True, *3 * [False], True] if averaging.delay else [False, True])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.model_state))
    if averaging.delay == 0:
        assert [x.tolist() for x in state.model_state.values()] == [[4.0, 4.0], [3.0, 3.0]]


# windows whose exchange is late


def test_a_rule_that_cannot_be_followed_late():
    train = elche.build_train_step(
        lambda p, state, batch, rng: (loss_fn(p, batch, rng), state), SGD,
        devices=jax.devices()[:2],
        averaging=elche.ParameterAveraging(optimizer_state="keep", delay=1),
        merge={"bn": "first", "steps": "max"},
    )  # fmt: skip
    start = {"bn": {"mean": np.float32(0), "var": np.float32(1)}, "steps": np.int32(0)}
    with pytest.raises(
        ValueError,
        match=r"^TrainStep\.init: merge must be 'mean', 'pooled', 'max' or 'keep' where exchanges "
        r"are late, got 'first'\. The first device's values cannot be corrected later; 'keep' ",
    ):
        train.init(params(), model_state=start)


@pytest.mark.parametrize("world", [slow(1), 3])
def test_a_device_that_is_left_out_of_a_late_exchange(world):
    """Its window's steps are gone, and nobody sees a number that is none."""
    counts = [(2,) * world] * 8
    train = elche.build_train_step(
        poisoned([4 * world])["loss"], SGD, devices=jax.devices()[:world], nonfinite="skip",
        cadence=elche.Replay(counts), averaging=elche.DiLoCo(optax.sgd(0.7), delay=1),
    )  # fmt: skip
    state, said = train.init(params()), []
    with train.windows(poisoned()["rows"], BATCH, shuffle=False) as windows:
        for window in windows:
            state, metrics = train(state, window)
            said.append(metrics)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
            if window.index == 2:
                base = elche.unreplicate(state.averaging.base)
                mine = jax.tree.leaves(jax.tree.map(lambda x: x[0], state.params))
                for a, b in zip(base, mine, strict=True):
                    np.testing.assert_array_equal(a, b)
            if window.index == 7:
                break
    assert train.left_out == (1,) + (0,) * (world - 1) and train.skipped == 1
    others = world - 1
    told = 3 if others else 2  # one device knows at once
    assert [bool(m["finite"]) for m in said] == [window != told for window in range(8)]
    want = [0.0] + [1 / others] * others if others else [0.0]
    np.testing.assert_allclose(said[told]["share"], want, rtol=1e-6)


def test_an_exponent_that_is_no_number_later_on():
    """The window is not taken, and is no finite one."""
    rule = elche.ParameterAveraging(lambda window: jnp.where(window < 1, 1.0, jnp.nan))
    train = elche.build_train_step(
        loss_fn, SGD, devices=jax.devices()[:2], averaging=rule, cadence=elche.Replay([(1, 2)] * 2)
    )
    state = train.init(params())
    few = {name: leaf[: 6 * BATCH] for name, leaf in data().items()}
    message = (
        r"window 1 \(epoch 0, counts \(1, 2\)\) were not: no device, but their average, or the rule"
    )
    with pytest.raises(elche.NonFiniteError, match=message), train.windows(few, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)


def test_schedules_that_are_none():
    rule = "be a number, or a schedule: a function of the window's number, made of jnp or optax"
    for exponent, got in [
        (lambda n: "1", "one that raises TypeError"),
        (lambda n: 1.0 if n < 4 else 0.0, "one that raises TracerBoolConversionError"),
        (lambda n: jnp.ones(2), r"one that gives ShapeDtypeStruct\(shape=\(2,\), dtype=float32\)"),
    ]:
        with pytest.raises(
            TypeError, match=f"^ParameterAveraging: exponent must {rule}, got {got}\\."
        ):
            elche.build_train_step(
                loss_fn, SGD, devices=jax.devices()[:2],
                averaging=elche.ParameterAveraging(exponent),
            )  # fmt: skip


@pytest.mark.parametrize("policy", ["auto", slow("cadence"), slow("async")])
def test_an_outer_optimizer_steps_after_windows_on_one_device_too(policy):
    """Whatever the policy, but "sync", which is a step after every microbatch."""
    rule = elche.DiLoCo(optax.sgd(0.5))
    for name, windows in ((policy, [(10,), (10,)]), ("sync", [(1,)] * 20)):
        train = elche.build_train_step(
            loss_fn, SGD, devices=jax.devices()[:1], averaging=rule,
            config=elche.DDPConfig(policy=name),
        )  # fmt: skip
        state = train.init(params())
        few = {key: leaf[: 20 * BATCH] for key, leaf in data().items()}
        for window in train.windows(few, BATCH):
            state, _ = train(state, window)
        assert train.counts_history == windows


def test_what_a_policy_cannot_take_up_late():
    for rule, message in [
        (elche.ParameterAveraging(), "ParameterAveraging: optimizer_state must be 'keep' with "
         "policy='async', as a device updates its moments while parameters are exchanged, got 'av"),
        (elche.DiLoCo(optax.sgd(1.0), fragments=2), "DiLoCo: fragments must be 1 with "
         "policy='async', as pending windows would hold different parts of the parameters, got 2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            elche.build_train_step(
                loss_fn, SGD, devices=jax.devices()[:2], averaging=rule,
                config=elche.DDPConfig(policy="async"),
            )  # fmt: skip


def test_average_of_one_copy():
    train = elche.build_train_step(
        loss_fn, SGD, devices=jax.devices()[:2], averaging=elche.ParameterAveraging()
    )
    message = r"^TrainStep\.average: state must be replicated over the 2 devices of this training"
    with pytest.raises(ValueError, match=message):
        train.average(elche.unreplicate(train.init(params())))


@pytest.mark.slow  # test_the_same_bits resumes such a rule, from a checkpoint
@pytest.mark.parametrize(
    "rule",
    [elche.ParameterAveraging(optimizer_state="keep"), elche.DiLoCo(optax.sgd(0.5), fragments=2),
     elche.DiLoCo(optax.sgd(0.5), compression="int8"), elche.DiLoCo(optax.sgd(0.5), delay=1)],
    ids=["keep", "fragments", "int8", "delay"],
)  # fmt: skip
def test_a_whole_state_goes_on_bit_for_bit(rule):
    """As the page on averaging says it: all devices' own states are saved and put back."""
    counts = [(2, 1)] * 8
    few = {name: leaf[: 24 * BATCH] for name, leaf in data().items()}

    def step():
        return elche.build_train_step(
            loss_fn, optax.adam(0.05), devices=jax.devices()[:2], averaging=rule,
            cadence=elche.Replay(counts),
        )  # fmt: skip

    train = step()
    state, saved = train.init(params()), None
    with train.windows(few, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 4:
                saved = pickle.dumps((jax.device_get(state), window.cursor.to_dict()))
    again = step()
    host_state, cursor = pickle.loads(saved)
    other = jax.tree.map(
        lambda new, old: jax.device_put(old, new.sharding), again.init(params()), host_state
    )
    with again.windows(few, BATCH, cursor=elche.Cursor.from_dict(cursor)) as windows:
        for window in windows:
            other, _ = again(other, window)
    if rule.delay:  # the sums of the window before, for its metrics, are not in the state
        other, state = other.params, state.params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other), jax.device_get(state))


@pytest.mark.parametrize("exchange", [slow("device"), "host"])
def test_a_state_of_another_outer_optimizer(exchange):
    """Restored into a step whose outer optimizer keeps something else; it stays usable."""

    def step(outer):
        return elche.build_train_step(
            loss_fn, SGD, devices=jax.devices()[:2], averaging=elche.DiLoCo(outer),
            cadence=elche.Replay([(1, 1)] * 2), config=elche.DDPConfig(exchange=exchange),
        )  # fmt: skip

    other = step(optax.sgd(0.7, momentum=0.9)).init(params())
    train = step(optax.adam(0.1))
    train.init(params())
    few = {name: leaf[: 4 * BATCH] for name, leaf in data().items()}
    message = (
        r"^train: state must have the shapes of the one that TrainStep\.init made last, got an"
    )
    with train.windows(few, BATCH) as windows, pytest.raises(ValueError, match=message):
        train(other, next(windows))
    assert np.isfinite(jax.device_get(other.params["w"])).all()
