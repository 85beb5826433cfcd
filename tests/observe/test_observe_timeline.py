"""The timeline: what goes in comes out, whatever happens to the file and the process."""

import errno
import gc
import json
import logging
import os
import signal
import sys
import threading
import weakref
from dataclasses import fields, replace
from pathlib import Path

import children
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from elche_jax.cadence import WindowMeasurement, WindowRecord
from elche_jax.observe import line_writer, timeline as module
from elche_jax.observe.report import limit_share
from elche_jax.observe.run import read_run
from elche_jax.observe.timeline import Event, SkipEvent, Timeline, WindowEvent

ROOT = Path(__file__).parents[2]
RECORD = WindowRecord(
    window=3, epoch=1, counts=(4, 2), examples=60, busy_ms=(40.0, 25.0), wall_ms=50.0,
    sync_ms=1.0, skew_ms=2.0, steady=True,
)  # fmt: skip
LINE = '{"event": "skip", "window": 1, "epoch": 0, "reason": "r", "at": 0.5}'
FULL = Path("/dev/full")
full_disk = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, a disk that is full")

laws = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the file is written anew
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
records = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        WindowRecord,
        window=st.integers(0, 2**60),
        epoch=st.integers(0, 2**60),
        counts=st.lists(st.integers(0, 2**53), min_size=n, max_size=n).map(tuple),
        examples=st.integers(0, 2**60),
        busy_ms=st.lists(numbers, min_size=n, max_size=n).map(tuple),
        wall_ms=numbers,
        sync_ms=numbers,
        skew_ms=numbers,
        steady=st.booleans(),
    )
)
reasons = st.text(st.characters(), max_size=20)
entries = st.lists(st.one_of(records, st.tuples(st.integers(0, 9), reasons)), max_size=6)


def fill(timeline, entries):
    for entry in entries:
        if isinstance(entry, WindowRecord):
            timeline.window(entry)
        else:
            timeline.add(SkipEvent, window=entry[0], epoch=0, reason=entry[1])


def skip(timeline, window):
    timeline.add(SkipEvent, window=window, epoch=0, reason="not finite")


# in memory


def test_events_in_order_with_their_times():
    timeline = Timeline()
    timeline.window(RECORD)
    skip(timeline, 4)
    timeline.window(RECORD)
    first, dropped, last = timeline.events
    assert first == WindowEvent(3, 1, (4, 2), 60, (40.0, 25.0), 50.0, 1.0, 2.0, True, at=first.at)
    assert dropped == SkipEvent(window=4, epoch=0, reason="not finite", at=dropped.at)
    assert 0 <= first.at <= dropped.at <= last.at


def test_a_window_event_is_a_record():
    timeline = Timeline()
    timeline.window(RECORD)
    (event,) = timeline.events
    assert {f.name: getattr(event, f.name) for f in fields(WindowMeasurement)} == {
        f.name: getattr(RECORD, f.name) for f in fields(WindowMeasurement)
    }
    assert limit_share(timeline.events) == limit_share([RECORD])


def test_only_the_last_events_are_kept_and_all_are_written(tmp_path):
    with Timeline(tmp_path / "run.jsonl", keep=2) as timeline:
        for window in range(5):
            skip(timeline, window)
    assert [event.window for event in timeline.events] == [3, 4]
    written = Timeline.read(tmp_path / "run.jsonl")
    assert [event.window for event in written] == [0, 1, 2, 3, 4]
    assert Timeline()._events.maxlen == 10_000


def test_the_list_of_events_is_the_callers_own():
    timeline = Timeline()
    skip(timeline, 0)
    timeline.events.clear()
    assert len(timeline.events) == 1


# through a file


@laws
@given(entries=entries)
def test_what_is_written_is_read(tmp_path, entries):
    path = tmp_path / "run.jsonl"
    path.unlink(missing_ok=True)
    with Timeline(path) as timeline:
        fill(timeline, entries)
        timeline.flush()
        assert Timeline.read(path) == timeline.events, "before it is closed"
    assert Timeline.read(path) == timeline.events
    assert len(timeline.events) == len(entries)


