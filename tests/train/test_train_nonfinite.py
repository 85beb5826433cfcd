"""Windows that are not finite: dropped on all devices alike, counted, named, or not."""

import pickle
import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.data.order import epoch_order
from elche_jax.engine import tentative
from elche_jax.engine.lane import lanes_of
from elche_jax.observe.events import LossEvent

BAD = np.float32("nan")


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"] - 1.0) ** 2)


PARAMS = {"w": np.zeros(3, "float32")}


def data(*bad, microbatches=24):
    """Microbatches of 4; those with a number in `bad` hold what is not a number."""
    x = np.random.default_rng(0).normal(size=(microbatches * 4, 3)).astype("float32")
    for number in bad:
        x[4 * number + 2, 1] = BAD
    return {"x": x}


def run(train, state, examples, **windows):
    history = []
    for window in train.windows(examples, 4, shuffle=False, **windows):
        state, metrics = train(state, window)
        history.append(bool(metrics["finite"]))
    return state, history


def build(counts=((3, 1),), world=2, **options):
    # a script of counts that goes on: Replay would end
    return elche.build_train_step(
        loss_fn, optax.adam(0.1), devices=jax.devices()[:world],
        cadence=elche.FixedTotal(sum(counts[0])) if world == 1 else Fixed(counts[0]), **options,
    )  # fmt: skip


shared = cache(build)
"""The same, once for all tests with these options: each of them begins with `init`."""


class Fixed(elche.Cadence):
    """Always the same counts."""

    adaptive = False
    state_type = elche.cadence.every_batch.EveryBatchState

    def __init__(self, counts):
        self._state = self.state_type(tuple(counts))

    def init(self, world_size):
        return self._state

    def update(self, state, report, verdict=elche.STABLE):
        return state

    @property
    def largest_count(self):  # so that no larger program is compiled ahead
        return max(self._state.counts)


def without(examples, *windows, size=16):
    """The data without the examples of some windows."""
    keep = np.ones(len(examples["x"]), bool)
    for window in windows:
        keep[window * size : (window + 1) * size] = False
    return {"x": examples["x"][keep]}


@pytest.mark.parametrize("in_place", [False, True])
def test_skip_drops_the_update_on_all_devices_and_goes_on(in_place, monkeypatch):
    """Parameters and moments are those of a run that never saw the window."""
    make = shared
    if in_place:  # as large models are
        monkeypatch.setattr(tentative, "IN_PLACE", 0)
        make = build
    bad = data(5)  # the second window, microbatch 1 of device 0
    train = make(nonfinite="skip")
    state, history = run(train, train.init(PARAMS), bad)
    assert history == [True, False, True, True, True, True]
    assert train.skipped == train.report().skipped == 1
    assert "not finite: 1 window (update dropped" in str(train.report())
    elche.check_replicas(state)
    clean = make()
    want, _ = run(clean, clean.init(PARAMS), without(bad, 1))
    for a, b in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((want.params, want.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert int(elche.unreplicate(state.step)) == 6  # it counts as work that was done
    assert int(elche.unreplicate(state.microbatches)) == 24
    assert int(elche.unreplicate(state.examples)) == 96


def test_a_new_run_counts_anew():
    train = shared(nonfinite="skip")
    run(train, train.init(PARAMS), data(5))
    train.init(PARAMS)
    assert train.skipped == 0


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (5, r"device 0 \({0}\), microbatches 4 to 6 of the epoch\. Its"),
        (7, r"device 1 \({1}\), microbatch 7 of the epoch\. Its"),
    ],
)
def test_raise_names_window_device_and_microbatches(bad, named):
    train = shared()
    named = named.format(*jax.devices())
    with pytest.raises(
        elche.NonFiniteError,
        match=r"must be finite, but those of window 1 \(epoch 0, counts \(3, 1\)\) were not: "
        rf"{named} update was ",
    ):
        run(train, train.init(PARAMS), data(bad))


def test_several_devices_are_named():
    with pytest.raises(
        elche.NonFiniteError,
        match=r"were not: device 0 \(.*\), microbatches 0 to 2 of the epoch; device 1 \(.*\), "
        r"microbatch 3 of the epoch\. Its",
    ):
        train = shared()
        run(train, train.init(PARAMS), data(0, 3))


