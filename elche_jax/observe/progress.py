"""How far a run is, on a terminal or as plain lines."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO, cast

from elche_jax import _check as check

REFRESH_S = 0.1
"""Least time between two pictures."""

NAMED = 8
"""Devices that are shown by name; of more the least, the mean and the most."""


@dataclass(frozen=True, slots=True)
class _Now:
    """The newest numbers."""

    epoch: int
    done: int
    loss: float | None
    examples_per_s: float | None
    busy: Sequence[float] | None


class Progress:
    """Shows how far a run is: a live bar on a terminal, else one plain line per epoch.

    A terminal that goes away stops the showing, never the run. There is no thread: `update`
    draws, ten times a second at most, and is cheap in between. While a bar is there, what
    is printed or logged to the same terminal appears above it.

        with Progress(microbatches, epochs, names) as progress:
            for window in train.windows(data, batch_size=32, epochs=epochs):
                ...
                progress.update(window.epoch, done, loss)

    Args:
        total: Microbatches of the whole run, at least 1; None where that is not known: no
            share and no time left are shown.
        epochs: Epochs of the run, at least 1; None where they have no end.
        devices: Names of the devices, in rank order.
        stream: Where to; None: the standard error stream, as it is then. A process that has
            none shows nothing.

    Raises:
        TypeError: `total` or `epochs` is no integer, or `devices` no sequence of strings.
        ValueError: `total` or `epochs` is below 1.

    Examples:
        >>> import io
        >>> from elche_jax.observe.progress import Progress
        >>> out = io.StringIO()
        >>> with Progress(40, 2, ["cpu:0", "cpu:1"], stream=out) as progress:
        ...     progress.update(0, 20, loss=2.5, examples_per_s=1000.0)
        ...     progress.update(1, 40, loss=1.5, examples_per_s=1000.0)
        >>> print(out.getvalue())
        epoch 1 of 2: loss 2.5, 1,000 examples/s
        epoch 2 of 2: loss 1.5, 1,000 examples/s
        <BLANKLINE>
    """

    def __init__(
        self,
        total: int | None,
        epochs: int | None,
        devices: Sequence[str],
        stream: TextIO | None = None,
    ):
        if total is not None:
            total = check.integer("Progress", "total", total, low=1)
        self._total = total
        if epochs is not None:
            epochs = check.integer("Progress", "epochs", epochs, low=1)
        self._epochs = epochs
        self._devices = check.items("Progress", "devices", devices, "strings")
        for rank, name in enumerate(self._devices):
            check.instance("Progress", f"devices[{rank}]", name, str)
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._now: _Now | None = None
        self._first: tuple[float, int] | None = None
        self._due = 0.0
        self._live: Any = None
        self._shown: Any = None
        self._lost = self._stream is None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        self._safely(self._start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._shown = self._picture()  # the last one, which stays
        elif kind is None and self._now is not None:
            self._write(self._epoch_line(self._now))
        self._stop()

    def update(
        self,
        epoch: int,
        done: int,
        loss: float | None = None,
        examples_per_s: float | None = None,
        busy: Sequence[float] | None = None,
    ) -> None:
        """Takes the newest numbers, and shows them when it is time.

        Args:
            epoch: Number of the epoch, the first one 0.
            done: Microbatches of the run that are done, those before a resume as well.
            loss: Loss, of the newest window for instance; None: not known.
            examples_per_s: Valid examples per second; None: not known.
            busy: Busy share per device, each 0 to 1; None: not known.

        Raises:
            TypeError: `epoch` or `done` is no integer, another value no number.
            ValueError: `epoch` or `done` is below 0, or a busy share not finite.
        """
        where, before = "Progress.update", self._now
        epoch = check.integer(where, "epoch", epoch, low=0)
        done = check.integer(where, "done", done, low=0)
        for name, value in (("loss", loss), ("examples_per_s", examples_per_s)):
            _check_number(where, name, value)
        if busy is not None:
            busy = check.reals(where, "busy", busy)
        self._now = _Now(epoch, done, loss, examples_per_s, busy)
        if self._live is None:
            if before is not None and epoch != before.epoch:
                self._write(self._epoch_line(before))
            return
        now = time.perf_counter()
        if self._first is None:
            self._first = now, done
        if now >= self._due:
            self._due = now + REFRESH_S
            self._shown = self._picture()
            self._safely(self._live.refresh)

    def line(self, text: str) -> None:
        """Writes a line, above the bar where there is one.

        Args:
            text: The line.

        Raises:
            TypeError: It is no string.
        """
        check.instance("Progress.line", "text", text, str)
        self._write(text)

    def _write(self, text: str) -> None:
        self._safely(lambda: self._print(text))

    def _safely(self, deed: Callable[[], object]) -> None:
        """Does something to the stream; one that fails is left alone from then on."""
        if self._lost:
            return
        try:
            deed()
        except (OSError, ValueError):  # a closed stream is a ValueError
            self._lost = True
            self._stop()

    def _start(self) -> None:
        stream = self._stream
        if stream is None or not _on_terminal(stream):
            return
        from rich.live import Live

        console = _console(stream)
        if console.is_dumb_terminal:
            return
        self._shown = self._picture()
        streams = sys.stdout, sys.stderr
        live = Live(
            console=console,
            auto_refresh=False,  # no thread of rich's
            get_renderable=lambda: self._shown,
            # What goes into a file stays out of the terminal.
            redirect_stdout=_on_terminal(sys.stdout),
            redirect_stderr=_on_terminal(sys.stderr),
        )
        self._cleanup.callback(live.stop)
        live.start(refresh=True)
        self._cleanup.enter_context(_logging_through(*streams))
        self._live = live

    def _stop(self) -> None:
        self._live = None
        try:
            self._cleanup.close()
        except (OSError, ValueError):
            self._lost = True

    def _print(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text), soft_wrap=True)
            return
        stream = cast(TextIO, self._stream)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()

    def _epoch_line(self, now: _Now) -> str:
        epoch = self._epoch(now, " of ")
        return f"{epoch}: {', '.join(_numbers(now))}".rstrip(": ")

    def _epoch(self, now: _Now, of: str) -> str:
        return f"epoch {now.epoch + 1}" + (f"{of}{self._epochs}" if self._epochs else "")

    def _picture(self) -> Any:
        """The bar and the line below it."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._now
        if now is None:
            return Text("starting", style="dim")
        row: list[Any] = [Text(self._epoch(now, "/"), style="bold")]
        if self._total is None:
            row.append(Text(f"{now.done:,} microbatches"))
        else:
            done, calm = min(now.done, self._total), "cyan"
            bar = ProgressBar(self._total, done, complete_style=calm, finished_style=calm)
            row.append(bar)
            row.append(Text(f"{min(1.0, now.done / self._total):.0%}"))
        row.append(Text("  ".join(_numbers(now))))
        left = self._time_left(now)
        if left is not None:
            row.append(Text(f"{_clock(left)} left", style="dim"))
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for cell in row:
            table.add_column(
                no_wrap=True, ratio=1 if isinstance(cell, ProgressBar) else None, min_width=4
            )
        table.add_row(*row)
        return Group(table, Text(self._busy_line(now), style="dim", overflow="ellipsis"))

    def _busy_line(self, now: _Now) -> str:
        busy = now.busy
        if not busy:
            return ""
        if len(busy) > NAMED:
            mean = sum(busy) / len(busy)
            spread = f"least {min(busy):.0%}, mean {mean:.0%}, most {max(busy):.0%}"
            return f"busy: {spread} of {len(busy)} devices"
        pairs = zip(self._devices, busy, strict=False)
        return "busy: " + "   ".join(f"{name} {share:.0%}" for name, share in pairs)

    def _time_left(self, now: _Now) -> float | None:
        """Seconds, at the pace since the first update of this process."""
        if self._total is None or self._first is None:
            return None
        began, before = self._first
        seconds = time.perf_counter() - began
        if now.done <= before or seconds <= 0:
            return None
        return max(0, self._total - now.done) * seconds / (now.done - before)


