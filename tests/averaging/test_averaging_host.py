"""Exchange on the host: the same averages, devices that run ahead, devices that are late."""

import gc
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from averaged import NESTEROV, THREE, TX, assert_history, poisoned, train_on
from held import Held
from marks import slow, table
from reference import BATCH, LEARNING_RATE, LEAVES, MOMENTUM, Outer, data, loss_fn, params, run
from waits import eventually

import elche_jax as elche
from elche_jax.engine.host.coordinator import Coordinator
from elche_jax.engine.host.exchange import LiveExchange
from elche_jax.engine.host.limits import Limits
from elche_jax.lab import EmulatedSpeeds, ExtraWork

HOST = elche.DDPConfig(exchange="host")
KEEP = elche.ParameterAveraging(optimizer_state="keep")


def ahead(**knobs):
    return elche.DDPConfig(policy="async", exchange="host", **knobs)


def threads():
    """Those of runs; one that compiles ends by itself when it is done."""
    ours = ("elche-fetch", "elche-average", "elche-prefetch")
    return [t for t in threading.enumerate() if t.name.startswith(ours)]


def first(microbatches):
    """So many microbatches of the data."""
    return {name: leaf[: microbatches * BATCH] for name, leaf in data().items()}


def built(config):
    return elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, config=config,
        cadence=elche.Replay([(2, 1)] * 6),
    )  # fmt: skip


@pytest.fixture(scope="module")
def step():
    """A training step whose windows wait for their average; every run begins anew."""
    return built(HOST)


@pytest.fixture(scope="module")
def running_ahead():
    """A training step whose devices run ahead; every run begins anew."""
    return built(ahead(max_overshoot=0))


# -- every window waits for its average


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        slow(elche.ParameterAveraging(), {}, id="average"),
        pytest.param(elche.ParameterAveraging(0.5, optimizer_state="reset"),
                     {"exponent": 0.5, "optimizer_state": "reset"}, id="reset"),
        slow(elche.DiLoCo(optax.sgd(**NESTEROV)),
                     {"outer": Outer(0.7, 0.9, True), "optimizer_state": "keep"}, id="diloco"),
        slow(elche.ParameterAveraging(lambda window: 1.0 - 0.1 * window), None, id="schedule"),
    ],
)  # fmt: skip
def test_ten_windows(rule, want):
    """As on the devices: the same parameters, the same metrics, replicas alike."""
    history, metrics, state, train = train_on(rule, THREE, config=HOST, window_bytes=4 * 16 * BATCH)
    if want is not None:
        assert_history(history, run(THREE, **want))
    elche.check_replicas(state.params)
    elche.check_replicas(state.averaging)
    if rule.optimizer_state != "keep":
        elche.check_replicas(state)
    others, on_devices, other, _ = train_on(rule, THREE)
    np.testing.assert_allclose(history[-1]["w"], others[-1]["w"], rtol=2e-5)
    assert [sorted(m) for m in metrics] == [sorted(m) for m in on_devices]
    before_outer = {"distance"} if rule.outer is not None else set()
    for mine, theirs in zip(metrics, on_devices, strict=True):
        for name in set(mine) - before_outer:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=2e-4, atol=1e-6, err_msg=name)
    for name in ("microbatches", "examples", "step", "key"):
        np.testing.assert_array_equal(getattr(state, name), getattr(other, name))
    np.testing.assert_array_equal(train.average(state)["w"], history[-1]["w"][0])
    assert threads() == []


@pytest.mark.slow  # test_distances_by_hand, and rules on the host in the table of them
def test_distances_are_from_the_average():
    """`|y - a| / |a|` with `a` the average, also where an outer optimizer goes elsewhere."""
    counts, tx, mean = [(2, 1)], optax.sgd(0.05), elche.ParameterAveraging()
    history, metrics, _, _ = train_on(elche.DiLoCo(optax.sgd(0.5)), counts, config=HOST, tx=tx)
    alone, _, _, _ = train_on(mean, counts, config=HOST, tx=tx)
    start = flat({name: leaf[None] for name, leaf in params().items()})
    average = flat(alone[0])
    np.testing.assert_allclose(flat(history[0]), start + 0.5 * (average - start), rtol=1e-5)
    for rank, only in enumerate([(2, 0), (0, 1)]):
        own, _, _, _ = train_on(mean, [only], config=HOST, tx=tx, rows=shifted(rank))
        apart, moved = flat(own[0]) - average, flat(own[0]) - start
        want = np.linalg.norm(apart) / np.linalg.norm(average)
        np.testing.assert_allclose(metrics[0]["distance"][rank], want, rtol=1e-4)
        want = np.linalg.norm(moved)
        np.testing.assert_allclose(metrics[0]["update_norm"][rank], want, rtol=1e-5)


def flat(stacked):
    """The first device's parameters in one row."""
    return np.concatenate([np.ravel(stacked[name][0]) for name in LEAVES]).astype(np.float64)


def shifted(rank):
    """The data from where device `rank` begins in a window of (2, 1)."""
    return {name: leaf[(2 * BATCH if rank else 0) :] for name, leaf in data().items()}


def with_statistics(p, model_state, batch, rng):
    new = {
        "bn": {
            "mean": 0.9 * model_state["bn"]["mean"] + 0.1 * batch["x"].mean(axis=0),
            "var": 0.9 * model_state["bn"]["var"] + 0.1 * batch["x"].var(axis=0),
        },
        "ema": 0.5 * model_state["ema"] + 0.5 * batch["y"].mean(),
        "seen": model_state["seen"] + 1,
        "any": model_state["any"] | (batch["y"][0] > 2),
        "head": batch["x"][0],
        "mine": model_state["mine"] + batch["y"].sum(),
        "never": model_state["never"],
    }
    return loss_fn(p, batch, rng), new


