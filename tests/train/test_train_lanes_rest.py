"""A lane without work rests: it runs nothing, and its replicas are copies made once read."""

import contextlib
import copy
import threading
from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from marks import slow
from models import assert_close, host
from test_train_lanes import (
    ADAM,
    BATCH,
    IDLE,
    LATE,
    MOMENTUM,
    PARAMS,
    all_bytes,
    assert_trained,
    build,
    loss_fn,
    plain_loss,
    run,
    shared,
)

import elche_jax as elche
from elche_jax.engine import lane
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.laned import LanedArray, LateArray, LeadArray
from elche_jax.engine.lanes.window import LanesWindow
from elche_jax.engine.runner import Launch

RESTS = [(2, 3, 1), (2, 0, 1), (2, 0, 1), (1, 0, 3), (2, 2, 1), (1, 0, 1), (2, 0, 2), (3, 1, 1)]
"""Of the second device, the only one of its lane."""
AT_REST = [2, 3, 6]
"""Windows in which it rests: without work, and not the first of that kind."""


def rows(counts=RESTS):
    x = np.random.default_rng(0).normal(size=(BATCH * sum(map(sum, counts)), 4)).astype("float32")
    return {"x": x, "y": np.sin(x).sum(axis=1)}


def train(devices, **options):
    return run(devices, RESTS, rows=rows(), **options)


@cache
def rested():
    """What comes of it on two kinds, for tests that only look at the end."""
    cpus, (twin, *_) = jax.devices("cpu"), jax.devices("twin")
    return train([cpus[0], twin, cpus[1]], again=True)


@cache
def _one_device(counts, **options):
    devices = jax.devices("cpu")[:1]
    return run(devices, [(sum(row),) for row in counts], rows=rows(counts), **options)


def one_device(counts=RESTS, **options):
    """The same microbatches on one device, once for all tests with these options."""
    return _one_device(tuple(counts), **options)


@pytest.fixture
def ran(monkeypatch):
    """For every window the lanes that took part."""
    windows, run_lane = [], LanesWindow.run

    def noted(self, at, work):
        windows.append((self.launch.number - 1, at))
        return run_lane(self, at, work)

    monkeypatch.setattr(LanesWindow, "run", noted)
    return windows


def late(leaf):
    """Whether copies for the lane at rest were not made."""
    part = leaf.parts[1]
    return isinstance(part, LateArray) and "made" not in vars(part)


# -- the same result


@pytest.mark.parametrize(
    "options", [{}, *map(slow, ({"placement": "resident"}, {"tx": optax.sgd(0.1)}))]
)
def test_a_job_with_a_lane_at_rest_trains_as_one_device(options, mixed, ran):
    got = train(mixed, again=True, **options)
    part = [number for number, at in sorted(ran) if at == 1]
    assert part == [at for at in range(len(RESTS)) if at not in AT_REST]
    assert [number for number, at in sorted(ran) if at == 0] == list(range(len(RESTS)))
    assert_trained(got, one_device(**options))


@pytest.mark.slow  # test_a_job_with_a_lane_at_rest_trains_as_one_device, within rounding; kinds
def test_it_makes_no_difference_to_the_bit(mixed, ran, monkeypatch):
    state, said, _ = rested()
    with monkeypatch.context() as patched:
        patched.setattr(GradientRule, "rests", False)
        ran.clear()
        awake = train(mixed)
        assert len(ran) == 2 * len(RESTS)
    assert all_bytes(state) == all_bytes(awake[0])
    assert all_bytes(said) == all_bytes(awake[1])


