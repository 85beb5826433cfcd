"""What a run shares with the threads that follow it."""

import threading
from collections.abc import Iterator
from typing import Any

from elche_jax._waiting import interruptible
from elche_jax.trainer.epochs import EpochMetrics


class Control:
    """Lets other threads stop a run, and follow its epochs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reason: str | None = None  # why the run is to end, once it is
        self._epochs: list[EpochMetrics] = []
        self.over = False
        self._error: BaseException | None = None
        self._result: Any = None

    def stop(self, reason: str) -> None:
        """Asks the run to end before its next window; the first reason counts."""
        with self._changed:
            self.reason = self.reason or reason

    def told(self, metrics: EpochMetrics) -> None:
        """An epoch is over."""
        with self._changed:
            self._epochs.append(metrics)
            self._changed.notify_all()

    def ended(self, result: Any = None, error: BaseException | None = None) -> None:
        """The run is over."""
        with self._changed:
            self.over, self._result, self._error = True, result, error
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; False if it does not come in time."""
        with interruptible(), self._changed:
            return self._changed.wait_for(lambda: self.over, timeout)

    def result(self) -> Any:
        """What a run that is over gave; raises what ended it."""
        if self._error is not None:
            raise self._error
        return self._result

    def since(self, number: int) -> tuple[EpochMetrics, ...]:
        """The epochs from the given one on that are over; raises what ended the run."""
        with self._changed:
            there = tuple(self._epochs[number:])
            if not there and self._error is not None:
                raise self._error
            return there

    def follow(self) -> Iterator[EpochMetrics]:
        """Every epoch as soon as it is over; at the end raises what ended the run."""
        given = 0

        def more() -> bool:
            return len(self._epochs) > given or self.over

        while True:
            with interruptible(), self._changed:
                self._changed.wait_for(more)
            there = self.since(given)
            if not there:
                return
            yield from there
            given += len(there)