STATISTICS = {
    "bn": {"mean": np.zeros(3, "f"), "var": np.ones(3, "f")}, "ema": np.float32(0),
    "seen": np.int32(0), "any": np.bool_(False), "head": np.zeros(3, "f"),
    "mine": np.float32(0), "never": np.full(2, np.inf, "f"),
}  # fmt: skip
MERGE = {"bn": "pooled", "ema": "mean", "seen": "max", "any": "max", "head": "first",
         "mine": "keep", "never": "mean"}  # fmt: skip


def noisy(rate):
    return optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(rate, momentum=MOMENTUM))


@pytest.mark.parametrize("how", ["average", slow("keep")])
def test_model_state_and_optimizer_state_as_on_the_devices(how):
    """Every rule, an optimizer with a key, a frozen parameter, a clipped norm."""
    counts = [(2, 3), (0, 2), (1, 0)]
    states = []
    for config in (HOST, elche.DDPConfig()):
        train = elche.build_train_step(
            with_statistics, noisy(0.1), devices=jax.devices()[:2], config=config,
            averaging=elche.ParameterAveraging(optimizer_state=how), merge=MERGE,
            cadence=elche.Replay(counts), trainable={"b": True, "v": False, "w": True},
        )  # fmt: skip
        state = train.init(params(), model_state=STATISTICS, rng=3)
        with train.windows(first(8), BATCH) as windows:
            for window in windows:
                state, metrics = train(state, window)
        states.append((state, metrics, train.report().exchange_bytes))
    (host, said, sent), (device, other, also) = states
    assert sent == also == float(said["exchange_bytes"]) == float(other["exchange_bytes"])
    for name in ("params", "opt_state", "model_state"):
        mine, theirs = getattr(host, name), getattr(device, name)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_device_that_is_not_finite_is_left_out():
    rows = poisoned()
    history, metrics, state, train = train_on(
        KEEP, THREE, config=HOST, nonfinite="skip", **{"loss": rows["loss"], "rows": rows["rows"]}
    )
    assert_history(history, run(THREE, optimizer_state="keep", lost={(4, 1)}))
    assert train.left_out == (0, 1, 0) and train.skipped == 1
    assert [bool(m["finite"]) for m in metrics] == [w != 4 for w in range(len(THREE))]
    assert np.isnan(metrics[4]["distance"]).tolist() == [False, True, False]
    elche.check_replicas(state.params)


def test_not_finite_is_an_error_where_it_was_asked_for():
    rows = poisoned()
    with pytest.raises(
        elche.NonFiniteError,
        match=r"device 1 \(.*\), microbatches 27 to 28 of",
    ):
        train_on(KEEP, THREE, config=HOST, **{"loss": rows["loss"], "rows": rows["rows"]})
    assert threads() == []


class Spoilt:
    """An outer optimizer whose update is infinite where the average moved by a given step.

    With a gradient of 1 and `sgd(1.0)` the average of a window moves by the mean of its
    counts, weighted by themselves.
    """

    @staticmethod
    def at(moved):
        def update(updates, state, params=None):
            bad = jnp.isclose(updates[0][0], moved)
            return jax.tree.map(lambda u: jnp.where(bad, jnp.inf, -u), updates), state

        return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize("config", [slow(HOST), slow(ahead(max_overshoot=0)), ahead()], ids=str)
