"""Display of a run's progress, on a terminal or as plain lines."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self, TextIO, cast

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.observe.events import strings

REFRESH_S = 0.1
"""Shortest time between two refreshes of the bar."""

SPEED_S = 600.0
"""How far back the estimate of the remaining time looks; updates may be minutes apart."""

NAMED = 8
"""Most devices whose busy shares are shown one by one, not as minimum, mean and maximum."""


class _Status(NamedTuple):
    """The arguments of `Progress.update`."""

    epoch: int
    done: int
    loss: float | None
    examples_per_s: float | None
    busy: Sequence[float] | None


class Progress:
    """A display of a run's progress: a live bar on a terminal, or one plain line per epoch.

    If the terminal goes away, the display stops but the run does not. There is no thread:
    `update` draws at most ten times per second, and is cheap in between. While a bar is shown,
    anything printed or logged to the same terminal appears above it.

        with Progress(microbatches, epochs, names) as progress:
            for window in train.windows(data, batch_size=32, epochs=epochs):
                ...
                progress.update(window.epoch, done, loss)

    Args:
        total: Microbatches of the whole run, at least 1. None if unknown: the completed share
            and the remaining time are then not shown.
        epochs: Epochs of the run, at least 1; None if unlimited.
        devices: Names of the devices, in rank order.
        stream: The stream to write to. None selects the current `sys.stderr`; a process
            without one shows nothing.

    Raises:
        TypeError: `total` or `epochs` is not an integer, or `devices` not a sequence of strings.
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
        for name, number in (("total", total), ("epochs", epochs)):
            if number is not None:
                check.integer("Progress", name, number, low=1)
        self._total, self._epochs = total, epochs
        self._devices = strings("Progress", "devices", devices)
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._lost = self._stream is None  # as in a process started without stderr
        self._status: _Status | None = None
        self._next_refresh = 0.0
        self._bar: Any = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        self._unless_lost(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._status is not None:
            if self._bar is not None:
                self._update_bar(self._status)  # `_stop` draws it a last time
            elif kind is None:
                self.line(self._epoch_line(self._status))
        self._stop()

    def update(
        self,
        epoch: int,
        done: int,
        loss: float | None = None,
        examples_per_s: float | None = None,
        busy: Sequence[float] | None = None,
    ) -> None:
        """Take the newest numbers, and show them if a refresh is due.

        Args:
            epoch: Number of the epoch, counted from 0.
            done: Microbatches of the run completed so far, including those before a resume.
            loss: The loss, for instance of the newest window; None if unknown.
            examples_per_s: Valid examples per second; None if unknown.
            busy: Busy share per device, each 0 to 1; None if unknown.

        Raises:
            TypeError: `epoch` or `done` is not an integer, or another value not a number.
            ValueError: `epoch` or `done` is below 0, or a busy share is not finite.
        """
        where, before = "Progress.update", self._status
        epoch = check.integer(where, "epoch", epoch, low=0)
        done = check.integer(where, "done", done, low=0)
        for name, value in (("loss", loss), ("examples_per_s", examples_per_s)):
            # a scalar array may not be computed yet: it is not read here
            if value is not None and getattr(value, "ndim", None) != 0:
                check.number(where, name, value)
        if busy is not None:
            busy = check.reals(where, "busy", busy)
        status = self._status = _Status(epoch, done, loss, examples_per_s, busy)
        if self._bar is None:
            if before is not None and epoch != before.epoch:
                self.line(self._epoch_line(before))
        elif time.perf_counter() >= self._next_refresh:
            self._next_refresh = time.perf_counter() + REFRESH_S
            self._update_bar(status)
            self._unless_lost(self._bar.refresh)

    def line(self, text: str) -> None:
        """Write a line, above the bar if there is one.

        Args:
            text: The line.

        Raises:
            TypeError: It is not a string.
        """
        check.instance("Progress.line", "text", text, str)
        self._unless_lost(lambda: self._print(text))

    def _unless_lost(self, action: Callable[[], object]) -> None:
        """Do something with the stream, which is left alone after the first failure."""
        if self._lost:
            return
        try:
            action()
        except (OSError, ValueError):  # a closed stream raises ValueError
            self._lost = True
            self._stop()

    def _start(self) -> None:
        if not _on_terminal(self._stream):
            return
        bar = _make_bar(cast(TextIO, self._stream), self._total)
        if bar.console.is_dumb_terminal:
            return
        stdout, stderr = sys.stdout, sys.stderr
        # Before `start`, which may fail after it has redirected the streams.
        self._cleanup.callback(bar.stop)
        bar.start()
        now = {id(stdout): sys.stdout, id(stderr): sys.stderr}
        self._cleanup.enter_context(_logging_to(now))
        self._bar = bar

    def _stop(self) -> None:
        self._bar = None
        try:
            self._cleanup.close()
        except (OSError, ValueError):
            self._lost = True

    def _print(self, text: str) -> None:
        if self._bar is not None:
            # Without markup: rich would take "[/x]" for the end of a style, and raise.
            self._bar.console.print(text, markup=False, soft_wrap=True)
            return
        stream = cast(TextIO, self._stream)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # A stream that cannot encode a character, as with ASCII, must not end the display.
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()

    def _update_bar(self, status: _Status) -> None:
        self._bar.update(
            self._bar.task_ids[0],
            completed=status.done,
            description=self._epoch(status, "/"),
            numbers="  ".join(_numbers(status)),
            busy=self._busy_line(status.busy),
        )

    def _epoch_line(self, status: _Status) -> str:
        epoch = self._epoch(status, " of ")
        return f"{epoch}: {', '.join(_numbers(status))}".rstrip(": ")

    def _epoch(self, status: _Status, of: str) -> str:
        return f"epoch {status.epoch + 1}" + (f"{of}{self._epochs}" if self._epochs else "")

    def _busy_line(self, busy: Sequence[float] | None) -> str:
        if not busy:
            return ""
        if len(busy) > NAMED:
            mean = sum(busy) / len(busy)
            spread = f"least {min(busy):.0%}, mean {mean:.0%}, most {max(busy):.0%}"
            return f"busy: {spread} of {len(busy)} devices"
        pairs = zip(self._devices, busy, strict=False)
        return "busy: " + "   ".join(f"{name} {share:.0%}" for name, share in pairs)


def _numbers(status: _Status) -> list[str]:
    loss = [] if status.loss is None else [f"loss {status.loss:.4g}"]
    speed = [] if status.examples_per_s is None else [f"{status.examples_per_s:,.0f} examples/s"]
    return loss + speed


def _on_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no such method, or the stream is closed
        return False


def _make_bar(stream: TextIO, total: int | None) -> Any:
    """Return a rich progress bar of one task, with the devices' busy shares on a line below."""
    from rich import progress as rich
    from rich.console import Console
    from rich.text import Text

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process

    class Bar(rich.Progress):
        def get_renderables(self) -> Iterable[Any]:
            yield from super().get_renderables()
            for task in self.tasks:
                yield Text(task.fields["busy"], style="dim", overflow="ellipsis", no_wrap=True)

    text = rich.TextColumn("{task.description}", style="bold", markup=False)
    numbers = rich.TextColumn("{task.fields[numbers]}", markup=False)
    if total is None:
        columns = [text, rich.TextColumn("{task.completed:,} microbatches"), numbers]
    else:
        columns = [text, rich.BarColumn(None), rich.TaskProgressColumn(), numbers]
        columns += [rich.TimeRemainingColumn()]
    bar = Bar(
        *columns,
        console=QuietConsole(
            file=stream, force_terminal=True, force_jupyter=False, highlight=False, emoji=False
        ),
        auto_refresh=False,  # no thread
        # Output that goes to a file must not appear on the terminal.
        redirect_stdout=_on_terminal(sys.stdout),
        redirect_stderr=_on_terminal(sys.stderr),
        speed_estimate_period=SPEED_S,
        get_time=time.perf_counter,
        expand=total is not None,  # only the bar can use more room
    )
    bar.add_task("starting", total=total, numbers="", busy="")
    return bar


@contextmanager
def _logging_to(streams: dict[int, TextIO]) -> Generator[None]:
    """Send log records meant for some streams, given by their ids, to others.

    A handler keeps the stream it was made with, whatever `sys.stderr` is now. A line written
    straight to the terminal would be overwritten by the next refresh of the bar.
    """
    handlers = [*logging.getLogger().handlers, *logger.handlers]
    moved = [
        (handler, handler.stream)
        for handler in handlers
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams
    ]
    # Not by `setStream`, which flushes the old stream, and that may fail.
    for handler, stream in moved:
        handler.stream = streams[id(stream)]
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.stream = stream
