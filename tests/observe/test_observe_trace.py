"""A trace, against the lines it was made of."""

import gzip
import json
import os
from collections import defaultdict
from itertools import pairwise

import pytest

from elche_jax.observe import trace as module
from elche_jax.observe.run import read_run
from elche_jax.observe.trace import write_trace


def load(path):
    content = path.read_bytes()
    text = gzip.decompress(content) if path.name.endswith(".gz") else content
    return json.loads(text)


@pytest.fixture
def traced(tmp_path, made):
    """The lines of a resumed run, and the trace of it."""
    lines = made.resumed(tmp_path / "timeline.jsonl")
    return lines, load(write_trace(read_run(tmp_path), tmp_path / "new" / "trace.json"))


def tracks(trace):
    """Bars by the name of their track."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    bars = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            bars[names[event["pid"], event["tid"]]].append(event)
    return bars


def of(lines, kind):
    return [line for line in lines if line["event"] == kind]


def test_busy_times_add_up(traced):
    lines, trace = traced
    bars = tracks(trace)
    assert sorted(bars) == ["a", "b", "c", "synchronisation"]
    for rank, name in enumerate("abc"):
        expected = [1e3 * line["busy_ms"][rank] for line in of(lines, "window")]
        assert [bar["dur"] for bar in bars[name]] == pytest.approx(expected, abs=2e-3)
        assert sum(bar["dur"] for bar in bars[name]) == pytest.approx(sum(expected))
        counts = [line["counts"][rank] for line in of(lines, "window")]
        assert [bar["args"]["count"] for bar in bars[name]] == counts
        examples = [line["examples"] for line in of(lines, "window")]
        assert [bar["args"]["examples"] for bar in bars[name]] == examples
    sync = bars["synchronisation"]
    for key, field in (("cost_ms", "sync_ms"), ("skew_ms", "skew_ms"), ("window", "window")):
        assert [bar["args"][key] for bar in sync] == [line[field] for line in of(lines, "window")]
    expected = [1e3 * line["sync_ms"] for line in of(lines, "window")]
    assert [bar["dur"] for bar in sync] == pytest.approx(expected, abs=2e-3)


def test_bars_are_in_order_and_do_not_overlap(traced):
    _, trace = traced
    for bars in tracks(trace).values():
        for bar, after in pairwise(bars):
            # in whole nanoseconds, as a viewer reckons
            assert round(1e3 * bar["ts"]) + round(1e3 * bar["dur"]) <= round(1e3 * after["ts"])
        assert min(bar["dur"] for bar in bars) >= 0
    times = [event["ts"] for event in trace["traceEvents"]]
    assert times == sorted(times) and times[0] == 0


def test_busy_times_beyond_the_window_do_not_overlap(tmp_path, made):
    lines = [
        made.window(i, 1 + 0.08 * i, busy_ms=(90.0, -1.0, 80.0000001), sync_ms=s)
        for i, s in enumerate((500.0, -3.0, 1e-9))
    ]
    trace = load(write_trace(read_run(made.write(tmp_path / "t.jsonl", lines)), tmp_path / "t"))
    test_bars_are_in_order_and_do_not_overlap((lines, trace))
    bars = tracks(trace)
    assert [bar["dur"] for bar in bars["device 0"]] == pytest.approx([9e4] * 3, abs=2e-3)
    assert [bar["dur"] for bar in bars["device 1"]] == [0] * 3
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "C"] == ["counts"]
    assert [bar["dur"] for bar in bars["synchronisation"]] == pytest.approx([9e4, 0, 0], abs=2e-3)


def test_moments_and_curves(traced):
    lines, trace = traced
    events = trace["traceEvents"]
    moments = [event for event in events if event["ph"] == "i"]
    expected = [line for line in lines if line["event"] not in ("window", "loss")]
    assert [event["name"] for event in moments] == [line["event"] for line in expected]
    for event, line in zip(moments, expected, strict=True):
        values = {key: value for key, value in line.items() if key not in ("event", "at")}
        assert event["args"] == values and event["s"] == "t"
    curves = {
        name: [event["args"] for event in events if event["ph"] == "C" and event["name"] == name]
        for name in ("loss", "counts", "anchor")
    }
    assert [args["loss"] for args in curves["loss"]] == [line["loss"] for line in of(lines, "loss")]
    # each process tells of one change from 2 to 5
    assert [args["anchor"] for args in curves["anchor"]] == [2, 5, 2, 5]
    rows = [tuple(line["counts"]) for line in of(lines, "window")]
    changes = [rows[0]] + [row for before, row in pairwise(rows) if row != before]
    assert [tuple(args[name] for name in "abc") for args in curves["counts"]] == changes


def test_times_are_microseconds_on_the_runs_axis(traced, tmp_path):
    lines, trace = traced
    begins = [event["ts"] for event in trace["traceEvents"] if event["name"] == "run"]
    again = next(at for at, line in enumerate(lines) if at and line["event"] == "run")
    assert begins == pytest.approx([1e4, 1e6 * lines[again - 1]["at"] + 1e4])
    (process,) = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process["args"] == {"name": tmp_path.name}


def test_devices_that_came_later_have_tracks_of_their_own(tmp_path, made):
    lines = made.process(0, 2, 1, names=("a", "b")) + made.process(2, 4, 2, names=("a", "c"))
    trace = load(write_trace(read_run(made.write(tmp_path / "t.jsonl", lines)), tmp_path / "t"))
    found = {name: len(bars) for name, bars in tracks(trace).items()}
    assert found == {"a": 4, "b": 2, "c": 2, "synchronisation": 4}


def test_compressed_it_is_the_same(tmp_path, made):
    made.resumed(tmp_path / "timeline.jsonl")
    run = read_run(tmp_path)
    plain = load(write_trace(run, tmp_path / "trace.json"))
    packed = write_trace(run, str(tmp_path / "trace.json.gz"))
    first = packed.read_bytes()
    assert load(packed) == plain
    assert write_trace(run, packed).read_bytes() == first


def test_names_are_kept_whatever_they_are(tmp_path, made):
    lines = [made.begin(0.0, names=('</script>"', "é\n", "\udcff")), made.window(0, 1.0)]
    run = read_run(made.write(tmp_path / "t.jsonl", lines))
    assert {'</script>"', "é\n", "\udcff"} < set(tracks(load(write_trace(run, tmp_path / "t"))))


def test_an_empty_run_is_a_trace(tmp_path, made):
    run = read_run(made.write(tmp_path / "t.jsonl", []))
    assert {e["ph"] for e in load(write_trace(run, tmp_path / "t"))["traceEvents"]} == {"M"}


def test_an_error_leaves_the_old_trace(tmp_path, made, monkeypatch):
    made.resumed(tmp_path / "timeline.jsonl")
    path = tmp_path / "trace.json"
    path.write_text("old")
    monkeypatch.setattr(module, "_instants", lambda run: iter([{"ts": float("nan")}]))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_trace(read_run(tmp_path), path)
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == [
        "timeline.jsonl",
        "trace.json",
    ]


def test_what_is_no_run(tmp_path):
    with pytest.raises(TypeError, match=r"^write_trace: run must be of type Run, got \[\]"):
        write_trace([], tmp_path / "t")
