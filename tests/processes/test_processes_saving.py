"""Checkpoints of jobs of several processes: what resumes, and what the processes do alike."""

import itertools
import random
import time

import jax
import jobs
import numpy as np
import pytest
import saving
from marks import slow
from waits import eventually

import elche_jax as elche
from elche_jax._processes import MET

FLEET = (2, 1)
RULES = [slow("mean"), "local", slow("diloco"), slow("late")]
"""As with "diloco", every device has an optimizer of its own with "local"; the mean of gradients is
stopped and goes on in `coverage` and `unreported`, too; test_checkpoint_resume.py has windows that
are pending on the host, as with "late"."""


def alone(folder, rules):
    """Halves of runs of one process with three devices, and their other halves."""
    wholes = {}
    for rule in rules:
        train = saving.build(rule, devices=jax.devices()[:3])
        saving.run(train, folder / rule, saving.STOP)
        state, _ = saving.run(train, folder / f"{rule}-once", saving.LAST)
        wholes[rule] = saving.said_of(train, state)
    return wholes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the job."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def wholes(request, place):
    """What runs of one process with three devices become; the job finds halves of them."""
    return alone(place / "alone", jobs.asked(request, "half"))


@pytest.fixture(scope="module")
def job(request, place, wholes):
    """What the two processes say, by the names of the scenes, and their folder."""
    # other scenes look at what it has saved
    rules = sorted({"local", *jobs.asked(request, "rule")})
    scenes = jobs.asked(request, "scene")
    return jobs.run("saving.py", FLEET, "straight", place, *rules, *scenes), place


