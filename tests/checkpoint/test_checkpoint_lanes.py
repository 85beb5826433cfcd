"""Checkpoints of devices of two kinds: taken up by the same, by alike ones, and by one."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from marks import slow
from models import assert_bitwise, assert_close
from resumed import (
    GRADIENTS,
    OUTER,
    PLAIN,
    SCRIPT,
    STATISTICS,
    Case,
    averaged,
    data,
    loop,
    plain_loss,
)  # fmt: skip

import elche_jax as elche
from elche_jax.engine.bits import raw as data_of
from elche_jax.engine.laned import LeadArray, Stacked

EVERY = 3
"""Windows before the stop."""

KEEP = elche.ParameterAveraging(optimizer_state="keep")
CASES = {
    "adam": Case(plain_loss, PLAIN),
    "statistics": GRADIENTS["dropout"],
    "scaled": GRADIENTS["scaled"],
    "frozen": GRADIENTS["frozen"],
    "noise": Case(plain_loss, PLAIN, optax.chain(optax.sgd(0.05), optax.add_noise(
        1e-3, 0.5, jax.random.key(5)))),
    "delay": Case(plain_loss, PLAIN, options={"averaging": elche.MeanGradient(delay=1)}),
    "delay of two": Case(plain_loss, PLAIN, options={"averaging": elche.MeanGradient(delay=2)}),
    "int8": Case(plain_loss, PLAIN, options={"averaging": elche.MeanGradient(compression="int8")}),
    "keep": averaged(KEEP, STATISTICS),
    "diloco": averaged(elche.DiLoCo(OUTER)),
    "fragments": averaged(elche.DiLoCo(OUTER, fragments=2)),
    "delayed diloco": averaged(elche.DiLoCo(OUTER, delay=1)),
}  # fmt: skip


def raw(leaf):
    """A leaf on the host; of keys their data."""
    return np.asarray(data_of(leaf))


def content(state):
    """The bytes of a state by name, those of every device."""
    named = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): raw(leaf).tobytes() for path, leaf in named}


@pytest.fixture
def places(twins):
    """Devices by name."""
    cpus = jax.devices("cpu")
    return {
        "cpu+twin": [cpus[0], twins[0]],
        "twin+cpu": [twins[0], cpus[0]],
        "2 cpus": cpus[:2],
        "1 cpu": cpus[:1],
        "cpu+twin+cpu": [cpus[0], twins[0], cpus[1]],
    }


def script(devices):
    rows = SCRIPT[2]
    if len(devices) == 3:
        return [(a, b - 1, 1) for a, b in rows]
    return rows if len(devices) == 2 else [(sum(row),) for row in rows]


def build(case, devices):
    return elche.build_train_step(
        case.loss, case.optimizer, devices=devices, cadence=elche.Replay(script(devices)),
        **case.options,
    )  # fmt: skip


class Begun(NamedTuple):
    """A run up to the stop, and the same run to its end."""

    stopped: Any
    counts: list
    average: Any
    saved: Path
    ended: Any
    metrics: Any
    all_counts: list


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Trains a case on some devices, once for all tests that go on from there."""

    @cache
    def begun(name, *devices):
        case, folder = CASES[name], tmp_path_factory.mktemp("begun")
        train = build(case, devices)
        saver = elche.Checkpointer(train, elche.Checkpoints(folder, every_windows=EVERY))
        stopped, _ = loop(train, case.init(train), data(), None, saver, EVERY)
        counts, average = train.counts_history, jax.tree.map(raw, train.average(stopped))
        ended, metrics = loop(train, case.init(train), data(), None, None, None)
        metrics = jax.device_get(metrics)
        return Begun(stopped, counts, average, folder, ended, metrics, train.counts_history)

    return begun


