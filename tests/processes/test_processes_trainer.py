"""`Trainer` in a job of two processes: one history, one end, and the files of the first."""

import jobs
import numpy as np
import pytest
import reference
from marks import slow

FLEET = (2, 1)


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """What the two processes say, by the names of the scenes, and their folder."""
    folder, asked = tmp_path_factory.mktemp("trainer"), jobs.asked(request, "scene")
    return jobs.run("fitting_jobs.py", FLEET, folder, *asked), folder


def test_all_processes_have_the_same_history(job):
    first, second = (process["whole"] for process in job[0])
    assert first["history"] == second["history"] and len(first["history"]) == 2
    assert first["losses"][1] < first["losses"][0]
    assert first["params"] == second["params"]
    assert first["stopped"] == second["stopped"] == "epochs"


def test_the_first_process_writes_all_files(job):
    (first, second), folder = (process["whole"] for process in job[0]), job[1]
    assert {"metrics.csv", "report.html", "timeline.jsonl", "checkpoints/.lock"} <= {
        *first["files"]
    }
    assert first["own timeline"] > 20
    assert second["files"] == [] and second["own timeline"] == 0
    assert not (folder / "nothing").exists()
    header, *rows = (folder / "run" / "metrics.csv").read_text().splitlines()
    assert "loss" in header and len(rows) >= 2 + 20 // 4


def test_callbacks_run_in_all_processes_alike(job):
    for process in job[0]:
        assert process["whole"]["seen"] == list(range(20))
        assert process["whole"]["written"] == job[0][0]["whole"]["written"]
        assert [step for step, _ in process["whole"]["written"]] == [10, 20]


def test_a_run_that_was_stopped_goes_on(job):
    for process in job[0]:
        whole = process["whole"]
        # counts follow times, so only rounding differs
        np.testing.assert_allclose(whole["again"], whole["losses"], rtol=1e-5)
        for name, values in whole["params"].items():
            np.testing.assert_allclose(whole["again, params"][name], values, rtol=1e-5)


def test_one_process_stops_all(job):
    first, second = (process["stopped"] for process in job[0])
    assert first == second
    for reason in ("max_seconds", "max_windows", "callback", "stop", "early_stopping"):
        assert first[reason][0] == reason
    assert first["max_windows"][1] == 7
    # asked after window 3, told in window 4, known to all once window 6 is dispatched
    assert first["callback"][1] == 7
    assert first["stop"][1] >= 10 and len(first["stop"][2]) >= 1


def test_an_interrupt_of_one_process_ends_all_with_a_checkpoint(job):
    first, second = (process["interrupted"] for process in job[0])
    assert [first[0], second[0]] == ["interrupt", "KeyboardInterrupt"]
    assert first[1] == second[1] == 7
    assert (job[1] / "interrupted" / "7").is_dir()


def test_what_fails_in_one_process_is_an_error_in_all(job):
    (first, second), folder = (process["broken"] for process in job[0]), job[1]
    text = "RuntimeError: the callback is broken"
    assert first["callback"] == f"RuntimeError: Trainer.fit: process 1 raised {text}"
    assert second["callback"] == text
    assert first["windows"] == second["windows"] < 9
    for process in first, second:
        assert process["twice"].startswith("RuntimeError: Trainer.fit: a trainer must do one run")
        assert process["went on"] == "stop"
    assert first["writer"] == "OSError: the writer is broken"
    assert second["writer"] == f"RuntimeError: Trainer.fit: process 0 raised {first['writer']}"
    for name, want in {
        "run_dir": "ValueError: Trainer.fit: run_dir must be a folder that can be created, got ",
        "must": f"ValueError: checkpoints: {folder}/new/checkpoints must hold a whole checkpoint",
    }.items():
        assert first[name] == second[name]
        assert first[name].startswith(want)


CHECKPOINTS = (
    "Checkpoints(folder=None, every_windows=2, every_seconds=None, every_epochs=1, keep_last=3, "
    "keep_best=0, monitor='loss', mode='min', on_error='now')"
)
EVALUATION = (
    "Evaluation(metric_fn='function', batch_size=4, every_epochs=1, every_windows=None, "
    "mask_key=None)"
)
OF_ONE = {
    "run_dir": "a folder",
    "checkpoints": CHECKPOINTS,
    "evaluation": EVALUATION,
    "early_stopping": "EarlyStopping(monitor='loss', mode='min', patience=2, min_delta=0.0)",
    "max_windows": "5",
}


@pytest.mark.parametrize("name", OF_ONE)
def test_what_one_process_alone_is_to_do_is_an_error_in_all(name, job):
    for process in job[0]:
        assert process["broken"][f"own {name}"] == (
            f"ValueError: Trainer.fit: {name} must be the same in all processes, got None in "
            f"process 1 and {OF_ONE[name]} in 0."
        )


# test_one_process_stops_all, and checkpoints of devices that run ahead in test_processes_saving.py
@pytest.mark.parametrize("scene", [slow("ahead")])
def test_devices_that_run_ahead_are_stopped_and_saved_alike(scene, job):
    first, second = (process[scene] for process in job[0])
    for name in ("history", "stopped", "params"):
        assert first[name] == second[name]
    assert first["stopped"] == ["callback", 17] and first["saved"]
    assert len(first["history"]) >= 1 and "'error'" in first["history"][0]


def test_model_states_of_their_own_are_joined_over_all_processes(job):
    first, second = (process["kept_apart"] for process in job[0])
    assert first["joined"] == second["joined"] and first["error"] == second["error"]
    own = {name: first["own"][name] + second["own"][name] for name in first["own"]}
    assert len({str(row) for row in own["mean"]}) == 3, "each of three devices has its own"
    np.testing.assert_allclose(first["joined"]["mean"], np.mean(own["mean"], axis=0), rtol=1e-6)
    np.testing.assert_allclose(first["joined"]["peak"], np.mean(own["peak"]), rtol=1e-6)
    rows = reference.data(60)["x"][:50]
    want = ((rows - np.mean(own["mean"], axis=0)).sum(axis=1) ** 2).mean()
    np.testing.assert_allclose(first["error"], want, rtol=1e-5)


def test_an_evaluation_is_of_all_processes(job):
    (first, second), folder = (process["evaluated"] for process in job[0]), job[1]
    assert first["history"] == second["history"] and first["stopped"] == "early_stopping"
    rows = {name: leaf[:50] for name, leaf in reference.data(60).items()}
    p = {name: np.asarray(leaf, np.float64) for name, leaf in first["params"].items()}
    guess = rows["x"] @ p["w"] + p["b"] + p["v"].sum()
    want = ((guess - rows["y"]) ** 2).mean()
    np.testing.assert_allclose(first["errors"][-1], want, rtol=1e-5)
    saved = [path.name for path in (folder / "best").iterdir() if path.name.isdigit()]
    assert saved, "the newest checkpoint, which is also the best"