def assert_params(got, want):
    """Compares the devices that both have."""
    ranks = [rank for rank in got["ranks"] if rank in want["ranks"]]
    assert ranks
    for name in got["params"]:
        values, wanted = (
            [said["params"][name][said["ranks"].index(rank)] for rank in ranks]
            for said in (got, want)
        )
        np.testing.assert_allclose(values, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_stop_and_resume_give_the_same_bits(rule, job):
    for process in job[0]:
        one = process["straight"][rule]
        assert one["cursor"] == saving.STOP
        assert one["stopped"] == one["once"]


@pytest.mark.parametrize("rule", RULES)
def test_one_process_goes_on_with_a_checkpoint_of_two(rule, job):
    said, folder = job
    train = saving.build(rule, devices=jax.devices()[:3])
    state, cursor = saving.run(train, folder / rule, saving.LAST, "must")
    assert cursor.window == saving.STOP
    got, wholes = saving.said_of(train, state), [one["straight"][rule]["once"] for one in said]
    assert_params(got, wholes[0])
    if rule != "diloco":  # XLA may round its outer optimizer otherwise, in another program
        assert got["bits"] == [bits for whole in wholes for bits in whole["bits"]]
    assert got["counts"] == [tuple(row) for row in saving.COUNTS]
    opt_state = jax.tree.leaves(state.opt_state)
    alike = [np.array_equal(leaf[0], leaf[1]) for leaf in map(np.asarray, opt_state)]
    assert all(alike) == (rule == "mean")


@pytest.mark.parametrize("half", RULES)
def test_two_processes_go_on_with_a_checkpoint_of_one(half, job, wholes):
    for process in job[0]:
        got, whole = process["resumed"][half], wholes[half]
        assert_params(got, whole)
        assert got["counts"] == [list(row) for row in whole["counts"]]


@pytest.mark.further  # a start of three processes; test_processes_elastic.py has fewer go on, too
@pytest.mark.parametrize("rule", [slow("local")])  # the same as with a checkpoint of one
def test_two_processes_go_on_with_a_checkpoint_of_three(rule, job, tmp_path):
    jobs.run("saving.py", (1, 1, 1), "half", tmp_path, rule)
    processes = jobs.run("saving.py", FLEET, "resumed", tmp_path, rule)
    for process, before in zip(processes, job[0], strict=True):
        assert_params(process["resumed"][rule], before["straight"][rule]["once"])


def test_every_example_once_over_stop_and_resume(job):
    read = [process["coverage"] for process in job[0]]
    assert all(read), "both have work"
    assert sorted(read[0] + read[1]) == list(range(saving.EXAMPLES))


@pytest.mark.parametrize("scene", [slow("ahead")])  # "late" is stopped and goes on, too
def test_devices_that_run_ahead_go_on_with_what_was_pending(scene, job):
    error = "ValueError: TrainStep.restore_run: pending must be the same in all processes, got "
    for once, stopped, said in (process[scene] for process in job[0]):
        assert stopped == once
        assert said.startswith(error)


def test_the_clock_of_the_first_process_decides_for_all(job):
    (saved, written), others = (process["timed"] for process in job[0])
    assert [saved, written] == others
    # asked after window 0, told in window 1, known to all two windows later
    assert saved[0] == 3 and len(saved) > 1
    assert saved[0] + 1 in written, "all know what is on disk"


def test_only_what_is_on_disk_counts_as_written(job):
    """Not the next one either, which is being written when all learn of the first."""
    assert [process["failing"] for process in job[0]] == [[None] * 5 + [3] * 5] * 2


def test_all_end_where_one_is_asked_to_start_again(job):
    # told in window 3, known to all two windows later, after which all have saved
    assert [process["again"] for process in job[0]] == [[5, 6, 75, 6]] * 2


def test_a_full_disk_of_the_first_process_is_an_error_everywhere(job):
    said, folder = job
    full = "OSError: [Errno 28] No space left on device. Fix that, or use another folder."
    for process in said:
        for when in ("now", "end"):
            text, last = process["full"][when]
            where = f"checkpoints: {folder / when} must take checkpoints"
            assert text == f"CheckpointError: {where}, but {full}"
            assert last == said[0]["full"][when][1]
    assert said[0]["full"]["now"][1] < said[0]["full"]["end"][1] == 19


def test_the_window_before_a_stop_is_reported_after_it(job):
    """With a window pending its metrics come one window later: those of all devices."""
    losses = [
        saving.loss_fn(saving.params(), {name: leaf[at : at + saving.BATCH] for name, leaf in
                                         saving.ROWS.items()}, None)
        for at in range(0, saving.EXAMPLES, saving.BATCH)
    ]  # fmt: skip
    ends = np.cumsum([0, *map(sum, saving.COUNTS)])
    want = [np.mean(losses[at:end]) for at, end in itertools.pairwise(ends[:-1])]
    for process in job[0]:
        (none, no_weight), *rest = process["unreported"]
        assert np.isnan(none) and no_weight == 0
        got, weights = zip(*rest, strict=True)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert weights == tuple(map(sum, saving.COUNTS[:-1]))


ERRORS = {
    "must": "ValueError: checkpoints: {}/none must hold a whole checkpoint with resume='must'",
    "never": "ValueError: checkpoints: {}/local must be empty with resume='never', got a checkp",
    "later": "ValueError: checkpoints: {}/once-local must hold no checkpoint of the window to",
    "intervals": "ValueError: Checkpointer: checkpoints must be the same in all processes, got "
    "Checkpoints(folder=None, every_windows=3, ",
    "folder": "OSError: checkpoints: {}/file/folder must be readable and writable, but Not",
    "best": "ValueError: checkpoints: {}/best must hold a checkpoint with a score of 'loss', got",
}


@pytest.mark.parametrize("name", ["calls", "calls of one shape"])
def test_processes_in_other_calls_are_told_so(name, job):
    """By gloo one of them would be aborted, or both would read what they do not expect."""
    for at, process in enumerate(job[0]):
        assert process["errors"][name].endswith(f"RuntimeError: {MET.format(1 - at, at)}")


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, job):
    said, folder = job
    for process in said:
        assert process["errors"][name].startswith(ERRORS[name].format(folder))


@pytest.mark.slow  # test_kills kills a process that saves
def test_a_job_that_is_killed_leaves_whole_checkpoints(tmp_path):
    with jobs.started("saving.py", FLEET, "endless", tmp_path):
        eventually(lambda: [*tmp_path.glob("[2-9]")], 120)
        time.sleep(random.uniform(0, 0.5))  # at any moment of writing: what is held is for all
    train = saving.build(cadence=elche.FixedTotal(3), devices=jax.devices()[:3])
    with elche.Checkpointer(train, elche.Checkpoints(tmp_path)) as saver:
        state, cursor = saver.restore(train.init(saving.params()), "must")
    assert cursor.window == int(np.asarray(state.step)[0]) >= 2
    assert not list(tmp_path.glob("damaged*"))
