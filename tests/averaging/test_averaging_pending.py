"""What else goes with windows that are pending: model state, numbers that are none, weights."""

import dataclasses

import averaged
import exchanged
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from marks import slow, table
from reference import BATCH, data, loss_fn, params

import elche_jax as elche
from elche_jax.train.divergence import DivergenceReader

KEEP = {"optimizer_state": "keep"}
COUNTS = [(3, 1), (1, 3), (4, 0), (0, 2), (2, 2), (1, 3), (3, 1), (1, 2)]
RULES = {
    "gradient": lambda delay: elche.MeanGradient(delay=delay),
    "average": lambda delay: elche.ParameterAveraging(**KEEP, delay=delay),
}
START = {"bn": {"mean": np.float32(0.5), "var": np.float32(2)}, "sum": np.float32(1),
         "peak": np.float32(-9)}  # fmt: skip
MERGE = {"bn": "pooled", "sum": "mean", "peak": "max"}


def loss(p, state, batch, rng):
    x = batch["x"][:, 0]
    new = {
        "bn": {"mean": 0.9 * state["bn"]["mean"] + 0.1 * x.mean(),
               "var": 0.9 * state["bn"]["var"] + 0.1 * x.var()},
        "sum": state["sum"] + x.sum(),
        "peak": jnp.maximum(state["peak"], x.max()),
    }  # fmt: skip
    return loss_fn(p, batch, rng), new


def by_hand(counts, delay):
    """Every device's model state after every window, in NumPy float64: the common one, and what
    the windows that are pending have changed of it."""
    rows, at, world = data()["x"][:, 0].astype("float64"), 0, len(counts[0])
    base = {"mean": 0.5, "var": 2.0, "sum": 1.0, "peak": -9.0}
    own, pending, history = [dict(base) for _ in range(world)], [], []
    for each in counts:
        changes = []
        for device, count in zip(own, each, strict=True):
            start = dict(device)
            for _ in range(count):
                x = rows[at * BATCH : (at + 1) * BATCH]
                device["mean"] = 0.9 * device["mean"] + 0.1 * x.mean()
                device["var"] = 0.9 * device["var"] + 0.1 * x.var()
                device["sum"] += x.sum()
                device["peak"] = max(device["peak"], x.max())
                at += 1
            change = {name: device[name] - start[name] for name in ("mean", "sum")}
            factor = {"var": device["var"] / start["var"]}
            changes.append(change | factor | {"peak": device["peak"]})
        pending.append((np.array(each, float), changes))
        if len(pending) > delay:
            amount, done = pending.pop(0)
            share = amount / amount.sum()

            def mean(values, share=share):
                return sum(w * v for w, v in zip(share, values, strict=True) if w)

            moves = [d["mean"] for d in done]
            apart = mean([(m - mean(moves)) ** 2 for m in moves])
            base["var"] = base["var"] * mean([d["var"] for d in done]) + apart
            base["mean"] += mean(moves)
            base["sum"] += mean([d["sum"] for d in done])
            base["peak"] = max(
                [base["peak"], *(d["peak"] for d, w in zip(done, share, strict=True) if w)]
            )
            before, own = own, [dict(base) for _ in range(world)]
            for _, later in pending:
                for device, change in zip(own, later, strict=True):
                    device["mean"] += change["mean"]
                    device["sum"] += change["sum"]
                    device["var"] *= change["var"]
                    device["peak"] = max(device["peak"], change["peak"])
            for device, mine in zip(own, before, strict=True):
                for name in ("mean", "var", "sum") if pending else ():
                    device[name] = (device[name] + mine[name]) / 2
        history.append([dict(device) for device in own])
    return history


