"""Training in a job of two processes with two devices and one: what both must know and do alike."""

import itertools
import json
import re

import jax
import jobs
import numpy as np
import optax
import pytest
from behaviour import BATCH, FAR, ROWS
from exchanged import train as by_hand_in_numpy
from marks import slow
from reference import data, loss_fn, params

import elche_jax as elche
from elche_jax._turns import SECOND

FLEET = (2, 1)
WITHOUT_ROWS = [
    "replayed", "apart", "apart at last", "torn", "other optimizer",
    "planned_apart", "errors", "two_threads",
]  # fmt: skip
"""Scenes that one test looks at each. After the last one all exchanges are refused."""


@pytest.fixture(scope="module")
def said(request):
    """What the two processes say, by the names of the scenes."""
    scenes = [*jobs.asked(request, "scene"), *WITHOUT_ROWS]
    return jobs.run("behaviour.py", FLEET, json.dumps(scenes))


def alone(counts, averaging=None, **options):
    """The parameters that one process has after these counts on as many devices."""
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-2), devices=jax.devices()[:3],
        cadence=elche.Replay([tuple(row) for row in counts]), device_loss=True,
        averaging=averaging,
    )  # fmt: skip
    state, metrics = train.init(params()), []
    with train.windows(data(150), 4, epochs=None, **options) as windows:
        for window in windows:
            state, now = train(state, window)
            metrics.append(jax.device_get(now))
            if len(metrics) == len(counts):
                break
    return elche.unreplicate(state.params), metrics


def assert_params(got, want):
    for name, rows in got.items():
        for row in rows:
            np.testing.assert_allclose(row, want[name], rtol=1e-5, atol=1e-6)


UNEQUAL = {
    "unequal_devices": None,
    "unequal_devices, pending": elche.MeanGradient(delay=1),
    "unequal_devices, async": elche.MeanGradient(delay=1),
    "unequal_devices, host": None,
    "unequal_devices, ahead": elche.MeanGradient(delay=1),
    "unequal_devices, lanes": None,
}
PLANNED = [slow(name) if "," in name else name for name in UNEQUAL]
"""`make test` has windows pending in a replay, lanes in one process, and exchanges on the host with
devices that are late, and in the table of rules."""


@pytest.mark.parametrize("scene", PLANNED)
def test_all_processes_plan_alike(scene, said):
    first, second = (one[scene] for one in said)
    assert first["counts"] == second["counts"]
    assert first["records"] == second["records"]
    assert len(first["records"]) == len(first["counts"])


def test_what_the_first_exchange_costs_says_nothing_of_later_ones(said):
    """The second window tells it, as only then it is known."""
    cold = ["cold=True" in record for record in said[0]["unequal_devices"]["records"]]
    assert cold[:2] == [True, True] and not all(cold)


@pytest.mark.parametrize("scene", PLANNED)
def test_speeds_of_another_process_are_learned(scene, said):
    counts, busy = (said[0][scene][name] for name in ("counts", "busy"))
    assert counts[0] == [2, 2, 2]
    assert all(len(row) == 3 for row in busy)
    changed = next(at for at, row in enumerate(counts) if row != counts[0])
    # whatever the speeds were: on a busy machine they are not those that are emulated
    fastest = {int(np.argmin(row)) for row in busy[:changed]}
    given = counts[changed]
    assert fastest & {rank for rank, count in enumerate(given) if count == max(given)}


@pytest.mark.parametrize("scene", PLANNED)
def test_every_example_is_used_once_an_epoch_over_all_processes(scene, said):
    read = [one[scene]["read"] for one in said]
    assert all(read), "both have work"
    assert sorted(read[0] + read[1]) == sorted(2 * [*range(600)])


@pytest.mark.parametrize("scene", PLANNED)
def test_processes_train_as_one(scene, said):
    one = said[0][scene]
    counts = one["counts"]
    if scene.endswith("ahead"):  # it applies a mean before the window in which others do after it
        counts = counts[:-1]
    want, _ = alone(counts, UNEQUAL[scene], seed=5)
    for process in said:
        assert_params(process[scene]["params"], want)


@pytest.mark.parametrize("scene", PLANNED)
def test_no_compile_while_counts_change(scene, said):
    for process in said:
        first, last = process[scene]["misses"]
        assert first == last > 0
        counts = process[scene]["counts"]
        assert len(set(map(tuple, counts))) > 2


def test_a_replay_and_a_resumed_one_have_the_same_bits(said):
    for process in said:
        assert process["replayed"]["once"] == process["replayed"]["stopped"]


REPLAYED = [
    "replayed, pending", "replayed, gradients pending", "replayed, ahead",
    "replayed, gradients ahead",
]  # fmt: skip