def test_an_outer_optimizer_that_makes_what_is_not_finite(config):
    """Nobody takes it, and it is told once, as of that window or of one soon after."""
    counts = [(n, n) for n in (1, 2, 3, 4, 5, 6, 7, 8)]
    train = elche.build_train_step(
        lambda p, batch, rng: p["w"].sum(), optax.sgd(1.0), devices=jax.devices()[:2],
        averaging=elche.DiLoCo(Spoilt.at(3.0)), cadence=elche.Replay(counts), config=config,
        nonfinite="skip",
    )  # fmt: skip
    state = train.init({"w": np.zeros(2, "f")})
    with train.windows(first(72), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
    assert train.skipped == 1 and train.left_out == (0, 0)
    np.testing.assert_allclose(train.average(state)["w"], np.full(2, 3.0 - 36.0), rtol=1e-6)


@pytest.mark.slow  # as on the devices; one device of several is left out above
def test_a_window_in_which_no_device_is_finite_changes_nothing():
    rows = poisoned([2, 3])
    for how in ("average", "keep"):
        train = elche.build_train_step(
            rows["loss"], optax.adam(0.1), devices=jax.devices()[:2], config=HOST,
            averaging=elche.ParameterAveraging(optimizer_state=how),
            cadence=elche.Replay([(1, 1)] * 2), nonfinite="skip",
        )  # fmt: skip
        states = [train.init(params())]
        few = {name: leaf[: 4 * BATCH] for name, leaf in rows["rows"].items()}
        with train.windows(few, BATCH, shuffle=False) as windows:
            for window in windows:
                state, _ = train(states[-1], window)
                states.append(jax.device_get(state))
                states[-1] = state if window.index == 1 else state.replace()
                if window.index == 0:
                    kept = jax.device_get((state.params, state.opt_state))
        now = jax.device_get((state.params, state.opt_state))
        jax.tree.map(np.testing.assert_array_equal, now, kept)
        assert train.skipped == 1 and train.left_out == (1, 1)


@pytest.mark.slow  # test_extra_work_changes_no_bit_of_the_sums
def test_work_that_really_costs():
    """A device that computes everything three times computes the same."""
    history, _, _, _ = train_on(KEEP, THREE[:3], config=HOST, emulate=ExtraWork((1, 3, 1)))
    assert_history(history, run(THREE[:3], optimizer_state="keep"))


# -- devices that run ahead


def test_one_window_ahead():
    """Device 1 is held: device 0 goes on, and both are corrected one window late.

    The average of a window is there when that after the next begins: the parameters are
    those of `delay=1`, before each correction instead of after it.
    """
    counts = [(3, 1), (2, 2), (4, 1), (1, 3), (5, 2)]
    emulate = Held((w, 1) for w in range(len(counts)))
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=elche.DiLoCo(optax.sgd(**NESTEROV)),
        cadence=elche.Replay(counts), config=ahead(), emulate=emulate,
    )  # fmt: skip
    state, history, metrics = train.init(params()), [], []
    with train.windows(first(sum(map(sum, counts))), BATCH, shuffle=False) as windows:
        for window in windows:
            state, said = train(state, window)
            history.append(jax.device_get(state.params))
            metrics.append(jax.device_get(said))
            emulate.reached[window.index, 0].wait(30)
            if window.index:  # of two windows in flight the older one is averaged
                emulate.let_go(window.index - 1, 1)
                eventually(lambda at=window.index: len(train.records) == at)
            if window.index == len(counts) - 1:
                emulate.let_go(window.index, 1)
    want = run(counts, outer=Outer(0.7, 0.9, True), optimizer_state="keep", delay=1, before=True)
    assert_history(history, want)
    _, on_devices, _, _ = train_on(
        elche.DiLoCo(optax.sgd(**NESTEROV), delay=1), counts, rows=first(sum(map(sum, counts)))
    )
    assert np.isnan(metrics[0]["loss"]) and np.isnan(metrics[1]["loss"])
    for mine, theirs in zip(metrics[2:], on_devices[1:], strict=False):  # one window later still
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
        np.testing.assert_allclose(mine["share"], theirs["share"], rtol=1e-6)
    assert threads() == []