@table(rule=RULES, exchange=["device", "host"], delay=[1, 0, 3])
def test_model_state_goes_on_and_becomes_one(rule, exchange, delay):
    train = elche.build_train_step(
        loss, averaged.TX, devices=jax.devices()[:2], averaging=RULES[rule](delay), merge=MERGE,
        cadence=elche.Replay(COUNTS), config=elche.DDPConfig(exchange=exchange),
    )  # fmt: skip
    state, want = train.init(params(), model_state=START), by_hand(COUNTS, delay)
    rows = {name: leaf[: sum(map(sum, COUNTS)) * BATCH] for name, leaf in data().items()}
    for window, devices in zip(train.windows(rows, BATCH, shuffle=False), want, strict=True):
        state, _ = train(state, window)
        got = jax.device_get(state.model_state)
        got = {**got["bn"], "sum": got["sum"], "peak": got["peak"]}
        for rank, mine in enumerate(devices):
            for name, value in mine.items():
                np.testing.assert_allclose(got[name][rank], value, rtol=2e-5, err_msg=name)
    assert int(elche.unreplicate(state.microbatches)) == sum(map(sum, COUNTS))
    assert int(elche.unreplicate(state.examples)) == sum(map(sum, COUNTS)) * BATCH


def forgetful(p, state, batch, rng):
    """Statistics of which 30 microbatches leave 4 %."""
    x, of = batch["x"], state["bn"]
    now = {"mean": x.mean(), "var": x.var()}
    return p.sum() * 0, {"bn": {name: 0.9 * of[name] + 0.1 * now[name] for name in of}}


@pytest.mark.parametrize(
    ("exchange", "delay", "merge"),
    [("device", 1, "pooled"), slow("host", 3, "pooled"), slow("host", 1, "mean"),
     slow("device", 3, "mean")],
)  # fmt: skip
def test_statistics_that_a_window_forgets_do_not_build_up(exchange, delay, merge):
    """They deviate as those of a run without delay, by the noise of some microbatches."""
    windows, counts = 60, (30, 30)
    x = np.random.default_rng(0).normal(3, 2, (windows * sum(counts) * BATCH,)).astype("f")
    start = {"bn": {"mean": np.float32(3), "var": np.float32(4)}}

    def apart():
        train = elche.build_train_step(
            forgetful, optax.sgd(0.1), devices=jax.devices()[:2], merge=merge,
            averaging=elche.ParameterAveraging(**KEEP, delay=delay),
            cadence=elche.Replay([counts] * windows), config=elche.DDPConfig(exchange=exchange),
        )  # fmt: skip
        state, most = train.init(np.zeros(1, "f"), model_state=start), {"mean": 0.0, "var": 0.0}
        for window in train.windows({"x": x}, BATCH, shuffle=False):
            state, _ = train(state, window)
            for name, value in jax.device_get(state.model_state["bn"]).items():
                most[name] = max(most[name], np.abs(value - start["bn"][name]).max())
        return most

    def by_hand():
        """Without a delay, in NumPy float64."""
        now, most, at = {"mean": 3.0, "var": 4.0}, {"mean": 0.0, "var": 0.0}, 0
        for _ in range(windows):
            ends = []
            for count in counts:
                mine = dict(now)
                for _ in range(count):
                    rows = x[at * BATCH : (at + 1) * BATCH].astype("float64")
                    mine["mean"] = 0.9 * mine["mean"] + 0.1 * rows.mean()
                    mine["var"] = 0.9 * mine["var"] + 0.1 * rows.var()
                    at += 1
                ends.append(mine)
            now = {name: np.mean([end[name] for end in ends]) for name in now}
            if merge == "pooled":
                now["var"] += np.var([end["mean"] for end in ends])
            for name, value in now.items():
                most[name] = max(most[name], abs(value - start["bn"][name]))
        return most

    late, at_once = apart(), by_hand()
    assert all(late[name] < 2 * at_once[name] for name in late), (late, at_once)


@table(rule=RULES, delay=[0, 2], exchange=["host", "device"])
def test_a_window_that_is_not_finite_is_counted_once(rule, delay, exchange):
    bad = sum(map(sum, COUNTS[:4]))  # the first microbatch of window 4
    poisoned = averaged.poisoned((bad,))
    _, metrics, _, train = averaged.train_on(
        RULES[rule](delay), COUNTS, config=elche.DDPConfig(exchange=exchange), nonfinite="skip",
        **poisoned,
    )  # fmt: skip
    assert train.skipped == 1
    assert sum(not said["finite"] for said in metrics) == 1


