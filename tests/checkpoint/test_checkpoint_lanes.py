"""Checkpoints of devices of two kinds: taken up by the same, by alike ones, and by one."""

from itertools import product

import jax
import numpy as np
import optax
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
from elche_jax.engine.laned import LeadArray, Stacked
from elche_jax.engine.replicas import raw as data_of

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


def run(case, devices, folder=None, until=None, resume="auto"):
    """Trains two epochs, or up to a window; gives the state and the training step."""
    train = build(case, devices)
    state, cursor, saver = case.init(train), None, None
    if folder is not None:
        saver = elche.Checkpointer(train, elche.Checkpoints(folder, every_windows=EVERY))
        state, cursor = saver.restore(state, resume)
    state, metrics = loop(train, state, data(), cursor, saver, until)
    return state, train, jax.device_get(metrics)


def build(case, devices):
    return elche.build_train_step(
        case.loss, case.optimizer, devices=devices, cadence=elche.Replay(script(devices)),
        **case.options,
    )  # fmt: skip


def restored(case, devices, folder):
    """A state as it comes from a checkpoint."""
    train = build(case, devices)
    with elche.Checkpointer(train, elche.Checkpoints(folder)) as saver:
        state, cursor = saver.restore(case.init(train), "must")
    return state, train, cursor


SAME = ["keep"]


@pytest.mark.parametrize("name", [name if name in SAME else slow(name) for name in CASES])
def test_the_same_kinds_go_on_with_the_same_bits(name, places, tmp_path):
    case, devices = CASES[name], places["cpu+twin"]
    stopped, train, _ = run(case, devices, tmp_path, until=EVERY)
    state, again, cursor = restored(case, devices, tmp_path)
    assert content(state) == content(stopped) and cursor.window == EVERY
    assert again.counts_history == train.counts_history
    for leaf, before in zip(jax.tree.leaves(state), jax.tree.leaves(stopped), strict=True):
        assert isinstance(leaf, Stacked) and leaf.dtype == before.dtype
    got, again, metrics = run(case, devices, tmp_path, resume="must")
    want, whole, expected = run(case, devices)
    assert content(got) == content(want)
    assert_bitwise(metrics, expected)
    assert again.counts_history == whole.counts_history


MOVES = [
    ("cpu+twin", "2 cpus"),
    ("2 cpus", "cpu+twin"),
    ("cpu+twin", "1 cpu"),
    ("1 cpu", "cpu+twin"),
    ("cpu+twin", "twin+cpu"),
    ("cpu+twin+cpu", "cpu+twin"),
    ("cpu+twin", "cpu+twin+cpu"),
]
QUICK = MOVES[2:3]
"""Of those with another number of devices; others are moved in further tests."""


@pytest.mark.parametrize("move", [move if move in QUICK else slow(move) for move in MOVES])
@pytest.mark.parametrize("name", ["adam", slow("frozen"), slow("noise")])
def test_other_devices_go_on_with_the_same_numbers(move, name, places, tmp_path):
    case, (before, now) = CASES[name], (places[name] for name in move)
    stopped, _, _ = run(case, before, tmp_path, until=EVERY)
    state, _, _ = restored(case, now, tmp_path)
    assert content(elche.unreplicate(state)) == content(elche.unreplicate(stopped))
    elche.check_replicas(state)
    got, train, metrics = run(case, now, tmp_path, resume="must")
    want, _, expected = run(case, before)
    elche.check_replicas(train.common(got))
    assert int(elche.unreplicate(got.step)) == int(elche.unreplicate(want.step)) > EVERY
    rows = [jax.tree.map(raw, elche.unreplicate(s.params)) for s in (got, want)]
    assert_close(*rows, rtol=1e-5, atol=1e-7)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)


OWN = ["delay", "keep", "diloco", "delayed diloco", "fragments", "delay of two"]


@pytest.mark.parametrize(
    ("name", "move"),
    [
        row if row in (("delay", MOVES[0]), ("keep", MOVES[1])) else slow(*row)
        for row in product(OWN, (*MOVES[:2], MOVES[4]))
    ],
)
def test_as_many_devices_of_other_kinds_go_on_the_same(name, move, places, tmp_path):
    """Every device has what the one of its rank had."""
    case, (before, now) = CASES[name], (places[name] for name in move)
    stopped, _, _ = run(case, before, tmp_path, until=EVERY)
    state, _, _ = restored(case, now, tmp_path)
    assert content(state) == content(stopped)
    got, train, _ = run(case, now, tmp_path, resume="must")
    want, _, _ = run(case, before)
    elche.check_replicas(train.common(got))
    assert_close(*(jax.tree.map(raw, s.params) for s in (got, want)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("move", [MOVES[2], slow(("cpu+twin", "cpu+twin+cpu"))])
@pytest.mark.parametrize("name", ["keep", "delay", slow("diloco"), slow("delayed diloco")])
def test_another_number_of_devices_takes_their_average(move, name, places, tmp_path):
    case, (before, now) = CASES[name], (places[name] for name in move)
    stopped, first, _ = run(case, before, tmp_path, until=EVERY)
    averaged = jax.device_get(first.average(stopped))
    state, train, cursor = restored(case, now, tmp_path)
    elche.check_replicas(train.common(state))
    for name, want in averaged.items():
        np.testing.assert_allclose(raw(elche.unreplicate(state.params)[name]), want, rtol=1e-6)
    with train.windows(data(), 2, epochs=2, cursor=cursor) as windows:
        for window in windows:
            state, metrics = train(state, window)
    assert np.isfinite(metrics["loss"]) and window.index > EVERY


def test_what_the_lead_alone_has_is_saved_once(places, tmp_path):
    """And it is no leaf of which each device has its own."""
    case, devices = CASES["adam"], places["cpu+twin"]
    stopped, _, _ = run(case, devices, tmp_path / "a", until=EVERY)
    alike, _, _ = run(case, places["2 cpus"], tmp_path / "b", until=EVERY)
    assert isinstance(stopped.opt_state[0].mu["a"], LeadArray)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
        for name in "ab"
    ]
    assert abs(sizes[0] - sizes[1]) < 0.2 * sizes[1]
    state, _, _ = restored(case, devices, tmp_path / "b")
    assert content(state) == content(alike)


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
