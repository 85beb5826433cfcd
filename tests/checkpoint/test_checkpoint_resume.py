"""A run that was stopped goes on as if it had not been, bit for bit."""

import json
import shutil

import numpy as np
import pytest
from marks import slow
from resumed import AVERAGES, CASES, EVERY, GRADIENTS, averaged, content, data, run, steps

import elche_jax as elche
from elche_jax.checkpoint.store import Store

AT = 6
"""The checkpoint that is gone on from."""


def both(case, folder, world, cadence=None):
    """A run to its end, and one that goes on from a checkpoint of the first."""
    whole = run(case, folder, world=world, cadence=cadence)
    assert steps(folder)[:3] == [EVERY, AT, 3 * EVERY]
    for step in steps(folder)[2:]:
        shutil.rmtree(folder / str(step))
    return whole, run(case, folder, world=world, cadence=cadence, resume="must")


QUICK = ("delayed_diloco", "late_host")
"""Averages on the devices, and on the host; test_kills has gradients."""


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, 2) if name in QUICK else slow(name, 4) for name in CASES]
    + [slow(name, 1) for name in ("dropout", "scaled", "delay")],
)
def test_the_same_bits(name, world, tmp_path):
    (state, train), (again, resumed) = both(CASES[name], tmp_path, world)
    assert content(again) == content(state)
    assert resumed.counts_history == train.counts_history
    assert int(again.step[0]) == len(train.counts_history) > 2 * AT
    if name in AVERAGES and world > 1:
        assert_divergence(train.divergence, resumed.divergence)


def assert_divergence(whole, resumed):
    """Of the windows in flight at the checkpoint nothing was known yet."""
    assert {repr(seen) for seen in resumed} <= {repr(seen) for seen in whole}
    lost = {seen.window for seen in whole} - {seen.window for seen in resumed}
    assert lost <= {AT - 3, AT - 2, AT - 1}


@pytest.mark.slow  # test_the_same_bits shows it with counts that do
def test_the_same_bits_with_counts_that_do_not_change(tmp_path):
    (state, train), (again, resumed) = both(CASES["host"], tmp_path, 4, elche.EveryBatch())
    assert content(again) == content(state)
    assert resumed.counts_history == train.counts_history


@pytest.mark.slow  # test_the_same_bits shows it for counts that are given
def test_counts_that_followed_the_speeds_of_another_process(tmp_path, caplog):
    """What was measured is told to no other cadence; the run's own counts give its bits."""
    rule = elche.ParameterAveraging(optimizer_state="keep")
    config = elche.DDPConfig(  # counts that grow slowly, so that there are some windows
        policy="cadence", exchange="host", anchor=1, max_anchor=2, max_batch_diff=1
    )
    state, train = run(averaged(rule, config=config, cadence=None), tmp_path)
    _, *later = steps(tmp_path)  # how many there are depends on the speeds
    for step in later:
        shutil.rmtree(tmp_path / str(step))
    caplog.clear()
    again, resumed = run(
        averaged(rule, config=elche.DDPConfig(exchange="host")), tmp_path, resume="must",
        cadence=elche.Replay(train.counts_history),
    )  # fmt: skip
    assert content(again) == content(state)
    assert resumed.counts_history == train.counts_history
    assert (
        "elche: the checkpoint is of a run with ElChe, this one has Replay: the cadence starts "
        "over." in caplog.messages
    )


@pytest.mark.slow  # test_kills stops anywhere
@pytest.mark.parametrize("name", ["average", "dropout"])
def test_stopped_between_two_checkpoints(name, tmp_path):
    """The windows since the last one are lost, and trained again; saving changes nothing."""
    case = CASES[name]
    run(case, tmp_path, until=2 * EVERY + 2)
    assert steps(tmp_path) == [EVERY, 2 * EVERY]
    (again, resumed), (state, train) = run(case, tmp_path, resume="must"), run(case)
    assert content(again) == content(state)
    assert resumed.counts_history == train.counts_history


@pytest.mark.slow  # test_the_same_bits in `make test-all` needs it
def test_every_case_has_what_it_is_for():
    """Devices differ where they should, and the guard has something to say."""
    state, train = run(AVERAGES["keep"], until=4)
    assert len(train.divergence) == 4
    own = np.asarray(state.opt_state[0].mu["a"])
    assert not np.array_equal(own[0], own[1])
    state, _ = run(AVERAGES["int8"], until=4)
    assert np.abs(np.asarray(state.averaging.error[0])).max() > 0
    state, _ = run(AVERAGES["fragments"], until=4)
    assert len({row.tobytes() for row in np.asarray(state.params["a"])}) > 1
    state, _ = run(GRADIENTS["scaled"])
    assert len(set(np.asarray(state.loss_scale.scale).tolist())) == 1
    assert float(state.loss_scale.scale[0]) != 2.0**14


def test_the_cadence_goes_on_with_what_it_has_measured(tmp_path):
    case = GRADIENTS["dropout"]
    train, fresh = (case.build(cadence=elche.FixedTotal(8)) for _ in range(2))
    known = train.cadence_state.to_dict()
    known["cadence"]["ms_per_batch"] = [1.0, 2.0, 1.0, 4.0]
    state, begun = case.init(train), fresh.cadence_state
    train.cadence_state = known
    asked = elche.Checkpoints(tmp_path, every_windows=1, keep_last=9)
    with elche.Checkpointer(train, asked) as saver:
        for window in train.windows(data(), 2):
            state, _ = train(state, window)
            saver.save(state, window)
            if window.index == 2:
                break
    with elche.Checkpointer(fresh, asked) as saver:
        saver.restore(case.init(fresh), "must")
    store = Store(tmp_path, asked)
    written = store.read(3).notes["run"]["cadence"]
    assert fresh.cadence_state != begun
    assert json.loads(json.dumps(fresh.cadence_state.to_dict())) == written
    assert fresh.counts_history == train.counts_history


@pytest.mark.parametrize("name", ["average", slow("dropout")])
def test_windows_that_were_not_finite_stay_counted(name, tmp_path):
    """One microbatch in each epoch, in the first one in window 0, before the checkpoint."""
    case, rows = CASES[name], data()
    rows["x"][20] = np.inf
    whole, train = run(case, tmp_path, world=2, nonfinite="skip", rows=rows)
    for step in steps(tmp_path)[2:]:
        shutil.rmtree(tmp_path / str(step))
    again, resumed = run(case, tmp_path, world=2, nonfinite="skip", rows=rows, resume="must")
    assert content(again) == content(whole)
    assert train.skipped == resumed.skipped == 2  # one in each epoch
    assert sum(train.left_out) == (2 if name == "average" else 0)
    assert resumed.left_out == train.left_out
