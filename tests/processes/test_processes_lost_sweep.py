"""Evaluation and `predict` in a job in which a process ends, against one process."""

import jax
import jobs
import numpy as np
import pytest
from evaluated import BATCH, ROWS, SIZE, W, apply_fn, metric_fn

import elche_jax as elche

LOST = "process 2 (device 2) ended before window {} was complete; 2 of 3 devices are left."
pytestmark = pytest.mark.slow  # `make test` has one kill, while a job trains
MOMENTS = [
    ("evaluate", "read", 30), ("evaluate", "read", 1), ("predict", "read", 30),
    ("evaluate", "told", 1), ("evaluate", "told", 2), ("predict", "told", 3),
    ("evaluate", "told", 4),
]  # fmt: skip


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], np.asarray(value, np.float64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("what", "moment", "number"), MOMENTS)
def test_the_others_share_out_the_rows(what, moment, number):
    first, second, _ = jobs.run("losing_sweep.py", (1, 1, 1), what, moment, number, killed=[2])
    for name in first.keys() - {"read"}:
        assert first[name] == second[name], name  # metrics to the bit
    (said,) = first["said"]  # not in every call that follows
    assert said.endswith(LOST.partition("{}")[2])
    devices = jax.devices()[:2]
    metrics = elche.build_eval_step(metric_fn, devices=devices)(W, ROWS, BATCH)
    outputs = elche.predict(apply_fn, W, ROWS, BATCH, devices=devices)
    assert_close(first["during"], metrics if what == "evaluate" else outputs)
    for name in ("after", "new"):
        assert_close(first[name], metrics)
    assert_close(first["predicted"], outputs)
    whole = {name: row[: SIZE // BATCH * BATCH] for name, row in ROWS.items()}
    want = elche.build_eval_step(metric_fn, devices=devices)(W, whole, BATCH)
    assert_close(first["batches"], want)
    if moment == "told" and number > 1:  # all was read of what was not told, and read again
        assert first["read"] + second["read"] > SIZE * 2 / 3
    assert first["counts"][2] == 0 and sum(first["counts"]) == 8
    assert first["recording"] == (
        f"ProcessLostError: build_eval_step: {LOST.format(0)} A recording needs all devices."
    )
    for name in ("by hand", "reduced"):
        assert first[name] == (
            "ProcessLostError: process 2 of the job has ended. Training, evaluation and predict go "
            "on without it, if they can; what is timed or reduced by hand needs all."
        )


def test_an_iterable_cannot_be_evaluated_again():
    first, second, _ = jobs.run("losing_sweep.py", (1, 1, 1), "iterable", "told", 4, killed=[2])
    assert first == second
    assert first["error"] == (
        f"ProcessLostError: build_eval_step: {LOST.format(2)} The data of a window must be read "
        "again, which an iterable does not allow. Resume from a checkpoint; iterables must have "
        "the same length in every process."
    )
