"""Jobs in which one process raises in its loop: the others are told, at once."""

import json

import jobs
import pytest
from marks import slow

HOW = {
    "data": (1, "raised OSError: the disk is gone"),
    "own code": (1, "raised ValueError: a mistake"),
    "own code, without with": (1, "left it before its end"),
    "data, then sys.exit": (1, "raised OSError: the disk is gone"),
    "exit": (3, "raised SystemExit: 3"),
    "exit, without with": (3, "left it before its end"),
    "break": (0, "left it before its end"),
    "loss": (1, "raised KeyError: 'no such name'"),
    "step": (1, "raised ValueError: train: state must be replicated over the 1 devices"),
}


@pytest.mark.parametrize("how", [next(iter(HOW)), *map(slow, [*HOW][1:])])
def test_an_error_of_one_process_reaches_the_others(how):
    code, error = HOW[how]
    *others, (left, _, _) = jobs.outcomes("raising.py", (1, 1, 1), how, 2)
    assert left == code
    for ended, out, err in others:  # and not after the timeouts, which are longer than a test
        assert ended == 0, err
        said = json.loads(out.strip().splitlines()[-1])
        assert said["processes"] == [2]
        rule = "train: every process of the job must get through its loop, but process 2 "
        assert said["error"].startswith(rule + error)
        assert said["error"].endswith(
            "Start the job again, with resume='auto' to go on from its last checkpoint."
        )


@pytest.mark.slow
def test_an_error_of_the_first_process_ends_the_job():
    """JAX's coordinator ends with it. The others say so, or JAX does, which ends them."""
    (code, _, said), *others = jobs.outcomes("raising.py", (1, 1, 1), "own code", 0)
    assert code == 1 and "ValueError: a mistake" in said
    for _, out, err in others:
        assert "process 0, which holds JAX's coordinator, ended" in out + err or (
            "the JAX distributed service detected fatal errors" in err
        )
