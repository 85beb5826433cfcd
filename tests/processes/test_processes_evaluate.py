"""Evaluation, `predict` and `DDP` in a job of several processes, against one process and NumPy."""

import jax
import jobs
import numpy as np
import optax
import pytest
from evaluated import BATCH, ROWS, SIZE, STATE, W, apply_fn, masked_fn, metric_fn
from marks import slow
from reference import data, loss_fn, params

import elche_jax as elche

FLEETS = [(2, 1), slow((1, 3)), slow((1, 1, 1))]


@pytest.fixture(scope="module", params=FLEETS, ids=lambda fleet: "+".join(map(str, fleet)))
def said(request):
    """What the processes say, by the names of the scenes."""
    asked = jobs.asked(request, "scene")
    return jobs.run("evaluated.py", request.param, *asked)


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], np.asarray(value, np.float64), rtol=1e-6, atol=1e-7)


def in_all(said, scene, *names):
    """What all processes say alike, to the bit."""
    for name in names:
        for process in said[1:]:
            assert process[scene][name] == said[0][scene][name]
    return said[0][scene]


def test_metrics_are_those_of_one_process(said):
    got = in_all(said, "evaluated", "first", "again", "masked", "state", "few", "batches")
    devices = jax.devices()[:3]
    want = elche.build_eval_step(metric_fn, devices=devices)(W, ROWS, BATCH)
    assert_close(got["first"], want)
    assert_close(got["again"], want)
    assert_close(got["state"], want)
    masked = elche.build_eval_step(masked_fn, devices=devices)
    want = masked(W, ROWS, BATCH, model_state=STATE, mask_key="mask")
    assert_close(got["masked"], want)
    x = ROWS["x"].astype(np.float64)
    np.testing.assert_allclose(got["masked"]["error"], 3 * (x @ W["w"]).mean(), rtol=1e-6)
    for name in ("few", "batches"):
        np.testing.assert_allclose(got[name]["wide"], 2 * x[:BATCH].mean(0), rtol=1e-6)


