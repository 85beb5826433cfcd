"""Windows that are pending on the host when a run is saved, and what becomes of them."""

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from resumed import AVERAGES, KEEP, OUTER, averaged, content, data

import elche_jax as elche
from elche_jax.engine.host.coordinator import Coordinator
from elche_jax.engine.host.pending import PendingWindow, PendingWindows, arrays_of
from elche_jax.engine.reduce import Mean
from elche_jax.engine.state import PendingUpdate
from elche_jax.train.pipeline import Pipeline

STOP, COUNTS = 4, elche.Replay([(2, 1), (1, 3), (3, 2)] * 8)
HOST = elche.HostExchange()
LOCAL = averaged(elche.ParameterAveraging(**KEEP, delay=2), exchange=HOST)
GRADIENTS = averaged(elche.MeanGradient(delay=2), exchange=HOST)
ON_DEVICES = {"exchange": None}


def train_on(train, state, until=None, cursor=None):
    """Trains to a window, and gives the state, the metrics and the last window."""
    seen, window = [], None
    with train.windows(data(), 2, epochs=1, cursor=cursor) as windows:
        for window in windows:
            state, metrics = train(state, window)
            seen.append({name: np.asarray(value).tobytes() for name, value in metrics.items()})
            if window.index + 1 == until:
                break
    return state, seen, window


def placed(train, case, saved):
    """The state from `jax.device_get`."""
    return jax.tree.map(
        lambda like, host: jax.device_put(host, like.sharding), case.init(train), saved
    )


def halves(case, pack=lambda run: run, **options):
    """A run, and the second half of a run saved by hand, with its training step."""
    whole = case.build(2, COUNTS)
    state, seen, _ = train_on(whole, case.init(whole))
    first = case.build(2, COUNTS)
    half, _, window = train_on(first, case.init(first), STOP)
    saved = pickle.dumps((jax.device_get(half), pack(first.run_to_dict(half))))
    again = case.build(2, COUNTS, **options)
    host, run = pickle.loads(saved)
    begin = placed(again, case, host)
    again.restore_run(run, begin)
    return (state, seen), (again, begin, window.cursor, run)


def as_json(run):
    """As a user may write it."""
    counts = run["counts"].tolist()
    arrays = [np.asarray(array).tolist() for array in run["pending"]["arrays"]]
    pending = run["pending"] | {"arrays": arrays}
    return json.loads(json.dumps(run | {"counts": counts, "pending": pending}))


@pytest.mark.parametrize(
    ("case", "pack"),
    [
        (LOCAL, as_json),
        slow(GRADIENTS, lambda run: run),
        slow(averaged(elche.DiLoCo(OUTER, delay=1), exchange=HOST), as_json),
    ],
    ids=["local", "gradients", "diloco"],
)
def test_a_run_that_is_saved_by_hand(case, pack):
    (want, seen), (train, state, cursor, _) = halves(case, pack)
    state, later, _ = train_on(train, state, cursor=cursor)
    assert content(state) == content(want)
    assert later == seen[STOP:]


@pytest.mark.slow  # test_a_run_that_is_saved_by_hand in `make test`
def test_what_was_restored_is_saved_again_as_it_was():
    """Before the loop begins, and before its first window."""
    _, (train, state, cursor, run) = halves(LOCAL)
    want = [np.asarray(array).tobytes() for array in run["pending"].pop("arrays")]
    for _ in range(2):
        got = train.run_to_dict(state)["pending"]
        arrays = [np.asarray(array).tobytes() for array in got["arrays"]]
        assert arrays == want and got.items() >= run["pending"].items()
        with train.windows(data(), 2, cursor=cursor):
            pass
    assert train.run_to_dict(LOCAL.init(train))["pending"] == {}


@pytest.mark.slow  # test_a_run_that_is_saved_by_hand in `make test`
def test_a_state_that_is_changed_after_the_stop():
    """What is pending goes with the next delivery, as in a second loop of one process."""
    whole = LOCAL.build(2, COUNTS)
    half, _, window = train_on(whole, LOCAL.init(whole), STOP)
    want, _, _ = train_on(whole, half.replace(params=half.params), cursor=window.cursor)
    _, (train, state, cursor, _) = halves(LOCAL)
    state, _, _ = train_on(train, state.replace(params=state.params), cursor=cursor)
    assert content(state) == content(want)