@pytest.mark.parametrize(
    ("times", "delay", "exchange"),
    [(0.0, 2, "host"), slow(0.0, 0, "device"), slow(np.nan, 2, "device"), slow(np.nan, 0, "host")],
)
def test_weights_that_share_nothing_out_are_an_error(times, delay, exchange):
    class Broken(elche.ParameterAveraging):
        def weigh(self, work):
            return work.steps * times

    with pytest.raises(elche.NonFiniteError):
        averaged.train_on(
            Broken(**KEEP, delay=delay), COUNTS, config=elche.DDPConfig(exchange=exchange)
        )


@table(rule=RULES, exchange=["device", "host"])
def test_what_a_run_leaves_pending_is_taken_up_in_the_next(rule, exchange):
    """Four calls of `windows` are one, also with the state in another one's place."""
    train = elche.build_train_step(
        loss_fn, averaged.TX, devices=jax.devices()[:2], averaging=RULES[rule](2),
        cadence=elche.Replay([(2, 1)] * 8), config=elche.DDPConfig(exchange=exchange),
    )  # fmt: skip

    def trained(calls):
        rows = {name: leaf[: 24 * BATCH] for name, leaf in data().items()}
        state, each = train.init(params()), 8 // calls
        for call in range(calls):
            part = slice(call * each * 3 * BATCH, (call + 1) * each * 3 * BATCH)
            some = {name: leaf[part] for name, leaf in rows.items()}
            for window in train.windows(some, BATCH, shuffle=False):
                state, metrics = train(state, window)
        return state, metrics

    (one, said), (four, again) = trained(1), trained(4)
    tolerance = {"rtol": 0, "atol": 0} if rule == "gradient" else {"rtol": 1e-5, "atol": 1e-7}
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(four.params), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)
    assert float(said["loss"]) == pytest.approx(float(again["loss"]), rel=1e-5)


class Plain(elche.AveragingRule):
    """A rule that is no dataclass, and checks nothing itself."""

    optimizer_state = "keep"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("delay", -1, "delay must be at least 0, got -1"),
        ("compression", "int4", "compression must be one of None, 'bfloat16', 'int8', got 'int4'"),
        ("optimizer_state", "avg", "optimizer_state must be one of 'average', 'keep', 'reset', go"),
        ("exponent", float("inf"), "exponent must be finite, got inf"),
    ],
)
def test_a_rule_of_any_class_is_checked(name, value, message):
    rule = Plain()
    setattr(rule, name, value)
    with pytest.raises(ValueError, match=f"^Plain: {message}"):
        elche.build_train_step(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], averaging=rule)


def test_a_rule_of_any_class_trains():
    history, _, _, _ = averaged.train_on(Plain(), COUNTS)
    same, _, _, _ = averaged.train_on(elche.ParameterAveraging(**KEEP), COUNTS)
    for a, b in zip(jax.tree.leaves(history), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)


@dataclasses.dataclass(frozen=True)
class ByLoss(elche.DiLoCo):
    """Weights of the loss, which is known at an exchange only."""

    def weigh(self, work):
        return work.loss


def below(windows):
    """An exponent of 1 for so many windows, the last exchange among them."""
    return lambda window: jnp.where(window < windows, 1.0, jnp.nan)


@pytest.mark.parametrize(
    ("rule", "since"),
    [
        # the last window, the eighth, exchanged b and v
        (ByLoss(optax.sgd(1.0), fragments=2, exponent=below(8)), [[*COUNTS[7]], [0, 0]]),
        # it exchanged nothing, as it was dropped
        (elche.DiLoCo(optax.sgd(1.0), fragments=2, exponent=below(7)), [[0, 0], [*COUNTS[6]]]),
        slow(elche.ParameterAveraging(delay=1, exponent=below(7), **KEEP), [[*COUNTS[7]]]),
    ],
)
def test_one_set_of_parameters_in_between_is_by_the_steps(rule, since):
    _, _, state, train = averaged.train_on(rule, COUNTS, nonfinite="skip")
    kept, got = jax.device_get(state.averaging), train.average(state)
    own = jax.device_get(state.params)
    assert kept.steps.T.tolist() == since
    for i, name in enumerate(("b", "v", "w")):
        part = 0 if name == "w" or rule.delay else 1
        steps = kept.steps[:, part]
        base = kept.base[i][0]
        if steps.sum():
            share = (steps / steps.sum()).reshape(-1, *(1,) * base.ndim)
            base = base - (share * (kept.base[i] - own[name])).sum(axis=0)
        np.testing.assert_allclose(got[name], base, rtol=1e-5, atol=1e-7)


