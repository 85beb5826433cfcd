"""Taken up by another number of devices, another model, another cadence."""

import json
import logging
import re
from functools import cache

import jax
import numpy as np
import optax
import pytest
from marks import slow
from resumed import (
    AVERAGES,
    EVERY,
    GRADIENTS,
    PLAIN,
    SCRIPT,
    Case,
    averaged,
    content,
    data,
    plain_loss,
    raw,
    run,
    weights,
)  # fmt: skip

import elche_jax as elche

ANEW = (
    "elche: the number of devices is {}, the checkpoint's was {}: the cadence, the guard's history "
    "and counts_history start over."
)


def taken_up(case, folder, world, cadence=None):
    """A training step that has taken up what is in a folder, and the state and cursor."""
    train = case.build(world, cadence)
    with elche.Checkpointer(train, elche.Checkpoints(folder)) as saver:
        state, cursor = saver.restore(case.init(train), "must")
    return train, state, cursor


def totals(script):
    return [sum(counts) for counts in script[:12]]


def test_the_scripts_give_windows_the_same_microbatches():
    assert totals(SCRIPT[2]) == totals(SCRIPT[4])


@pytest.mark.parametrize(("before", "now"), [(4, 2), slow(2, 4), slow(4, 1), slow(1, 4)])
def test_other_devices_go_on_with_the_same_numbers(before, now, tmp_path, caplog):
    case = GRADIENTS["dropout"]
    scripts = {n: elche.Replay(SCRIPT[n]) for n in (2, 4)}
    scripts[1] = elche.Replay([(total,) for total in totals(SCRIPT[4])] * 3)
    # model state is merged from what the devices saw: it would depend on the split
    case = Case(plain_loss, PLAIN, case.optimizer)
    stopped, first = run(case, tmp_path, world=before, cadence=scripts[before], until=EVERY)
    want, _ = run(case, world=before, train=first)
    train, state, cursor = taken_up(case, tmp_path, now, scripts[now])
    assert ANEW.format(now, before) in caplog.messages
    assert train.counts_history == [] and train.left_out == (0,) * now and train.skipped == 0
    assert train.cadence_state == case.build(now, scripts[now]).cadence_state
    elche.check_replicas(state)
    assert content(elche.unreplicate(state)) == content(elche.unreplicate(stopped))
    assert cursor.window == EVERY
    for window in train.windows(data(), 2, epochs=2, cursor=cursor):
        state, _ = train(state, window)
    assert int(state.step[0]) == int(want.step[0]) == window.index + 1
    for name in PLAIN:
        got, wanted = (raw(elche.unreplicate(s.params)[name]) for s in (state, want))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
    assert len(train.counts_history) == int(state.step[0]) - EVERY


def test_windows_are_numbered_on_by_other_devices(tmp_path):
    """In each call of `windows`, and also by a run that resumes on these devices once more."""

    def two_calls(world):
        """The numbers of windows in two calls, the first of which begins at the cursor."""
        case, numbers = Case(plain_loss, PLAIN), []
        train = case.build(world)
        with elche.Checkpointer(train, elche.Checkpoints(tmp_path)) as saver:
            state, cursor = saver.restore(case.init(train))
            begun, done = (0, 0) if cursor is None else (cursor.epoch + 1, cursor.window)
            for start, epochs in ((cursor, begun + 1), (None, 1)):
                assert train.counts == SCRIPT[world][done + len(numbers)]
                for window in train.windows(data(), 2, epochs=epochs, cursor=start):
                    state, _ = train(state, window)
                    numbers.append(window.index)
                saver.save(state, window, force=True)
        assert window.index + 1 == int(state.step[0])
        return numbers

    first, second, third = two_calls(2), two_calls(1), two_calls(1)
    assert first + second + third == list(range(third[-1] + 1))