def test_all_processes_plan_an_evaluation_alike(said):
    got = in_all(said, "evaluated", "counts", "records", "planned", "report")
    assert sum(map(sum, got["counts"])) == -(-SIZE // BATCH)
    assert all(len(row) == len(got["planned"]) for row in got["counts"])


@pytest.mark.parametrize("scene", ["evaluated", "predicted"])
def test_every_example_is_read_in_one_process(scene, said):
    # the last microbatch, of 3 examples, is filled up with one of them
    read = [number for process in said for number in set(process[scene]["read"])]
    assert sorted(read) == list(range(SIZE))
    assert sum(len(process[scene]["read"]) for process in said) == -(-SIZE // BATCH) * BATCH


def test_outputs_are_in_order_in_every_process(said):
    got = in_all(said, "predicted", "out", "few", "small")
    want = elche.predict(apply_fn, W, ROWS, BATCH, devices=jax.devices()[:3])
    assert_close(got["out"], want)
    assert_close(got["small"], want)
    assert_close(got["few"], {name: leaf[:2] for name, leaf in want.items()})
    assert got["out"]["index"] == list(range(SIZE)) and got["dtype"] == "bfloat16"


def test_values_larger_than_a_piece_are_exchanged(said):
    want = [np.arange(400_000 + 50_000 * at) for at in range(len(said))]
    for process in said:
        assert process["big"] == [[len(one), int(one.sum())] for one in want]


OTHERS = "{}: every process must get through it, but process 1 raised {}"
SAME = "must be the same in all processes, got different values in processes 1 and 0."
ERRORS = {
    "metric_fn": ("build_eval_step", "KeyError: 'no such name'"),
    "data": ("build_eval_step", "OSError: the disk is gone"),
    "predict": ("predict", "OSError: the disk is gone"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_one_process_is_raised_by_all(name, said):
    where, error = ERRORS[name]
    for at, process in enumerate(said):
        want = error if at == 1 else f"RuntimeError: {OTHERS.format(where, error)}"
        assert process["failing"][name] == want


def test_what_differs_between_processes_is_named(said):
    for process in said:
        found = process["failing"]
        assert found["params"] == f"ValueError: build_eval_step: params {SAME}"
        size = len(ROWS["x"])
        assert found["rows"].startswith(
            "ValueError: build_eval_step: data must be the same in all processes, got "
            f"{size - 1} examples of {{"
        )
        assert f"in process 1 and {size} examples of {{" in found["rows"]
        assert found["batch_size"] == (
            "ValueError: build_eval_step: batch_size must be the same in all processes, got 5 in "
            "process 1 and 4 in 0."
        )


def test_errors_of_all_processes(said):
    for at, process in enumerate(said):
        found, other = process["failing"], int(at == 0)
        assert found["empty"] == "ValueError: data must hold at least one example, got 0."
        for name, where in (("devices", "build_eval_step"), ("DDP", "DDP")):
            assert found[name].startswith(
                f"ValueError: {where}: devices must hold devices of every process of the job, got "
                f"none of process {other}."
            )
        assert found["good"] == "nothing"  # after all these


def test_reductions_by_hand(said):
    for process in said:
        got = process["by_hand"]
        every = {name: np.array(x) for name, x in got["every"].items()}
        size, own = len(every["a"]), len(got["ranks"])
        weighings = {"mean": [1] * size, "weighted": got["counts"], "unlike": got["counts"]}
        for name, weights in weighings.items():
            for leaf, x in every.items():
                want = np.tensordot(np.array(weights, float), x, 1) / sum(weights)
                rows = [want] * own
                np.testing.assert_allclose(got[name][leaf], rows, rtol=1e-6, atol=1e-7)
        assert got["params"] == {name: [x[0].tolist()] * own for name, x in every.items()}
        assert got["synced"]["n"] == [0] * own and got["sign"]
        assert got["key"] == [0, 0]
        want = every["a"][got["ranks"]] ** 2 + np.reshape(got["ranks"], (-1, 1))
        np.testing.assert_allclose(got["map"], want, rtol=1e-6)
        assert got["wrapped"]["w"] == [[rank] * 2 for rank in got["ranks"]]
    for name in ("mean", "weighted", "unlike"):
        for process in said[1:]:
            for leaf, rows in process["by_hand"][name].items():
                assert rows[0] == said[0]["by_hand"][name][leaf][0]


def test_a_window_by_hand_is_timed_alike_in_all_processes(said):
    got = in_all(said, "by_hand", "reports", "plan")
    compiled = [compiled for _, compiled in got["reports"]]
    assert compiled[0] and not compiled[-1]
    assert len(got["plan"]) == len(got["counts"])
    assert sum(got["plan"]) > 2 * len(got["plan"])  # speeds are known


MESSAGES = {
    "torn": "ReplicaMismatch: check_replicas: all replicas must be bitwise equal, but leaf ['w'] "
    "on cpu:2048 of process 1 differs from cpu:0 of process 0.",
    "leaves": "ValueError: check_replicas: tree must have the same leaves in all processes, got "
    "different ones in process 1.",
    "axis": "ValueError: DDP.map: fn: must use no named axis, as devices of several processes have "
    "none in common, got 'devices'. Exchange outside of it, with "
    "DDP.weighted_all_reduce_gradients, and pass ranks as np.array(ddp.ranks).",
}


def test_errors_by_hand(said):
    world = sum(len(process["by_hand"]["ranks"]) for process in said)
    widest = max(range(len(said)), key=lambda at: len(said[at]["by_hand"]["ranks"]))
    for at, process in enumerate(said):
        found, own = process["by_hand"], len(process["by_hand"]["ranks"])
        for name, message in MESSAGES.items():
            assert found[name] == message
        assert found["batch_counts"] == (
            "ValueError: DDP.weighted_all_reduce_gradients: batch_counts must have one entry per "
            f"device ({world}), got 1."
        )
        assert f"one entry per device ({own})" in found["stacked"]
        assert found["replicas"] == (
            f"ValueError: DDP.wrap: replicas must have one entry per device ({own}), got "
            f"{world + 1}."
        )
        if len(said[widest]["by_hand"]["ranks"]) > 1:
            assert found["own torn"].startswith(
                "ReplicaMismatch: check_replicas: all replicas must be bitwise equal, but leaf "
                "['w'] on cpu:"
            )
            assert found["own torn"].endswith(f" in 1 of 1 elements. In process {widest}.")
        told = "ValueError: check_replicas: every leaf must be a stacked array"
        others = OTHERS.format("check_replicas", told)
        assert found["not stacked"].startswith(told if at == 1 else f"RuntimeError: {others}")


# test_what_devices_that_run_ahead_have_pending_is_in_their_next_delivery averages, too
@pytest.mark.parametrize("scene", [slow("averaged")])
def test_average_between_two_exchanges(scene, said):
    if scene not in said[0]:
        pytest.skip("the counts are for three devices, this job has another number")
    counts = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2)]
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.05, momentum=0.9), devices=jax.devices()[:3], device_loss=True,
        averaging=elche.DiLoCo(optax.sgd(0.7), fragments=2), cadence=elche.Replay(counts),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(data(150), BATCH, shuffle=False, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 2:
                break
    got = in_all(said, scene, *params())
    for name, leaf in train.average(state).items():
        np.testing.assert_allclose(got[name], leaf, rtol=1e-5, atol=1e-6)


# test_advice_measure.py in one process, and test_all_processes_plan_alike
@pytest.mark.parametrize("scene", [slow("advised")])
def test_all_processes_get_the_advice_of_the_job(scene, said):
    if scene not in said[0]:
        pytest.skip("the speeds are those of three devices, this job has another number")
    assert all(process[scene] == said[0][scene] for process in said)
    advice = said[0][scene]["advice"]
    together = [device["together_ms"] for device in advice["devices"]]
    # emulated devices take at least this long; alone, the times of steps are taken off
    assert all(ms >= least for ms, least in zip(together, [4.0, 4.0, 12.0], strict=True)), together
    assert all(device["solo_ms"] > 0 for device in advice["devices"])
    *fast, last = advice["elche"]["counts"]
    assert last < min(fast)
    assert advice["batch_size"] == 4 and advice["epoch"] == 1024
    assert advice["local_steps"] is None and "link" not in said[0][scene]["text"]
