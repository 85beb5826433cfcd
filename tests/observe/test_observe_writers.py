"""Writers: what is in the file is what was given, also after a kill, a resume, a full disk."""

import contextlib
import csv
import errno
import math
import os
import struct
import sys
from io import FileIO
from pathlib import Path

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elche_jax.observe import writers as module
from elche_jax.observe.writers import CSVWriter, TensorBoardWriter, Writer

ROOT = Path(__file__).parents[2]
KINDS = [CSVWriter, TensorBoardWriter]


def rows(path):
    """Rows as dicts, without the empty cells."""
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def write(path, table):
    writer = CSVWriter(path)
    for step, values in table:
        writer.scalars(step, values)
    writer.close()


# a table


def test_rows_come_back(tmp_path):
    path = tmp_path / "new" / "metrics.csv"
    write(path, [(step, {"loss": 1 / (3 + step), "n": step}) for step in range(5)])
    found = [(int(row["step"]), float(row["loss"]), float(row["n"])) for row in rows(path)]
    assert found == [(step, 1 / (3 + step), step) for step in range(5)]


def test_a_row_is_there_as_soon_as_it_was_given(tmp_path):
    writer = CSVWriter(tmp_path / "metrics.csv")
    assert os.listdir(tmp_path) == []
    for step in range(3):
        writer.scalars(step, {"loss": 0.5})
        assert (tmp_path / "metrics.csv").read_text().count("\n") == step + 2
    writer.close()


def test_columns_that_come_later(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, [(0, {"loss": 1.0}), (0, {"b": 2.0, "a,\n": 3.0}), (4, {"loss": 4.0, "c": 5.0})])
    assert rows(path) == [
        {"step": "0", "loss": "1.0"},
        {"step": "0", "b": "2.0", "a,\n": "3.0"},
        {"step": "4", "loss": "4.0", "c": "5.0"},
    ]
    with open(path, newline="") as file:
        head, *table = csv.reader(file)
    assert head == ["step", "loss", "b", "a,\n", "c"] and {len(row) for row in table} == {5}
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_numbers_of_every_kind(tmp_path):
    path = tmp_path / "metrics.csv"
    values = {
        "nan": float("nan"), "inf": math.inf, "low": -math.inf, "int": 3, "tiny": 5e-324,
        "numpy": np.float32(0.1), "array": np.array(2.5),
    }  # fmt: skip
    write(path, [(np.int64(7), values)])
    (row,) = rows(path)
    assert (row["step"], row["nan"], row["inf"], row["low"]) == ("7", "nan", "inf", "-inf")
    assert {k: float(row[k]) for k in ("int", "tiny", "numpy", "array")} == {
        "int": 3.0, "tiny": 5e-324, "numpy": float(np.float32(0.1)), "array": 2.5,
    }  # fmt: skip


FORMULAS = ("=cmd|' /C calc'!A0", "+1", "-x", "@S", "\t=1", "\r=1", "\n=1", "\0", "'=1", "''-")
PLAIN = ("loss", "a=b", "'loss", "x-1", "", "a\rb", '"=1"', "größe")


def test_names_that_a_spreadsheet_would_take_for_formulas(tmp_path):
    path = tmp_path / "metrics.csv"
    values = {name: -1.0 - at for at, name in enumerate((*FORMULAS, *PLAIN))}
    write(path, [(0, values)])
    write(path, [(1, values)])  # goes on with the same columns
    with open(path, newline="") as file:
        head, *table = csv.reader(file, strict=True)
    assert head == ["step", *(f"'{name}" for name in FORMULAS), *PLAIN]
    assert table == [[str(step), *map(repr, values.values())] for step in range(2)]