@pytest.mark.slow  # test_train_lanes has both, and to rest changes no bit
def test_with_state_of_the_model_and_a_dynamic_scale(mixed, ran):
    def loss(params, model_state, batch, rng):
        new = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(axis=0)}
        return plain_loss(params, batch, rng), new

    options = {
        "loss": loss, "model_state": {"mean": np.zeros(4, "float32")},
        "loss_scale": DynamicScale(growth_interval=2, scale=8.0),
    }  # fmt: skip
    got = train(mixed, **options)
    assert sum(at == 1 for _, at in ran) == len(RESTS) - len(AT_REST)
    elche.check_replicas(got[0])
    assert got[0].loss_scale.scale[1] > 8
    # both are merged over the devices with work, so it does not matter where the others are
    assert_trained(got, run(jax.devices("cpu")[:3], RESTS, rows=rows(), **options))


@pytest.mark.slow  # test_the_lead_changes_while_another_lane_rests has three such lanes
@pytest.mark.parametrize("lanes", [((0,), (1,), (2,)), ((1,), (0, 2)), ((2, 1), (0,))])
def test_lanes_of_alike_devices_rest_too(lanes, ran):
    got = train(jax.devices("cpu")[:3], lanes=lanes)
    rested = len(AT_REST) if (1,) in lanes else 0
    assert len(ran) == len(lanes) * len(RESTS) - rested
    assert_trained(got, one_device())


def test_what_has_something_of_its_own_does_not_rest(mixed):
    for averaging, rests in (
        (None, True),
        (elche.MeanGradient(delay=1), False),
        (elche.MeanGradient(compression="int8"), False),
        (elche.ParameterAveraging(), False),
    ):
        step = elche.build_train_step(plain_loss, ADAM, devices=mixed, averaging=averaging)
        step.init(PARAMS)
        with step.windows(rows(), BATCH):
            assert step._last_pipeline.runner._rule.rests == rests


@pytest.mark.slow  # the one above; test_a_lead_without_work_stays_where_nothing_rests trains one
@pytest.mark.parametrize(
    "averaging",
    [
        elche.MeanGradient(delay=1),
        elche.MeanGradient(compression="int8"),
        elche.ParameterAveraging(),
    ],
)
def test_devices_with_something_of_their_own_do_not_rest(averaging, mixed, ran):
    train(mixed, averaging=averaging)
    assert len(ran) == 2 * len(RESTS)


# -- what a user sees of it meanwhile


def test_copies_are_made_only_where_they_are_read(mixed):
    """And the old state is given up as always."""
    seen, states = [], []

    def each(window, state):
        states.append(state)
        if window.index in AT_REST:
            leaves = jax.tree.leaves((state.params, state.step))
            assert all(isinstance(leaf, LanedArray) and late(leaf) for leaf in leaves)
            assert state.params["a"].dtype == np.float32 and state.params["a"].shape == (3, 4, 5)
            assert state.params["a"][0].shape == (4, 5) and late(state.params["a"])
            own = state.params["a"].addressable_data(1)
            assert own.devices() == {mixed[1]} and not late(state.params["a"])
            np.testing.assert_array_equal(own[0], state.params["a"][0])
            assert late(state.params["b"])
            seen.append(window.index)

    assert_trained(train(mixed, each=each, again=True), one_device())
    assert seen == AT_REST
    assert all(leaf.is_deleted() for state in states[:-1] for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(states[-1]))


def test_reading_changes_nothing(mixed, tmp_path):
    kept = {}

    def each(window, state):
        elche.check_replicas(state)
        kept[window.index] = copy.deepcopy(state.params), host(state.params)
        jax.block_until_ready(state)
        return jax.tree.map(lambda leaf: leaf.copy(), state)

    assert_trained(train(mixed, each=each, again=True), one_device())
    for copied, then in kept.values():
        for name, leaf in copied.items():
            np.testing.assert_array_equal(np.asarray(leaf), [then[name]] * 3)