# test_the_same_bits, and test_stop_and_resume_give_the_same_bits of processes
@pytest.mark.parametrize("scene", [*map(slow, REPLAYED)])
def test_what_is_pending_is_resumed_to_the_bit(scene, said):
    first, second = (process[scene] for process in said)
    for once, stopped, metrics, again, *plans in (first, second):
        assert once == stopped
        assert metrics == again
        assert plans[0] == plans[1] and len(plans[0]) == 7
    assert first[2:] == second[2:]


def test_one_lead_decides_where_they_are_not_alike(said):
    """By itself the second process would have trained with another rate."""
    for process in said:
        one = process["replayed"]
        for name, (first, *_) in said[0]["replayed"]["params"].items():
            assert all(row == first for row in one["unlike"][name])
        assert repr(one["unlike metrics"]) == repr(one["metrics"])


def test_metrics_are_those_of_all_devices(said):
    counts = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (0, 0, 3), (3, 1, 1)]
    want, metrics = alone(counts, seed=3)
    first, second = (process["replayed"] for process in said)
    assert repr(first["metrics"]) == repr(second["metrics"])  # NaN, too
    for got, now in zip(first["metrics"], metrics, strict=True):
        assert got.keys() == now.keys()
        for name, value in now.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)
    assert_params(first["params"], want)


POISONED = [
    slow("poisoned"), "poisoned, pending", slow("poisoned at last"), slow("poisoned, host"),
    slow("poisoned, ahead"),
]  # fmt: skip


@pytest.mark.parametrize("scene", POISONED)
def test_a_window_that_is_not_finite_is_an_error_everywhere(scene, said):
    first, second = (process[scene] for process in said)
    assert first == second
    assert re.search(
        r"NonFiniteError: train: .* those of window 0 .* device 2 \(.*\), microbatches 4 to 5",
        first[0],
    )


# test_windows_of_a_closed_loop_are_checked_by_all counts one, too
@pytest.mark.parametrize("scene", [slow("skipped, pending")])
def test_a_pending_window_that_is_not_finite_is_counted_once_everywhere(scene, said):
    for process in said:
        assert process[scene] == ["nothing", 1, [0, 0, 1]]


def test_replicas_of_processes_that_differ_are_found_by_all(said):
    (first, last), (second, others_last) = (process["apart"] for process in said)
    assert first == second and last == others_last
    assert first == (
        "ReplicaMismatch: train: all replicas must be bitwise equal, but after the last window "
        "that was verified those of process 1 differ from those of process 0. Most "
        "likely their optimizers differ, or the order in which they train several steps."
    )


def test_replicas_of_the_last_window_are_compared_too(said):
    for process in said:
        assert process["apart at last"] == (
            "ReplicaMismatch: train: all replicas must be bitwise equal, but after the last window "
            "that was verified those of process 1 differ from those of process 0. Most "
            "likely their optimizers differ, or the order in which they train several steps."
        )


def test_another_optimizer_in_one_process_is_found_though_nobody_asked(said):
    for process in said:
        assert process["other optimizer"] == process["apart at last"]


def test_replicas_of_one_process_that_differ_are_told_the_other(said):
    (own, last), (other, others_last) = (process["torn"] for process in said)
    assert last == others_last
    assert re.match(r"ReplicaMismatch: train: after window 2: .* leaf .key on .* differs", own)
    assert other == (
        "ReplicaMismatch: train: all replicas must be bitwise equal, but after a window those of "
        "process 0 differ."
    )


def assert_replicas(*processes):
    """The devices of all processes have the same bits."""
    for name, (copy, *_) in processes[0].items():
        assert all(row == copy for own in processes for row in own[name])


@pytest.mark.parametrize("scene", [slow("late"), "late, ahead", slow("late, DiLoCo ahead")])
def test_a_late_device_is_left_out_by_all(scene, said):
    first, second = (process[scene] for process in said)
    for name in ("counts", "records", "left_out", "loss"):
        assert first[name] == second[name]
    assert_replicas(first["params"], second["params"])
    assert first["left_out"][1] > 0 == first["left_out"][0] == first["left_out"][2]
    assert [0] in [row[1:2] for row in first["counts"]], "it gets no work while it is late"
    assert any("left_out=(1,)" in record for record in first["records"])


def test_nobody_waits_for_a_late_device_where_they_run_ahead(said):
    counts, records = (said[1]["late, ahead"][name] for name in ("counts", "records"))
    assert len(records) == len(counts) > FAR + 1
    # it has work in the windows that were planned before, and once all know that it is back
    late = [at for at, record in enumerate(records) if "left_out=(1,)" in record]
    assert late == [2, 3, 4, 5] and counts[-1][1] > 0
    assert all(row[1] == 0 for row in counts[6 : FAR + 1])
    # by hand: without its microbatches of these windows
    first = np.cumsum([0, *map(sum, counts)])
    lost = [first[at] + counts[at][0] for at in late]
    lost = [BATCH * at + i for at in lost for i in range(BATCH)]
    rows = {name: np.delete(leaf, lost, axis=0) for name, leaf in ROWS.items()}
    there = [(row[0], 0 if at in late else row[1], row[2]) for at, row in enumerate(counts)]
    want = by_hand_in_numpy(there, rows=rows, ahead=lambda pending, _: len(pending) > 1)[-1]
    for process in said:
        assert_params(process["late, ahead"]["params"], want[0])