def test_a_file_of_before_gets_the_same_names(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,=1\n0,2.0\n")
    write(path, [(1, {"=1": 3.0})])
    assert path.read_text() == "step,'=1\n0,2.0\n1,3.0\n"


def test_a_run_that_goes_on(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, [(step, {"loss": float(step)}) for step in range(10)])
    write(path, [(6, {"accuracy": 0.5}), (7, {"loss": -7.0})])
    assert rows(path) == [{"step": str(step), "loss": f"{step}.0"} for step in range(6)] + [
        {"step": "6", "accuracy": "0.5"},
        {"step": "7", "loss": "-7.0"},
    ]
    write(path, [(0, {"loss": 1.0})])  # from the beginning
    assert rows(path) == [{"step": "0", "loss": "1.0"}]


@pytest.mark.parametrize("left", [b"", b"6", b"6,1.2", b'6,"1'])
def test_a_row_that_a_kill_left_unfinished(tmp_path, left):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,loss\n5,1.0\n" + left)
    write(path, [(9, {"loss": 2.0})])
    assert path.read_text() == "step,loss\n5,1.0\n9,2.0\n"


def test_a_file_that_is_replaced_under_it_stays_whole(tmp_path, monkeypatch):
    """The old table is there until the new one is."""
    path = tmp_path / "metrics.csv"
    writer = CSVWriter(path)
    writer.scalars(0, {"loss": 1.0})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: pytest.fail(str(path.read_bytes() == before)))
        with pytest.raises(pytest.fail.Exception, match="True"):
            writer.scalars(1, {"loss": 1.0, "new": 2.0})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["metrics.csv"]
    writer.close()


class Full(FileIO):
    """A file on a disk that takes nine bytes more."""

    left = 9

    def write(self, data):
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data[: self.left]))
        self.left -= taken
        return taken


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    monkeypatch.setattr(module, "FileIO", Full)
    writer = CSVWriter(path)
    writer.scalars(0, {"loss": 1.0})  # six bytes
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'$"):
        writer.scalars(1, {"loss": 2.0})
    assert path.read_text() == "step,loss\n0,1.0\n"
    Full.left = 9
    writer.close()


