"""Events: what they take, what they refuse, and that files keep them."""

import inspect
import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from elche_jax.observe import events as module, timeline as timelines
from elche_jax.observe.events import (
    EVENTS,
    FIELDS,
    NAMES,
    EvaluationEvent,
    Event,
    RunEvent,
)
from elche_jax.observe.timeline import Timeline

VALUES = {
    bool: True, str: 'é"\n\u2028', int: 3, float: 0.1, tuple[int, ...]: (4, 2),
    tuple[float, ...]: (0.5, 0.25), tuple[str, ...]: ("a", "</script>"),
}  # fmt: skip


def values_of(kind):
    return {field.name: VALUES[field.type] for field in fields(kind) if field.name != "at"}


def test_every_event_has_an_entry_and_plain_fields():
    kinds = {kind for kind in vars(module).values() if inspect.isclass(kind) and is_dataclass(kind)}
    kinds = {kind for kind in kinds if issubclass(kind, Event)}
    assert set(EVENTS.values()) == kinds and len(EVENTS) == len(kinds)
    assert {kind: name for name, kind in EVENTS.items()} == NAMES
    for kind in kinds:
        assert {field.type for field in fields(kind)} <= set(FIELDS)
        assert [field.name for field in fields(kind)][-1] == "at"
        assert "at:" in kind.__doc__
        assert not hasattr(kind(**values_of(kind), at=1.0), "__dict__")


def test_names_in_files():
    assert list(EVENTS) == [
        "run", "window", "skip", "verdict", "compile", "anchor", "loss", "evaluation",
        "checkpoint", "epoch",
    ]  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_through_a_file(tmp_path, name):
    values = values_of(EVENTS[name])
    with Timeline(tmp_path / "run.jsonl") as timeline:
        timeline.add(EVENTS[name], **values)
    (event,) = timeline.events
    assert Timeline.read(tmp_path / "run.jsonl") == [event]
    assert {key: getattr(event, key) for key in values} == values
    (line,) = (tmp_path / "run.jsonl").read_bytes().splitlines()
    assert json.loads(line) == json.loads(json.dumps({"event": name} | values | {"at": event.at}))


def test_a_file_of_before_is_read(tmp_path, made):
    run = made.begin(0.5)
    del run["exchange_bytes"], run["frozen_bytes"]
    lines = [
        run,
        made.window(0, 1.0),
        {"event": "skip", "window": 0, "epoch": 0, "reason": "not finite", "at": 1.0},
        {"event": "verdict", "window": 0, "epoch": 0, "action": "stable", "factor": 1.0, "at": 1.5},
    ]
    events = Timeline.read(made.write(tmp_path / "old.jsonl", lines))
    assert [type(event) for event in events] == [EVENTS[line["event"]] for line in lines]
    assert (events[0].exchange_bytes, events[0].frozen_bytes) == (0, 0)
    Timeline(tmp_path / "old.jsonl").close()


def test_values_become_plain():
    given = np.array(["a", "b"]), np.str_("x"), np.float32(0.5), np.int64(3), 8, 0, 1
    event = RunEvent(*given).validate()
    assert event == RunEvent(("a", "b"), "x", 0.5, 3, 8, 0, 1.0)
    kinds = [type(getattr(event, field.name)) for field in fields(RunEvent)]
    assert kinds == [tuple, str, float, int, int, int, float] and {
        type(n) for n in event.devices
    } == {str}


def test_metrics_by_name():
    event = EvaluationEvent(9, 1, 0.5, ["loss", "accuracy"], [2.0, 0.5], 1.0)
    assert event.metrics == {"loss": 2.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"names": ("loss",)}, ValueError, r"values must have one entry per name \(1\), got 2\.$"),
        ({"names": "ab"}, TypeError, r"names must be a sequence of strings, got 'ab' \(str\)\.$"),
        ({"names": ("a", 3)}, TypeError, r"names\[1\] must be of type str, got 3 \(int\)\.$"),
        ({"values": (1.0, float("nan"))}, ValueError, r"values\[1\] must be finite, got nan\.$"),
        ({"window": 1.5}, TypeError, r"window must be an integer, got 1\.5 \(float\)\.$"),
    ],
)
def test_what_is_refused(change, kind, text):
    values = {"window": 9, "epoch": 1, "seconds": 0.5, "names": ("a", "b"), "values": (1.0, 2.0)}
    with pytest.raises(kind, match="^EvaluationEvent: " + text):
        Timeline().add(EvaluationEvent, **values | change)


@pytest.mark.parametrize(("counts", "busy"), [((4, 2), (1.0,)), ((4, 2), ()), ((4,), (1.0, 2.0))])
def test_a_window_has_a_busy_time_per_device(counts, busy):
    values = values_of(EVENTS["window"]) | {"counts": counts, "busy_ms": busy}
    rule = rf"must have one entry per device \({len(counts)}\), got {len(busy)}\.$"
    with pytest.raises(ValueError, match=r"^WindowEvent: busy_ms " + rule):
        EVENTS["window"](**values, at=0.0).validate()
    one = EVENTS["window"](**values | {"counts": (4,), "busy_ms": ()}, at=0.0)
    assert one.validate().busy_ms == ()


def test_the_old_place_of_the_names():
    for name in ("EVENTS", "Event", "WindowEvent", "SkipEvent", "VerdictEvent"):
        assert getattr(timelines, name) is getattr(module, name)
