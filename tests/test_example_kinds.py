"""`examples/06_mixed_kinds.py` runs on two kinds of devices, and learns."""

import re
import sys

import children
import pytest


@pytest.mark.slow  # tests/train/test_train_lanes.py trains on several kinds, too
def test_the_example_trains_on_two_kinds(twins):
    example = children.ROOT / "examples" / "06_mixed_kinds.py"
    done = children.run(sys.executable, example, "--short", env={"JAX_PLATFORMS": "cpu,twin"})
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert re.match(r"elche: 3 devices \(2 kinds\) \| .* \| cpu$", first)
    assert "(twin)" in done.stdout or "(NVIDIA" in done.stdout
    found = re.fullmatch(
        r"loss [\d.]+, test accuracy ([\d.]+)%, counts \((\d+), (\d+), (\d+)\)", last
    )
    assert found and float(found[1]) > 50
    assert sum(map(int, found.groups()[1:])) == 16