def restored(case, devices, saved, folder):
    """A state as it comes from a copy of a checkpoint, its training step, and the cursor."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    train = build(case, devices)
    with elche.Checkpointer(train, elche.Checkpoints(folder)) as saver:
        state, cursor = saver.restore(case.init(train), "must")
    return state, train, cursor


def goes_on(state, train, cursor, saver=None):
    """The state and the metrics of the run from there to its end."""
    state, metrics = loop(train, state, data(), cursor, saver, None)
    return state, jax.device_get(metrics)


@pytest.mark.slow  # test_as_many_devices_of_other_kinds_go_on_the_same
@pytest.mark.parametrize("name", CASES)
def test_the_same_kinds_go_on_with_the_same_bits(name, places, begun, tmp_path):
    devices = places["cpu+twin"]
    run = begun(name, *devices)
    state, train, cursor = restored(CASES[name], devices, run.saved, tmp_path)
    assert content(state) == content(run.stopped) and cursor.window == EVERY
    assert train.counts_history == run.counts
    for leaf, before in zip(jax.tree.leaves(state), jax.tree.leaves(run.stopped), strict=True):
        assert isinstance(leaf, Stacked) and leaf.dtype == before.dtype
    saver = elche.Checkpointer(train, elche.Checkpoints(tmp_path / "later", every_windows=2))
    got, metrics = goes_on(state, train, cursor, saver)
    assert content(got) == content(run.ended) and saver.written > EVERY, "it saves as before"
    assert_bitwise(metrics, run.metrics)
    assert train.counts_history == run.all_counts


MOVES = [
    ("cpu+twin", "2 cpus"),
    ("2 cpus", "cpu+twin"),
    ("cpu+twin", "1 cpu"),
    ("1 cpu", "cpu+twin"),
    ("cpu+twin", "twin+cpu"),
    ("cpu+twin+cpu", "cpu+twin"),
    ("cpu+twin", "cpu+twin+cpu"),
]
OTHER = [("adam", move) for move in MOVES]
OTHER += [(name, move) for name in ("frozen", "noise") for move in MOVES[2:4]]
"""One case moves wherever it can, the others from lanes to one device, and back."""
QUICK = OTHER[2:3]
"""Of those with another number of devices; others are moved in further tests."""


@pytest.mark.parametrize(("name", "move"), [row if row in QUICK else slow(*row) for row in OTHER])
def test_other_devices_go_on_with_the_same_numbers(name, move, places, begun, tmp_path):
    before, now = (places[place] for place in move)
    run = begun(name, *before)
    state, train, cursor = restored(CASES[name], now, run.saved, tmp_path)
    assert content(elche.unreplicate(state)) == content(elche.unreplicate(run.stopped))
    elche.check_replicas(state)
    got, metrics = goes_on(state, train, cursor)
    elche.check_replicas(train.common(got))
    assert int(elche.unreplicate(got.step)) == int(elche.unreplicate(run.ended.step)) > EVERY
    rows = [jax.tree.map(raw, elche.unreplicate(s.params)) for s in (got, run.ended)]
    assert_close(*rows, rtol=1e-5, atol=1e-7)
    assert metrics["loss"] == pytest.approx(run.metrics["loss"], rel=1e-5)


OWN = [
    slow("delay", MOVES[0]),
    ("keep", MOVES[1]),
    slow("keep", MOVES[0]),
    slow("keep", MOVES[4]),
    slow("diloco", MOVES[1]),
    slow("delayed diloco", MOVES[4]),
    slow("fragments", MOVES[0]),
    slow("delay of two", MOVES[1]),
]
"""Cases in which each device has something of its own; one of them moves wherever it can."""


@pytest.mark.parametrize(("name", "move"), OWN)
def test_as_many_devices_of_other_kinds_go_on_the_same(name, move, places, begun, tmp_path):
    """Every device has what the one of its rank had."""
    before, now = (places[place] for place in move)
    run = begun(name, *before)
    state, train, cursor = restored(CASES[name], now, run.saved, tmp_path)
    assert content(state) == content(run.stopped)
    got, _ = goes_on(state, train, cursor)
    elche.check_replicas(train.common(got))
    rows = (jax.tree.map(raw, s.params) for s in (got, run.ended))
    assert_close(*rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("move", [MOVES[2], slow(("cpu+twin", "cpu+twin+cpu"))])
@pytest.mark.parametrize("name", ["keep", slow("delay"), slow("diloco"), slow("delayed diloco")])
def test_another_number_of_devices_takes_their_average(move, name, places, begun, tmp_path):
    before, now = (places[place] for place in move)
    run = begun(name, *before)
    state, train, cursor = restored(CASES[name], now, run.saved, tmp_path)
    elche.check_replicas(train.common(state))
    for leaf, want in run.average.items():
        np.testing.assert_allclose(raw(elche.unreplicate(state.params)[leaf]), want, rtol=1e-6)
    with train.windows(data(), 2, epochs=2, cursor=cursor) as windows:
        for window in windows:
            state, metrics = train(state, window)
    assert np.isfinite(metrics["loss"]) and window.index > EVERY


def saved_shapes(folder):
    """The shapes of the arrays in a checkpoint, by their names."""
    found = ocp.PyTreeCheckpointHandler().metadata(folder / str(EVERY) / "state")
    leaves = jax.tree_util.tree_flatten_with_path(found.tree)[0]
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def test_what_the_lead_alone_has_is_saved_once(places, begun, tmp_path):
    """And it is no leaf of which each device has its own."""
    devices = places["cpu+twin"]
    run, alike = begun("adam", *devices), begun("adam", *places["2 cpus"])
    assert isinstance(run.stopped.opt_state[0].mu["a"], LeadArray)
    shapes = saved_shapes(run.saved)
    assert shapes == saved_shapes(alike.saved)
    assert shapes["['opt_state']['0']['mu']['a']"] == PLAIN["a"].shape
    state, _, _ = restored(CASES["adam"], devices, alike.saved, tmp_path)
    assert content(state) == content(alike.stopped)


@pytest.mark.parametrize(
    ("before", "now", "over"),
    [
        ("cpu+twin", "cpu+twin", False),
        ("cpu+twin", "twin+cpu", True),
        ("cpu+twin", "2 cpus", True),
        ("2 cpus", "cpu+twin", True),
        ("2 cpus", "2 cpus", False),
    ],
)
def test_speeds_are_those_of_the_same_kinds(before, now, over, places, caplog):
    def train_on(devices):
        train = elche.build_train_step(
            CASES["adam"].loss, CASES["adam"].optimizer, devices=devices, cadence=elche.ElChe()
        )
        CASES["adam"].init(train)
        return train

    train, again = train_on(places[before]), train_on(places[now])
    speeds = train.cadence_state.to_dict()
    speeds["cadence"] |= {"counts": (10, 30), "ms_per_batch": (3.0, 1.0), "calibrated": True}
    train.cadence_state = speeds
    again.restore_run(train.run_to_dict())  # as a checkpoint does
    assert again.counts == ((10, 10) if over else (10, 30))
    assert any("elche: the devices are of " in line for line in caplog.messages) == over
