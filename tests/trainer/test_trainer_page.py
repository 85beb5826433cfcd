"""`docs/training.md`: its pieces make one script, which runs as it stands."""

import re
import sys
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DEVICES = 'import jax; jax.config.update("jax_num_cpu_devices", 4)\n'


@pytest.mark.slow  # tests/trainer shows each of its pieces
def test_the_page_runs(tmp_path):
    assert len(SCRIPTS) == 5
    script = "\n".join([DEVICES, *SCRIPTS])
    done = children.run(sys.executable, "-W", "error", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reason, loss = done.stdout.split()[:2]
    assert reason in ("epochs", "early_stopping") and float(loss) < 1.5
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sines", "best", "mine"}
    kept = {path.name for path in (tmp_path / "runs" / "sines").iterdir()}
    assert kept == {"checkpoints", "metrics.csv", "report.html", "timeline.jsonl", ".run.lock"}
    state = next((tmp_path / "runs" / "mine").glob("[0-9]*")) / "state"
    read = "import sys, orbax.checkpoint as ocp\nprint(sorted(ocp.PyTreeCheckpointer()"
    read += f".restore({str(state)!r})['params']))"
    done = children.run(sys.executable, "-c", read)
    assert (done.returncode, done.stdout) == (0, "['a', 'b']\n")
