"""A run read back: the time axis, its parts, and what a report says of it."""

from itertools import pairwise

import pytest

from elche_jax.observe.events import (
    EVENTS,
    AnchorEvent,
    CheckpointEvent,
    CompileEvent,
    Event,
    LossEvent,
    RunEvent,
    VerdictEvent,
)
from elche_jax.observe.report import limit_share
from elche_jax.observe.run import LATE, LEFT_OUT, read_run
from elche_jax.observe.timeline import Timeline
from elche_jax.train import pipeline
from elche_jax.train.finite import AVERAGES, GRADIENTS


def test_every_event_is_there_once(tmp_path, made):
    lines = made.resumed(tmp_path / "timeline.jsonl")
    run = read_run(tmp_path)
    assert run.name == tmp_path.name and read_run(tmp_path / "timeline.jsonl").name == "timeline"
    found = {
        "run": run.of(RunEvent), "window": run.windows, "skip": run.skips,
        "verdict": run.of(VerdictEvent), "compile": run.of(CompileEvent),
        "anchor": run.of(AnchorEvent), "checkpoint": run.of(CheckpointEvent),
        "loss": run.losses, "evaluation": run.evaluations, "epoch": run.epochs,
    }  # fmt: skip
    assert set(found) == set(EVENTS)
    for name, events in found.items():
        assert len(events) == sum(line["event"] == name for line in lines) > 0


def test_parts_are_laid_one_after_another(tmp_path, made):
    lines = made.resumed(tmp_path / "timeline.jsonl")
    run = read_run(tmp_path)
    again = next(at for at, line in enumerate(lines) if at and line["event"] == "run")
    gone = lines[again - 1]["at"]  # the time at which the first process ended
    assert [segment.at for segment in run.segments] == pytest.approx([0.01, gone + 0.01])
    assert run.seconds == pytest.approx(gone + lines[-1]["at"])
    times = [(0 if at < again else gone) + line["at"] for at, line in enumerate(lines)]
    # losses are where their windows are
    over = [t for t, line in zip(times, lines, strict=True) if line["event"] == "window"]
    assert [event.at for event in run.losses] == over
    assert [event.at for event in run.events] == sorted(event.at for event in run.events)
    numbers = [window.record.window for window in run.windows]
    assert numbers == [*range(12), *range(10, 16)] and run.repeated == 2
    assert [window.segment for window in run.windows] == [0] * 12 + [1] * 6
    # Windows that were reported when they were over are where they were.
    expected = [t for t, line in zip(times, lines, strict=True) if line["event"] == "window"]
    assert [window.end for window in run.windows] == pytest.approx(expected)
    begins = [window.end - window.record.wall_ms / 1e3 for window in run.windows]
    assert [window.begin for window in run.windows] == pytest.approx(begins)


def test_what_counts_as_done_twice(tmp_path, made):
    parts = made.process(0, 5, 1), made.process(3, 6, 2), made.process(2, 4, 3)
    path = tmp_path / "timeline.jsonl"
    assert read_run(made.write(path, [line for part in parts for line in part])).repeated == 2 + 2
    again = parts[0] + parts[0]  # two trainings, one after the other
    assert read_run(made.write(path, again)).repeated == 0


def test_windows_that_were_reported_late_do_not_overlap(tmp_path, made):
    # three windows of 80 ms, all reported together, and one that was busy beyond its end
    lines = [made.window(i, 1.0 + i * 1e-3) for i in range(3)]
    lines.append(made.window(3, 1.2, wall_ms=50.0, busy_ms=(90.0, 10.0, 10.0)))
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert [window.end for window in run.windows] == pytest.approx([0.842, 0.922, 1.002, 1.2])
    assert run.windows[3].begin == pytest.approx(1.11)
    assert all(before.end <= after.begin for before, after in pairwise(run.windows))