def test_one_device_is_named_too():
    train = build(world=1)
    with pytest.raises(elche.NonFiniteError, match=r"device 0 \(.*\), microbatches 4 to 7 of"):
        run(train, train.init(PARAMS), data(6))


def test_an_update_that_is_not_finite_is_nobodys():
    """Gradients are, what the optimizer makes of them is not."""
    broken = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g / 0, grads))
    train = elche.build_train_step(loss_fn, broken, devices=jax.devices()[:2])
    with pytest.raises(
        elche.NonFiniteError, match="were not: each device's sums were finite, but their total or"
    ):
        run(train, train.init(PARAMS), data())


def test_too_many_skips_in_a_row_raise_and_name_the_last():
    train = shared(nonfinite="skip", max_skips=3)
    with pytest.raises(
        elche.NonFiniteError,
        match=r"^train: 3 windows in a row were dropped as not finite \(max_skips\), the last one "
        r"window 4 \(epoch 0, counts \(3, 1\)\): device 1 \(.*\), microbatch 19 of the "
        r"epoch\. Look at the data, lower the learning rate, or raise max_skips\.$",
    ) as caught:
        run(train, train.init(PARAMS), data(8, 12, 19))
    assert train.skipped == 3
    assert (caught.value.window, caught.value.epoch) == (4, 0)
    assert caught.value.microbatches == {1: range(19, 20)}


def test_the_error_leads_to_the_examples():
    """By the page's own line, for shuffled data in the second epoch."""
    examples = data(microbatches=16)
    number = 37
    train = shared()
    state = train.init(PARAMS)
    for window in train.windows(examples, 4, seed=5):
        state, _ = train(state, window)
    examples["x"][number] = BAD
    with (
        pytest.raises(elche.NonFiniteError) as caught,
        train.windows(examples, 4, 2, seed=5, cursor=window.cursor.next_epoch()) as windows,
    ):
        for window in windows:
            state, _ = train(state, window)
    error = pickle.loads(pickle.dumps(caught.value))  # as it comes out of another process
    assert (error.epoch, error.window) == (1, caught.value.window)
    assert str(error) == str(caught.value)
    ((_, work),) = error.microbatches.items()
    order = epoch_order(len(examples["x"]), seed=5, epoch=1)
    assert number in order[work.start * 4 : work.stop * 4]
    assert len(work) in (1, 3)


@pytest.mark.parametrize("most", [3, None])
def test_skips_that_are_not_in_a_row(most):
    train = shared(nonfinite="skip", max_skips=most)
    _, history = run(train, train.init(PARAMS), data(0, 4, 12, 16))
    assert history == [False, False, True, False, False, True]
    assert train.skipped == 4


def test_skips_in_a_row_over_two_calls_of_windows():
    train = shared(nonfinite="skip", max_skips=3)
    state, _ = run(train, train.init(PARAMS), data(16, 20))
    with pytest.raises(elche.NonFiniteError, match="train: 3 windows in a row"):
        run(train, state, data(0))


def test_skips_of_a_saved_run_that_are_already_too_many():
    train = shared(nonfinite="skip", max_skips=3)
    state = train.init(PARAMS)
    train.restore_run(train.run_to_dict() | {"in_a_row": 10, "skipped": 10})
    with pytest.raises(elche.NonFiniteError, match=r"^train: 11 windows in a row .* window 0 "):
        run(train, state, data(0))


def test_too_many_skips_are_told_again():
    train = shared(nonfinite="skip", max_skips=3)
    state, told = train.init(PARAMS), []
    for _ in range(2):
        with pytest.raises(elche.NonFiniteError) as caught:
            run(train, state, data(*range(24)))
        told.append(caught.value.window)
        state = train.init(PARAMS)
    state = train.init(PARAMS)
    for _ in range(2):
        with pytest.raises(elche.NonFiniteError):
            for window in train.windows(data(*range(24)), 4, shuffle=False):
                state, _ = train(state, window)
    assert told == [2, 2] and train.skipped >= 4


def state_loss(params, model_state, batch, rng):
    x = batch["x"][:, 0]
    return (x * params["w"][0]).mean(), jnp.maximum(model_state, x.max())


