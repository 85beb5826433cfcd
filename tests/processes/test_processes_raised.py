"""Jobs in which one process raises in its loop: the others are told, at once."""

import json
import sys
from pathlib import Path

import children
import jobs
import pytest
from marks import slow

HOW = {
    "data": (1, "raised OSError: the disk is gone"),
    "own code": (1, "raised ValueError: a mistake"),
    "own code, without with": (1, "left it before its end"),
    "data, Trainer": (1, "raised OSError: the disk is gone"),
    "data, then sys.exit": (1, "raised OSError: the disk is gone"),
    "exit": (3, "raised SystemExit: 3"),
    "exit, without with": (3, "left it before its end"),
    "break": (0, "left it before its end"),
    "break after an evaluation": (0, "left it before its end"),
    "loss": (1, "raised KeyError: 'no such name'"),
    "step": (1, "raised ValueError: train: state must be replicated over the 1 devices"),
}


OF_FIRST = ("data", "exit", "exit, without with", "break", "loss")
CASES = [*((1, how) for how in HOW), *((0, how) for how in OF_FIRST)]
QUICK = 0, "data"
"""By the process with the coordinator; that of another one reaches the first in the job of
`test_what_fails_in_one_process_is_an_error_in_all`."""


@pytest.mark.parametrize(("who", "how"), [row if row == QUICK else slow(*row) for row in CASES])
def test_an_error_of_one_process_reaches_the_others(who, how):
    code, error = HOW[how]
    fleet = (1, 1, 1) if how == "data" else (1, 1)
    others = jobs.outcomes("raising.py", fleet, how, who)
    left, _, _ = others.pop(who)
    assert left == code
    for ended, out, err in others:  # and not after the timeouts, which are longer than a test
        assert ended == 0, err
        said = json.loads(out.strip().splitlines()[-1])
        assert said["processes"] == [who]
        rule = f"train: every process of the job must get through its loop, but process {who} "
        assert said["error"].startswith(rule + error)
        assert "what to do" not in said["error"], "one line"
        assert said["error"].endswith(
            "Start the job again, with resume='auto' to go on from its last checkpoint."
        )


# test_an_error_of_one_process_reaches_the_others
@pytest.mark.parametrize("how", [slow("all"), slow("all at the start")])
def test_an_error_of_all_processes_is_that_of_each(how):
    """Also if the first one, with which JAX's coordinator ends, is quicker than the others."""
    for code, _, err in jobs.outcomes("raising.py", (1, 1), how, -1):
        assert code == 1 and "ValueError: a mistake" in err
        assert "the JAX distributed service detected fatal errors" not in err


def test_processes_that_find_nothing_to_do_end_at_once():
    """Without a device of JAX: who asked for one would wait minutes for those that have left."""
    for code, out, err in jobs.outcomes("raising.py", (1, 1), "nothing to do"):
        assert (code, out) == (0, "") and "Traceback" not in err


@pytest.mark.slow  # the exchange takes five seconds
def test_one_that_leaves_its_loop_and_goes_on_is_in_another_call():
    for _, out, err in jobs.outcomes("raising.py", (1, 1), "another call", 1):
        # the later one may know already that the other one left with this error
        assert "one that leaves its loop before the others, or that evaluates or" in out + err


PROGRAM = Path(__file__).parent / "blaming.py"


# test_because_of_whom_a_process_leaves, and test_the_one_whose_error_ended_another_is_blamed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 7, ["process 1 ended with exit code 7"]),
        (
            ["--on-failure", "continue"], 1,
            [
                "process 1 ended with exit code 7",
                "process 0 ended with exit code 1 because of process 1",
            ],
        ),
    ],
)  # fmt: skip
def test_a_launcher_names_the_one_that_raised_not_the_one_that_ended_first(
    options, code, said, tmp_path
):
    done = children.run(
        sys.executable, "-m", "elche_jax", "launch", "-n", "2", "--cpu-devices", "1",
        "--grace", "60", *options, PROGRAM, cwd=tmp_path,
        env={"PYTHONPATH": ":".join(map(str, jobs.PATHS))},
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("elche-jax launch: ")]
    assert [line.removeprefix("elche-jax launch: ") for line in lines] == said, done.stderr
    assert done.returncode == code