UNKNOWN = (
    "elche: windows that were pending on the host when this run was saved are not known, so the "
    "parameters will not be those of an uninterrupted run."
)
ADVICE = " Pass the state to run_to_dict and restore_run."


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"averaging": elche.MeanGradient(delay=1), "exchange": HOST}, True),
        ({"averaging": elche.MeanGradient(delay=1)}, False),
        ({"exchange": HOST}, False),
    ],
)
def test_windows_that_are_not_saved(options, warned, caplog):
    train = averaged(elche.MeanGradient()).build(2, COUNTS, **options)
    state = GRADIENTS.init(train)
    known, unknown = train.run_to_dict(state), train.run_to_dict()
    for run, given, advice in ((unknown, None, ADVICE), (unknown, state, "")):
        caplog.clear()
        train.restore_run(run, given)
        said = [text for text in caplog.messages if "pending" in text]
        assert said == warned * [UNKNOWN + advice]
    caplog.clear()
    for given in (None, state):  # nothing is pending
        train.restore_run(known, given)
    assert not [text for text in caplog.messages if "pending" in text]


@pytest.mark.slow  # test_windows_that_are_not_saved in `make test`
@pytest.mark.parametrize("options", [{}, ON_DEVICES])
def test_a_run_with_pending_windows_that_is_restored_without_its_state(options, caplog):
    """Also if a state was passed to an earlier call."""
    _, (train, state, _, run) = halves(GRADIENTS, **options)
    train.restore_run(run)
    assert UNKNOWN + ADVICE in caplog.messages
    assert train.run_to_dict(state)["pending"] == {}


@pytest.mark.slow  # test_a_run_that_is_saved_by_hand in `make test`
@pytest.mark.parametrize("call", ["run_to_dict", "restore_run"])
def test_what_is_no_state(call):
    train = LOCAL.build(2, COUNTS)
    LOCAL.init(train)
    args = ({},) if call == "restore_run" else ()
    with pytest.raises(TypeError, match=rf"^TrainStep\.{call}: state must be a TrainState"):
        getattr(train, call)(*args, {"a": 1})


@pytest.mark.slow  # test_a_run_that_is_saved_by_hand in `make test`
def test_what_windows_in_flight_tell_is_saved_with_their_means(monkeypatch):
    """As a window is counted as not finite by its record, which follows its mean."""
    train, calls = LOCAL.build(2, COUNTS), []
    state = LOCAL.init(train)
    for owner, name in ((Pipeline, "settle"), (Coordinator, "settled")):
        before = getattr(owner, name)

        def noting(self, name=name, before=before):
            calls.append(name)
            return before(self)

        monkeypatch.setattr(owner, name, noting)
    with train.windows(data(), 2) as windows:
        state, _ = train(state, next(windows))
        train.run_to_dict(state)
        assert calls == ["settle", "settled"]


@pytest.mark.slow  # a job of several processes has such windows, see test_processes_lost_ahead.py
def test_a_mean_that_is_not_known_is_not_saved(monkeypatch, caplog):
    train = LOCAL.build(2, COUNTS)
    state = LOCAL.init(train)
    with train.windows(data(), 2) as windows:
        state, _ = train(state, next(windows))
        monkeypatch.setattr(Coordinator, "settled", lambda self: [])
        assert "pending" not in train.run_to_dict(state)
        assert caplog.messages[-1] == (
            "elche: windows that are pending on the host have no mean, as a process of the job has "
            "ended, and are not saved. Call TrainStep.whole before."
        )
        monkeypatch.undo()
        assert train.run_to_dict(state)["pending"]


