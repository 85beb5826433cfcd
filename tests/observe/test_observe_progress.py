"""The progress display: on a terminal that is real, as plain lines, and when nobody looks."""

import contextlib
import io
import logging
import os
import re
import signal
import sys
import threading

import children
import numpy as np
import pytest

from elche_jax.observe import progress as module
from elche_jax.observe.progress import Progress

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
pty = pytest.importorskip("pty", reason="needs a pseudo terminal, which this system has not")


class Terminal:
    """A pseudo terminal: what is written to `stream` is read from the other end."""

    END = "\x03"

    def __init__(self):
        self._master, slave = os.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115  # closed below
        self._text = b""
        self._all_read = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(self._master, 4096):
                self._text += data
                if self._text.endswith(self.END.encode()):
                    self._all_read.set()

    @property
    def text(self):
        """All that was written; closes the terminal."""
        if not self.stream.closed:
            # what is on its way when one end is closed may not arrive
            self.stream.write(self.END)
            self.stream.flush()
            assert self._all_read.wait(60)
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return self._text.decode().removesuffix(self.END)


def plain(text):
    """Without colours and moves."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    _ = terminal.text


class Clock:
    """A clock that stands until it is set."""

    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


# not a terminal


def test_one_line_per_epoch_and_nothing_else():
    out = io.StringIO()
    with Progress(60, 3, ["a", "b"], stream=out) as progress:
        for step in range(60):
            progress.update(step // 20, step + 1, 6.0 / (step + 1), 1234.5, (0.9, 0.8))
            assert out.getvalue().count("\n") == step // 20
    assert out.getvalue() == (
        "epoch 1 of 3: loss 0.3, 1,234 examples/s\n"
        "epoch 2 of 3: loss 0.15, 1,234 examples/s\n"
        "epoch 3 of 3: loss 0.1, 1,234 examples/s\n"
    )


def test_lines_and_numbers_that_are_not_known():
    out = io.StringIO()
    with Progress(None, 2, [], stream=out) as progress:
        progress.line("a [bold]line[/]")
        progress.update(0, 1)
        progress.update(1, 2, loss=float("nan"))
    assert out.getvalue() == "a [bold]line[/]\nepoch 1 of 2\nepoch 2 of 2: loss nan\n"


def test_an_epoch_that_was_broken_off_has_no_line():
    out = io.StringIO()
    with pytest.raises(KeyError), Progress(9, 2, [], stream=out) as progress:
        progress.update(0, 1)
        raise KeyError
    with Progress(9, 2, [], stream=out):
        pass  # nothing was done
    assert out.getvalue() == ""


def test_a_stream_of_few_letters():
    raw = io.BytesIO()
    with Progress(9, 2, [], stream=io.TextIOWrapper(raw, "ascii")) as progress:
        progress.line("naïve")
        assert raw.getvalue() == b"na?ve\n"


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Progress(9, 1, ["a"], stream=terminal.stream) as progress:
        progress.update(0, 9, 1.0)
    assert terminal.text == "epoch 1 of 1: loss 1\r\n"


def test_the_stream_is_the_standard_error_of_now(capsys):
    with Progress(9, 1, []) as progress:
        progress.line("here")
    assert capsys.readouterr().err == "here\n"


def test_without_a_standard_error_stream_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    out = Progress(9, 2, ["a"])
    out.line("nobody sees it")
    with out as progress:
        for epoch in range(2):
            progress.update(epoch, epoch + 1, 1.0)


def test_a_stream_that_knows_of_no_terminals_gets_lines():
    class Bare:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    out = Bare()
    with Progress(9, 1, ["a"], stream=out) as progress:
        progress.update(0, 9, 1.0)
    assert out.text == "epoch 1 of 1: loss 1\n"


# a terminal


def test_the_bar(terminal, clock):
    with Progress(200, 4, ["5 ms", "[b]20 ms"], stream=terminal.stream) as progress:
        progress.update(0, 40)
        clock.now += 10
        progress.update(1, 80, 1.25, 3119.4, (0.91, 0.785))
        progress.line("a [line]")
    text = terminal.text
    shown = plain(text)
    # 40 in ten seconds, so the other 120 take thirty
    assert re.search(r"epoch 2/4 +.*40% +loss 1\.25  3,119 examples/s +0:00:30", shown)
    assert "busy: 5 ms 91%   [b]20 ms 78%" in shown and "a [line]" in shown
    assert "epoch 1/4" in shown and "starting" in shown
    assert text.index(HIDE) < text.rindex(SHOW) and text.rindex(HIDE) < text.rindex(SHOW)


def test_at_most_ten_pictures_a_second(terminal, clock):
    with Progress(10_000, 1, ["a"], stream=terminal.stream) as progress:
        for step in range(1000):
            clock.now = 100 + step / 1000
            progress.update(0, step + 1)
    pictures = plain(terminal.text).count("epoch 1/1")
    assert 10 <= pictures <= 11  # and the last one


def test_without_a_total_and_with_many_devices(terminal, clock):
    names = [f"gpu:{rank}" for rank in range(64)]
    busy = [0.5] + [0.75] * 62 + [1.0]
    with Progress(None, 4, names, stream=terminal.stream) as progress:
        progress.update(0, 1234, busy=busy)
        clock.now += 5000
        progress.update(0, 2345, busy=busy)
    shown = plain(terminal.text)
    assert "2,345 microbatches" in shown and "%  " not in shown and ":--" not in shown
    assert "busy: least 50%, mean 75%, most 100% of 64 devices" in shown


def test_long_runs_say_hours(terminal, clock):
    with Progress(1000, 1, [], stream=terminal.stream) as progress:
        progress.update(0, 10)
        clock.now += 40
        progress.update(0, 20)
    assert " 1:05:20" in plain(terminal.text)


def test_no_thread_is_started(terminal):
    before = set(threading.enumerate())
    with Progress(10, 1, ["a"], stream=terminal.stream) as progress:
        progress.update(0, 5)
        assert set(threading.enumerate()) == before


def test_what_is_logged_to_the_terminal_appears_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    handler = logging.StreamHandler(terminal.stream)
    logger = logging.getLogger("elche_jax")
    logger.addHandler(handler)
    try:
        with Progress(10, 1, ["a"]) as progress:
            progress.update(0, 5)
            logger.warning("a warning")
            print("printed", file=sys.stderr)
        assert handler.stream is sys.stderr is terminal.stream
    finally:
        logger.removeHandler(handler)
    # Where the bar was wiped out, not behind it, where the next picture would wipe them out.
    text = terminal.text
    for words in ("a warning", "printed"):
        assert re.search(rf"\x1b\[2K{words}\r\n", text)


def test_what_goes_to_a_file_stays_out_of_the_terminal(terminal, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with Progress(10, 1, ["a"], stream=terminal.stream) as progress:
        progress.update(0, 5)
        print("into the file")
        assert sys.stdout is file
    assert file.getvalue() == "into the file\n" and "into the file" not in terminal.text


def test_after_an_error_the_terminal_is_as_before(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    with pytest.raises(KeyError), Progress(10, 1, ["a"]) as progress:
        progress.update(0, 5)
        assert sys.stderr is not terminal.stream
        raise KeyError
    assert sys.stderr is terminal.stream
    text = terminal.text
    assert text.rindex(SHOW) > text.rindex(HIDE)


class Unflushed(io.StringIO):
    """Written to, but nothing of it arrives."""

    def flush(self):
        raise OSError("gone")


def test_all_handlers_get_their_streams_back(terminal, monkeypatch):
    """Also those behind one that cannot be flushed."""
    stdout, stderr = Unflushed(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(module, "_on_terminal", lambda stream: True)
    logger = logging.getLogger("elche_jax")
    handlers = [logging.StreamHandler(stream) for stream in (stdout, stderr)]
    monkeypatch.setattr(logger, "handlers", handlers)
    with Progress(10, 1, ["a"], stream=terminal.stream) as progress:
        progress.update(0, 5)
        assert not {stdout, stderr} & {handler.stream for handler in handlers}
    assert [handler.stream for handler in handlers] == [stdout, stderr]
    assert sys.stdout is stdout and sys.stderr is stderr


INTERRUPTED = """
import sys
from elche_jax.observe.progress import Progress
with Progress(10**9, 1, ["a"]) as progress:
    progress.update(0, 1)
    print("ready", flush=True)
    step = 1
    while True:
        step += 1
        progress.update(0, step, 1.0, 1.0, (0.5,))
