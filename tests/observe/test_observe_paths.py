"""Paths as users write them: from the home folder on, and folders in place of files."""

import re
from pathlib import Path

import pytest

from elche_jax.cadence import WindowRecord
from elche_jax.observe.page import write_page
from elche_jax.observe.plots import plot_run
from elche_jax.observe.run import read_run
from elche_jax.observe.timeline import Timeline
from elche_jax.observe.trace import write_trace
from elche_jax.observe.writers import CSVWriter, TensorBoardWriter

WINDOW = WindowRecord(0, 0, (4, 2), 60, (40.0, 38.0), 50.0, 1.0, 2.0, True)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder; the current folder is another one, which stays empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not list((tmp_path / "here").iterdir())


def test_paths_begin_at_home(home):
    with Timeline("~/run/timeline.jsonl") as timeline:
        timeline.window(WINDOW)
    assert Timeline.read("~/run/timeline.jsonl") == timeline.events
    run = read_run("~/run")
    assert (run.name, len(run.windows)) == ("run", 1)
    for writer in (CSVWriter("~/run/metrics.csv"), TensorBoardWriter(Path("~/run/board"))):
        writer.scalars(0, {"loss": 1.0})
        writer.close()
    assert write_page(run, "~/run/report.html") == home / "run" / "report.html"
    assert write_trace(run, Path("~/run/trace.json")) == home / "run" / "trace.json"
    assert plot_run([WINDOW], "~/run/run.png") == home / "run" / "run.png"
    assert {path.name for path in (home / "run").iterdir()} == {
        "timeline.jsonl", "metrics.csv", "board", "report.html", "trace.json", "run.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "example", "take"),
    [
        ("Timeline", "timeline.jsonl", Timeline),
        ("Timeline.read", "timeline.jsonl", Timeline.read),
        ("CSVWriter", "metrics.csv", CSVWriter),
        ("write_page", "report.html", lambda path: write_page(read_run(path), path)),
        ("write_trace", "trace.json.gz", lambda path: write_trace(read_run(path), path)),
        ("plot_run", "run.png", lambda path: plot_run([WINDOW], path)),
    ],
)
def test_a_folder_is_no_file(name, example, take, tmp_path):
    (tmp_path / "timeline.jsonl").write_text("")
    text = f"{name}: path must be a file, got the folder {tmp_path}. Name a file in it, such as "
    with pytest.raises(ValueError, match=f"^{re.escape(text + str(tmp_path / example))}\\.$"):
        take(tmp_path)