def test_lines_are_plain_json(tmp_path):
    record = WindowRecord(
        window=np.int64(3), epoch=np.int32(1), counts=np.array([4, 2]), examples=np.uint8(60),
        busy_ms=tuple(np.array([40.0, 25.0], "float32")), wall_ms=np.float32(50), sync_ms=1,
        skew_ms=np.float64(2), steady=np.bool_(True),
    )  # fmt: skip
    with Timeline(tmp_path / "run.jsonl") as timeline:
        timeline.window(record)
        timeline.add(SkipEvent, window=4, epoch=0, reason=np.str_("two\nlines \u2028 é"))
    window, dropped = (tmp_path / "run.jsonl").read_bytes().splitlines()
    assert json.loads(window) == {
        "event": "window", "window": 3, "epoch": 1, "counts": [4, 2], "examples": 60,
        "busy_ms": [40.0, 25.0], "wall_ms": 50.0, "sync_ms": 1.0, "skew_ms": 2.0, "steady": True,
        "at": timeline.events[0].at,
    }  # fmt: skip
    assert json.loads(dropped)["reason"] == "two\nlines \u2028 é"
    for value in (timeline.events[0].counts[0], timeline.events[0].busy_ms[0]):
        assert type(value) in (int, float)


def test_missing_folders_are_made(tmp_path):
    Timeline(tmp_path / "a" / "b" / "run.jsonl").close()
    assert Timeline.read(str(tmp_path / "a" / "b" / "run.jsonl")) == []


def test_several_threads_write_whole_lines_in_the_order_of_time(tmp_path):
    start = threading.Barrier(8)
    with Timeline(tmp_path / "run.jsonl") as timeline:

        def report(thread):
            start.wait()
            for window in range(100):
                timeline.add(SkipEvent, window=window, epoch=thread, reason="x" * 200)

        threads = [threading.Thread(target=report, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = Timeline.read(tmp_path / "run.jsonl")
    assert events == timeline.events and len(events) == 800
    times = [event.at for event in events]
    assert times == sorted(times)
    for thread in range(8):
        assert [e.window for e in events if e.epoch == thread] == list(range(100))


# after a kill


def test_a_torn_last_line_is_left_out_wherever_it_is_torn(tmp_path):
    path = tmp_path / "run.jsonl"
    with Timeline(path) as timeline:
        fill(timeline, [(4, 'a "reason"}\n'), RECORD])
    content = path.read_bytes()
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        whole = content[: end + 1].count(b"\n")  # only the end of the line may be missing
        assert Timeline.read(path) == timeline.events[:whole]
        # and the next run goes on behind what is whole
        with Timeline(path) as again:
            skip(again, 7)
        assert Timeline.read(path) == timeline.events[:whole] + again.events
    assert whole == 2


KILLED = """
import sys
from elche_jax.observe.timeline import SkipEvent, Timeline
timeline = Timeline(sys.argv[1])
for window in range(10**9):
    timeline.add(SkipEvent, window=window, epoch=0, reason="x" * 5000)
    if window == 100:
        timeline.flush()
        print("ready", flush=True)
"""


def test_after_a_kill_everything_flushed_is_there(tmp_path):
    path = tmp_path / "run.jsonl"
    with children.started(sys.executable, "-c", children.NO_JAX + KILLED, path) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
    events = Timeline.read(path)
    assert len(events) > 100
    assert [event.window for event in events] == list(range(len(events)))


def test_a_second_timeline_continues_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    runs = []
    for window in range(3):
        with Timeline(path) as timeline:
            skip(timeline, window)
        runs += timeline.events
    assert Timeline.read(path) == runs and len(runs) == 3


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b"\n", b'{"event": 1}\n', b"\0 \0"])
def test_another_file_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^Timeline: line 1 of .*notes\.txt must be an event of a timeline, got "
    ):
        Timeline(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("zeros", [1, 4096, 200_000])
@pytest.mark.parametrize("torn", [0, 1, 30])
def test_zeros_that_a_power_loss_has_left(tmp_path, zeros, torn):
    path = tmp_path / "run.jsonl"
    with Timeline(path) as timeline:
        fill(timeline, [RECORD, (4, "a"), RECORD])
    content = path.read_bytes()
    for whole in (0, 3):
        lines = content if whole else b""
        path.write_bytes(lines + content[:torn] + b"\0" * zeros)
        assert Timeline.read(path) == timeline.events[:whole]
        with Timeline(path) as again:
            skip(again, 7)
        assert Timeline.read(path) == timeline.events[:whole] + again.events
        assert path.read_bytes().startswith(lines + b'{"event"') and b"\0" not in path.read_bytes()


@pytest.mark.parametrize("ended", [True, False])
def test_a_long_file_is_continued_by_its_first_and_last_line(tmp_path, monkeypatch, ended):
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(json.loads(LINE) | {"window": number}) for number in range(3000)]
    text = "\n".join(lines) + ended * "\n"
    path.write_text(text)
    parsed = []
    real = module._from_line
    monkeypatch.setattr(module, "_from_line", lambda *a: (parsed.append(a[-1]), real(*a))[1])
    with Timeline(path) as timeline:
        skip(timeline, 3000)
    assert len(parsed) <= 3 and json.loads(parsed[-1])["window"] == 2999
    assert [event.window for event in Timeline.read(path)] == list(range(3001))