@pytest.mark.slow  # test_other_devices_go_on_with_the_same_numbers
def test_other_devices_save_again_and_come_back(tmp_path):
    case = GRADIENTS["dropout"]
    run(case, tmp_path, until=EVERY)
    state, train = run(case, tmp_path, world=2, until=2 * EVERY, resume="must")
    back, here, cursor = taken_up(case, tmp_path, 2)
    assert content(here) == content(state) and cursor.window == 2 * EVERY
    assert back.counts_history == train.counts_history and len(train.counts_history) == EVERY


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run of a case in which devices have their own, up to the stop, and its checkpoint."""

    @cache
    def own(name):
        folder = tmp_path_factory.mktemp("own")
        return *run(AVERAGES[name], folder, until=EVERY), folder

    return own


def check_pending(state, devices):
    """What was pending is in the parameters; several devices exchange it with their next window."""
    if state.averaging is None:
        return
    for done in state.averaging.pending:
        assert np.asarray(done.own).all()
        leaves = [raw(leaf) for leaf in jax.tree.leaves(state.params)]
        for progress, base, own in zip(done.progress, state.averaging.base, leaves, strict=True):
            apart = raw(base) - own if devices > 1 else np.zeros_like(own)
            np.testing.assert_array_equal(progress, apart)
        steps = raw(state.averaging.steps)[:, 0] if devices > 1 else [0]
        np.testing.assert_array_equal(done.steps, steps)


@pytest.mark.parametrize(
    ("name", "now"),
    [("delay", 2)]
    + [slow(name, 2) for name in ("keep", "average", "fragments", "int8")]
    + [slow(name, 1) for name in ("keep", "average", "fragments", "int8", "delay")],
)
def test_devices_that_have_their_own_are_averaged(name, now, own):
    stopped, first, folder = own(name)
    wanted = {key: np.array(leaf) for key, leaf in first.average(stopped).items()}
    train, state, cursor = taken_up(AVERAGES[name], folder, now)
    for key in PLAIN:
        rows = raw(state.params[key])
        assert (rows == rows[:1]).all()
        np.testing.assert_allclose(rows[0], wanted[key], rtol=1e-6)
    rest, here = (flat(s.replace(params=None)) for s in (stopped, state))
    common = flat(first.common(stopped).replace(params=None))
    assert rest.keys() == here.keys()
    check_pending(state, now)
    for key, rows in rest.items():
        if ".pending[" in key:
            continue
        if key in common and rows.shape == common[key].shape:
            want = rows[0]
        elif np.issubdtype(rows.dtype, np.floating):
            want = rows.astype(np.float64).mean(axis=0).astype(rows.dtype)
        else:
            want = rows.max(axis=0)
        assert here[key].shape == (now, *want.shape)
        for row in here[key]:
            np.testing.assert_array_equal(row, want, err_msg=key)
    for window in train.windows(data(), 2, epochs=2, cursor=cursor):
        state, _ = train(state, window)
    assert np.isfinite(raw(train.average(state)["a"])).all()
    assert int(state.step[0]) == window.index + 1 > EVERY


def test_gradients_that_one_device_cannot_have_pending_are_dropped(tmp_path, caplog):
    case = averaged(elche.MeanGradient(delay=1))
    stopped, _ = run(case, tmp_path, world=2, until=EVERY)
    _, state, cursor = taken_up(case, tmp_path, 1)
    assert content(elche.unreplicate(state.params)) == content(elche.unreplicate(stopped.params))
    assert cursor.window == EVERY
    assert (
        "elche: gradients of up to 1 windows were not applied when this run was saved; they are "
        "dropped, as this run has one device or exchanges on the host." in caplog.messages
    )


def flat(state):
    named = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): raw(leaf) for path, leaf in named}


# -- another model, optimizer or cadence


def stop(folder, case=None, **options):
    run(case or GRADIENTS["dropout"], folder, world=1, until=EVERY, **options)


OTHERS = {
    "shape": (
        Case(plain_loss, {"a": weights(4, 6), "b": weights(6)}),
        r"leaf params/a is float32\[4, 5\] there and float32\[4, 6\] here",
    ),
    "dtype": (
        Case(plain_loss, {"a": weights(4, 5), "b": weights(5, dtype="bfloat16")}),
        r"leaf params/b is float32\[5\] there and bfloat16\[5\] here",
    ),
    "missing": (
        Case(plain_loss, PLAIN | {"c.d": weights(2)}),
        "leaf params/c%2Ed of this run is not in it",
    ),
    "extra": (Case(plain_loss, {"a": weights(4, 5)}), "its leaf params/b is not in this run"),
    "optimizer": (
        Case(plain_loss, PLAIN, optax.sgd(0.1, momentum=0.9)),
        r"leaf opt_state/0/trace/a of this run is not in it",
    ),
}


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    stop(folder, Case(plain_loss, PLAIN))
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_another_model(name, plain_run):
    case, message = OTHERS[name]
    text = rf"checkpoints: .*/3 must be of this model and optimizer, but {message}\. Is it another"
    with pytest.raises(ValueError, match=text):
        taken_up(case, plain_run, 1, elche.EveryBatch())
    assert (plain_run / "3").is_dir()  # it is whole, and stays


def test_an_optimizer_of_less_state(tmp_path):
    """Another place of the tree, the same rule: the first leaf that is too much."""
    stop(tmp_path, Case(plain_loss, PLAIN, optax.sgd(0.1, momentum=0.9)))
    with pytest.raises(ValueError, match=r"its leaf opt_state/0/trace/a is not in this run"):
        taken_up(Case(plain_loss, PLAIN, optax.sgd(0.1)), tmp_path, 1)


def test_another_cadence_begins_anew(tmp_path, caplog):
    case = GRADIENTS["dropout"]
    _, before = run(case, tmp_path, cadence=elche.FixedTotal(8), until=EVERY)
    train, _, _ = taken_up(case, tmp_path, 4, elche.Balanced(8))
    assert (
        "elche: the checkpoint is of a run with FixedTotal, this one has Balanced: the cadence "
        "starts over." in caplog.messages
    )
    assert train.cadence_state == case.build(4, elche.Balanced(8)).cadence_state
    assert train.counts_history == before.counts_history


class Mine(elche.Cadence):
    """A cadence whose state nobody can store."""

    adaptive = False

    def init(self, world_size):
        return type("MyState", (), {"counts": (1,) * world_size})()

    def update(self, state, report, verdict=None):
        return state


def test_a_cadence_whose_state_cannot_be_stored(tmp_path, caplog):
    case = GRADIENTS["dropout"]
    with caplog.at_level(logging.WARNING, "elche_jax"):
        want, train = run(case, tmp_path, cadence=Mine(), until=2 * EVERY)
    again, state, _ = taken_up(case, tmp_path, 4, Mine())
    assert content(state) == content(want)
    assert again.counts_history == train.counts_history


# -- the place in the data


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("batch_size", {"batch_size": 4}, r"batch_size .*\(2\), got 4"),
        ("seed", {"seed": 1}, r"seed .*\(0\), got 1"),
        ("shuffle", {"shuffle": False}, r"shuffle .*\(True\), got False"),
        ("examples", {"data": data(94)}, r"the number of examples .*\(96\), got 94"),
    ],
)
@pytest.mark.parametrize("form", ["checkpoint", "json"])
def test_data_that_are_read_otherwise(name, changed, message, form, plain_run):
    case = Case(plain_loss, PLAIN)
    train, _, cursor = taken_up(case, plain_run, 1)
    if form == "json":
        cursor = elche.Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    asked = {"data": data(), "batch_size": 2} | changed
    with pytest.raises(ValueError, match=rf"^windows: {message}\. Pass that value"):
        train.windows(asked.pop("data"), epochs=2, cursor=cursor, **asked)
    train.windows(data(), 2, epochs=2, cursor=cursor).close()


def test_a_cursor_of_a_checkpoint_without_reading(plain_run):
    train, _, cursor = taken_up(Case(plain_loss, PLAIN), plain_run, 1)
    numbers = {n: v for n, v in cursor.to_dict().items() if n != "reading"}
    old = elche.Cursor.from_dict(numbers)
    assert old == cursor and old.reading is None
    train.windows(data(), 4, epochs=2, cursor=old).close()  # nobody knows
    assert re.fullmatch(r"Cursor\(epoch=0, microbatch=13, window=3\)", repr(cursor))