def test_what_takes_one_copy_takes_that_of_a_first_device_at_rest(tmp_path):
    """Also onto the disk."""
    counts, devices = [(0, 2, 1)] * 3, jax.devices("cpu")[:3]

    def build():
        return elche.build_train_step(
            plain_loss, optax.adam(1e-2), devices=devices, lanes=((0,), (1, 2)),
            cadence=elche.Replay(counts),
        )  # fmt: skip

    step = build()
    state, checkpoints = step.init(PARAMS), elche.Checkpoints(tmp_path, every_windows=1)
    with contextlib.closing(elche.Checkpointer(step, checkpoints)) as saver:
        for window in step.windows(rows(counts), BATCH, shuffle=False):
            state, _ = step(state, window)
            saver.save(state, window)
    assert isinstance(state.params["a"].parts[0], LateArray)
    want, _, _ = run(devices[:1], [(3,)] * 3, rows=rows(counts), loss=plain_loss, shuffle=False)
    last = step.average(state)
    assert last["a"].devices() == {devices[0]}
    assert_close(jax.device_get(last), host(want.params))
    again = build()
    with contextlib.closing(elche.Checkpointer(again, checkpoints)) as saver:
        restored, _ = saver.restore(again.init(PARAMS))
    assert all_bytes(restored) == all_bytes(state)


# -- the lead follows the work


LEADS = [(2, 3, 1), (0, 3, 0), (0, 3, 0), (0, 1, 0), (1, 2, 0), (1, 0, 1), (0, 2, 0), (0, 2, 0)]
"""Of the first and the third device, which share a lane; the second one has the other lane."""
LED = [0, 1, 1, 1, 0, 0, 1, 1]
"""The rank that leads."""


def led(state):
    (device,) = {leaf.devices().pop() for leaf in jax.tree.leaves(state.opt_state)}
    return device


@pytest.mark.parametrize("tx", [ADAM, slow(optax.sgd(0.1))])
def test_the_lane_that_leads_may_rest(tx, mixed, ran):
    leads = []

    def each(window, state):
        assert all(isinstance(leaf, LeadArray) for leaf in jax.tree.leaves(state.opt_state))
        if jax.tree.leaves(state.opt_state):
            leads.append(led(state))

    got = run(mixed, LEADS, rows=rows(LEADS), each=each, tx=tx, again=True)
    assert_trained(got, one_device(LEADS, tx=tx))
    held = jax.tree.leaves(got[0].opt_state)
    assert leads == ([mixed[rank] for rank in LED] if held else [])
    assert [number for number, at in sorted(ran) if at == 0] == [0, 1, 4, 5, 6]
    assert [number for number, at in sorted(ran) if at == 1] == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, slow({"device_loss": True})])
def test_metrics_are_on_one_device_whoever_leads(options, mixed):
    total, step = 0.0, shared(tuple(mixed), tuple(LEADS), loss_fn, ADAM, **options)
    state = step.init(PARAMS, rng=3)
    for window in step.windows(rows(LEADS), BATCH, placement="stream"):
        state, metrics = step(state, window)
        assert {leaf.devices().pop() for leaf in jax.tree.leaves(metrics)} == {mixed[0]}
        total = total + metrics["loss"]
    assert np.isfinite(total)


def test_metrics_are_moved_in_a_lanes_thread(mixed, monkeypatch):
    """Where a Ctrl-C waits for the end of the window, and the loop gets the new state."""
    home, where = LanesWindow._home, []

    def noted(self, metrics):
        where.append(threading.current_thread())
        return home(self, metrics)

    monkeypatch.setattr(LanesWindow, "_home", noted)
    run(mixed, LEADS, rows=rows(LEADS), again=True)
    assert len(where) == len(LEADS) and threading.main_thread() not in where


def test_who_may_lead_by_memory(mixed, monkeypatch):
    """What only the lead holds may not fit elsewhere."""
    limits = {mixed[0]: 8, mixed[1]: 4, mixed[2]: 8}
    monkeypatch.setattr(lane, "memory_limit", limits.__getitem__)
    for limit, order, leads in ((4, (0,), 0), (8, (0, 1), 1), (9, (0, 1), 1)):
        limits[mixed[1]] = limit
        step = build(mixed, LEADS, plain_loss, ADAM)
        assert step.fleet.lead_order == order
        step.init(PARAMS)
        with step.windows(rows(LEADS), BATCH):
            assert step._last_pipeline.runner._led_by({0}) == leads, "the first lane has no work"