@pytest.mark.parametrize("last", ["foo\n", "foo", LINE[:30] + "\n"])
def test_a_file_that_ends_as_something_else_is_left_as_it_is(tmp_path, last):
    path = tmp_path / "run.jsonl"
    text = (LINE + "\n") * 2000 + last
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^Timeline: the last line of .*run\.jsonl must be an ev"):
        Timeline(path)
    assert path.read_text() == text


# lines that are no events


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("3", "AttributeError"),
        ('{"event": "x"}', "KeyError: 'x'"),
        ('{"event": ["skip"]}', "TypeError: unhashable"),
        ('{"window": 1}', "KeyError: 'event'"),
        (LINE[:30], "JSONDecodeError"),
        (LINE.replace('"epoch": 0, ', ""), "TypeError: .*'epoch'"),
        (LINE.replace('"epoch"', '"age"'), "TypeError: .*'age'"),
        (LINE.replace('"r"', "2"), "TypeError: SkipEvent: reason must be of type str, got 2"),
        (LINE.replace("1", "1.5"), "TypeError: SkipEvent: window must be an integer, got 1.5"),
        (LINE.replace("0.5", "NaN"), "ValueError: SkipEvent: at must be finite, got nan"),
        ("[" * 100_000, "RecursionError"),
        ('"\udcff"', "UnicodeDecodeError"),
    ],
)
def test_another_bad_line_is_named(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    text = f"{LINE}\n{LINE}\n{line}\n{LINE}\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        ValueError,
        match=rf"^Timeline\.read: line 3 of {path} must be an event of a timeline, got b.*"
        rf"\({why}[^$]*\)\. Is it another file, or was it edited\?$",
    ):
        Timeline.read(path)