def test_a_rewrite_that_fails_leaves_the_table_to_go_on_with(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    writer = CSVWriter(path)
    for step in range(2):
        writer.scalars(step, {"loss": float(step)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: full(number))
        for _ in range(2):
            with pytest.raises(OSError, match=rf"No space left on device: '{path}'$"):
                writer.scalars(1, {"loss": 1.0, "new": 2.0})
    writer.scalars(1, {"loss": 3.0})
    writer.scalars(1, {"new": 4.0})
    writer.close()
    expected = [("0", "0.0"), ("1", "1.0"), ("1", "3.0")]
    assert [(row["step"], row["loss"]) for row in rows(path)[:3]] == expected
    assert rows(path)[3:] == [{"step": "1", "new": "4.0"}]


def full(number):
    raise OSError(errno.ENOSPC, "No space left on device")


DAMAGED = {
    b"step,loss\n1\n": "line 2 must be a step and its values (2 cells), got ['1']",
    b"step,loss\n0,1.0\n1,2.0,3.0\n": "line 3 must be a step and its values (2 cells), got ['1', ",
    b"step,loss\n0,1.0\nx,2\n": "line 3 must be a step and its values (2 cells), got ['x', '2']",
    b'step,loss\n0,1.0\n"1\n': "unexpected end of data",
    b"step,loss\n\xff,2\n": "'utf-8' codec can't decode byte 0xff",
    b"step,loss\n0,1.0\n\0\0,1\n2,1.0\n": "",
    b"step,lo": "line 1 has no end",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_table_is_put_aside(tmp_path, content, caplog):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    write(path, [(7, {"loss": 1.0}), (8, {"loss": 2.0})])
    assert path.read_text() == "step,loss\n7,1.0\n8,2.0\n"
    (aside,) = tmp_path.glob("metrics-damaged-*.csv")
    assert aside.read_bytes() == content
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"elche: {path} is a damaged table: ") and DAMAGED[content] in said
    assert said.endswith(f"It was renamed to {aside.name}, and a new one is started.")


@pytest.mark.parametrize("zeros", [b"", b"\0" * 4096])
@pytest.mark.parametrize("rows", [b"", b"step,loss\n5,1.0\n"])
def test_what_a_power_loss_has_left_of_a_table(tmp_path, rows, zeros):
    path = tmp_path / "metrics.csv"
    path.write_bytes(rows + zeros)
    write(path, [(9, {"loss": 2.0})])
    assert path.read_bytes() == (rows or b"step,loss\n") + b"9,2.0\n"
    assert os.listdir(tmp_path) == ["metrics.csv"]


@pytest.mark.parametrize("content", [b"a,b\n1,2\n", b"\n", b"\xff\n", b"x", b"steps\n1\n"])
def test_another_file_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.csv"
    path.write_bytes(content)
    text = (
        r"^CSVWriter: .*notes\.csv must be a table with a first column 'step', got b'.*'\. "
        r"Give another path, or move that file away\.$"
    )
    with pytest.raises(ValueError, match=text):
        write(path, [(0, {"loss": 1.0})])
    assert path.read_bytes() == content


def test_a_table_needs_a_regular_file():
    """Reading a pipe would wait for its other end; this one has none."""
    read, write_end = os.pipe()
    os.close(write_end)
    path = f"/dev/fd/{read}"
    text = (
        rf"^CSVWriter: {path} must be a regular file, got another kind, such as a pipe\. "
        r"Give another path, as a table is read and rewritten\.$"
    )
    try:
        with pytest.raises(ValueError, match=text):
            CSVWriter(path).check()
        with pytest.raises(ValueError, match=text):
            write(path, [(0, {"loss": 1.0})])
    finally:
        os.close(read)
    write(os.devnull, [(0, {"loss": 1.0})])


# TensorBoard, read back by the protobufs


def events(folder):
    """Events of all files of a folder, by the format of the files: length, check, event."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        content = path.read_bytes()
        at = 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def scalars(folder):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


def test_tensorboard_gets_the_values(tmp_path):
    writer = TensorBoardWriter(tmp_path / "tb")
    for step in (0, 1, 5):
        writer.scalars(step, {"train/loss": step + 0.5, "n": 3})
    writer.close()
    assert scalars(tmp_path / "tb") == [
        (step, tag, value)
        for step in (0, 1, 5)
        for tag, value in (("train/loss", step + 0.5), ("n", 3))
    ]
    assert not [event for event in events(tmp_path / "tb") if event.HasField("session_log")]


def test_tensorboard_gets_what_is_not_finite(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.scalars(0, {"a": math.nan, "b": math.inf})
    writer.close()
    (_, _, nan), (_, _, inf) = scalars(tmp_path)
    assert math.isnan(nan) and inf == math.inf


def test_a_resumed_run_purges_what_it_does_again(tmp_path):
    for first in (0, 4, 2):  # three processes within a second or so
        writer = TensorBoardWriter(tmp_path)
        for step in range(first, first + 6):
            writer.scalars(step, {"loss": float(step)})
        writer.close()
    assert len(list(tmp_path.iterdir())) == 3
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [4, 2]
    assert [step for step, _, _ in scalars(tmp_path)] == [*range(6), *range(4, 10), *range(2, 8)]


def test_tensorboard_is_written_as_soon_as_it_is_given(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for step in range(3):
        writer.scalars(step, {"loss": 0.5})
        assert len(scalars(tmp_path)) == step + 1
    writer.close()


FULL_DISK = """
import resource, sys
from elche_jax.observe.writers import TensorBoardWriter
writer = TensorBoardWriter(sys.argv[1])
writer.scalars(0, {"loss": 0.0})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    for step in range(1, 100_000):
        writer.scalars(step, {"loss": 1.0})
except OSError as error:
    print(step, type(error).__name__, error.strerror)
writer.close()
"""


def test_a_disk_that_fails_does_not_hold_up_tensorboard(tmp_path):
    done = children.run(sys.executable, "-c", children.NO_JAX + FULL_DISK, tmp_path)
    assert done.returncode == 0, done.stderr
    failed, *what = done.stdout.split(maxsplit=1)
    assert what == ["OSError File too large\n"]
    # what was given before is there, whole
    assert [step for step, _, _ in scalars(tmp_path)] == list(range(int(failed)))


def test_without_tensorboardx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    text = r"^TensorBoardWriter: needs tensorboardX: pip install 'elche_jax\[tensorboard\]'\.$"
    with pytest.raises(ImportError, match=text):
        TensorBoardWriter(tmp_path)


# both


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_writers(kind, tmp_path):
    assert isinstance(kind(tmp_path / "x"), Writer)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_twice_and_writing_after(kind, tmp_path):
    writer = kind(tmp_path / "x")
    writer.close()  # before anything was written: nothing is there
    assert os.listdir(tmp_path) == []
    writer = kind(tmp_path / "x")
    writer.scalars(0, {"loss": 1.0})
    writer.close()
    writer.close()
    text = rf"^{kind.__name__}\.scalars: the writer must be open, got a closed one\.$"
    with pytest.raises(ValueError, match=text):
        writer.scalars(1, {"loss": 1.0})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("step", "values", "error", "text"),
    [
        (1, {}, ValueError, r"step must be at least 2, got 1\.$"),
        (2.0, {}, TypeError, r"step must be an integer, got 2\.0 \(float\)\.$"),
        (2, [], TypeError, r"values must be of type Mapping, got \[\] \(list\)\.$"),
        (2, {3: 1.0}, TypeError, r"a name in values must be of type str, got 3 \(int\)\.$"),
        (2, {"a": "1"}, TypeError, r"values\['a'\] must be a number, got '1' \(str\)\.$"),
        (2, {"a": True}, TypeError, r"values\['a'\] must be a number, got True \(bool\)\.$"),
        (2, {"a": np.ones(2)}, TypeError, r"values\['a'\] must be a number, got array\("),
    ],
)
def test_what_is_refused(kind, step, values, error, text, tmp_path):
    writer = kind(tmp_path / "x")
    writer.scalars(2, {"loss": 1.0})
    with pytest.raises(error, match=rf"^{kind.__name__}\.scalars: " + text):
        writer.scalars(step, values)
    writer.scalars(2, {"loss": 1.0})  # what was refused has changed nothing
    writer.close()


def test_the_metrics_of_a_step_are_taken_as_they_are(tmp_path):
    metrics = {
        "loss": jnp.float32(0.5), "finite": jnp.bool_(True), "weight": np.float32(3),
        "low": jnp.bfloat16(0.25),
    }  # fmt: skip
    with contextlib.closing(CSVWriter(tmp_path / "metrics.csv")) as writer:
        writer.scalars(0, metrics)
    text = (tmp_path / "metrics.csv").read_text()
    assert text.splitlines() == ["step,loss,finite,weight,low", "0,0.5,1.0,3.0,0.25"]
    for value, got in ((jnp.complex64(1j), r"1j \(complex\)"), (jax.random.key(0), "Array")):
        with pytest.raises(TypeError, match=rf"values\['a'\] must be a number, got {got}"):
            CSVWriter(tmp_path / "other.csv").scalars(0, {"a": value})


def test_what_is_no_path_and_a_name_that_is_taken(tmp_path):
    with pytest.raises(TypeError, match=r"^CSVWriter: path must be a path, got 3 \(int\)\.$"):
        CSVWriter(3)
    with pytest.raises(TypeError, match=r"^TensorBoardWriter: folder must be a path, got 3"):
        TensorBoardWriter(3)
    text = r"^CSVWriter\.scalars: values must hold no name 'step', got \['loss', 'step'\]\.$"
    with pytest.raises(ValueError, match=text):
        write(tmp_path / "x", [(0, {"loss": 1.0, "step": 2.0})])
    with pytest.raises(ValueError, match=r"step must be at least 0, got -1"):
        write(tmp_path / "x", [(-1, {})])