def test_what_int8_cannot_say():
    with pytest.raises(
        ValueError, match=r"^MeanGradient: compression must be None or 'bfloat16' w"
    ):
        elche.build_train_step(
            loss_fn, optax.sgd(0.1), averaging=elche.MeanGradient("int8"), nonfinite="ignore"
        )


@pytest.mark.slow  # test_small_steps_of_64_bits changes such numbers by a few bits
@pytest.mark.parametrize("averaging", [None, elche.ParameterAveraging()])
def test_64_bits(averaging):
    """Numbers of 64 bits that no device changes stay as they are."""

    def loss(p, state, batch, rng):
        return loss_fn(p, batch, rng), state

    with jax.enable_x64(True):
        train = elche.build_train_step(
            loss, averaged.TX, devices=jax.devices()[:2], averaging=averaging,
            cadence=elche.Replay(COUNTS[:2]),
        )  # fmt: skip
        state = train.init(params(), model_state={"third": np.float64(1) / 3})
        assert state.model_state["third"].dtype == np.float64
        few = {name: leaf[: 8 * BATCH] for name, leaf in data().items()}
        for window in train.windows(few, BATCH):
            state, metrics = train(state, window)
        assert metrics["finite"]
        assert np.asarray(state.model_state["third"]).tolist() == [1 / 3] * 2


@table(rule=RULES, exchange=["device", "host"])
def test_metrics_of_no_window_yet_are_nan(rule, exchange):
    train = elche.build_train_step(
        lambda p, batch, rng: (p * batch.mean(), {"mine": batch.mean()}), optax.sgd(0.1),
        has_aux=True, devices=jax.devices()[:2], averaging=RULES[rule](2),
        cadence=elche.EveryBatch(), config=elche.DDPConfig(exchange=exchange),
    )  # fmt: skip
    state, seen = train.init(np.float32(1)), []
    for window in train.windows(np.ones(8, "float32"), 1):
        state, metrics = train(state, window)
        seen.append([float(metrics[name]) for name in ("loss", "mine")])
    assert np.isnan(seen[:2]).all() and np.isfinite(seen[2:]).all()
    assert np.array(seen)[2:, 1].tolist() == [1, 1]


SMALL = {
    "gradient": None,
    "late": elche.ParameterAveraging(optimizer_state="keep", delay=1),
    "DiLoCo": elche.DiLoCo(optax.sgd(1.0)),
    "averages": elche.ParameterAveraging(),
    "fragments": elche.DiLoCo(optax.sgd(1.0), fragments=2, optimizer_state="keep"),
}


@pytest.mark.parametrize(
    ("rule", "exchange"),
    [
        (rule, exchange) if at in (0, 1, 3) and at % 2 == place else slow(rule, exchange)
        for at, rule in enumerate(SMALL)
        for place, exchange in enumerate(("device", "host"))
    ],
)
def test_small_steps_of_64_bits(rule, exchange):
    """Steps that float32 would lose, of parameters and model state: what travels is a change."""

    def loss(p, state, batch, rng):
        return p["w"].sum() + p["v"], {"time": state["time"] + 1e-6}

    with jax.enable_x64(True):
        train = elche.build_train_step(
            loss, optax.sgd(1e-9), devices=jax.devices()[:2], averaging=SMALL[rule],
            cadence=elche.EveryBatch(), config=elche.DDPConfig(exchange=exchange),
        )  # fmt: skip
        start = {"w": np.full(2, np.pi), "v": np.float64(np.e)}
        state = train.init(start, model_state={"time": np.float64(1e6)})
        for window in train.windows(np.zeros((16, 1)), 1):  # eight windows
            state, _ = train(state, window)
        for name, begin in start.items():
            moved = np.asarray(state.params[name]) - begin
            np.testing.assert_allclose(moved, -8e-9, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(state.model_state["time"]) - 1e6, 8e-6, rtol=1e-4)
    if rule == "gradient":
        assert train.report().exchange_bytes == 8 * 4  # three parameters, and the time