def test_a_last_line_that_is_no_beginning_of_an_event_is_no_torn_one(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(f"{LINE}\nfoo")
    with pytest.raises(ValueError, match=r"^Timeline\.read: line 2 of .* got b'foo' \(JSON"):
        Timeline.read(path)


# a disk that is full


@full_disk
def test_a_full_disk_does_not_stop_the_recording(caplog):
    timeline = Timeline(FULL)
    for window in range(3):
        skip(timeline, window)
    assert [event.window for event in timeline.events] == [0, 1, 2]
    text = r"^\[Errno 28\] No space left on device: '/dev/full'$"
    with pytest.raises(OSError, match=text):
        timeline.flush()
    with pytest.raises(OSError, match=text):
        timeline.close()
    timeline.close()
    # now the thread has ended, which may have been the one to say it
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("elche: Timeline('/dev/full') could not be written, events are kept in")


class Disk:
    """A file that takes so many bytes at a time; an error or None is what it answers."""

    name = "disk"

    def __init__(self, *answers):
        self.answers, self.content, self.closed = list(answers), b"", False

    def write(self, data):
        answer = self.answers.pop(0) if self.answers else len(data)
        if isinstance(answer, OSError):
            raise answer
        self.content += data[: answer or 0]
        return answer and len(data[:answer])

    def close(self):
        self.closed = True
        raise OSError(5, "Input/output error")


def test_an_event_of_which_no_line_can_be_made(tmp_path):
    timeline = Timeline(tmp_path / "run.jsonl")
    skip(timeline, 0)
    skip(timeline, 10**5000)  # more digits than Python writes
    skip(timeline, 1)
    with pytest.raises(OSError, match=r"an event cannot be written \(ValueError: .*digits"):
        timeline.close()
    assert [event.window for event in Timeline.read(tmp_path / "run.jsonl")] == [0]
    assert len(timeline.events) == 3


class Full(Disk):
    """One that takes a line and a part of the next, and then no more."""

    def write(self, data):
        if b"\n" not in self.content:
            whole = len((self.content + data).split(b"\n")[0]) + 1 - len(self.content)
            self.answers.insert(0, min(whole + 20, len(data)))
        elif self.content.endswith(b"\n"):
            self.answers.insert(0, 20)
        return super().write(data)


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def on(disk, monkeypatch):
    monkeypatch.setattr(module, "_open", lambda path: (disk, 0.0))
    return Timeline("run.jsonl")


def test_a_line_that_takes_several_writes(tmp_path, caplog, monkeypatch):
    disk = Disk(7, 10, 1)
    timeline = on(disk, monkeypatch)
    skip(timeline, 0)
    skip(timeline, 1)
    timeline.flush()
    (tmp_path / "run.jsonl").write_bytes(disk.content)
    assert Timeline.read(tmp_path / "run.jsonl") == timeline.events
    with pytest.raises(OSError, match="Input/output error"):  # of closing itself
        timeline.close()
    assert disk.closed and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("answer", "text"), [(NO_SPACE, "No space left"), (None, "the file accepts no data")]
)
def test_nothing_is_written_behind_a_torn_line(tmp_path, caplog, monkeypatch, answer, text):
    disk = Full(answer)
    timeline = on(disk, monkeypatch)
    for window in range(4):
        skip(timeline, window)
    with pytest.raises(OSError, match=text):
        timeline.flush()
    (tmp_path / "run.jsonl").write_bytes(disk.content)
    assert disk.content.count(b"\n") == 1 and not disk.content.endswith(b"\n")
    assert Timeline.read(tmp_path / "run.jsonl") == timeline.events[:1]
    assert len(timeline.events) == 4
    with pytest.raises(OSError, match=text):  # the first error, not that of closing
        timeline.close()
    assert disk.closed and len(caplog.records) == 1
    timeline.close()


@full_disk
def test_the_context_raises_what_could_not_be_written():
    with pytest.raises(OSError, match="No space left"), Timeline(FULL) as timeline:
        skip(timeline, 0)


@full_disk
def test_the_loops_own_error_comes_first():
    with pytest.raises(KeyError, match="the loop's own") as caught, Timeline(FULL) as timeline:
        skip(timeline, 0)
        raise KeyError("the loop's own")
    (note,) = caught.value.__notes__
    assert note.startswith("Besides, Timeline('/dev/full') could not be written: [Errno 28]")


# a file that is slow


