"""`docs/training.md`: its pieces make one script, which runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DEVICES = 'import jax; jax.config.update("jax_num_cpu_devices", 4)\n'


def test_the_page_runs(tmp_path):
    assert len(SCRIPTS) == 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join([DEVICES, *SCRIPTS])],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reason, loss = done.stdout.split()[:2]
    assert reason in ("epochs", "early_stopping") and float(loss) < 1.5
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"sines", "mine"}
    kept = {path.name for path in (tmp_path / "runs" / "sines").iterdir()}
    assert kept == {"checkpoints", "metrics.csv", "report.html", "timeline.jsonl"}
    state = next((tmp_path / "runs" / "mine").glob("[0-9]*")) / "state"
    read = "import sys, orbax.checkpoint as ocp\nprint(sorted(ocp.PyTreeCheckpointer()"
    read += f".restore({str(state)!r})['params']))"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout == "['a', 'b']\n"
