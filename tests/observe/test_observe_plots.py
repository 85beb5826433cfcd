"""Pictures: a PNG comes out, of any run, and nothing global is touched."""

import sys

import children
import pytest
from marks import slow

from elche_jax.cadence.window import WindowRecord
from elche_jax.observe.plots import _widths, plot_run


def record(window, counts, wall_ms=80.0):
    busy = tuple(wall_ms * (rank + 1) / len(counts) for rank in range(len(counts)))
    busy = busy if len(counts) > 1 else ()
    return WindowRecord(window, 0, counts, 8 * sum(counts), busy, wall_ms, 1.0, 0.0, True)


def run(world, windows=5):
    return [record(i, tuple(i + rank for rank in range(world))) for i in range(windows)]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("world", [1, slow(2), slow(8), 20])
def test_any_number_of_devices(world, tmp_path):
    assert is_png(plot_run(run(world), tmp_path / "run.png", "title"))


def test_one_window_that_does_nothing(tmp_path):
    assert is_png(plot_run([record(3, (0, 0))], tmp_path / "run.png"))


def test_against_a_baseline_into_a_new_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "run.png"
    made = plot_run(run(2), path, devices=["a", "b"], baseline=run(2, 40), names=("mine", "other"))
    assert made == path and is_png(path)


def test_equal_counts_all_show():
    assert _widths((4, 4, 2, 4)) == [6.0, 4.0, 2.0, 2.0]


def test_matplotlib_is_loaded_only_for_a_picture_and_has_no_current_figure(tmp_path):
    script = f"""
import sys
from elche_jax.observe.plots import plot_run
from elche_jax.cadence.window import WindowRecord
assert "matplotlib" not in sys.modules
window = WindowRecord(0, 0, (1, 2), 3, (1.0, 2.0), 2.0, 0.0, 0.0, True)
plot_run([window], {str(tmp_path / "a.png")!r})
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = children.run(sys.executable, "-c", children.NO_JAX + script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"records": []}, r"^plot_run: records must hold at least one window, got none\.$"),
        ({"baseline": []}, r"^plot_run: baseline must hold at least one window, got none\.$"),
        ({"devices": ["a"]}, r"^plot_run: devices must have one entry per device \(2\), got 1\.$"),
        ({"baseline": run(3)}, r"^plot_run: baseline must have as many .* \(2\), got 3\.$"),
        (
            {"records": [*run(2), *run(3)]},
            r"^plot_run: records must have the same number of .*2, 3\]",
        ),
    ],
)
def test_errors(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plot_run(**{"records": run(2), "path": tmp_path / "run.png", **arguments})
    assert not (tmp_path / "run.png").exists()
