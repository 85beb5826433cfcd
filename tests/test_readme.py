"""What README and the other pages show: it runs, and what they name exists."""

import re
import sys
from functools import cache
from pathlib import Path

import children
import jax
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax.data.order import epoch_order

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SCRIPTS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
MAKE = re.compile(r"\bmake ([a-z-]+)`?")
DEVICES = 'import jax; jax.config.update("jax_num_cpu_devices", {})\n'


def page_name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def loss_on(tmp_path_factory):
    """The loss that the page's scripts reach on so many devices; they run once."""

    @cache
    def run(devices):
        script = "\n".join([DEVICES.format(devices), *SCRIPTS])
        folder = tmp_path_factory.mktemp("runs")  # each has runs of its own
        done = children.run(sys.executable, "-W", "error", "-c", script, cwd=folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert "of the limit" in done.stdout
        return float(re.match(r"loss ([\d.]+)", done.stdout)[1])

    return run


@pytest.mark.slow  # tests/train and tests/trainer show what its lines do
@pytest.mark.parametrize("devices", [4, 1])
def test_scripts_of_the_readme_run_and_the_devices_do_not_matter(devices, loss_on):
    assert loss_on(devices) < 0.3
    assert loss_on(devices) == pytest.approx(loss_on(4), abs=1e-3)


def test_there_are_scripts():
    assert len(SCRIPTS) >= 3


def numerics():
    """The snippets of the page about numerics."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/numerics.md").read_text(), re.DOTALL)


def test_snippets_of_the_numerics_page_run():
    """Each with what it takes for granted: a loss, an optimizer, optax and the library."""
    snippets = [snippet for snippet in numerics() if "except" not in snippet]
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


@pytest.mark.parametrize("world", [1, 2])
def test_the_numerics_page_shows_how_to_go_on_after_a_window_that_is_not_finite(world, capsys):
    (snippet,) = [snippet for snippet in numerics() if "except" in snippet]
    data = np.arange(64, dtype="float32")
    data[[5, 29, 63]] = np.nan
    train = elche.build_train_step(
        lambda params, batch, rng: params * batch.mean(), optax.sgd(1.0),
        devices=jax.devices()[:world], cadence=elche.EveryBatch(),
    )  # fmt: skip
    names = {"elche": elche, "train": train, "state": train.init(np.float32(0)), "data": data}
    names |= {"batch_size": 2, "epochs": 1}
    exec(snippet, names)
    steps = data[epoch_order(64, seed=0, epoch=0)].reshape(-1, 2 * world).mean(axis=1)
    want = -np.nansum(steps)
    np.testing.assert_allclose(np.asarray(names["state"].params), want, rtol=1e-5)
    assert names["state"].microbatches.tolist() == [32] * world
    assert capsys.readouterr().out.count("was dropped") == np.isnan(steps).sum()


def test_links_lead_somewhere():
    links = [(p, to) for p in PAGES for to in re.findall(r"\]\(([^)#:]+)\)", p.read_text())]
    assert len(links) > len(PAGES)
    assert [(page_name(p), to) for p, to in links if not (p.parent / to).exists()] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(p, to) for p in PAGES for to in MAKE.findall(code(p.read_text()))]
    assert named and [(page_name(p), to) for p, to in named if to not in targets] == []


def test_no_path_of_somebodys_machine():
    machine = re.compile(r"(?<![\w.])/(home|root|Users|work|tmp)/")
    assert [page_name(page) for page in PAGES if machine.search(page.read_text())] == []


def code(text):
    """What stands in backticks."""
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
