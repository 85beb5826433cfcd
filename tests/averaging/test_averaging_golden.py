"""Ten windows of every rule against NumPy float64, and rules that must agree."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from averaged import COUNTS, NESTEROV, PARTS, THREE, TX, assert_history, train_on
from marks import slow
from reference import BATCH, LEARNING_RATE, LEAVES, Outer, data, loss_fn, params, run

import elche_jax as elche
from elche_jax.engine.runner import Runner
from elche_jax.train.timing import Timing


@pytest.mark.slow  # test_ten_windows has an exponent, the next one its shares
@pytest.mark.parametrize(
    ("how", "exponent", "counts"),
    [
        ("average", 1.0, COUNTS),
        ("average", 1.0, THREE),
        ("average", -0.5, THREE),
        ("keep", 0.0, THREE),
        ("keep", 2.0, COUNTS),
        ("reset", 1.0, THREE),
    ],
)
def test_parameter_averaging(how, exponent, counts):
    rule = elche.ParameterAveraging(exponent=exponent, optimizer_state=how)
    history, metrics, state, _ = train_on(rule, counts)
    want = run(counts, exponent=exponent, optimizer_state=how)
    assert_history(history, want)
    elche.check_replicas(state.params)
    for said, each in zip(metrics, counts, strict=True):
        powers = np.array([float(c) ** exponent if c else 0.0 for c in each])
        shares = powers / powers.sum()
        np.testing.assert_allclose(said["share"], shares, rtol=1e-6)
        np.testing.assert_allclose(said["workers"], 1 / (shares**2).sum(), rtol=1e-6)


@cache
def by_a_schedule():
    """Training with an exponent that falls from 2 to 0, and with a leaf that nothing changes."""

    def loss(p, batch, rng):
        return loss_fn(p | {"v": jax.lax.stop_gradient(p["v"])}, batch, rng)

    rule = elche.ParameterAveraging(exponent=optax.linear_schedule(2.0, 0.0, 8))
    return train_on(rule, COUNTS, loss=loss)


def test_an_exponent_that_follows_a_schedule():
    _, metrics, _, train = by_a_schedule()
    assert train.report().exchange_bytes == 4 * (6 + 6)  # momentum, too
    for window, (said, each) in enumerate(zip(metrics, COUNTS, strict=True)):
        powers = np.array([c ** (2 - min(window, 8) / 4) if c else 0.0 for c in each])
        shares = powers / powers.sum()
        np.testing.assert_allclose(said["share"], shares, rtol=1e-5)
        np.testing.assert_allclose(said["workers"], 1 / (shares**2).sum(), rtol=1e-5)
        assert said["exchange_bytes"] == 4 * (6 + 6)


@pytest.mark.parametrize("how", ["average", "keep", "reset"])
@pytest.mark.slow  # test_every_rule_on_every_transport has such a rule
def test_diloco_with_nesterov(how):
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), optimizer_state=how)
    history, _, state, _ = train_on(rule, THREE)
    assert_history(history, run(THREE, outer=Outer(0.7, 0.9, True), optimizer_state=how))
    elche.check_replicas(state.params)
    elche.check_replicas(state.averaging.outer)


@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.slow  # test_every_rule_on_every_transport has such a rule
def test_fragments(fragments):
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), fragments=fragments)
    history, metrics, state, _ = train_on(rule, THREE)
    want = run(THREE, outer=Outer(0.7, 0.9, True), optimizer_state="keep", parts=PARTS[fragments])
    assert_history(history, want)
    sizes = {"b": 1, "v": 2, "w": 3}
    for window, said in enumerate(metrics):
        part = PARTS[fragments][window % fragments]
        assert said["exchange_bytes"] == 4 * sum(sizes[name] for name in part)
    if fragments > 1:
        elche.check_replicas(state.averaging.base)
        with pytest.raises(elche.ReplicaMismatch):
            elche.check_replicas(state.params)


@pytest.mark.slow  # test_every_rule_on_every_transport has such a rule
def test_int8_with_error_feedback():
    rule = elche.DiLoCo(outer=optax.sgd(**NESTEROV), compression="int8")
    history, metrics, state, _ = train_on(rule, THREE)
    want = run(THREE, outer=Outer(0.7, 0.9, True), optimizer_state="keep", int8=True)
    assert_history(history, want, rtol=1e-4)
    assert all(said["exchange_bytes"] == 6 + 4 * 3 for said in metrics)
    exact = run(THREE, outer=Outer(0.7, 0.9, True), optimizer_state="keep")
    with pytest.raises(AssertionError):  # compression does show
        assert_history(history, exact, rtol=1e-4)
    assert_history(history, exact, rtol=0.1)
    elche.check_replicas(state.params)


@pytest.mark.slow  # test_bytes, and test_every_rule_on_every_transport has such a rule
def test_bfloat16_on_the_wire():
    rule = elche.DiLoCo(outer=optax.sgd(1.0), compression="bfloat16")
    history, metrics, _, _ = train_on(rule, THREE)
    assert all(said["exchange_bytes"] == 2 * 6 for said in metrics)
    want = run(THREE, optimizer_state="keep")
    assert_history(history, want, rtol=0.02, atol=0.01)
    with pytest.raises(AssertionError):
        assert_history(history, want, rtol=1e-5)


# rules that must agree


@pytest.mark.slow  # test_parameters_of_16_bits_are_joined_in_float32 compares the bits, too
@pytest.mark.parametrize("how", ["average", "keep", "reset"])
@pytest.mark.parametrize("tx", [TX, optax.adamw(0.01)], ids=["sgd", "adamw"])
def test_diloco_with_sgd_of_rate_1_is_parameter_averaging_bit_for_bit(how, tx):
    ours, _, first, _ = train_on(elche.ParameterAveraging(optimizer_state=how), THREE, tx=tx)
    other, _, second, _ = train_on(
        elche.DiLoCo(outer=optax.sgd(1.0), optimizer_state=how), THREE, tx=tx
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True):
        assert a.tobytes() == b.tobytes()
    for a, b in zip(*map(jax.tree.leaves, (first.opt_state, second.opt_state)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    "rule",
    [slow(elche.ParameterAveraging(), id="average"),
     slow(elche.ParameterAveraging(0.0, "keep"), id="keep"),
     slow(elche.DiLoCo(outer=optax.sgd(1.0)), id="diloco"),
     pytest.param(elche.DiLoCo(outer=optax.sgd(1.0), compression="int8"), id="int8")],
)  # fmt: skip
def test_one_device_is_plain_training_bit_for_bit(rule):
    tx = optax.adamw(0.01)
    history, _, _, _ = train_on(rule, [(1,)] * 20, tx=tx)

    @jax.jit
    def step(p, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(p, batch, None), opt_state, p)
        return optax.apply_updates(p, updates), opt_state

    p, opt_state, rows = params(), tx.init(params()), data()
    for window, got in enumerate(history):
        batch = {name: leaf[window * BATCH : (window + 1) * BATCH] for name, leaf in rows.items()}
        p, opt_state = step(p, opt_state, batch)
        for name in LEAVES:
            assert got[name][0].tobytes() == np.asarray(p[name]).tobytes()


@pytest.mark.slow  # test_every_rule_on_every_transport has both rules
@pytest.mark.parametrize("tx", [optax.sgd(LEARNING_RATE), TX], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    "rule", [elche.ParameterAveraging(), elche.DiLoCo(outer=optax.sgd(1.0))], ids=["pa", "diloco"]
)
def test_windows_of_one_microbatch_are_gradient_mode(tx, rule):
    """Of SGD: with the state averaged, or kept where it is the same as averaged, none."""
    if rule.optimizer_state == "keep" and tx is TX:
        rule = elche.DiLoCo(outer=optax.sgd(1.0), optimizer_state="average")
    ones = [(1, 1, 1)] * 15
    averaged, _, _, _ = train_on(rule, ones, tx=tx)
    gradients, _, _, _ = train_on(None, ones, tx=tx)
    for a, b in zip(averaged, gradients, strict=True):
        for name in LEAVES:
            np.testing.assert_allclose(a[name], b[name], rtol=2e-5, atol=1e-6)


def test_what_no_device_changes_stays_to_the_last_bit():
    history, _, _, _ = by_a_schedule()
    for got in history:
        assert (got["v"] == np.float32(0.5)).all()


# delay


@pytest.mark.parametrize("exponent", [1.0, 0.0])
@pytest.mark.slow  # test_every_rule_on_every_transport has such a rule
def test_delay_of_the_average(exponent):
    rule = elche.ParameterAveraging(exponent=exponent, optimizer_state="keep", delay=1)
    history, metrics, state, _ = train_on(rule, THREE)
    assert_history(history, run(THREE, exponent=exponent, optimizer_state="keep", delay=1))
    elche.check_replicas(state.averaging.base)
    for said, before in zip(metrics[1:], THREE, strict=False):
        powers = np.array([float(c) ** exponent if c else 0.0 for c in before])
        np.testing.assert_allclose(said["share"], powers / powers.sum(), rtol=1e-6)
        assert said["weight"] == sum(before)


@pytest.mark.parametrize(
    "window_bytes", [slow(2**28, id="one call"), pytest.param(120, id="several calls")]
)
@pytest.mark.parametrize(
    "rule",
    [
        elche.DiLoCo(outer=optax.sgd(**NESTEROV), delay=1),
        slow(None),
        slow(elche.ParameterAveraging()),
    ],
    ids=["delay", "gradients", "average"],
)
def test_windows_that_are_not_timed_give_the_same_bits(rule, window_bytes, monkeypatch):
    """Their last call and their end are one program."""
    counts = THREE + THREE
    plain, first, _, _ = train_on(rule, counts, window_bytes=window_bytes)

    def fuses(runner, payload):  # without waiting for the background
        return runner._get(runner._last_program(payload)) is not None

    monkeypatch.setattr(Runner, "fuses", fuses)
    monkeypatch.setattr(Timing, "timed", lambda self, window, counts, epoch: window % 6 < 2)
    fused, second, _, train = train_on(rule, counts, window_bytes=window_bytes)
    for a, b in zip(*map(jax.tree.leaves, ((plain, first), (fused, second))), strict=True):
        assert a.tobytes() == b.tobytes()
    steady = [record.steady for record in train.records]
    assert not any(steady[w] for w in range(20) if w % 6 >= 2) and any(steady)


@pytest.mark.slow  # test_every_rule_on_every_transport streams them, too
def test_delay_over_data_that_come_otherwise():
    """Another call of `windows`, with programs of its own, tells of the window before it; a run
    that begins anew does not."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], cadence=elche.Replay([(3, 1)] * 4),
        averaging=elche.ParameterAveraging(optimizer_state="keep", delay=1),
    )  # fmt: skip

    def weights(state, **how):
        seen, rows = [], {name: leaf[: 4 * BATCH] for name, leaf in data().items()}
        for window in train.windows(rows, BATCH, **how):
            state, metrics = train(state, window)
            seen.append(float(metrics["weight"]))
        return seen, state

    first, state = weights(train.init(params()))
    second, state = weights(state, mask_key="mask")
    third, _ = weights(state)
    assert [first, second, third] == [[0], [4], [4]]
    assert weights(train.init(params()))[0] == [0]