@pytest.mark.slow  # the one above; test_a_lead_without_work_stays_where_nothing_rests trains one
def test_a_lane_with_less_memory_does_not_lead(mixed, ran, monkeypatch):
    """The lead then takes the step without work."""
    limits = {mixed[0]: 8, mixed[1]: 4, mixed[2]: 8}
    monkeypatch.setattr(lane, "memory_limit", limits.__getitem__)
    leads = []
    got = run(
        mixed, LEADS, rows=rows(LEADS), each=lambda window, state: leads.append(led(state))
    )  # fmt: skip
    assert leads == [mixed[0]] * len(LEADS)
    assert [number for number, at in sorted(ran) if at == 0] == list(range(len(LEADS)))
    assert_trained(got, one_device(LEADS, tx=ADAM))
    assert got[2].fleet.lead_order == (0,)


@pytest.mark.slow  # test_the_lane_that_leads_may_rest moves them; kinds, rest and a replaced leaf
def test_a_replaced_leaf_does_not_keep_the_others_from_moving(mixed):
    """A learning rate that the user sets, on all devices, beside the moments on the lead."""

    def tx():
        return optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)

    def halved(devices):
        def each(window, state):
            new = (
                np.int32(window.index + 1),
                {"learning_rate": np.float32(0.01 / (window.index + 1))},
            )
            count, rates = elche.replicate(new, devices)  # the first leaves
            old = state.opt_state
            new = old._replace(count=count, hyperparams=old.hyperparams | rates)
            return state.replace(opt_state=new)

        return each

    got = run(mixed, LEADS, rows=rows(LEADS), tx=tx(), each=halved(mixed))
    devices = jax.devices("cpu")[:1]
    counts = [(sum(row),) for row in LEADS]
    assert_trained(got, run(devices, counts, rows=rows(LEADS), tx=tx(), each=halved(devices)))


@pytest.mark.parametrize("lasts", [(2,), slow((0, 1, 3, 4, 5, 6))], ids=str)
def test_who_leads_follows_from_the_counts_of_a_window_alone(lasts, mixed, tmp_path):
    """Kinds round differently: a run that goes on from any checkpoint has the same bits."""
    whole, how = [], {"shuffle": False, "placement": "stream"}

    def saving(step, window):
        folder = elche.Checkpoints(tmp_path / str(window), every_windows=1)
        return contextlib.closing(elche.Checkpointer(step, folder))

    step = shared(tuple(mixed), tuple(LEADS), loss_fn, ADAM)
    state = step.init(PARAMS)
    for window in step.windows(rows(LEADS), BATCH, **how):
        state, _ = step(state, window)
        whole.append(all_bytes(state))
        if window.index in lasts:
            with saving(step, window.index) as saver:
                saver.save(state, window)
    for last in lasts:
        again = build(mixed, LEADS, loss_fn, ADAM)
        with saving(again, last) as saver:
            state, cursor = saver.restore(again.init(PARAMS))
        for window in again.windows(rows(LEADS), BATCH, cursor=cursor, **how):
            state, _ = again(state, window)
            assert all_bytes(state) == whole[window.index]
        assert window.index == len(LEADS) - 1


