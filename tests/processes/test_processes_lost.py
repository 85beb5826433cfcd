"""Jobs in which a process ends in the middle: the others go on without its devices."""

import json

import fitting_jobs
import jax
import jobs
import losing_trainer
import numpy as np
import optax
import pytest
from losing import BATCH, EPOCHS, ROWS, RULES
from marks import slow
from reference import loss_fn, params

import elche_jax as elche

ELCHE, TOTAL = ("ElChe", 3), ("FixedTotal", 8)
SIZE = len(ROWS["x"]) // BATCH
"""Microbatches of an epoch."""


def run(fleet, rule, cadence, exchange=None, *more, **dying):
    """What the processes say that are left; `dying` says how the others end, by their number.

    None waits for a heartbeat, which none would outlive: they see each other's end.
    """
    how = {int(name[1:]): moment for name, moment in dying.items()}
    lost, job = [*how], json.dumps((rule, cadence, how, None, exchange))
    said = jobs.run("losing.py", fleet, job, *more, killed=lost)
    return [one for at, one in enumerate(said) if at not in lost]


def alone(rule, counts):
    """The parameters of every device after these counts, in one process."""
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-2), devices=jax.devices()[: len(counts[0])],
        averaging=RULES[rule], cadence=elche.Replay([tuple(row) for row in counts]),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(ROWS, BATCH, epochs=EPOCHS) as windows:
        for window in windows:
            state, _ = train(state, window)
    return {name: np.asarray(leaf) for name, leaf in state.params.items()}


def check(said, fleet, rule, lost):
    """What must hold whatever the moment was."""
    first, *others = said
    ranks = [at for at, process in enumerate(np.repeat(np.arange(len(fleet)), fleet))
             if process not in lost]  # fmt: skip
    gone = sorted(set(range(sum(fleet))) - set(ranks))
    for other in others:
        for name in ("counts", "records", "weights", "next"):
            assert other[name] == first[name], name
    # every microbatch once an epoch
    for epoch in range(EPOCHS):
        plans = [plan[1:] for plan in first["plans"] if plan[0] == epoch]
        assert [at for at, _ in plans] == [0, *np.cumsum([size for _, size in plans])[:-1]]
        assert sum(size for _, size in plans) == SIZE
    counts = np.array(first["counts"])
    assert not counts[-1][gone].any()
    assert first["weights"] == counts.sum(axis=1).tolist()
    want, at = alone(rule, first["counts"]), 0
    for process in said:
        for name, rows in process["params"].items():
            own = want[name][ranks[at : at + len(rows)]]
            np.testing.assert_allclose(np.array(rows), own, rtol=1e-4, atol=1e-5)
        at += len(process["params"]["w"])
    assert at == len(ranks)
    return counts


MOMENTS = {
    "between its window and the exchange": ("exchange", 7),
    "in the middle of a window": ("contribute", 8),
    "as it compiles": ("compile", 3),
    "in the first exchange": ("exchange", 1),
    "as it reads data": ("read", 100),
}


@pytest.mark.parametrize("moment", [next(iter(MOMENTS)), *map(slow, [*MOMENTS][1:])])
def test_the_others_go_on(moment):
    fleet = (1, 1, 1)
    said = run(fleet, "mean gradient", TOTAL, p2=MOMENTS[moment])
    counts = check(said, fleet, "mean gradient", [2])
    assert (counts[0][2] == 0) == (moment in ("as it compiles", "in the first exchange"))
    assert sum(said[0]["next"]) == 8, "the total is that of the cadence"
    assert said[0]["throughput"][2] is None


@pytest.mark.slow
def test_the_heartbeat_tells_the_end_of_one_on_another_host():
    fleet, rule = (1, 1, 1), "mean gradient"
    check(run(fleet, rule, TOTAL, None, "apart", p2=("exchange", 7)), fleet, rule, [2])


@pytest.mark.parametrize("rule", [*map(slow, ["diloco", "averaging", "int8", "mean gradient"])])
def test_every_rule(rule):
    fleet = (2, 1, 1)
    # how many windows there are depends on the speeds, unless the cadence says it
    cadence, number = (ELCHE, 2) if rule == "mean gradient" else (TOTAL, 6)
    check(run(fleet, rule, cadence, p1=("exchange", number)), fleet, rule, [1])


@pytest.mark.slow  # `make test` has one kill: that of the test above
@pytest.mark.parametrize("rule", ["averaging", "diloco", "int8", "mean gradient"])
def test_the_others_go_on_with_an_exchange_on_the_host(rule):
    fleet = (2, 1, 1)
    check(run(fleet, rule, TOTAL, "host", p1=("average", 7)), fleet, rule, [1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 11, 12, 13])
def test_in_any_of_the_exchanges_of_a_window_on_the_host(number):
    fleet, rule = (1, 1, 1), "averaging"
    check(run(fleet, rule, TOTAL, "host", p2=("one of its exchanges", number)), fleet, rule, [2])


