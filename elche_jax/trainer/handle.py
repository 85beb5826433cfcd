"""`Handle`: a run that goes on in the background."""

import threading
from collections.abc import Callable, Iterator

from elche_jax import _check as check
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import EpochMetrics
from elche_jax.trainer.result import FitResult


class Handle:
    """A run that `Trainer.start` has begun.

    It ends by itself, on `stop`, or, at its next window, when the program ends: call
    `join` to wait for all of it.

    Args:
        run: Trains; called by a thread. `control` keeps what it raises.
        control: What the run and this object share.
    """

    def __init__(self, run: Callable[[], object], control: Control):
        self._control = control
        self._joined = False
        self._polled = 0
        self._thread = threading.Thread(target=run, name="elche-trainer", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the run goes on."""
        return not self._control.over

    def metrics(self) -> Iterator[EpochMetrics]:
        """Gives every epoch as soon as it is over, from the first one on; ends with the run.

        Raises:
            RuntimeError: `join` was called before: the result's `history` has them. Or a
                callback of the run asks, which would wait for itself.
            Exception: What ended the run, after the epochs before.
        """
        self._check_open("metrics")
        self._check_thread("metrics")
        return self._control.follow()

    def poll(self) -> tuple[EpochMetrics, ...]:
        """The epochs that are over and that no earlier `poll` gave; does not wait.

        Raises:
            RuntimeError: `join` was called before.
            Exception: What ended the run, after the epochs before.
        """
        self._check_open("poll")
        found = self._control.since(self._polled)
        self._polled += len(found)
        return found

    def stop(self) -> None:
        """Asks the run to end before its next window, with a checkpoint if there are any.

        Returns at once; `join` waits.
        """
        self._control.stop("stop")

    def join(self, timeout: float | None = None) -> FitResult:
        """Waits for the end of the run.

        An interrupt (Ctrl-C) while it waits stops the run, and is raised when that has ended.

        Args:
            timeout: Seconds to wait at most, at least 0; None for as long as it takes.

        Returns:
            What the run returned; the same again if called again.

        Raises:
            TimeoutError: It is still running.
            RuntimeError: A callback of the run asks, which would wait for itself.
            Exception: What ended the run.
        """
        self._check_thread("join")
        if timeout is not None:
            timeout = check.real("Handle.join", "timeout", timeout, low=0)
        try:
            ended = self._control.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            self._control.wait()  # a join that is interrupted takes the thread for ended (3.11)
            self._thread.join()
            raise
        if not ended:
            raise TimeoutError(
                f"Handle.join: the run must end within timeout ({timeout} s), but goes on. "
                "Call stop first, or wait longer."
            )
        self._joined = True
        self._thread.join()
        return self._control.result()

    def _check_open(self, method: str) -> None:
        if self._joined:
            raise RuntimeError(
                f"Handle.{method}: must be called before join; the history of what join returned "
                "has all epochs."
            )

    def _check_thread(self, method: str) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"Handle.{method}: must not be called by the run itself, in a callback, which "
                "would wait for its own end. Call context.stop."
            )