@pytest.mark.parametrize("run_ahead", [False, slow(True)])
def test_a_dynamic_scale_goes_over_the_host(run_ahead):
    scale = DynamicScale(scale=8.0, growth_interval=3)

    def trained(**options):
        train = elche.build_train_step(
            loss_fn, averaged.TX, devices=jax.devices()[:2], loss_scale=scale,
            cadence=elche.Replay([(2, 1)] * 20), **options,
        )  # fmt: skip
        state, scales = train.init(params()), []
        rows = {name: leaf[: 60 * BATCH] for name, leaf in data().items()}
        for window in train.windows(rows, BATCH):
            state, metrics = train(state, window)
            scales.append(float(metrics["loss_scale"]))
        return elche.unreplicate(state.params), scales

    hosted, reported = trained(exchange=elche.HostExchange(run_ahead=run_ahead))
    assert reported[0] == 8 and reported[-1] > 8
    if not run_ahead:
        plain, scales = trained()
        assert reported == scales
        np.testing.assert_allclose(hosted["w"], plain["w"], rtol=1e-5)


@pytest.mark.parametrize("lanes", [None, slow(((0,), (1,)))])
def test_a_dynamic_scale_counts_the_windows_whose_mean_is_known(lanes):
    """Not the first ones, which apply no mean as those before them are pending."""
    scale = DynamicScale(scale=8.0, growth_interval=2)
    train = elche.build_train_step(
        loss_fn, averaged.TX, devices=jax.devices()[:2], lanes=lanes, loss_scale=scale,
        averaging=elche.MeanGradient(delay=3), cadence=elche.EveryBatch(),
    )  # fmt: skip
    state, scales = train.init(params()), []
    rows = {name: leaf[: 16 * BATCH] for name, leaf in data().items()}
    for window in train.windows(rows, BATCH):
        state, metrics = train(state, window)
        scales.append(float(metrics["loss_scale"]))
    # at the start of each window; the fourth one applies the first mean, and Flax doubles the
    # scale with the first finite window after two
    assert scales == [8, 8, 8, 8, 8, 8, 16, 16]
    assert np.asarray(state.loss_scale.fin_steps).tolist() == [2, 2]


def test_gradients_that_nobody_waits_for():
    """Over the host, with nothing else in the state."""
    train = elche.build_train_step(
        loss_fn, averaged.TX, devices=jax.devices()[:2], cadence=elche.Replay([(2, 1)] * 20),
        config=elche.DDPConfig(policy="async", exchange="host"),
    )  # fmt: skip
    state = train.init(params())
    rows = {name: leaf[: 60 * BATCH] for name, leaf in data().items()}
    for window in train.windows(rows, BATCH):
        state, metrics = train(state, window)
    assert train.skipped == 0 and np.isfinite(metrics["loss"])
    elche.check_replicas(state.params)
    assert np.abs(elche.unreplicate(state.params)["w"] - params()["w"]).max() > 0.1


@pytest.mark.parametrize(
    ("weigh", "got"),
    [
        (lambda work: work.steps[:2], r"ShapeDtypeStruct\(shape=\(2,\), .*\)"),
        (lambda work: [1.0, 2.0], r"\[.*\]"),
        (lambda work: None, "None"),
        (lambda work: np.sqrt(work.steps), "one that raises TracerArrayConversionError: "),
        (lambda work: work.steps if work.loss[0] > 1 else work.loss, "one that raises Tracer"),
        (lambda work: next(iter(())), r"one that raises StopIteration\.$"),
    ],
    ids=["shape", "list", "none", "numpy", "branch", "no text"],
)
def test_weights_that_are_no_array(weigh, got):
    class Own(elche.ParameterAveraging):
        def weigh(self, work):
            return weigh(work)

    with pytest.raises(
        TypeError, match=f"^Own: weigh must return one number per device, .* got {got}"
    ):
        elche.build_train_step(loss_fn, optax.sgd(0.1), averaging=Own())