def test_an_idle_device_is_not_asked_for_its_state():
    """A running maximum begins at -inf, and a device without work still has that."""
    train = elche.build_train_step(
        state_loss, optax.sgd(0.1), devices=jax.devices()[:2], cadence=Fixed((4, 0)), merge="max"
    )
    state = train.init(PARAMS, model_state=np.float32(-np.inf))
    state, history = run(train, state, data(microbatches=4))
    assert history == [True] and np.isfinite(np.asarray(state.model_state)).all()


MERGED = ("first", "max", "mean")


@cache
def merging():
    """A step with a number in its model state for each rule; its data say which one is bad."""

    def loss(params, model_state, batch, rng):
        bad = jnp.where(batch["bad"].max(axis=0) > 0, jnp.nan, 1.0).astype(jnp.float32)
        return (batch["x"] @ params["w"]).mean(), dict(zip(MERGED, bad, strict=True))

    return elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:2], merge={rule: rule for rule in MERGED},
        nonfinite="skip",
    )  # fmt: skip


@pytest.mark.parametrize("rule", MERGED)
def test_a_state_that_is_no_number_shows_whatever_the_rule(rule):
    """Also that of a device whose state the rule does not take."""
    bad = np.zeros((8, len(MERGED)), "float32")
    bad[4:, MERGED.index(rule)] = 1.0  # of the second device
    train = merging()
    state = train.init(PARAMS, model_state={name: np.float32(0) for name in MERGED})
    state, history = run(train, state, {"x": np.ones((8, 3), "float32"), "bad": bad})
    assert history == [False]
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in state.model_state.values())


class Held(elche.Timeline):
    """Notes a window when it may, and says that it would."""

    def __init__(self):
        super().__init__()
        self.closed, self.held = threading.Event(), threading.Event()
        self.closed.set()

    def window(self, record):
        self.held.set()
        assert self.closed.wait(30)
        super().window(record)


TIMELINE = Held()
"""Of one step for two tests, which begin with `init` and look at the events after it."""


def test_a_window_in_flight_at_a_break_counts_once():
    """The watcher is held up in its record while the loop closes and begins anew."""
    train = shared(nonfinite="skip", config=elche.DDPConfig(timeline=TIMELINE))
    closed, held = TIMELINE.closed, TIMELINE.held
    closed.clear()
    held.clear()
    before, state = len(TIMELINE.events), train.init(PARAMS)
    for window in train.windows(data(1), 4, shuffle=False):
        state, _ = train(state, window)
        assert held.wait(30)
        break
    threading.Timer(0, closed.set).start()
    state, _ = run(train, state, data())
    kinds = [type(event).__name__ for event in TIMELINE.events[before:]]
    assert train.skipped == kinds.count("SkipEvent") == 1


def test_ignore_applies_it():
    train = build(nonfinite="ignore")
    state, history = run(train, train.init(PARAMS), data(5))
    assert history == [True, *[False] * 5]
    assert np.isnan(np.asarray(state.params["w"])).all()
    assert train.skipped == 0
    np.testing.assert_array_equal(*np.asarray(state.step))  # the replicas go on together


def test_ignore_leaves_it_to_the_optimizer():
    """optax.apply_if_finite drops the update itself, and counts."""
    train = elche.build_train_step(
        loss_fn, optax.apply_if_finite(optax.sgd(0.1), 5), devices=jax.devices()[:2],
        cadence=Fixed((3, 1)), nonfinite="ignore",
    )  # fmt: skip
    state, _ = run(train, train.init(PARAMS), data(5))
    assert np.isfinite(np.asarray(state.params["w"])).all()
    assert int(elche.unreplicate(state.opt_state.total_notfinite)) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nonfinite": "warn"}, ValueError, "nonfinite must be one of 'raise', 'skip', 'ignore', "),
        ({"max_skips": 0}, ValueError, r"max_skips must be at least 1, got 0"),
        ({"max_skips": 3}, ValueError, r"max_skips must be left out with nonfinite='raise', got 3"),
        ({"max_skips": None, "nonfinite": "ignore"}, ValueError, "max_skips must be left out with"),
        ({"max_skips": 1.5}, TypeError, r"max_skips must be an integer, got"),
    ],
)
def test_options_that_are_none(options, error, message):
    with pytest.raises(error, match=f"^build_train_step: {message}"):
        build(**options)


