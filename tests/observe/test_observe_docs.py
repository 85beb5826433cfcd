"""What the page on observing shows: it runs as written, and leaves the files it names."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import children
import pytest

from elche_jax.observe.events import EVENTS
from elche_jax.observe.run import read_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observing.md").read_text()
DEVICES = 'import jax; jax.config.update("jax_num_cpu_devices", 4)\n'


@pytest.mark.slow  # tests/observe shows each of its pieces
def test_the_code_runs_in_order(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 8
    script = "\n".join([DEVICES, *blocks])
    done = children.run(sys.executable, "-W", "error", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"epoch 1 of 1: loss [\d.]+\n", done.stderr)
    assert "of the limit" in done.stdout
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "timeline.jsonl", "report.html", "trace.json.gz", "metrics.csv", "tensorboard",
    }  # fmt: skip
    run = read_run(tmp_path / "run")
    assert len(run.devices) == 4 and len(run.evaluations) == 1 and len(run.losses) > 1


def test_the_table_of_events_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == {
        name: kind.__name__ for name, kind in EVENTS.items()
    }
    for name, _, listed in rows:
        names = [field.name for field in fields(EVENTS[name]) if field.name != "at"]
        assert re.findall(r"`(\w+)`", listed) == names
