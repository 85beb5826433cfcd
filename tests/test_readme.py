"""What README and the other pages show: it runs, and what they name exists."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

import elche_jax as elche

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
DEVICES = 'import jax; jax.config.update("jax_num_cpu_devices", {})\n'


def page_name(path):
    return path.relative_to(ROOT).as_posix()


def test_scripts_of_the_readme_run_and_the_devices_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    losses = []
    for devices in (1, 4):
        folder = tmp_path / str(devices)  # each has runs of its own
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", "\n".join([DEVICES.format(devices), *SCRIPTS])],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "of the limit" in done.stdout
        losses.append(float(re.match(r"loss ([\d.]+)", done.stdout)[1]))
    assert losses[0] < 0.3
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_there_are_scripts():
    assert len(SCRIPTS) >= 3


def test_snippets_of_the_numerics_page_run():
    """Each with what it takes for granted: a loss, an optimizer, optax and the library."""
    page = (ROOT / "docs" / "numerics.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        names = {
            "elche": elche,
            "optax": optax,
            "loss_fn": lambda params, batch, rng: (batch["x"] * params["w"]).mean(),
            "tx": optax.sgd(0.1),
            "x": np.ones(300),
            "batch_size": 4,
        }
        exec(snippet, names)
        train = names.get("train") or elche.build_train_step(names["loss_fn"], names["tx"])
        state = train.init({"w": np.ones((), "float32")})
        for window in train.windows({"x": np.ones(64, "float32")}, 4):
            state, metrics = train(state, window)
        assert metrics["finite"]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)`?", code(page.read_text()))) <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_path_of_somebodys_machine(page):
    assert not re.search(r"(?<![\w.])/(home|root|Users|work|tmp)/", page.read_text())


def code(text):
    """What stands in backticks."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