def test_windows_that_need_more_time_than_was_told_push_the_axis(tmp_path, made):
    lines = [made.window(i, 0.05) for i in range(3)] + [made.window(3, 0.01)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert run.windows[0].begin == pytest.approx(0)
    assert [window.end for window in run.windows] == pytest.approx([0.08, 0.16, 0.24, 0.32])
    assert run.seconds == pytest.approx(0.32)


def test_without_a_run_event_devices_have_their_rank(tmp_path, made):
    lines = [made.window(0, 1.0), made.window(1, 2.0)]
    lines += [made.window(0, 0.5), made.window(1, 0.9, (3, 3), busy_ms=(70.0, 70.0))]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    names = [segment.devices for segment in run.segments]
    assert names == [("device 0", "device 1", "device 2")] * 2 + [("device 0", "device 1")]
    assert [window.segment for window in run.windows] == [0, 0, 1, 2]  # time went back before 1
    assert run.segments[0].cadence == "" and run.segments[0].overhead_target == 0


def test_what_comes_before_the_run_event_belongs_to_its_part(tmp_path, made):
    compiled = {
        "event": "compile",
        "seconds": 1.0,
        "ahead": False,
        "program": "accumulate",
        "at": 0.5,
    }
    lines = [compiled, made.begin(0.6), made.window(0, 1.0)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert [segment.devices for segment in run.segments] == [("a", "b", "c")]
    assert [window.segment for window in run.windows] == [0]


def two_steps(made):
    """What two steps report in turns, one on three devices and one on two."""
    pair = {"counts": (3, 3), "busy_ms": (70.0, 70.0)}
    lines = [made.begin(0.0), made.begin(0.1, names=("x", "y"))]
    for number in range(4):
        lines.append(made.window(number, 1.0 + number))
        lines.append(made.window(2 * number, 1.2 + number, **pair))
        lines.append(made.window(2 * number + 1, 1.4 + number, **pair))
    return lines


def test_windows_of_two_steps_are_told_apart_by_their_devices(tmp_path, made):
    run = read_run(made.write(tmp_path / "timeline.jsonl", two_steps(made)))
    assert [segment.devices for segment in run.segments] == [("a", "b", "c"), ("x", "y")]
    assert [window.segment for window in run.windows] == [0, 1, 1] * 4
    assert run.repeated == 0
    assert run.devices == ("x", "y") and len(run.latest) == 8
    again = two_steps(made) + two_steps(made)  # another process: its windows are its own
    run = read_run(made.write(tmp_path / "timeline.jsonl", again))
    assert [window.segment for window in run.windows] == [0, 1, 1] * 4 + [2, 3, 3] * 4


def test_a_window_on_devices_that_nobody_told_of_begins_a_part(tmp_path, made):
    lines = [made.begin(0.0, names=("a", "b")), made.window(7, 1.0), made.window(8, 1.1)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    names = [segment.devices for segment in run.segments]
    assert names == [("a", "b"), ("device 0", "device 1", "device 2")]
    assert [window.segment for window in run.windows] == [1, 1]


def test_a_late_device_drops_no_update(tmp_path, made):
    reasons = ["not finite", LATE, "left out: not finite", LATE]
    lines = [
        {"event": "skip", "window": at, "epoch": 0, "reason": reason, "at": 1.0}
        for at, reason in enumerate(reasons)
    ]
    run = read_run(made.write(tmp_path / "timeline.jsonl", [made.window(0, 0.5), *lines]))
    assert len(run.skips) == 4 and run.report().skipped == 2
    assert LATE == pipeline.LATE and AVERAGES.event.startswith(LEFT_OUT)
    assert not GRADIENTS.event.startswith(LEFT_OUT)


def test_no_event_is_checked_a_second_time(tmp_path, made, monkeypatch):
    """Of a long run there are millions."""
    checked = []
    check = Event.validate
    monkeypatch.setattr(Event, "validate", lambda event: (checked.append(1), check(event))[1])
    lines = made.resumed(tmp_path / "timeline.jsonl")
    read_run(tmp_path)
    assert len(checked) == len(lines)


def test_devices_of_one_name_are_told_apart(tmp_path, made):
    lines = [made.begin(0.0, names=("A100", "A100", "T4")), made.window(0, 1.0)]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert run.devices == ("0: A100", "1: A100", "2: T4")


def test_the_report_is_of_all_windows_on_the_last_devices(tmp_path, made):
    lines = made.process(0, 5, 1, names=("a", "b")) + made.process(5, 9, 2)
    lines += made.process(9, 12, 3)
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert [window.record.window for window in run.latest] == list(range(5, 12))
    records = [line for line in lines if line["event"] == "window"][5:]
    steady = [record for record in records if record["steady"]]
    report = run.report()
    seconds = sum(record["wall_ms"] for record in steady) / 1e3
    assert report.examples_per_s == pytest.approx(sum(r["examples"] for r in steady) / seconds)
    assert report.limit_share == limit_share([w.record for w in run.latest if w.record.steady])
    assert [device.name for device in report.devices] == ["a", "b", "c"]
    assert report.compile_hits is None
    assert report.counts == tuple(records[-2]["counts"]) and report.windows == 7
    assert (report.exchange_bytes, report.frozen_bytes) == (4_000_000, 1_000_000)
    assert (report.compile_misses, report.compiled_ahead, report.skipped) == (3, 0, 3)
    assert report.compile_s == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("epochs", "counts"),
    [((0, 0, 0), (5, 2)), ((0, 0, 1), (4, 1)), ((0, 1, 2), (1, 1)), ((0,), (4, 1))],
    ids=["within an epoch", "an epoch's first", "epochs of one window", "one window"],
)
def test_a_window_that_the_end_cut_is_not_the_plan(epochs, counts, tmp_path, made):
    planned = [(4, 1), (5, 2), (1, 1)]
    lines = [
        made.window(number, 1.0 + number, planned[number], epoch=epoch, busy_ms=(9.0, 9.0))
        for number, epoch in enumerate(epochs)
    ]
    assert read_run(made.write(tmp_path / "timeline.jsonl", lines)).report().counts == counts


def test_one_device_is_busy_all_the_time(tmp_path, made):
    lines = [made.window(0, 1.0, (4,), busy_ms=())]
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert run.windows[0].busy_ms == (80.0,) and run.devices == ("device 0",)
    assert run.windows[0].begin == pytest.approx(0.92)


def test_the_anchor_over_time(tmp_path, made):
    where = {"event": "anchor", "window": 0, "epoch": 0}
    lines = [
        made.begin(0.0), {**where, "before": 1, "anchor": 2, "at": 1.0},
        {**where, "before": 2, "anchor": 4, "at": 2.0},
        made.begin(0.5), {**where, "before": 3, "anchor": 5, "at": 1.0},
    ]  # fmt: skip
    run = read_run(made.write(tmp_path / "timeline.jsonl", lines))
    assert run.anchor_steps == [(0.0, 1), (1.0, 2), (2.0, 4), (2.5, 3), (3.0, 5)]


def test_a_run_without_a_window(tmp_path):
    with Timeline(tmp_path / "timeline.jsonl"):
        pass
    run = read_run(tmp_path)
    assert (run.devices, run.windows, run.seconds, run.repeated) == ((), [], 0.0, 0)
    assert run.report().limit_share is None and run.anchor_steps == []
    with Timeline(tmp_path / "timeline.jsonl") as timeline:
        timeline.add(LossEvent, window=0, epoch=0, loss=1.0)
    assert len(read_run(tmp_path).losses) == 1


def test_what_is_refused(tmp_path, made):
    with pytest.raises(TypeError, match=r"^read_run: path must be a path, got 3 \(int\)\.$"):
        read_run(3)
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path)
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"event": "party", "at": 1.0}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* must be an event of a timeline"):
        read_run(path)


def test_losses_that_were_reported_together_are_where_their_windows_are(tmp_path, made):
    lines = [made.window(i, 1.0 + i) for i in range(3)]
    late = [{"event": "loss", "epoch": 0, "loss": 1.0, "at": 4.0} | {"window": i} for i in range(4)]
    skip = {"event": "skip", "window": 1, "epoch": 0, "reason": "r", "at": 2.5}
    run = read_run(made.write(tmp_path / "timeline.jsonl", [*lines[:2], skip, lines[2], *late]))
    assert [(event.window, event.at) for event in run.losses] == [
        (0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)  # nothing is known of the last one's window
    ]  # fmt: skip
    assert [event.at for event in run.events] == [1.0, 2.0, 2.5, 3.0, 4.0]