class Slow(Disk):
    """A file that takes nothing until it is let go."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def write(self, data):
        self.asked.set()
        self.go.wait()
        return super().write(data)

    def close(self):
        self.closed = True


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "elche-timeline"]


def test_whoever_reports_does_not_wait_for_the_file(tmp_path, monkeypatch):
    disk = Slow()
    with on(disk, monkeypatch) as timeline:
        for window in range(50):
            skip(timeline, window)  # would wait here for ever
        assert disk.asked.wait(10) and not disk.content and len(timeline.events) == 50
        disk.go.set()
    assert disk.closed and disk.content.count(b"\n") == 50
    assert not threads()


def test_close_gives_up_on_a_file_that_takes_nothing(monkeypatch, caplog):
    monkeypatch.setattr(line_writer, "PATIENCE_S", 0.05)
    disk = Slow()
    timeline = on(disk, monkeypatch)
    skip(timeline, 0)
    with pytest.raises(OSError, match=r"the file has accepted no data for 0\.05 s"):
        timeline.flush()
    skip(timeline, 1)
    with pytest.raises(OSError, match="the file has accepted no data"):
        timeline.close()
    assert len(timeline.events) == 2 and len(caplog.records) == 1
    (thread,) = threads()
    disk.go.set()  # the thread ends as soon as the file goes on
    thread.join(10)
    assert disk.closed and not thread.is_alive() and disk.content.count(b"\n") == 1


def test_a_file_that_falls_far_behind_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(line_writer, "BACKLOG", 3)
    disk = Slow()
    timeline = on(disk, monkeypatch)
    skip(timeline, 0)
    assert disk.asked.wait(10)
    for window in range(1, 9):
        skip(timeline, window)
    assert len(timeline.events) == 9 and len(caplog.records) == 1
    disk.go.set()
    with pytest.raises(OSError, match="3 lines wait for a file that is too slow"):
        timeline.close()
    assert disk.content.count(b"\n") == 1 and not threads()


def test_a_flush_that_gives_up_waiting_does_not_give_up_the_file(monkeypatch, caplog):
    monkeypatch.setattr(line_writer, "PATIENCE_S", 0.05)
    disk = Slow()
    timeline = on(disk, monkeypatch)
    skip(timeline, 0)
    with pytest.raises(OSError, match="the file has accepted no data"):
        timeline.flush()
    disk.go.set()
    monkeypatch.setattr(line_writer, "PATIENCE_S", 10.0)
    skip(timeline, 1)
    timeline.close()
    assert disk.content.count(b"\n") == 2 and not caplog.records


def test_a_close_that_was_interrupted_may_be_repeated(monkeypatch):
    disk = Slow()
    timeline = on(disk, monkeypatch)
    skip(timeline, 0)
    assert disk.asked.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            timeline.close()
    disk.go.set()
    timeline.close()
    assert disk.content.count(b"\n") == 1 and disk.closed and not threads()


def _interrupted(condition, predicate, timeout=None):
    raise KeyboardInterrupt


def test_one_that_is_forgotten_still_writes_and_ends(tmp_path):
    timeline = Timeline(tmp_path / "run.jsonl")
    skip(timeline, 0)
    writing = threads()
    del timeline
    gc.collect()
    for thread in writing:
        thread.join(10)
    assert len(Timeline.read(tmp_path / "run.jsonl")) == 1 and not threads()


@full_disk
def test_an_error_does_not_hold_what_it_was_raised_through(caplog):
    timeline = Timeline(FULL)

    def training():
        state = Disk()
        skip(timeline, 0)
        with pytest.raises(OSError, match="No space left"):
            timeline.flush()
        return weakref.ref(state)

    state = training()
    gc.collect()
    assert state() is None
    with pytest.raises(OSError, match="No space left"):
        timeline.close()


def test_a_log_that_reports_to_the_timeline_does_not_hang(monkeypatch):
    monkeypatch.setattr(line_writer, "BACKLOG", 1)
    disk = Slow()
    timeline = on(disk, monkeypatch)
    handler = logging.Handler()
    handler.emit = lambda record: skip(timeline, 99)
    log = logging.getLogger("elche_jax")
    log.addHandler(handler)
    try:
        skip(timeline, 0)
        assert disk.asked.wait(10)
        for window in range(1, 5):
            skip(timeline, window)
    finally:
        log.removeHandler(handler)
        disk.go.set()
    assert [event.window for event in timeline.events] == [0, 1, 2, 99, 3, 4]
    with pytest.raises(OSError, match="1 lines wait"):
        timeline.close()


FORKED = """
import os, sys
from elche_jax.observe.timeline import SkipEvent, Timeline
timeline = Timeline(sys.argv[1])
timeline.add(SkipEvent, window=0, epoch=0, reason="parent")
timeline.flush()
child = os.fork()
timeline.add(SkipEvent, window=1, epoch=0, reason="child" if child == 0 else "parent")
if child == 0:
    try:
        timeline.close()
    except OSError as error:
        print(error)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
