"""Mistakes in joining a job, each in a process of its own: one joins once."""

import sys

import children
import pytest

JOIN = "import elche_jax as elche, jax; {}; elche.distributed.initialize({})"
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "localhost:1234"}
VARIABLES = "JAX_COORDINATOR_ADDRESS, ELCHE_NUM_PROCESSES and ELCHE_PROCESS_ID"


@pytest.mark.parametrize(
    ("before", "arguments", "env", "said"),
    [
        (
            "pass", "", ADDRESS,
            "ValueError: distributed.initialize: coordinator_address, num_processes, process_id "
            "must be given together, got none for num_processes, process_id. Or leave out all of "
            f"them and set {VARIABLES}.",
        ),
        (
            "jax.devices()", "'localhost:1234', 2, 0", {},
            "RuntimeError: distributed.initialize: it must be called before JAX is used, but a "
            "backend is running. Call it first thing, before jax.devices() or any array.",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_or_too_late_is_said(before, arguments, env, said):
    done = children.run(sys.executable, "-c", JOIN.format(before, arguments), env=env)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == said