ASKED = ["asked, ahead", slow("asked, host")]


@pytest.mark.parametrize("scene", ASKED)
def test_a_loop_may_exchange_while_windows_are_averaged(scene, said):
    """Exchanges in another order than the other process's would hang or be mixed up."""
    first, second = (process[scene] for process in said)
    assert first == second and len(first) > 9
    assert all(before != after for before, after in itertools.pairwise(first))


ENDED = ["ended_early", slow("ended_early, pending"), slow("ended_early, ahead")]


@pytest.mark.parametrize("scene", ENDED)
def test_loops_that_end_early_leave_all_with_the_same_plans(scene, said):
    first, second = (process[scene] for process in said)
    assert first == second
    assert len(first["records"]) == len(first["counts"]) == first["windows"] > 4


KEPT = [slow("kept"), "kept, pending", slow("kept, host"), slow("kept, ahead")]


@pytest.mark.parametrize("scene", KEPT)
def test_windows_of_a_closed_loop_are_checked_by_all(scene, said):
    first, second = (process[scene] for process in said)
    assert first[0] == second[0] == 1
    assert_replicas(first[1], second[1])


def test_plans_that_differ_are_an_error_everywhere(said):
    for process in said:
        assert re.match(
            "RuntimeError: train: all processes must plan the same windows, but process 1 has "
            r"a different plan for its window from process 0: here window 3 has counts \(.*\)\. ",
            process["planned_apart"],
        )


SAME = "must be the same in all processes, got {} in process 1 and {} in 0."
# of arrays, which a message cannot show
APART = "must be the same in all processes, got different values in processes 1 and 0."
DEVICES = "['cpu:0', 'cpu:1', 'cpu:2048']"
HOST = "HostExchange(timeout={}, run_ahead=False, max_overshoot=None, max_batch_diff=None)"
ERRORS = {
    "cadence": "ValueError: build_train_step: cadence "
    + SAME.format("FixedTotal(total=7)", "FixedTotal(total=6)"),
    "verify_every": f"ValueError: build_train_step: verify_every {SAME.format(2, 1)}",
    "nonfinite": "ValueError: build_train_step: nonfinite "
    + SAME.format(*(f"FinitePolicy(action='{do}', max_skips=20)" for do in ("skip", "raise"))),
    "order": "ValueError: build_train_step: devices "
    + SAME.format("['cpu:2048', 'cpu:1', 'cpu:0']", DEVICES),
    "fewer, DDP": "ValueError: DDP: devices " + SAME.format("['cpu:1', 'cpu:2048']", DEVICES),
    "params": f"ValueError: TrainStep.init: params {APART}",
    "rng": f"ValueError: TrainStep.init: rng {APART}",
    "data": f"ValueError: windows: data {APART}",
    "size": "ValueError: windows: data must be the same in all processes, got 596 examples of "
    "{'x': 'float32[3]', 'y': 'float32[]'} in process 1 and 600 examples of",
    "batch_size": f"ValueError: windows: batch_size {SAME.format(5, 4)}",
    "seed": f"ValueError: windows: seed {SAME.format(1, 0)}",
    "exchange": "ValueError: build_train_step: exchange "
    + SAME.format(HOST.format(6.0), HOST.format(5.0)),
    "bits": "ValueError: build_train_step: exchange must be None where the processes' devices do "
    "not compute the same bits, got HostExchange(",
    "loss_scale": "ValueError: build_train_step: loss_scale must be the same in all processes, got "
    "DynamicScale(",
    "trainable": "ValueError: TrainStep.init: trainable "
    + SAME.format("""frozen ["['b']", "['v']"]""", "frozen []"),
    "merge": f"ValueError: TrainStep.init: merge {SAME.format(['max'], ['mean'])}",
    "optimizer": f"ValueError: TrainStep.init: shapes of the optimizer's state {APART}",
    "metrics": f"ValueError: windows: metrics of loss_fn {SAME.format(['other'], ['own'])}",
    "again": "RuntimeError: distributed.initialize: it must be called once, but this process "
    "has joined a job before.",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, said):
    for process in said:
        assert process["errors"][name].startswith(ERRORS[name])


def test_devices_of_one_process_only(said):
    for at, process in enumerate(said):
        assert process["errors"]["devices"].startswith(
            "ValueError: build_train_step: devices must hold devices of every process of the job, "
            f"got none of process {1 - at}."
        )


def test_a_second_thread_that_trains_is_refused_in_all_processes(said):
    refused = f"RuntimeError: {SECOND}"
    for process in said:
        assert process["two_threads"] == {"second": refused, "first": refused}