timeline.close()
"""


def test_a_forked_process_says_that_it_cannot_write(tmp_path):
    path = tmp_path / "run.jsonl"
    done = children.run(sys.executable, "-c", children.NO_JAX + FORKED, path)
    assert done.returncode == 0, done.stderr
    assert "it was opened before this process was forked" in done.stdout
    assert "could not be written, events are kept in memory only" in done.stderr
    assert [event.reason for event in Timeline.read(path)] == ["parent", "parent"]


STUCK = """
import os, sys, threading
from elche_jax.observe import line_writer
from elche_jax.observe.timeline import SkipEvent, Timeline
line_writer.PATIENCE_S = 0.3
reader = threading.Thread(target=lambda: os.open(sys.argv[1], os.O_RDONLY))
reader.start()
timeline = Timeline(sys.argv[1])  # a pipe that nobody drains
for window in range(2000):
    timeline.add(SkipEvent, window=window, epoch=0, reason="x" * 100)
"""


def test_the_end_of_the_interpreter_says_what_could_not_be_written(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = children.run(sys.executable, "-c", children.NO_JAX + STUCK, pipe)
    assert done.returncode == 0
    assert "the file has accepted no data for 0.3 s" in done.stderr


CYCLE = """
import gc, sys, time
from elche_jax.observe import timeline as module
from elche_jax.observe.timeline import SkipEvent, Timeline
gc.disable()

class Disk:
    lines = 0
    def write(self, data):
        gc.collect()  # in the writer's own thread
        time.sleep(0.01)
        Disk.lines += data.count(10)  # ends of lines
        open(sys.argv[1], "w").write(str(Disk.lines))
        return len(data)
    def close(self):
        pass

module._open = lambda path: (Disk(), 0.0)
timeline = Timeline("x")
timeline.itself = timeline
for window in range(50):
    timeline.add(SkipEvent, window=window, epoch=0, reason="x")
del timeline
"""


def test_a_timeline_collected_in_its_own_thread_is_still_written_whole(tmp_path):
    path = tmp_path / "lines"
    done = children.run(sys.executable, "-c", children.NO_JAX + CYCLE, path)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "50"


FORGOTTEN = """
import sys
from elche_jax.observe.timeline import SkipEvent, Timeline
timeline = Timeline(sys.argv[1])
for window in range(1000):
    timeline.add(SkipEvent, window=window, epoch=0, reason="x")