# -- replicas -------------------------------------------------------------------------


def flip(leaf, rank, bit):
    """A stacked leaf with one bit of one device's copy turned over."""
    rows = [np.array(shard.data)[0] for shard in leaf.addressable_shards]
    rows[rank].reshape(-1).view(np.uint8)[0] ^= 1 << bit
    devices = [shard.device for shard in leaf.addressable_shards]
    shards = [jax.device_put(r[None], d) for r, d in zip(rows, devices, strict=True)]
    return lanes_of(devices).stack(shards)


def broken(state, rank):
    moments = state.opt_state[0]
    mu = {"w": flip(moments.mu["w"], rank, bit=3)}
    return state.replace(opt_state=(moments._replace(mu=mu), *state.opt_state[1:]))


@pytest.mark.parametrize("rank", [slow(1), 2])
def test_a_flipped_bit_is_found_during_training(rank):
    train = build([(1, 1, 1)], world=3, config=elche.DDPConfig(verify_every=2))
    state, steps = train.init(PARAMS), 0
    message = (
        rf"^train: after window 4: all replicas must be bitwise equal, but leaf \.params\['w'\] on "
        rf"{jax.devices()[rank]} differs from {jax.devices()[0]} \(1 more such pairs\)\.$"
    )
    with pytest.raises(elche.ReplicaMismatch, match=message):
        for window in train.windows(data(), 4):
            if window.index == 3:  # not verified itself: found one later
                state = broken(state, rank)
            state, _ = train(state, window)
            steps += 1
    assert 5 <= steps <= 7


def test_equal_replicas_pass_and_nothing_is_compiled_later():
    train = build([(1, 1, 1)], world=3, config=elche.DDPConfig(verify_every=3))
    state, compiles = train.init(PARAMS), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
    )
    try:
        for window in train.windows(data(), 4, shuffle=False):
            state, metrics = train(state, window)
            if window.index == 0:
                jax.block_until_ready(metrics)
                assert compiles
                compiles.clear()
    finally:
        jax.monitoring.clear_event_listeners()
    assert window.index == 7 and compiles == []


def test_verify_every_is_a_number_of_windows():
    with pytest.raises(ValueError, match="DDPConfig: verify_every must be at least 1, got 0"):
        elche.DDPConfig(verify_every=0)


def test_a_timeline_tells_of_dropped_windows():
    train = shared(nonfinite="skip", config=elche.DDPConfig(timeline=TIMELINE))
    before = len(TIMELINE.events)
    run(train, train.init(PARAMS), data(5))
    events = TIMELINE.events[before:]
    kinds = [type(event).__name__ for event in events]
    assert kinds.count("WindowEvent") == 6 and kinds.count("SkipEvent") == 1
    skip = events[kinds.index("SkipEvent")]
    assert (skip.window, skip.epoch, skip.reason) == (1, 0, "not finite")


def test_a_norm_that_overflows_does_not_make_zeros_of_the_gradient():
    """Finite gradients of 1e25 have no norm in float32: clipped by it they would vanish."""
    examples = {"x": np.full((8, 3), 1e25, "float32")}
    train = elche.build_train_step(
        lambda params, batch, rng: (batch["x"] @ params["w"]).mean(), optax.sgd(0.1),
        devices=jax.devices()[:2], config=elche.DDPConfig(max_grad_norm=1.0), nonfinite="skip",
    )  # fmt: skip
    _, history = run(train, train.init(PARAMS), examples)
    assert history == [False]


RULES = {
    "gradients": {},
    "averaging": {"averaging": elche.ParameterAveraging()},
    "host": {
        "averaging": elche.ParameterAveraging(),
        "config": elche.DDPConfig(exchange="host"),
    },
}


