"""What is no name of a file or folder is said where it is given, before anything is made."""

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax.observe.page import write_page
from elche_jax.observe.plots import plot_run
from elche_jax.observe.run import Run, read_run
from elche_jax.observe.trace import write_trace
from elche_jax.observe.writers import CSVWriter, TensorBoardWriter

RUN = Run("run", [], [], [], 0.0)


def fit(run_dir):
    def loss_fn(params, batch, rng):
        return (params["w"] * batch).mean()

    trainer = elche.Trainer(loss_fn, optax.sgd(0.1), devices=jax.devices()[:1])
    trainer.fit({"w": np.float32(1)}, np.ones(4, "f"), 2, run_dir=run_dir, progress=False)


TAKERS = {
    "Trainer.fit: run_dir": fit,
    "Checkpoints: folder": elche.Checkpoints,
    "Timeline: path": elche.Timeline,
    "Timeline.read: path": elche.Timeline.read,
    "CSVWriter: path": CSVWriter,
    "TensorBoardWriter: folder": TensorBoardWriter,
    "read_run: path": read_run,
    "write_page: path": lambda path: write_page(RUN, path),
    "write_trace: path": lambda path: write_trace(RUN, path),
    "plot_run: path": lambda path: plot_run([], path),
}


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("", ValueError, "must not be empty, got ''. Write '.' for the current folder."),
        ("a\0b", ValueError, "must hold no null byte, got 'a\\x00b'."),
        (3, TypeError, "must be a path, got 3 (int)."),
    ],
)
def test_what_is_no_path(path, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, take in TAKERS.items():
        with pytest.raises(kind) as caught:
            take(path)
        said = str(caught.value).replace("a path or None", "a path")
        assert said == f"{name} {message}"
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_is_too_long(tmp_path):
    name = tmp_path / ("a" * 300)
    with pytest.raises(ValueError) as caught:
        fit(name)
    assert str(caught.value) == (
        "Trainer.fit: run_dir must be a folder that can be created, got "
        f"{name} (File name too long)."
    )