def test_weights_for_these_devices_alone():
    class Fixed(elche.ParameterAveraging):
        def weigh(self, work):
            return work.xp.asarray([1.0, 2.0, 1.0])

    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:3], averaging=Fixed(),
        cadence=elche.FixedTotal(6),
    )  # fmt: skip
    state = train.init(params())
    for window in train.windows({name: leaf[: 6 * BATCH] for name, leaf in data().items()}, BATCH):
        state, metrics = train(state, window)
    assert np.asarray(metrics["share"]).tolist() == [0.25, 0.5, 0.25]


def test_more_windows_than_may_be_pending():
    with pytest.raises(ValueError, match=r"^MeanGradient: delay must be at most 64, got 65\.$"):
        elche.MeanGradient(delay=65)


def test_what_a_checkpoint_knows_stays_as_it_is_while_training_goes_on():
    """It is written while later windows are read."""
    train = elche.build_train_step(
        loss_fn, averaged.TX, devices=jax.devices()[:2], cadence=elche.Replay([(2, 1)] * 12),
        averaging=elche.ParameterAveraging(**KEEP, delay=2),
    )  # fmt: skip
    state = train.init(params())
    with train.windows({n: leaf[: 36 * BATCH] for n, leaf in data().items()}, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 5:
                windows.drain()
                known = train.run_to_dict()
    assert list(known["unread"]) == [(4, (2, 1)), (5, (2, 1))]
    assert [seen["window"] for seen in known["divergence"]] == [0, 1, 2, 3]
    assert [seen.window for seen in train.divergence] == list(range(10))


@pytest.mark.parametrize("seen", range(6))
def test_windows_whose_metrics_are_to_come_are_kept_however_few(seen):
    """A run that is stopped early goes on with what it has not told yet."""
    reader = DivergenceReader(jax.devices()[:2], pending=3)
    known = [(window, (2, 1)) for window in range(seen)]
    reader.restore(known)
    assert list(reader.unread) == known[-3:]


def test_over_the_host_every_window_tells_of_itself():
    """Also after windows that told of earlier ones, on the devices."""

    def build(exchange):
        return elche.build_train_step(
            loss_fn, averaged.TX, devices=jax.devices()[:2], cadence=elche.Replay([(2, 1)] * 12),
            averaging=elche.ParameterAveraging(**KEEP, delay=1),
            config=elche.DDPConfig(exchange=exchange),
        )  # fmt: skip

    first, then = build("device"), build("host")
    state, rows = first.init(params()), {n: leaf[: 18 * BATCH] for n, leaf in data().items()}
    for window in first.windows(rows, BATCH):
        state, _ = first(state, window)
    state, cursor = then.init(params()), window.cursor
    then.restore_run(first.run_to_dict())
    for window in then.windows(rows, BATCH, epochs=2, cursor=cursor):
        state, _ = then(state, window)
    assert [seen.window for seen in then.divergence][-1] == window.index


@pytest.mark.parametrize("exchange", [elche.HostExchange(), slow(None)], ids=["host", "device"])
@pytest.mark.parametrize("rule", ["average", slow("gradient")])
def test_windows_that_are_trained_after_their_loop_are_as_late_as_others(rule, exchange):
    train = elche.build_train_step(
        loss_fn, averaged.TX, devices=jax.devices()[:2], averaging=RULES[rule](2),
        cadence=elche.Replay(COUNTS), exchange=exchange,
    )  # fmt: skip
    state, cursor, history = train.init(params()), None, []
    while len(history) < len(COUNTS):
        kept = []
        with train.windows(data(), BATCH, shuffle=False, cursor=cursor) as windows:
            for window in windows:
                if window.index in (0, 5):  # in their loops
                    state, _ = train(state, window)
                    history.append(jax.device_get(state.params))
                else:
                    kept.append(window)
                if len(kept) == 2 or window.index == len(COUNTS) - 1:
                    break
        for window in kept:
            state, _ = train(state, window)
            history.append(jax.device_get(state.params))
        cursor = window.cursor
    averaged.assert_history(history, exchanged.train(COUNTS, local=rule == "average", delay=2))