"""


def test_ctrl_c_gives_the_terminal_back(terminal):
    command = (sys.executable, "-c", children.NO_JAX + INTERRUPTED)
    with children.started(*command, stderr=terminal.stream) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
    text = terminal.text
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert text.rindex("KeyboardInterrupt") > text.rindex(SHOW)


# a stream that goes away


def test_a_closed_stream_does_not_stop_the_run(clock):
    out = io.StringIO()
    with Progress(60, 3, ["a"], stream=out) as progress:
        progress.update(0, 1)
        out.close()
        progress.update(1, 2)
        progress.line("nobody sees it")
        progress.update(2, 3)
    with Progress(60, 3, ["a"], stream=out) as progress:  # closed from the beginning
        progress.update(0, 1)
        progress.update(1, 1)


def test_a_terminal_that_goes_away_does_not_stop_the_run(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    end, other = os.openpty()
    stream = open(other, "w")  # noqa: SIM115  # closed below
    with Progress(60, 3, ["a"], stream=stream) as progress:
        progress.update(0, 1)
        assert progress._bar is not None
        os.close(end)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(other, b"x")
        for step in range(5):
            clock.now += 1
            progress.update(1, 2 + step)
        assert progress._bar is None
        progress.line("nobody sees it")
    assert sys.stderr is stderr
    with pytest.raises(OSError, match="Input/output error"):  # what it could not write
        stream.close()


def test_a_pipe_that_breaks_does_not_end_the_process(clock, monkeypatch):
    """Rich's own console would leave with `SystemExit`."""

    class Broken(io.StringIO):
        broken = False

        def isatty(self):
            return True

        def write(self, text):
            if self.broken:
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setenv("TERM", "xterm")
    out = Broken()
    with Progress(60, 3, ["a"], stream=out) as progress:
        progress.update(0, 1)
        assert "epoch 1/3" in plain(out.getvalue())
        out.broken = True
        clock.now += 1
        progress.update(0, 2)
        progress.update(1, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((0, 1, []), ValueError, r"total must be at least 1, got 0\.$"),
        ((1.5, 1, []), TypeError, r"total must be an integer, got 1\.5 \(float\)\.$"),
        ((1, 0, []), ValueError, r"epochs must be at least 1, got 0\.$"),
        ((1, 1, "ab"), TypeError, r"devices must be a sequence of strings, got 'ab' \(str\)\.$"),
        ((1, 1, ["a", 3]), TypeError, r"devices\[1\] must be of type str, got 3 \(int\)\.$"),
    ],
)
def test_what_is_refused(arguments, kind, text):
    with pytest.raises(kind, match="^Progress: " + text):
        Progress(*arguments)


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"epoch": 0.5}, TypeError, r"epoch must be an integer, got 0\.5 \(float\)\.$"),
        ({"epoch": -1}, ValueError, r"epoch must be at least 0, got -1\.$"),
        ({"done": "2"}, TypeError, r"done must be an integer, got '2' \(str\)\.$"),
        ({"done": -1}, ValueError, r"done must be at least 0, got -1\.$"),
        ({"loss": "x"}, TypeError, r"loss must be a number, got 'x' \(str\)\.$"),
        ({"loss": True}, TypeError, r"loss must be a number, got True \(bool\)\.$"),
        ({"examples_per_s": [1]}, TypeError, r"examples_per_s must be a number, got \[1\]"),
        ({"busy": 0.5}, TypeError, r"busy must be a sequence of numbers, got 0\.5 \(float\)\.$"),
        ({"busy": ["x"]}, TypeError, r"busy\[0\] must be a number, got 'x' \(str\)\.$"),
    ],
)
@pytest.mark.parametrize("where", ["terminal", "lines"])
def test_an_error_of_the_caller_is_no_lost_terminal(terminal, clock, where, values, kind, text):
    out = terminal.stream if where == "terminal" else io.StringIO()
    with Progress(9, 2, ["a"], stream=out) as progress:
        progress.update(0, 1)
        clock.now += 1
        with pytest.raises(kind, match=r"^Progress\.update: " + text):
            progress.update(**{"epoch": 0, "done": 1} | values)
        with pytest.raises(TypeError, match=r"^Progress\.line: text must be of type str, got 3"):
            progress.line(3)
        progress.update(1, 2, np.float32(0.5), np.array(3.0), np.array([0.25]))
    shown = plain(terminal.text) if where == "terminal" else out.getvalue()
    assert re.search(r"epoch 2.*loss 0\.5,? +3 examples/s", shown)