def test_the_lead_changes_while_another_lane_rests(ran):
    """What that one contributes moves with the lead."""
    counts = [(1, 1, 1), (1, 0, 1), (1, 0, 1), (0, 0, 2), (0, 0, 2), (1, 0, 2), (0, 1, 1)]
    devices = jax.devices("cpu")[:3]
    leads = []
    got = run(
        devices, counts, rows=rows(counts), lanes=((0,), (1,), (2,)),
        each=lambda window, state: leads.append(led(state)),
    )  # fmt: skip
    want = run(devices[:1], [(sum(row),) for row in counts], rows=rows(counts))
    assert_trained(got, want)
    assert leads == [devices[rank] for rank in (0, 0, 0, 2, 2, 0, 1)]
    part = [[number for number, at in sorted(ran) if at == lane] for lane in range(3)]
    assert part == [[0, 1, 2, 3, 5, 6], [0, 1, 6], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.slow  # test_no_compile_while_counts_change has such windows
def test_another_lead_does_not_wait_for_a_compile(mixed):
    """What it needs is compiled ahead, in the background."""
    counts, misses = [(2, 1, 2), (0, 5, 0), (0, 5, 0)], set()
    step = elche.build_train_step(
        plain_loss, optax.adam(1e-2), devices=mixed, cadence=elche.Replay(counts)
    )
    state = step.init(PARAMS)
    for window in step.windows(rows(counts), BATCH, window_bytes=1):  # of one size for all counts
        state, _ = step(state, window)
        step._cache.wait()
        misses.add(step._cache.stats.misses)
    assert len(misses) == 1


def test_a_lead_without_work_stays_where_nothing_rests(mixed, ran):
    """Moving what it holds would gain nothing. Devices with something of their own do not rest."""
    leads = []
    run(
        mixed, IDLE, rows=rows(IDLE), averaging=LATE, loss=plain_loss, tx=MOMENTUM, again=True,
        each=lambda window, state: leads.append(led(state)),
    )  # fmt: skip
    assert leads == [mixed[0]] * len(IDLE)
    assert len(ran) == 2 * len(IDLE)


@pytest.mark.slow  # test_reading_changes_nothing compares the replicas of such lanes
def test_every_window_is_verified(mixed):
    assert_trained(train(mixed, verify_every=1), one_device())


WITHOUT = [(2, 0, 1)] * 4
"""Never with work for the second device."""


def test_a_new_run_begins_with_nobody_at_rest(mixed, ran):
    step = shared(tuple(mixed), tuple(WITHOUT), plain_loss, ADAM)
    for _ in range(2):
        state = step.init(PARAMS)
        ran.clear()
        for window in step.windows(rows(WITHOUT), BATCH, placement="stream"):
            state, _ = step(state, window)
            if window.index == 2:
                break
        assert [at for _, at in ran].count(1) == 1
        elche.check_replicas(state)


def test_a_lane_at_rest_has_nothing_to_be_timed(mixed, monkeypatch):
    """It is done when the window is dispatched, and the window when the others are."""
    passed, launch = [], Launch.__call__

    def noted(self, token, ranks=None):
        if ranks == (1,):
            passed.append((self.number - 1, isinstance(token, LeadArray) and token.is_ready()))
        launch(self, token, ranks)

    monkeypatch.setattr(Launch, "__call__", noted)
    _, _, step = train(mixed, again=True)
    assert dict(passed) == {at: at in AT_REST for at in range(len(RESTS))}
    assert [record.counts for record in step.records] == RESTS


def test_a_lane_at_rest_is_not_blamed_for_the_lead(mixed):
    examples = rows(WITHOUT)
    examples["x"][6 * BATCH] = np.nan  # in the third window, on the first device
    with pytest.raises(elche.NonFiniteError) as caught:
        run(mixed, WITHOUT, rows=examples, loss=plain_loss, shuffle=False, again=True)
    assert caught.value.window == 2 and caught.value.microbatches == {0: range(6, 8)}


@pytest.mark.slow  # test_copies_are_made_only_where_they_are_read
def test_what_takes_one_copy_wakes_nobody(mixed):
    def each(window, state):
        if window.index in AT_REST:
            elche.unreplicate(state.params)
            assert state.params["a"].devices() == set(mixed)
            assert [shard.device for shard in state.params["a"].addressable_shards] == mixed
            assert late(state.params["a"]) and late(state.step)

    train(mixed, each=each)


@pytest.mark.usefixtures("twins")
def test_the_lead_keeps_no_gradient_of_a_lane_that_works_again():
    _, _, step = rested()
    runner = step._last_pipeline.runner
    assert runner._idle == {}
