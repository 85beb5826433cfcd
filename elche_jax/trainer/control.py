"""The state that a run shares with the threads that follow it, and with Ctrl-C."""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from threading import TIMEOUT_MAX
from typing import Any

from elche_jax._waiting import Condition, HeldInterrupt, interruptible
from elche_jax.trainer.epochs import EpochMetrics


class Control:
    """Thread-safe handle on a run: stop it, follow its epochs, wait for its result."""

    def __init__(self) -> None:
        self._changed = Condition()
        self.reason: str | None = None  # set once the run has been asked to stop
        self._epochs: list[EpochMetrics] = []
        self.over = False
        self.error: BaseException | None = None
        self._result: Any = None

    def stop(self, reason: str) -> None:
        """Ask the run to stop before its next window; the first reason is kept."""
        with self._changed:
            self.reason = self.reason or reason

    def add_epoch(self, metrics: EpochMetrics) -> None:
        """Publish the metrics of a finished epoch."""
        with self._changed:
            self._epochs.append(metrics)
            self._changed.notify_all()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Mark the run as finished, with its result or its error."""
        with self._changed:
            self.over, self._result, self.error = True, result, error
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the run to finish; return False on timeout."""
        if timeout is not None and timeout >= TIMEOUT_MAX:
            timeout = None  # longer than a lock can wait
        with interruptible(), self._changed:
            return self._changed.wait_for(lambda: self.over, timeout)

    def result(self) -> Any:
        """Return the result of a finished run, or raise the error that ended it."""
        if self.error is not None:
            raise self.error
        return self._result

    def since(self, number: int) -> tuple[EpochMetrics, ...]:
        """Return the finished epochs from index `number` on; if none, raise the run's error."""
        with self._changed:
            there = tuple(self._epochs[number:])
            if not there and self.error is not None:
                raise self.error
            return there

    def follow(self) -> Iterator[EpochMetrics]:
        """Yield each epoch once it is finished, then raise the error that ended the run, if any."""
        for number in count():
            with interruptible(), self._changed:
                while len(self._epochs) <= number and not self.over:
                    self._changed.wait()
            # not under the lock, which the run needs while the caller handles an epoch
            epochs = self.since(number)
            if not epochs:
                return
            yield epochs[0]


@contextmanager
def interrupts(control: Control, say: bool) -> Generator[None]:
    """Make the first Ctrl-C stop a run gracefully, and raise it once the run has ended.

    A second Ctrl-C is raised immediately. If the program has installed its own SIGINT handler,
    or this is not the main thread, nothing changes.

    Args:
        control: Control of the run.
        say: Whether to print a line to standard error on Ctrl-C.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; its cause is the error of the run, if any.
    """

    def stop() -> None:
        control.stop("interrupt")
        if say and sys.stderr is not None:
            # the same Ctrl-C may have ended the reader, as in `train.py 2>&1 | tee log`; and the
            # loop may be in the middle of a `print` of its own
            with suppress(OSError, ValueError, RuntimeError):
                print(
                    "elche: stopping before the next window; press Ctrl-C again to stop now",
                    file=sys.stderr,
                )

    with HeldInterrupt(stop) as interrupt:
        interrupt.begin()
        yield
    if interrupt.came:
        error = control.error  # of the windows that were in flight, or of the last checkpoint
        raise KeyboardInterrupt from None if isinstance(error, KeyboardInterrupt) else error