@pytest.mark.parametrize("rule", ["gradients", slow("averaging"), "host"])
def test_weights_too_small_for_float32_are_not_lost(rule):
    """Devices take 1e-40 for 0, and 1e-35 times a gradient: each alone leaves no mean."""

    def loss(params, batch, rng):
        return elche.Weighted(loss_fn(params, batch, rng), batch["n"][0])

    weights = [1e-40, 1e-35, 1e-29, 1e-40, 0, 0]
    examples = data() | {"n": np.repeat(weights, 16).astype("float32")}
    examples["n"][3 * 16 : 3 * 16 + 4] = 1.0  # beside this one the others count as they should
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:2], cadence=Fixed((3, 1)),
        nonfinite="skip", **RULES[rule],
    )  # fmt: skip
    state, seen = train.init(PARAMS), []
    for window in train.windows(examples, 4, shuffle=False):
        before = np.asarray(state.params["w"])[0]
        state, metrics = train(state, window)
        moved = bool(np.abs(np.asarray(state.params["w"])[0] - before).max() > 1e-3)
        seen.append((bool(metrics["finite"]), moved))
    steps = rule != "gradients"  # which devices take by themselves, whatever the weight
    assert seen == [
        (False, steps),
        (False, steps),
        (True, True),
        (True, True),
        *[(True, False)] * 2,
    ]
    assert train.skipped == 2


def test_the_error_names_small_weights():
    def loss(params, batch, rng):
        return elche.Weighted(loss_fn(params, batch, rng), jnp.float32(1e-40))

    train = elche.build_train_step(loss, optax.sgd(0.1), devices=jax.devices()[:1])
    with pytest.raises(elche.NonFiniteError, match=r"or the window weighs less than 2\*\*-"):
        run(train, train.init(PARAMS), data(), epochs=1)


@pytest.mark.parametrize(
    ("devices", "rule"),
    [(1, {}), (2, {}), (2, {"exchange": elche.HostExchange()}), (2, RULES["averaging"])],
    ids=["one device", "gradients", "gradients on the host", "averaging"],
)
def test_a_window_without_weight_has_no_loss(devices, rule):
    def loss(params, batch, rng):
        return elche.Weighted(loss_fn(params, batch, rng), batch["n"].sum())

    timeline = elche.Timeline()
    examples = {"x": data()["x"][:24], "n": np.repeat([1.0, 0, 1], 8).astype("float32")}
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:devices], timeline=timeline,
        cadence=Fixed((2,) if devices == 1 else (1, 1)), **rule,
    )  # fmt: skip
    state, losses = train.init(PARAMS), []
    for window in train.windows(examples, 4, shuffle=False):
        state, metrics = train(state, window)
        losses.append(float(metrics["loss"]))
        assert metrics["finite"]
    assert np.isnan(losses).tolist() == [False, True, False] and losses[0] == pytest.approx(1.0)
    told = [event.loss for event in timeline.events if isinstance(event, LossEvent)]
    assert told == [losses[0], losses[2]]


def test_a_window_without_weight_changes_nothing_of_the_optimizer():
    """Adam would move by its momentum, and count."""

    def loss(params, batch, rng):
        return elche.Weighted(loss_fn(params, batch, rng), batch["n"].sum())

    examples = data() | {"n": np.repeat([1.0, 1, 0, 1, 1, 1], 16).astype("float32")}
    train = elche.build_train_step(
        loss, optax.adam(0.1), devices=jax.devices()[:2], cadence=Fixed((3, 1))
    )
    states = []
    for part in (examples, {name: leaf[:32] for name, leaf in examples.items()}):
        state = train.init(PARAMS)
        rows = {name: leaf[:48] for name, leaf in part.items()}
        # data of another size in programs of their own, were they resident
        for window in train.windows(rows, 4, shuffle=False, placement="stream"):
            state, metrics = train(state, window)
        states.append(state)
    assert float(metrics["weight"]) == 16 and int(states[0].step[0]) == 3
    for a, b in zip(
        jax.tree.leaves((states[0].params, states[0].opt_state)),
        jax.tree.leaves((states[1].params, states[1].opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_overflows_float16_is_not_taken(world):
    """Parameters, gradients and steps are finite, and their sum is not."""
    train = elche.build_train_step(
        lambda p, batch, rng: -sum(x.astype("f").sum() for x in p), optax.adam(3e4, eps=1e-4),
        devices=jax.devices()[:world], nonfinite="skip",
    )  # fmt: skip
    start = [np.full(3, value, "float16") for value in (7, 8, 9, 60000)]
    state = train.init(start)
    for window in train.windows(np.zeros(4 * world, "f"), 4):
        state, metrics = train(state, window)
    assert not metrics["finite"] and train.skipped == 1
    for got, want in zip(state.params, start, strict=True):
        np.testing.assert_array_equal(got, [want] * world)