@pytest.mark.slow  # test_nothing_is_lost_between_runs has no overshoot, either
def test_no_overshoot_is_no_delay():
    """Each window waits for the average of the one before: what comes of it is the same."""
    history, _, state, train = train_on(
        KEEP, THREE, config=ahead(max_overshoot=0), rows=first(sum(map(sum, THREE)))
    )
    want = run(THREE, optimizer_state="keep")
    # a state has the steps of its window, its average is taken up by the next one
    for window, stacked in enumerate(history[1:]):
        bases = [h[0] for h in want]
        for rank, count in enumerate(THREE[window + 1]):
            if count == 0:
                np.testing.assert_allclose(stacked["w"][rank], bases[window]["w"], rtol=2e-5)
    last = train.average(state)
    for name in LEAVES:
        np.testing.assert_allclose(last[name], want[-1][0][name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("copied", [slow(False), True])
def test_nothing_is_lost_between_runs(copied):
    """What the devices have not taken up when a run ends they take up in the next.

    With a gradient that is always the same, the parameters are known from the counts."""
    counts = [(3, 1), (2, 2), (4, 1), (1, 3), (5, 2), (2, 2)]
    train = elche.build_train_step(
        lambda p, batch, rng: p["w"].sum(), optax.sgd(1.0), devices=jax.devices()[:2],
        averaging=KEEP, cadence=elche.Replay(counts), config=ahead(max_overshoot=0),
    )  # fmt: skip
    state, cursor = train.init({"w": np.zeros(3, "f")}), None
    for _ in range(3):
        state = state.replace() if copied else state
        with train.windows(data(28), BATCH, cursor=cursor) as windows:
            for window in windows:
                state, _ = train(state, window)
                if window.index % 2:
                    break
        cursor = window.cursor
    # exchanges are of windows 0 to 5; of the last one the average is to be taken up. With
    # another state object what is open goes with its first delivery: 1 and 2; 3 and 4
    exchanged = [(3, 1), (6, 3), (6, 5), (2, 2)] if copied else counts
    moved = [sum(n * n for n in each) / sum(each) for each in exchanged]
    np.testing.assert_allclose(train.average(state)["w"], np.full(3, -sum(moved)), rtol=1e-5)
    np.testing.assert_allclose(state.averaging.base[0][0], np.full(3, -sum(moved[:-1])), rtol=1e-5)


@pytest.mark.parametrize("overshoot", [slow(None), slow(2), 4], ids=["one window", "two", "three"])
def test_a_difference_of_model_states_halves_with_every_average(overshoot):
    """A difference between the devices that comes up once: each average leaves half of it.

    Were the later windows' ends not corrected with the state, each of them would take the
    same difference off again."""
    steps, knobs = 12, {} if overshoot is None else {"max_overshoot": overshoot}
    emulate = Held((w, 1) for w in range(steps))

    def loss(p, model_state, batch, rng):
        once = jnp.where(batch["at"][0] == 1, 1.0, 0.0)  # device 1, window 0
        return p["w"].sum(), {"x": model_state["x"] + once}

    train = elche.build_train_step(
        loss, optax.sgd(1.0), devices=jax.devices()[:2], averaging=KEEP, merge="mean",
        cadence=elche.Replay([(1, 1)] * steps), config=ahead(**knobs), emulate=emulate,
    )  # fmt: skip
    state = train.init({"w": np.zeros(2, "f")}, model_state={"x": np.float32(0)})
    rows = {"at": np.repeat(np.arange(2 * steps, dtype="int32"), BATCH)}
    behind, seen = {None: 1, 2: 2, 4: 3}[overshoot], []
    with train.windows(rows, BATCH, shuffle=False) as windows:
        for window in windows:
            state, _ = train(state, window)
            seen.append(jax.device_get(state.model_state["x"]).tolist())
            if window.index >= behind:
                emulate.let_go(window.index - behind, 1)
                eventually(lambda at=window.index: len(train.records) > at - behind)
            if window.index == steps - 1:
                for left in range(steps):
                    emulate.let_go(left, 1)
    assert seen[behind] == [0.0, 1.0], "nobody has heard of it"
    half = [0.5 ** (2 + n) for n in range(steps - behind - 1)]
    assert seen[behind + 1 :] == [[0.5 - apart, 0.5 + apart] for apart in half]


@pytest.mark.slow  # the test before this one, three windows later
def test_model_state_is_corrected_late():
    counts = [(2, 1)] * 12
    rules = MERGE | {"head": "keep"}
    train = elche.build_train_step(
        with_statistics, optax.sgd(0.01), devices=jax.devices()[:2], averaging=KEEP, merge=rules,
        cadence=elche.Replay(counts), config=ahead(),
    )  # fmt: skip
    state = train.init(params(), model_state=STATISTICS)
    with train.windows(data(36), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
    got = jax.device_get(state.model_state)
    assert (got["bn"]["var"] > 0).all() and np.isfinite(got["bn"]["mean"]).all()
    assert np.abs(got["bn"]["mean"]).max() < 1 and np.abs(got["bn"]["var"] - 1).max() < 0.9
    assert got["seen"].max() == 24 and np.isinf(got["never"]).all()


def test_a_state_that_was_changed_waits_for_its_average():
    """A state that the step has not returned could not be told of it later."""
    counts = [(3, 1), (2, 2), (4, 1), (1, 3), (5, 2), (2, 2)]
    train = elche.build_train_step(
        lambda p, batch, rng: p["w"].sum(), optax.sgd(1.0), devices=jax.devices()[:2],
        averaging=KEEP, cadence=elche.Replay(counts), config=ahead(),
    )  # fmt: skip
    state, losses = train.init({"w": np.zeros(3, "f")}), []
    with train.windows(first(28), BATCH) as windows:
        for window in windows:
            state, said = train(state.replace(), window)
            losses.append(float(said["loss"]))
    # the first may run ahead; what it did goes with the second one's delivery
    merged = [(5, 3), (4, 1), (1, 3), (5, 2), (2, 2)]
    moved = [sum(n * n for n in each) / sum(each) for each in merged]
    np.testing.assert_allclose(state.params["w"], np.full((2, 3), -sum(moved)), rtol=1e-5)
    assert np.isnan(losses[0]) and np.isfinite(losses[1:]).all()


def sums(params, batch, rng):
    """With a gradient that is what the batch says."""
    return (params["w"] * batch["x"]).mean()


def digits(counts):
    """Windows of these counts in which every example has the gradient 10 to the power of one's
    index: the digits of -w say how often each window's gradient was applied."""
    exact = np.repeat(10.0 ** np.arange(len(counts)), [BATCH * sum(each) for each in counts])
    return {"x": exact.astype("float32")}


def delayed(delay=1, emulate=None, **options):
    """A training step with windows of (1, 1)."""
    return elche.build_train_step(
        sums, optax.sgd(1.0), devices=jax.devices()[:2], averaging=elche.MeanGradient(delay=delay),
        cadence=elche.Replay([(1, 1)] * 6), exchange=elche.HostExchange(**options), emulate=emulate,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_pending():
    """A training step with a window pending; every run begins anew."""
    return delayed()


def test_windows_before_a_changed_state_do_not_count_for_those_after_it(one_pending):
    """What was pending when the state was changed is lost, and nothing else."""
    train = one_pending
    state, rows, cursor = train.init({"w": np.float32(0)}), digits([(1, 1)] * 6), None
    for _ in range(2):
        with train.windows(rows, BATCH, shuffle=False, cursor=cursor) as windows:
            for window in windows:
                state, _ = train(state.replace() if window.index == 2 else state, window)
                if window.index == 3:
                    windows.drain()
                    break
        cursor = window.cursor
    # that of window 5 is pending
    np.testing.assert_array_equal(state.params["w"], np.full(2, -11101.0))


@pytest.mark.parametrize("closed", [[1], [3], [1, 3], [1, 3, 4], [1, 4]])
def test_a_run_leaves_the_outcomes_of_its_own_windows(closed):
    """Of windows 3 and 4, whatever the loop has not read of those before."""
    left, begun = [], [SimpleNamespace(number=number) for number in (3, 4)]
    session = SimpleNamespace(begun=begun, due=deque())
    coordinator = Coordinator(1, Limits(1.0), *[lambda *_: None] * 3)
    exchange = LiveExchange(coordinator, None, None, lambda *args: left.append(args))
    exchange.session = session
    coordinator.unread.extend((number, f"outcome of {number}") for number in closed)
    exchange.close()
    whole = [(session, [(3, "outcome of 3"), (4, "outcome of 4")])]
    assert left == (whole if {3, 4} <= set(closed) else [])


@table(how=["break", "interrupt"], options=[{"delay": 1}, {"delay": 0, "run_ahead": True}])
def test_a_loop_that_is_left_waits_for_what_is_pending(options, how, monkeypatch):
    """The gradient of window 3 is on the devices until the loop waits for it."""
    counts, emulate, wait = [(1, 1)] * 6, Held([(3, 0), (3, 1)]), threading.Condition.wait

    def let_go_and_wait(condition, timeout=None):
        if threading.current_thread() is threading.main_thread():
            emulate.let_go(3, 0)
            emulate.let_go(3, 1)
        return wait(condition, timeout)

    train = delayed(emulate=emulate, **options)
    state, cursor = train.init({"w": np.float32(0)}), None

    def leave():
        nonlocal state, cursor
        windows = train.windows(digits(counts), BATCH, shuffle=False)
        for window in windows:
            state, _ = train(state, window)
            if window.index == 3:
                monkeypatch.setattr(threading.Condition, "wait", let_go_and_wait)
                cursor = window.cursor
                if how == "break":
                    return
                with windows:
                    raise KeyboardInterrupt

    if how == "break":
        leave()
    else:
        with pytest.raises(KeyboardInterrupt):
            leave()
    monkeypatch.undo()
    gc.collect()
    assert threads() == []
    with train.windows(digits(counts), BATCH, shuffle=False, cursor=cursor) as windows:
        for window in windows:
            state, _ = train(state, window)
            windows.drain()
    # that of window 5 is pending; running ahead, the loop has applied what it knew before it
    np.testing.assert_array_equal(state.params["w"], np.full(2, -11111.0))
    assert [record.window for record in train.records] == list(range(6))


@pytest.fixture(scope="module")
def hanging():
    """A training step whose devices are held in window 1 until they are let go, and what holds."""
    emulate = Held([(1, 0), (1, 1)])
    return delayed(emulate=emulate, timeout=0.25), emulate


@pytest.mark.parametrize("who", ["nobody", "another thread", "the loop"])
def test_who_waits_for_what_is_pending(who, hanging):
    """Only the loop that left it, while its state is there; for devices that hang, not for ever."""
    (train, emulate), counts = hanging, [(1, 1)] * 3
    emulate.hold_again()
    state, windows = train.init({"w": np.float32(0)}), train.windows(digits(counts), BATCH)
    for window in windows:
        state, _ = train(state, window)
        if window.index == 1:
            break
    clock, found = windows._pipeline.clock, []
    if who == "nobody":
        del state
    if who == "another thread":
        thread = threading.Thread(target=lambda: found.append(clock.patience))
        thread.start()
        thread.join()
    else:
        found.append(clock.patience)
    assert found == [0.25 if who == "the loop" else 0.0]
    if who == "the loop":
        windows.close()
    for rank in range(2):
        emulate.let_go(1, rank)
    windows.close()
    eventually(lambda: threads() == [])


@pytest.mark.parametrize("late", [False, True], ids=["cadence", "async"])
def test_a_window_whose_run_is_over(late, step, running_ahead):
    """It stays usable, and is like any other."""
    train = running_ahead if late else step
    state = train.init(params())
    with train.windows(first(6), BATCH, shuffle=False) as windows:
        window = next(windows)
    state, said = train(state, window)
    want = run([(2, 1)], optimizer_state="keep")
    assert_history([jax.device_get(state.params)], want)
    assert np.isfinite(said["loss"]) and threads() == []


def test_frozen_parameters_and_the_key_stay_where_they_are():
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, config=HOST,
        trainable={"b": True, "v": True, "w": False},
    )  # fmt: skip
    state = train.init(params())
    begun = [leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in (state.params["w"],)]
    with train.windows(first(40), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
    assert begun == [state.params["w"].addressable_data(0).unsafe_buffer_pointer()]
    np.testing.assert_array_equal(state.params["w"], np.ones((2, 3)))
    assert not np.array_equal(state.params["b"], np.zeros(2))


def test_memory_is_given_back():
    """After a run nothing is left but what was left after runs with an exchange on devices."""

    def left(config):
        train = elche.build_train_step(
            loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, config=config,
            cadence=elche.Replay([(2, 1)] * 8),
        )  # fmt: skip
        state = train.init(params())
        windows = train.windows(first(24), BATCH, placement="stream")
        for window in windows:
            state, said = train(state, window)
        del state, said, window, windows
        train._runners.release()
        gc.collect()
        return sum(leaf.size for leaf in jax.live_arrays() if leaf.shape == (2, 3)), train

    gc.collect()
    before = sum(leaf.size for leaf in jax.live_arrays() if leaf.shape == (2, 3))
    for config in (HOST, ahead()):
        after, train = left(config)
        assert after == before and train.records


def test_a_state_that_was_put_together_on_one_device(step):
    state = jax.tree.map(jnp.asarray, jax.device_get(step.init(params())))
    history = []
    with step.windows(first(6), BATCH, shuffle=False) as windows:
        for window in windows:
            state, _ = step(state, window)
            history.append(jax.device_get(state.params))
    assert_history(history, run([(2, 1)] * 2, optimizer_state="keep"))


@pytest.mark.parametrize("config", [slow(HOST), ahead(max_overshoot=0)], ids=["cadence", "async"])
def test_busy_times_do_not_hold_the_wait_for_room(config):
    """A device that waits for the other one is not slow: the cadence sees its own time."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, cadence=elche.FixedTotal(8),
        config=config, emulate=EmulatedSpeeds([5.0, 20.0]), guard=elche.NoGuard(),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(first(8 * 12), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
    fast, slow = train.throughput
    assert fast / slow > 2.5 and train.counts[0] >= 5


@pytest.mark.slow  # test_a_flipped_bit_is_found_during_training
def test_replicas_are_compared():
    config = elche.DDPConfig(exchange="host", verify_every=2)
    train_on(elche.ParameterAveraging(), THREE, config=config)
    _, _, state, train = train_on(KEEP, THREE[:3], config=config)
    runner = next(iter(train._runners._runners.values()))
    assert runner.replicated(state).params is state.params
    spoilt = np.array(state.params["w"])
    spoilt[1] += 1
    shards = [jax.device_put(row[None], d) for row, d in zip(spoilt, train.devices, strict=True)]
    w = jax.make_array_from_single_device_arrays((3, 3), state.params["w"].sharding, shards)
    with pytest.raises(elche.ReplicaMismatch, match=r"\['w'\]"):
        elche.check_replicas(runner.replicated(state.replace(params=state.params | {"w": w})))


def test_a_guard_that_raises_does_not_cost_the_state():
    class Broken:
        def verdict(self, history):
            raise ZeroDivisionError("a guard's own")

    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, config=HOST, guard=Broken()
    )
    state = train.init(params())
    with pytest.raises(ZeroDivisionError), train.windows(first(80), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
    assert np.isfinite(jax.device_get(state.params["w"])).all() and threads() == []


@pytest.mark.parametrize("config", [slow(HOST), ahead()], ids=["cadence", "async"])
def test_all_examples_are_used_once(config):
    """Whoever waits for whom: in an epoch each device sums the numbers it was given."""
    rows = {"n": np.arange(400, dtype="f"), **{k: v[:400] for k, v in data().items()}}
    train = elche.build_train_step(
        lambda p, batch, rng: (loss_fn(p, batch, rng), {"n": batch["n"]}), TX, has_aux=True,
        devices=jax.devices()[:3], averaging=KEEP, config=config, guard=elche.NoGuard(),
        emulate=EmulatedSpeeds([1.0, 1.0, 8.0]),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(rows, BATCH, epochs=2) as windows:
        counts = []
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
    assert sum(map(sum, counts)) == 200
    assert elche.unreplicate(state.microbatches) == 200 and elche.unreplicate(state.examples) == 800
    assert len(train.records) == len(counts) and threads() == []
    assert max(c[0] for c in counts) > max(c[2] for c in counts)  # speeds were learned


# -- devices that are late


@pytest.mark.parametrize("late", [False, True], ids=["cadence", "async"])
def test_a_device_that_does_not_deliver(late, caplog):
    """It is left out and named, the others go on, and it comes back."""
    emulate = Held([(2, 1)])
    if late:
        averaging, config = KEEP, ahead(exchange_timeout=0.5)
    else:  # what the others have averaged meanwhile is given to it; and nobody checks it
        averaging = elche.ParameterAveraging()
        config = elche.DDPConfig(exchange="host", exchange_timeout=0.5, verify_every=1)
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:3], averaging=averaging, cadence=elche.EveryBatch(),
        config=config, emulate=emulate,
    )  # fmt: skip
    state, counts, back = train.init(params()), [], None
    with train.windows(data(6 * 60), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
            if window.index == 20:
                emulate.let_go(2, 1)
                eventually(lambda: not windows._pipeline.clock.late)
            if window.index > 20 and window.counts[1] and back is None:
                back = window.index
            if back is not None and window.index == back + 3:
                break
    absent = [index for index, each in enumerate(counts) if not each[1]]
    # planned before it was known: at most what was on its way
    assert 3 <= absent[0] <= 7 and absent[-1] <= 25 and len(absent) >= 14
    assert back is not None and counts[back][1] > 0
    assert 1 <= train.left_out[1] <= 5 and train.left_out[::2] == (0, 0)
    said = [r.getMessage() for r in caplog.records if "did not deliver" in r.getMessage()]
    assert len(said) == train.left_out[1]
    assert said[0].startswith("elche: device 1 (") and "window 2 (epoch 0" in said[0]
    assert not any(record.steady for record in train.records if record.window == 2)
    if not late:
        elche.check_replicas(state.params)
    assert np.isfinite(train.average(state)["w"]).all()
    assert threads() == []


@pytest.mark.slow  # test_the_times_of_a_device_that_is_late_again_are_learned
@pytest.mark.parametrize(
    "cadence", [elche.AdaComm(anchor=2), elche.PostLocal(switch=4, anchor=2)],
    ids=lambda cadence: type(cadence).__name__,
)  # fmt: skip
def test_the_windows_of_a_slow_device_are_counted_once(cadence):
    """Late, back, and late again: then the cadence is told its time, and nothing else."""
    emulate = Held((window, 1) for window in range(1000))
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, cadence=cadence,
        exchange=elche.HostExchange(timeout=0.25), emulate=emulate,
    )  # fmt: skip

    def speed():
        return train.cadence_state.cadence.ms_per_batch[1]

    state = train.init(params())
    with train.windows(data(6 * 60), BATCH, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            assert window.index < 1000
            if window.counts[1]:  # after one in time, the next late one would be the first again
                eventually(lambda: windows._pipeline.late)
                emulate.let_go(window.index, 1)
                eventually(lambda: not windows._pipeline.late)
            if speed() is not None:
                break
    assert train.left_out[1] >= 2 and speed() > 0
    seen = train.cadence_state.cadence
    assert seen.windows == len(train.records) >= 2
    assert seen.steps == sum(max(record.counts) for record in train.records)


def test_a_late_device_has_no_part_in_the_average():
    """Its steps are gone until it is back; then it goes on from what the others made."""
    counts = [(2, 2)] * 7
    emulate = Held([(1, 1)])
    train = elche.build_train_step(
        loss_fn, optax.sgd(LEARNING_RATE), devices=jax.devices()[:2], averaging=KEEP,
        cadence=elche.Replay(counts),
        config=elche.DDPConfig(exchange="host", exchange_timeout=0.5), emulate=emulate,
    )  # fmt: skip
    state, history, back = train.init(params()), [], 5
    with train.windows(first(28), BATCH, shuffle=False) as windows:
        for window in windows:
            if window.index == back:
                emulate.let_go(1, 1)
                eventually(lambda: not windows._pipeline.late)
            state, said = train(state, window)
            history.append(jax.device_get(state.params))
            if window.index == 1:
                assert np.isnan(said["distance"]).tolist() == [False, True]
                assert said["share"].tolist() == [1.0, 0.0] and bool(said["finite"])
    lost = {(window, 1) for window in range(1, back)}
    want = run(counts, optimizer_state="keep", lost=lost, momentum=0.0)
    for stacked, devices in zip(history, want, strict=True):
        for rank in range(2):  # the late one's, too: the state is whole, whoever reads it
            for name in LEAVES:
                np.testing.assert_allclose(
                    stacked[name][rank], devices[rank][name], rtol=2e-5, atol=1e-6
                )
    assert train.left_out == (0, back - 1)
    elche.check_replicas(state.params)
    elche.check_replicas(state.averaging)
    for name in ("step", "microbatches", "examples"):
        elche.check_replicas(getattr(state, name))


def busy_for(seconds, device):
    """Keeps a CPU device at real work for about so long; gives what to wait for."""

    @jax.jit
    def work(x, turns):
        return jax.lax.fori_loop(0, turns, lambda i, x: jnp.tanh(x @ x.T) * 0.1, x)

    x = jax.device_put(np.ones((64, 64), "f"), device)
    work(x, 1000).block_until_ready()
    begin = time.perf_counter()
    work(x, 2000).block_until_ready()
    rate = 2000 / (time.perf_counter() - begin)
    return lambda state: work(x, int(rate * seconds))


@pytest.mark.slow  # with real time; test_a_device_that_does_not_deliver holds one by an event
def test_a_device_that_really_works_on_something_else():
    """Nothing is queued on it, so that the others go on for as long as it takes."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, cadence=elche.EveryBatch(),
        config=elche.DDPConfig(exchange="host", exchange_timeout=0.1, verify_every=3),
    )  # fmt: skip
    work = busy_for(3.0, train.devices[1])
    state, while_late, known = train.init(params()), 0, False
    with train.windows(first(4 * 120), BATCH) as windows:
        for window in windows:
            if window.index == 5:
                other = work(state)
                part = state.params["b"].addressable_data(1) + 0 * other[0, 0]
                parts = [state.params["b"].addressable_data(0), part]
                b = jax.make_array_from_single_device_arrays(
                    (2,), state.params["b"].sharding, parts
                )
                state = state.replace(params=state.params | {"b": b})
            state, _ = train(state, window)
            while_late += not other.is_ready() if window.index > 5 else 0
            if window.index == 20:
                jax.device_get(state)
                train.average(state)
                known = not other.is_ready()
            if window.index == 40:
                other.block_until_ready()
                eventually(lambda: not windows._pipeline.late)
    assert while_late >= 15, "others have trained while it worked"
    assert known, "a state can be saved while it works"
    assert 1 <= train.left_out[1] <= 5
    elche.check_replicas(state.params)


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_run_that_ends_while_a_device_is_late(rank):
    """What is read then is what the others made; in the next run the device is like them."""
    emulate = Held([(3, rank)])
    train = elche.build_train_step(
        loss_fn, optax.sgd(LEARNING_RATE), devices=jax.devices()[:2], averaging=KEEP,
        cadence=elche.EveryBatch(), emulate=emulate,
        config=elche.DDPConfig(exchange="host", exchange_timeout=0.5),
    )  # fmt: skip
    state, cursor = train.init(params()), None
    for window_at_end in (6, 12):
        with train.windows(first(200), BATCH, cursor=cursor) as windows:
            for window in windows:
                state, _ = train(state, window)
                if window.index == window_at_end:
                    break
        cursor = window.cursor
        elche.check_replicas(state.params)
        elche.check_replicas(state.averaging)
        for name in ("step", "microbatches", "examples"):
            elche.check_replicas(getattr(state, name))
        assert int(elche.unreplicate(state.step)) == window_at_end + 1
        np.testing.assert_array_equal(train.average(state)["w"], state.params["w"][1 - rank])
        if window_at_end == 6:
            assert train.left_out[rank] >= 1
            emulate.let_go(3, rank)
    assert window.counts == (1, 1) and train.left_out[1 - rank] == 0


def test_average_of_a_state_that_was_changed(step):
    state = step.init(params())
    with step.windows(first(6), BATCH) as windows:
        for window in windows:
            state, _ = step(state, window)
    assert step.average(state)["w"].any()
    state = state.replace(params=jax.tree.map(lambda leaf: 0 * leaf, state.params))
    assert not step.average(state)["w"].any()


def test_an_exponent_that_is_no_number_later_on():
    rule = elche.ParameterAveraging(lambda window: jnp.where(window < 2, 1.0, jnp.nan))
    message = r"^averaging: exponent\(2\) must return finite numbers, got nan\. Check"
    with pytest.raises(ValueError, match=message):
        train_on(rule, THREE, config=HOST)
    assert threads() == []


@pytest.mark.slow  # with real time; test_the_times_of_a_device_that_is_late_again_are_learned
def test_a_slow_device_gets_less_when_it_is_late_again():
    """The first time may be an accident; the second time the cadence hears how slow it is."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=KEEP, cadence=elche.FixedTotal(16),
        config=elche.DDPConfig(exchange="host", exchange_timeout=0.1),
        emulate=EmulatedSpeeds([1.0, 40.0]), guard=elche.NoGuard(),
    )  # fmt: skip
    state, counts = train.init(params()), []
    with train.windows(data(16 * 40), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
            if train.left_out[1] and not window.counts[1]:
                eventually(lambda: not windows._pipeline.late)
    assert counts[0] == (8, 8) and counts[-1][1] <= 2
    fast, late = train.throughput
    assert late is None or (late < 30 and fast > 2 * late)  # None: left out again on a busy machine


@pytest.mark.slow  # with real time; test_a_device_that_does_not_deliver holds one by an event
@pytest.mark.further  # test_a_device_that_really_works_on_something_else has real time, too
def test_a_device_that_sleeps_for_five_seconds_once():
    """With real time: the others are done with all data before it wakes."""
    fleet = [1.0, 1.0, 2.0]
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:3], averaging=KEEP, guard=elche.NoGuard(),
        config=ahead(exchange_timeout=0.2), cadence=elche.EveryBatch(),
        emulate=EmulatedSpeeds(lambda w, r, i: 5000.0 if (w, r, i) == (3, 0, 0) else fleet[r]),
    )  # fmt: skip
    state, counts = train.init(params()), []
    with train.windows(data(600), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
    assert sum(map(sum, counts)) == 600
    slept = sum(each[0] == 0 for each in counts)
    assert slept >= 2 and train.left_out[0] >= 1
    assert threads() == []
    assert np.isfinite(train.average(state)["w"]).all()


# -- interrupts and errors


@pytest.mark.parametrize("late", [False, True], ids=["cadence", "async"])
def test_an_interrupt_while_the_loop_waits(late, step, running_ahead, monkeypatch):
    """The state is as it was before the window, and can be trained on."""
    train = running_ahead if late else step
    state, at = train.init(params()), "admit" if late else "outcome"
    method, calls = getattr(Coordinator, at), []

    def interrupted(exchange, *args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return method(exchange, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, at, interrupted)
        with pytest.raises(KeyboardInterrupt), train.windows(data(18), BATCH) as windows:
            for window in windows:
                state, _ = train(state, window)
    assert threads() == [] and elche.unreplicate(state.step) == 2
    cursor = elche.Cursor(window=2, microbatch=6)
    with train.windows(data(18), BATCH, cursor=cursor) as windows:
        for window in windows:
            state, _ = train(state, window)
    assert elche.unreplicate(state.microbatches) == 18
    if late:
        assert np.isfinite(train.average(state)["w"]).all()
        return
    other = step.init(params())
    with step.windows(data(18), BATCH) as windows:
        for window in windows:
            other, _ = step(other, window)
    for name in LEAVES:
        np.testing.assert_array_equal(state.params[name], other.params[name])


@pytest.mark.parametrize("at", ["admit", "next_closed"])
def test_ctrl_c_while_windows_are_pending_loses_none(at, one_pending, sigint, monkeypatch):
    """Before a window is launched it is not trained; after that the loop gets its state."""
    counts, method, calls = [(1, 1)] * 6, getattr(Coordinator, at), []

    def pressing(exchange, *args):
        calls.append(args)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return method(exchange, *args)

    train = one_pending
    state, cursor = train.init({"w": np.float32(0)}), None
    monkeypatch.setattr(Coordinator, at, pressing)
    with pytest.raises(KeyboardInterrupt):
        for window in train.windows(digits(counts), BATCH, shuffle=False):
            state, _ = train(state, window)
            cursor = window.cursor
    assert cursor.window == {"admit": 2, "next_closed": 4}[at]
    for window in train.windows(digits(counts), BATCH, shuffle=False, cursor=cursor):
        state, _ = train(state, window)
    np.testing.assert_array_equal(state.params["w"], np.full(2, -11111.0))


def test_ctrl_c_while_the_old_state_is_given_up(sigint, step, monkeypatch):
    put, pressed = jax.device_put, []

    def pressing(*args):
        if state.params["w"].is_deleted() and not pressed:
            pressed.append(window.index)
            signal.raise_signal(signal.SIGINT)
        return put(*args)

    state = step.init(params())
    monkeypatch.setattr(jax, "device_put", pressing)
    with pytest.raises(KeyboardInterrupt):
        for window in step.windows(data(18), BATCH):
            state, _ = step(state, window)
    assert pressed == [0] and elche.unreplicate(state.step) == 1
    assert np.isfinite(state.params["w"]).all()


def test_an_error_in_a_thread_reaches_the_loop(monkeypatch):
    def broken(board, *args):
        raise MemoryError("no room for a delivery")

    monkeypatch.setattr(Coordinator, "delivered", broken)
    with pytest.raises(MemoryError, match="no room for a delivery"):
        train_on(KEEP, THREE, config=HOST)
    assert threads() == []


def test_a_state_is_given_up(step):
    state = step.init(params())
    with step.windows(data(18), BATCH) as windows:
        step(state, next(windows))
        with pytest.raises(ValueError, match="given up"):
            step(state, next(windows))


def test_one_device_exchanges_with_nobody():
    history, _, state, _ = train_on(KEEP, [(3,), (2,)], config=HOST)
    assert_history(history, run([(3,), (2,)], optimizer_state="keep"))
    assert state.averaging is None and threads() == []