@pytest.mark.slow  # test_a_run_that_is_saved_by_hand in `make test`
def test_a_window_of_an_earlier_loop_hides_no_pending_windows():
    train = LOCAL.build(2, COUNTS)
    other = LOCAL.init(train)
    with train.windows(data(), 2) as windows:
        left = next(windows)
    state = LOCAL.init(train)
    with train.windows(data(), 2) as windows:
        state, _ = train(state, next(windows))
        train(other, left)
        assert train.run_to_dict(state)["pending"]["windows"] == 1


OTHER_RUN = (
    "elche: windows that were pending on the host when this run was saved do not fit this run, "
    "which has other devices, metrics or options: their {}."
)
DROPPED = OTHER_RUN.format("gradients, loss and metrics are dropped")
KEPT = OTHER_RUN.format("steps are kept, but not their loss and metrics")


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        (GRADIENTS, {}, None),
        (GRADIENTS, ON_DEVICES, DROPPED),
        slow(LOCAL, ON_DEVICES, KEPT),
    ],
)
def test_windows_that_do_not_fit_the_run(case, options, said, caplog):
    _, (train, state, cursor, _) = halves(case, **options)
    state, _, _ = train_on(train, state, STOP + 1, cursor)
    assert [text for text in caplog.messages if "pending" in text] == [said] * bool(said)


@pytest.mark.parametrize(
    "changed",
    [
        lambda pending: {"arrays": pending["arrays"][:-1]},
        lambda pending: {"arrays": [np.zeros(7), *pending["arrays"][1:]]},
        lambda pending: {"arrays": [np.full(2, "x"), *pending["arrays"][1:]]},
        lambda pending: {"windows": 1},
        lambda pending: {"windows": 0},
        lambda pending: {"windows": 10**9},
        lambda pending: {"step": STOP + 1},
        lambda pending: {"metrics": ["finite", "loss", "weights"]},
        lambda pending: {"merge": ["mean"]},
    ],
)
@pytest.mark.slow  # test_windows_that_do_not_fit_the_run in `make test`
def test_windows_of_another_run(changed, caplog):
    _, (train, state, cursor, run) = halves(GRADIENTS)
    pending = run["pending"]
    train.restore_run(run | {"pending": pending | changed(pending)}, state)
    train_on(train, state, STOP + 1, cursor)
    assert DROPPED in caplog.messages


@pytest.mark.slow  # test_windows_that_do_not_fit_the_run in `make test`
def test_another_number_of_devices(tmp_path, caplog):
    case = AVERAGES["late_host"]
    for world in (2, 3):
        train = case.build(world, elche.EveryBatch())
        state = case.init(train)
        with elche.Checkpointer(train, elche.Checkpoints(tmp_path)) as saver:
            state, cursor = saver.restore(state)
            with train.windows(data(), 2, cursor=cursor) as windows:
                for window in windows:
                    state, _ = train(state, window)
                    if window.index == 2 + world:
                        saver.save(state, window, force=True)
                        break
    assert KEPT in caplog.messages


class TwoProcesses:
    """A job of which the second device is lost."""

    one_process, first, members = False, True, SimpleNamespace(lost=(1,))

    def rows_at_first(self, rows):
        return {name: np.concatenate([row, row]) for name, row in rows.items()}


@pytest.mark.slow  # as test_a_mean_that_is_not_known_is_not_saved
def test_updates_of_a_lost_device_are_not_saved():
    row = jnp.ones(1)
    update = PendingUpdate([row], row, row > 0, [])
    nothing = PendingUpdate([0 * row], 0 * row, row > 0, [])
    mean = Mean([np.ones(())], [], [], *np.ones(4))
    first = PendingWindow(np.ones(2), replace(update, progress=[]), mean, {})
    second = PendingWindow(np.ones(2), update, mean, {})
    pending = PendingWindows(row > 0, {}, [first, second])
    wanted = jax.tree.structure(pending).unflatten(arrays_of(pending, nothing, TwoProcesses()))
    for window in wanted.windows:
        assert [rows.tolist() for rows in window.updates.progress] in ([], [[1, 0]])
        assert window.updates.steps.tolist() == [1, 0]
        assert window.updates.own.tolist() == [True, True]
