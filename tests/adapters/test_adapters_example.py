"""`examples/03_nnx.py` runs, learns, and goes on from its checkpoints."""

import re
import sys

import children
import pytest

EXAMPLE = children.ROOT / "examples" / "03_nnx.py"


def run(folder, *args):
    return children.run(sys.executable, EXAMPLE, "--folder", folder, *args)


@pytest.mark.slow  # docs/flax.md trains, test_adapters_nnx and test_checkpoint_resume go on
def test_the_example_learns_and_resumes(tmp_path):
    first = run(tmp_path, "--devices", "2", "--epochs", "1")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("1 epochs, test accuracy ")
    second = run(tmp_path, "--devices", "2", "--epochs", "2", "--resume")
    assert second.returncode == 0, second.stderr
    assert "epoch 1 of 2" not in second.stderr, "the first epoch is not trained again"
    found = re.fullmatch(r"2 epochs, test accuracy ([\d.]+)%\n", second.stdout)
    assert found and float(found[1]) > 80


@pytest.mark.slow  # only `make test-all` runs this example
def test_bad_arguments(tmp_path):
    done = run(tmp_path, "--devices", "0")
    assert (done.returncode, done.stdout) == (2, "")
    message = "argument --devices: must be an integer from 1 to 64, got '0'"
    assert done.stderr.splitlines()[-1] == f"03_nnx.py: error: {message}"