"""


def test_the_end_of_the_interpreter_waits_for_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    done = children.run(sys.executable, "-c", children.NO_JAX + FORGOTTEN, path)
    assert done.returncode == 0, done.stderr
    assert len(Timeline.read(path)) == 1000


# the end


def test_after_close_events_are_kept_in_memory_only(tmp_path):
    timeline = Timeline(tmp_path / "run.jsonl")
    skip(timeline, 0)
    timeline.close()
    timeline.close()
    skip(timeline, 1)
    assert [event.window for event in timeline.events] == [0, 1]
    assert Timeline.read(tmp_path / "run.jsonl") == timeline.events[:1]


def test_closing_one_in_memory_does_nothing():
    with Timeline() as timeline:
        skip(timeline, 0)
    timeline.close()
    assert len(timeline.events) == 1
    assert repr(timeline) == "Timeline()"


# errors


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"path": 3}, TypeError, r"Timeline: path must be a path, got 3 \(int\)\.$"),
        ({"path": b"x"}, TypeError, r"Timeline: path must be a path, got b'x' \(bytes\)\.$"),
        ({"keep": 0}, ValueError, r"Timeline: keep must be at least 1, got 0\.$"),
        ({"keep": 1.5}, TypeError, r"Timeline: keep must be an integer, got 1\.5"),
    ],
)
def test_arguments(options, kind, text):
    with pytest.raises(kind, match="^" + text):
        Timeline(**options)


def test_the_time_of_a_file_goes_on_in_the_next_process(tmp_path):
    """Also where that begins with a restore that takes longer than all before."""
    path = tmp_path / "timeline.jsonl"
    path.write_text(LINE + "\n" + LINE.replace("0.5", "70") + "\n" + LINE[:20])
    with Timeline(path) as timeline:
        timeline.add(SkipEvent, window=2, epoch=0, reason="later")
    first, second, third = Timeline.read(path)
    assert (first.at, second.at) == (0.5, 70) and third.at > 70


def test_windows_of_a_loop_of_ones_own_that_begins_anew(tmp_path):
    """No event says so, and its time goes on."""
    path = tmp_path / "timeline.jsonl"
    for _ in range(2):
        with Timeline(path) as timeline:
            for window in range(3):
                timeline.window(replace(RECORD, window=window))
    run = read_run(path)
    assert (len(run.segments), run.repeated, len(run.windows)) == (2, 0, 6)
    assert [window.segment for window in run.windows] == [0] * 3 + [1] * 3


def test_a_path_that_cannot_be_opened(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timeline.read(tmp_path / "none.jsonl")
    with pytest.raises(TypeError, match=r"^Timeline\.read: path must be a path, got None"):
        Timeline.read(None)


def test_what_is_no_event():
    timeline = Timeline()
    with pytest.raises(
        TypeError, match=r"^Timeline\.window: record must be of type WindowMeasurement"
    ):
        timeline.window({"window": 3})
    for kind in ("skip", Event, WindowRecord, []):
        with pytest.raises(
            ValueError,
            match=r"^Timeline\.add: kind must be one of RunEvent, WindowEvent, SkipEvent",
        ):
            timeline.add(kind, window=3)
    with pytest.raises(TypeError, match=r"missing 1 required .* 'reason'"):
        timeline.add(SkipEvent, window=3, epoch=0)
    with pytest.raises(TypeError, match=r"^SkipEvent: window must be an integer, got inf"):
        timeline.add(SkipEvent, window=float("inf"), epoch=0, reason="r")
    with pytest.raises(ValueError, match=r"^WindowEvent: wall_ms must be finite, got nan\.$"):
        timeline.window(replace(RECORD, wall_ms=float("nan")))
    assert timeline.events == []


def test_events_say_when_they_came(monkeypatch):
    moments = iter([100.0, 100.5, 103.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))
    timeline = Timeline()
    timeline.window(RECORD)
    timeline.add(SkipEvent, window=3, epoch=1, reason="not finite")
    assert [event.at for event in timeline.events] == [0.5, 3.0]


@laws
@given(records=st.lists(records, min_size=1, max_size=5))
def test_what_a_step_has_measured_is_recorded_as_any_window(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with Timeline(path) as timeline:
        for record in records:
            timeline.measured(record)
            timeline.window(record)
        found = timeline.events
    assert Timeline.read(path) == timeline.events == found
    assert [event.at for event in found] == sorted(event.at for event in found)
    for got, want, record in zip(found[::2], found[1::2], records, strict=True):
        assert isinstance(got, WindowEvent)
        assert replace(got, at=0.0) == replace(want, at=0.0)
        assert got.counts == record.counts and got.wall_ms == record.wall_ms