@pytest.mark.slow
def test_two_that_end_one_after_the_other():
    fleet = (1, 2, 1)
    said = run(fleet, "mean gradient", TOTAL, p1=("exchange", 4), p2=("exchange", 9))
    check(said, fleet, "mean gradient", [1, 2])


LOST = "train: process 1 (device 1) ended before window 2 was complete; 1 of 2 devices are left. "
RULE = "mean gradient"
CANNOT = {
    "a recording": (RULE, ("Replay", [(2, 2)] * 9), None, LOST + "A recording needs all devices."),
    "an iterable": (
        RULE, TOTAL, "iterable", LOST + "The data of a window must be read again, which an "
        "iterable does not allow. Resume from a checkpoint; iterables must have the same length in "
        "every process.",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_go_on_is_an_error(name):
    rule, cadence, data, message = CANNOT[name]
    job = json.dumps((rule, cadence, {1: ("exchange", 3)}, data))
    said, _ = jobs.run("losing.py", (1, 1), job, killed=[1])
    assert said == {"error": message, "processes": [1]}
    job = json.dumps((rule, cadence, {1: ("average", 3)}, data, "ahead"))
    said, _ = jobs.run("losing.py", (1, 1), job, killed=[1])
    assert said == {"error": message, "processes": [1]}


@pytest.mark.slow
def test_the_job_ends_with_its_first_process():
    """JAX's coordinator is in it. The others say so, or JAX does, which ends them."""
    job = json.dumps(("mean gradient", TOTAL, {0: ("exchange", 3)}))
    _, *others = jobs.outcomes("losing.py", (1, 1, 1), job)
    for code, _, err in others:
        assert code != 0
        assert "process 0, which holds JAX's coordinator, ended" in err or (
            "the JAX distributed service detected fatal errors" in err
        )


@pytest.mark.slow
@pytest.mark.further  # the moments that are known are tests of their own
@pytest.mark.parametrize("seeds", [range(5), range(5, 10)], ids=str)
def test_at_random_moments(seeds):
    """One process after the other, until two are left."""
    dying = {f"p{at}": ("time", seed) for at, seed in enumerate(seeds, 1)}
    fleet, lost = (1,) * (2 + len(dying)), range(1, 1 + len(dying))
    check(run(fleet, "mean gradient", TOTAL, **dying), fleet, "mean gradient", lost)


@pytest.mark.slow  # in `make test` a training step goes on
@pytest.mark.parametrize("rule", ["diloco", "averaging", "mean gradient"])
def test_a_trainer_goes_on_and_saves(rule, tmp_path):
    first, second, _ = jobs.run("losing_trainer.py", (1, 1, 1), rule, tmp_path, killed=[2])
    check_fit(first, second, rule, tmp_path)


def check_fit(first, second, rule, folder, *exchange):
    """What `Trainer` has done in a job in which a process ended."""
    assert first["history"] == second["history"] and len(first["history"]) == 2
    assert first["params"] == second["params"] and first["stopped"] == "epochs"
    steps = sorted(int(path.name) for path in (folder / "saved").iterdir() if path.name.isdigit())
    assert steps == [3, 6, 9, 10, 12, 15, 18, 20]  # 10 and 20 at the end of an epoch
    p, rows = {name: np.array(leaf) for name, leaf in first["params"].items()}, fitting_jobs.ROWS
    error = rows["x"] @ p["w"] + p["b"] + p["v"].sum() - rows["y"]
    np.testing.assert_allclose(first["metrics"]["error"], error.mean(), rtol=1e-4, atol=1e-6)
    resumed(rule, first, folder, *exchange)


def resumed(rule, first, folder, *exchange):
    """What three devices of one process get of the last checkpoint, in which none is missing."""
    # the last checkpoint is whole, also for a job of another size: nothing is left to train
    again = losing_trainer.trained(rule, folder, *exchange, devices=jax.devices()[:3])
    for name, values in first["params"].items():
        np.testing.assert_allclose(again["params"][name], values, rtol=1e-6)
    return again


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["int8, one pending", "fragments"])
def test_a_checkpoint_has_no_work_of_a_lost_device(rule, tmp_path):
    """It would be the first device's, and count twice."""
    first, *_ = jobs.run("losing_trainer.py", (1, 1, 1), rule, tmp_path, killed=[2])
    again = resumed(rule, first, tmp_path)
    assert any(any(left) for *left, _ in again["work"])  # a device may have none in a window
    assert not any(lost for *_, lost in again["work"])


@pytest.mark.slow
def test_the_process_of_the_first_device_ends():
    """It need not be that of the coordinator, if devices are named in another order."""
    *said, _ = jobs.run("losing_first.py", (1, 1, 1), killed=[2])
    error = (
        "ProcessLostError: process 2 of the job, which reads and writes its files, has ended. "
        "Start the job again, with resume='auto' to go on from its last checkpoint."
    )
    assert said == [[error] * 2] * 2