def _check_number(where: str, name: str, value: object) -> None:
    """Raises where a value is no number; one on a device is not waited for."""
    if value is None or getattr(value, "ndim", None) == 0:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(check.message(where, name, "be a number", check.describe(value)))


def _numbers(now: _Now) -> list[str]:
    loss = [] if now.loss is None else [f"loss {now.loss:.4g}"]
    speed = [] if now.examples_per_s is None else [f"{now.examples_per_s:,.0f} examples/s"]
    return loss + speed


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _on_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _console(stream: TextIO) -> Any:
    from rich.console import Console

    class Quiet(Console):
        """A console that ends no process when its terminal is gone."""

        def on_broken_pipe(self) -> None:
            raise

    return Quiet(file=stream, force_terminal=True, force_jupyter=False, highlight=False)


@contextmanager
def _logging_through(stdout: TextIO, stderr: TextIO) -> Generator[None, None, None]:
    """Sends what handlers log to these streams to those that stand in for them now.

    A line that goes to the terminal by itself is drawn over by the next picture.
    """
    moved: list[tuple[Any, Any]] = []
    for logger in (logging.getLogger(), logging.getLogger("elche_jax")):
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            through = {id(stdout): sys.stdout, id(stderr): sys.stderr}.get(id(stream))
            if isinstance(handler, logging.StreamHandler) and through not in (None, stream):
                moved.append((handler, stream))
                _lead(handler, through)
    try:
        yield
    finally:
        for handler, stream in moved:
            _lead(handler, stream)


def _lead(handler: Any, stream: Any) -> None:
    """Gives a handler another stream, also where it cannot flush the one it has."""
    try:
        handler.setStream(stream)
    except (OSError, ValueError):
        handler.stream = stream
