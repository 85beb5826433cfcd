"""`elche-jax report` and `elche-jax trace`: files of a run."""

import gzip
import io
import json
import os
import sys
import webbrowser
from pathlib import Path

import pytest

from elche_jax.cadence.window import WindowRecord
from elche_jax.cli import main
from elche_jax.observe.timeline import Timeline


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of two windows."""
    folder = tmp_path / "digits"
    with Timeline(folder / "timeline.jsonl") as timeline:
        for number in range(2):
            timeline.window(WindowRecord(number, 0, (4, 2), 60, (40.0, 38.0), 50.0, 1.0, 2.0, True))
    return folder


def test_report_writes_the_page_beside_the_timeline(folder, capsys):
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "last 2 windows: 1,200 examples/s" in out
    assert out.endswith(f"page: {folder / 'report.html'}\n")
    assert "<title>digits</title>" in (folder / "report.html").read_text(encoding="utf-8")


def test_report_takes_a_timeline_an_output_and_a_title(folder, tmp_path, capsys):
    page = tmp_path / "pages" / "one.html"
    argv = [str(folder / "timeline.jsonl"), "--output", str(page), "--title", "Digits", "--json"]
    assert main(["report", *argv]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["page"], figures["windows"]) == (str(page), 2)
    assert figures["examples_per_s"] == pytest.approx(1200)
    assert [device["microbatches"] for device in figures["devices"]] == [8, 4]
    assert "<title>Digits</title>" in page.read_text(encoding="utf-8")
    assert not (folder / "report.html").exists()


def test_paths_begin_at_home(folder, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    for command, output in (("report", "~/digits/new.html"), ("trace", "~/digits/new.json")):
        assert main([command, "~/digits", f"--output={output}"]) == 0
        assert (folder / Path(output).name).is_file()
    assert main(["advise", "~/train.py:job"]) == 1
    assert f"{folder.parent / 'train.py'} must be a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("works", "code", "err"), [(True, 0, ""), (False, 1, "no browser could be started")]
)
def test_report_opens_the_page(folder, capsys, monkeypatch, works, code, err):
    asked = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: asked.append(uri) or works)
    assert main(["report", str(folder), "--open"]) == code
    assert asked == [(folder / "report.html").resolve().as_uri()]
    assert err in capsys.readouterr().err


def test_trace(folder, tmp_path, capsys):
    assert main(["trace", str(folder)]) == 0
    packed = folder / "trace.json.gz"
    assert capsys.readouterr().out.startswith(f"trace: {packed}\n")
    names = [event["name"] for event in json.loads(gzip.decompress(packed.read_bytes()))[EVENTS]]
    assert names.count("window 1") == 2
    plain = tmp_path / "trace.json"
    assert main(["trace", str(folder / "timeline.jsonl"), "--output", str(plain)]) == 0
    assert [event["name"] for event in json.loads(plain.read_bytes())[EVENTS]] == names


@pytest.mark.parametrize(
    ("encoding", "errors", "printed"),
    [
        ("ascii", "strict", rb"gr\xf6\xdfe-\udcff"),
        ("ascii", "surrogateescape", rb"gr\xf6\xdfe-\udcff"),
        ("latin-1", "strict", b"gr\xf6\xdfe-\\udcff"),
        ("utf-8", "strict", "größe-\\udcff".encode()),
        ("utf-8", "surrogateescape", "größe-".encode() + b"\xff"),
    ],
)
def test_names_that_stdout_cannot_encode(encoding, errors, printed, folder, monkeypatch):
    folder = folder.rename(folder.with_name(os.fsdecode("größe-".encode() + b"\xff")))
    out = io.BytesIO()
    stream = io.TextIOWrapper(out, encoding, errors)
    monkeypatch.setattr(sys, "stdout", stream)
    for command, page in (("report", b"report.html"), ("trace", b"trace.json.gz")):
        assert main([command, str(folder)]) == 0
        assert b"%s/%s\n" % (printed, page) in out.getvalue()
    assert stream.errors == errors  # as it was


def test_a_path_that_is_empty(capsys):
    for argv in (["report", ""], ["trace", ""], ["report", "run", "--output", ""]):
        assert main(argv) == 2
        assert ": must not be empty (elche-jax " in capsys.readouterr().err


EVENTS = "traceEvents"


@pytest.mark.parametrize("command", ["report", "trace"])
def test_what_is_no_run(tmp_path, capsys, command):
    empty, other = tmp_path / "timeline.jsonl", tmp_path / "notes.txt"
    empty.write_text("")
    other.write_text("hello\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    cases = {
        tmp_path / "nowhere": f"{tmp_path / 'nowhere'}: No such file or directory",
        folder: f"{folder} must be the folder of a run, but has no timeline.jsonl",
        empty: f"{empty} must hold at least one window, but has none",
        other: f"Timeline.read: line 1 of {other} must be an event of a timeline",
    }
    for path, message in cases.items():
        assert main([command, str(path)]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"elche-jax {command}: {message}")
        assert err.count("\n") == 1
