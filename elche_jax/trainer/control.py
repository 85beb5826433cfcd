"""What a run and those who watch it from other threads share."""

import threading
from collections.abc import Iterator
from typing import Any

from elche_jax._waiting import interruptible
from elche_jax.trainer.epochs import EpochMetrics


class Control:
    """Lets other threads stop a run, and follow its epochs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._epochs: list[EpochMetrics] = []
        self._ended = False
        self._error: BaseException | None = None
        self._result: Any = None

    @property
    def reason(self) -> str | None:
        """Why the run is to end; None while it may go on."""
        return self._reason

    def stop(self, reason: str) -> None:
        """Asks the run to end before its next window; the first reason counts."""
        with self._changed:
            self._reason = self._reason or reason

    def told(self, metrics: EpochMetrics) -> None:
        """An epoch is over."""
        with self._changed:
            self._epochs.append(metrics)
            self._changed.notify_all()

    def ended(self, result: Any = None, error: BaseException | None = None) -> None:
        """The run is over."""
        with self._changed:
            self._ended, self._result, self._error = True, result, error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._ended

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; False where it does not come in time."""
        with interruptible(), self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout)

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
        number = 0
        while there := self._next(number):
            yield from there
            number += len(there)

    def _next(self, number: int) -> tuple[EpochMetrics, ...]:
        with interruptible(), self._changed:
            self._changed.wait_for(lambda: len(self._epochs) > number or self._ended)
        return self.since(number)
