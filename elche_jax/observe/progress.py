"""The progress of a run, on a terminal or as plain lines."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TextIO, cast

from elche_jax import _check as check

REFRESH_S = 0.1
"""Shortest time between two pictures."""

SPEED_S = 600.0
"""How long the time left looks back; updates may be minutes apart."""

NAMED = 8
"""Most devices that are shown by name; of more, the least, the mean and the most."""


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

    A terminal that goes away stops the display, never the run. There is no thread: `update`
    draws, at most ten times a second, and is cheap in between. While a bar is shown, what
    is printed or logged to the same terminal appears above it.

        with Progress(microbatches, epochs, names) as progress:
            for window in train.windows(data, batch_size=32, epochs=epochs):
                ...
                progress.update(window.epoch, done, loss)

    Args:
        total: Microbatches of the whole run, at least 1; None if unknown: no share and no
            time left are shown.
        epochs: Epochs of the run, at least 1; None if they have no end.
        devices: Names of the devices, in rank order.
        stream: Where to write; None for the standard error stream of that moment. A process
            that has none shows nothing.

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
        for name, number in (("total", total), ("epochs", epochs)):
            if number is not None:
                check.integer("Progress", name, number, low=1)
        self._total, self._epochs = total, epochs
        self._devices = check.items("Progress", "devices", devices, "strings")
        for rank, name in enumerate(self._devices):
            check.instance("Progress", f"devices[{rank}]", name, str)
        self._stream: TextIO | None = sys.stderr if stream is None else stream
        self._now: _Now | None = None
        self._due = 0.0
        self._bar: Any = None
        self._lost = self._stream is None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        self._safely(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._now is not None:
            if self._bar is not None:
                self._tell_bar(self._now)  # stopping draws it once more, and it stays
            elif kind is None:
                self.line(self._epoch_line(self._now))
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
            done: Microbatches of the run that are done, including those before a resume.
            loss: Loss, of the newest window for instance; None if unknown.
            examples_per_s: Valid examples per second; None if unknown.
            busy: Busy share per device, each 0 to 1; None if unknown.

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
        now = self._now = _Now(epoch, done, loss, examples_per_s, busy)
        if self._bar is None:
            if before is not None and epoch != before.epoch:
                self.line(self._epoch_line(before))
        elif time.perf_counter() >= self._due:
            self._due = time.perf_counter() + REFRESH_S
            self._tell_bar(now)
            self._safely(self._bar.refresh)

    def line(self, text: str) -> None:
        """Writes a line, above the bar if there is one.

        Args:
            text: The line.

        Raises:
            TypeError: It is no string.
        """
        check.instance("Progress.line", "text", text, str)
        self._safely(lambda: self._print(text))

    def _safely(self, deed: Callable[[], object]) -> None:
        """Does something with the stream, which is left alone from the first failure on."""
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
        console = _console(stream)
        if console.is_dumb_terminal:
            return
        streams = sys.stdout, sys.stderr
        bar = _rich_bar(console, self._total)
        self._cleanup.callback(bar.stop)
        bar.start()
        self._cleanup.enter_context(_logging_through(*streams))
        self._bar = bar

    def _stop(self) -> None:
        self._bar = None
        try:
            self._cleanup.close()
        except (OSError, ValueError):
            self._lost = True

    def _print(self, text: str) -> None:
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(text), soft_wrap=True)
            return
        stream = cast(TextIO, self._stream)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()

    def _tell_bar(self, now: _Now) -> None:
        self._bar.update(
            self._bar.task_ids[0],
            completed=now.done,
            description=self._epoch(now, "/"),
            numbers="  ".join(_numbers(now)),
            busy=self._busy_line(now),
        )

    def _epoch_line(self, now: _Now) -> str:
        epoch = self._epoch(now, " of ")
        return f"{epoch}: {', '.join(_numbers(now))}".rstrip(": ")

    def _epoch(self, now: _Now, of: str) -> str:
        return f"epoch {now.epoch + 1}" + (f"{of}{self._epochs}" if self._epochs else "")

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


def _check_number(where: str, name: str, value: object) -> None:
    """Raises if a value is no number, without waiting for one on a device."""
    if value is None or getattr(value, "ndim", None) == 0:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(check.message(where, name, "be a number", check.describe(value)))


def _numbers(now: _Now) -> list[str]:
    loss = [] if now.loss is None else [f"loss {now.loss:.4g}"]
    speed = [] if now.examples_per_s is None else [f"{now.examples_per_s:,.0f} examples/s"]
    return loss + speed


def _on_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no such method, or the stream is closed
        return False


def _console(stream: TextIO) -> Any:
    from rich.console import Console

    class Quiet(Console):
        """A console that does not end the process when its terminal is gone."""

        def on_broken_pipe(self) -> None:
            raise

    return Quiet(file=stream, force_terminal=True, force_jupyter=False, highlight=False)


def _rich_bar(console: Any, total: int | None) -> Any:
    """Rich's progress of one task, with the busy shares of the devices on a line below."""
    from rich import progress as rich
    from rich.text import Text

    class Bar(rich.Progress):
        def get_renderables(self) -> Iterable[Any]:
            yield from super().get_renderables()
            for task in self.tasks:
                yield Text(task.fields["busy"], style="dim", overflow="ellipsis", no_wrap=True)

    columns: list[Any] = [rich.TextColumn("{task.description}", style="bold", markup=False)]
    if total is None:
        columns += [rich.TextColumn("{task.completed:,} microbatches")]
    else:
        columns += [rich.BarColumn(None), rich.TaskProgressColumn()]
    columns += [rich.TextColumn("{task.fields[numbers]}", markup=False)]
    if total is not None:
        columns += [rich.TimeRemainingColumn()]
    bar = Bar(
        *columns,
        console=console,
        auto_refresh=False,  # no thread
        # Output that goes to a file must not appear on the terminal.
        redirect_stdout=_on_terminal(sys.stdout),
        redirect_stderr=_on_terminal(sys.stderr),
        speed_estimate_period=SPEED_S,
        get_time=time.perf_counter,
        expand=total is not None,  # only the bar has a use for more room
    )
    bar.add_task("starting", total=total, numbers="", busy="")
    return bar


@contextmanager
def _logging_through(stdout: TextIO, stderr: TextIO) -> Generator[None]:
    """Sends what handlers log to these streams to the ones that stand in for them now.

    A line that goes straight to the terminal would be overwritten by the next picture.
    """
    now = {id(stdout): sys.stdout, id(stderr): sys.stderr}
    moved: list[tuple[Any, Any]] = []
    for logger in (logging.getLogger(), logging.getLogger("elche_jax")):
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None)
            if isinstance(handler, logging.StreamHandler) and id(stream) in now:
                moved.append((handler, stream))
                # Not `setStream`, which flushes the old stream, and that may fail.
                handler.stream = now[id(stream)]
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.stream = stream
