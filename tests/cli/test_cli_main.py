"""The command line in this process: usage, help, errors, tables."""

import json
import re
import sys
from pathlib import Path

import pytest

import elche_jax
from elche_jax import cli
from elche_jax.cadence import WindowRecord
from elche_jax.cli import arguments, main, table
from elche_jax.observe.timeline import Timeline

ROOT = Path(__file__).parents[2]
NAMES = cli.COMMANDS


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit code and what it has printed."""

    def run(*argv):
        code = main(argv)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example(run, name):
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: elche-jax {name} " in out
    assert f"\nexample:\n  elche-jax {name}" in out


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_the_help_can_be_parsed(run, name):
    _, out, _ = run(name, "--help")
    examples = re.findall(rf"^  elche-jax ({name}.*)$", out, re.MULTILINE)
    assert examples
    for example in examples:
        assert cli.make_parser().parse_args(example.split()).prog == f"elche-jax {name}"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_tells_of_every_option(run, name):
    _, out, _ = run(name, "--help")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.split(f"## {name}\n")[1].split("\n## ")[0]
    told = page.split("\n## ")[0] + section
    options = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", out, re.MULTILINE)) - {"--help"}
    assert options
    assert not {option for option in options if f"`{option}" not in told}


def test_help_and_version(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n    {name} " in out for name in NAMES)
    assert run("--version") == (0, f"elche-jax {elche_jax.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", r"elche-jax: the following arguments are required: COMMAND \(elche-jax --help"),
        ("train", r"elche-jax: argument COMMAND: invalid choice: 'train'"),
        ("report", r"elche-jax report: the following arguments are required: RUN"),
        ("devices --fast", r"elche-jax: unrecognized arguments: --fast"),
        ("devices --seconds 0", r"devices: argument --seconds: must be a number above 0, got '0'"),
        ("devices --seconds x", r"argument --seconds: must be a number above 0, got 'x'"),
        ("devices --seconds inf", r"argument --seconds: must be a number above 0, got 'inf'"),
        (
            "devices --cpu-devices 0",
            r"argument --cpu-devices: must be an integer of at least 1, got '0'",
        ),
        ("advise --batch-size 1.5", r"must be an integer of at least 1, got '1\.5'"),
        ("advise --devices 0,-1", r"argument --devices: must be integers of at least 0, got '-1'"),
        ("advise --emulate 5,,5", r"argument --emulate: must be a number above 0, got ''"),
        ("devices --devices 0,99", r"elche-jax devices: --devices must be ranks below 8, got 99$"),
        ("devices --devices 1,1", r"elche-jax devices: --devices must name no device twice$"),
        (
            "advise --devices 0,1 --emulate 5",
            r"elche-jax advise: --emulate must have one entry per device \(2\)$",
        ),
        ("advise a:b --model mlp", r"advise: TARGET and --model must not both be given$"),
        ("report there --title=", r"report: argument --title: must not be empty"),
        ("report there --output .", r"report: --output must be a file, got a folder \(\.\)$"),
        ("trace there --output .", r"trace: --output must be a file, got a folder \(\.\)$"),
        (
            "advise .relative:job",
            r"TARGET must be module:function or path/.*, got '\.relative:job'$",
        ),
        ("advise train:job:it", r"TARGET must be module:function or path/.*, got 'train:job:it'$"),
        (
            "advise nothing",
            r"advise: TARGET must be module:function or path/to/file\.py:function, got 'nothing'$",
        ),
    ],
)
def test_wrong_usage_is_one_line(run, argv, message):
    code, out, err = run(*argv.split())
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err)


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_output_is_not_written_over_the_timeline(run, command, whole, tmp_path):
    path = tmp_path / "timeline.jsonl"
    with Timeline(path) as timeline:
        timeline.window(WindowRecord(0, 0, (4, 2), 60, (40.0, 40.0), 80.0, 1.0, 0.0, True))
    before = path.read_bytes()
    code, _, err = run(command, str(tmp_path if whole else path), "--output", str(path))
    assert code == 2 and "--output must not be the timeline itself, got " in err
    assert path.read_bytes() == before


@pytest.fixture
def breaks(monkeypatch):
    """Makes `demo` fail with an exception."""

    def breaks(error):
        def run(options):
            raise error

        monkeypatch.setattr(cli.demo, "run", run)

    return breaks


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("x: y must\n  hold"), 1, "x: y must hold (--debug shows where)"),
        (ZeroDivisionError("by 0\n\nlong"), 1, "ZeroDivisionError: by 0 (--debug shows where)"),
        (ValueError(), 1, "ValueError (--debug shows where)"),
        (OSError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
        (
            BrokenPipeError(32, "Broken pipe"),
            1,
            "BrokenPipeError: [Errno 32] Broken pipe (--debug shows where)",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
        (SystemExit("the target gave up"), 1, None),
        (SystemExit(7), 7, ""),
    ],
)
def test_exceptions_are_one_line_and_a_code(run, breaks, error, code, line):
    breaks(error)
    expected = {None: "the target gave up\n", "": ""}.get(line, f"elche-jax demo: {line}\n")
    assert run("demo") == (code, "", expected)


def test_debug_shows_the_traceback(run, breaks):
    breaks(ValueError("x must hold"))
    code, _, err = run("demo", "--debug")
    assert code == 1
    assert err.startswith("Traceback") and "in run\n" in err
    assert err.endswith("elche-jax demo: x must hold (--debug shows where)\n")


def test_without_streams_nothing_is_said(breaks, monkeypatch):
    breaks(ValueError("x must hold"))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["devices", "--no-probe"]) == 0
    assert main(["demo"]) == 1


def test_memory_is_counted_like_its_bandwidth(run, monkeypatch):
    """GB are 1e9 bytes in every column."""
    monkeypatch.setattr(cli.devices, "free_bytes", lambda devices: 2_500_000_000)
    code, out, _ = run("devices", "--no-probe", "--devices", "0", "--json")
    assert (code, json.loads(out)["devices"][0]["free_gb"]) == (0, 2.5)
    assert "2.5 GB" in run("devices", "--no-probe", "--devices", "0")[1]


def test_one_core_is_no_plural(run, monkeypatch):
    monkeypatch.setattr(cli.devices.os, "cpu_count", lambda: 1)
    assert "share the host's 1 core and its memory." in run("devices", "--no-probe")[1]


def test_devices_lists_and_probes(run):
    code, out, _ = run("devices", "--no-probe", "--devices", "0,2", "--json")
    listed = json.loads(out)
    assert code == 0
    assert [row["rank"] for row in listed["devices"]] == [0, 1]
    assert listed["devices"][1]["name"].endswith(":2")
    assert (listed["summary"], "speed_hint" in listed) == ("elche: 2 devices | cpu x2", False)
    code, out, _ = run("devices", "--devices", "0,1", "--seconds", "0.01", "--json")
    probed = json.loads(out)
    assert code == 0
    for row in probed["devices"]:
        rates = [row[f"{name}_{how}"] for name in ("gflops", "gb_per_s") for how in HOW]
        assert min(rates) > 0
    together = [row["gflops_together"] for row in probed["devices"]]
    assert probed["speed_hint"] == [round(rate / min(together), 2) for rate in together]
    code, out, _ = run("devices", "--devices", "0,1", "--seconds", "0.01")
    lines = out.splitlines()
    assert (code, lines[0], len(lines)) == (0, "elche: 2 devices | cpu x2", 7)
    assert lines[1].split()[:2] == ["device", "kind"]
    assert lines[-1].startswith("speed_hint=[")
    assert run("devices", "--no-probe", "--devices", "3")[1].count("\n") == 4


HOW = "alone", "together"


@pytest.mark.parametrize(
    ("terminal", "no_color", "lined"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_tables_have_lines_in_a_terminal(monkeypatch, capsys, terminal, no_color, lined):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    table.show(["device", "speed"], [["one", "1.5"], ["two", "12.0"]])
    out = capsys.readouterr().out
    assert ("│" in out) == lined
    if not lined:
        assert out == "device  speed\none       1.5\ntwo      12.0\n"


def test_numbers_with_commas():
    assert arguments.listed(arguments.duration)("5,2.5") == [5.0, 2.5]
    assert arguments.listed(arguments.rank)("3,0") == [3, 0]
