"""`Handle`: a run in the background."""

import threading
from collections.abc import Callable, Iterator

from elche_jax import _check as check
from elche_jax._threads import BackgroundThread, wait_at_exit
from elche_jax.trainer.control import Control
from elche_jax.trainer.epochs import EpochMetrics
from elche_jax.trainer.result import FitResult


class Handle:
    """A run in the background, started by `Trainer.start`.

    The run stops when it is complete, on `stop`, or before its next window once the main thread
    has ended: call `join` to wait until it is complete.

    Args:
        run: Function that trains, called on a new thread; it must pass its errors to `control`.
        control: State shared with the run.
    """

    def __init__(self, run: Callable[[], object], control: Control):
        self._control = control
        self._joined = False
        self._polled = 0
        # not a daemon: a thread in the runtime when the interpreter ends would crash the process
        self._thread = BackgroundThread(run, name="elche-trainer", daemon=False)
        wait_at_exit(self._thread)  # in case a Ctrl-C ends Python's own wait
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the run is still going."""
        return not self._control.over

    def metrics(self) -> Iterator[EpochMetrics]:
        """Yield the metrics of each epoch, from the first, as it finishes, until the run ends.

        Raises:
            RuntimeError: `join` was already called, so the epochs are in the result's
                `history`; or a callback of the run called this, which would deadlock.
            Exception: The error that ended the run, after the finished epochs.
        """
        self._check_open("metrics")
        self._check_thread("metrics")
        return self._control.follow()

    def poll(self) -> tuple[EpochMetrics, ...]:
        """Return the epochs finished since the last `poll`, without waiting.

        Raises:
            RuntimeError: `join` was already called.
            Exception: The error that ended the run, after the finished epochs.
        """
        self._check_open("poll")
        found = self._control.since(self._polled)
        self._polled += len(found)
        return found

    def stop(self) -> None:
        """Ask the run to stop before its next window, with a checkpoint if checkpoints are on.

        Returns immediately; call `join` to wait.
        """
        self._control.stop("stop")

    def join(self, timeout: float | None = None) -> FitResult:
        """Wait for the run to end and return its result.

        Ctrl-C while waiting stops the run and is raised once the run has ended.

        Args:
            timeout: Most seconds to wait, at least 0; None to wait without limit.

        Returns:
            The result of the run; the same object on every call.

        Raises:
            TimeoutError: The run is still going.
            RuntimeError: A callback of the run called this, which would deadlock.
            Exception: The error that ended the run.
        """
        self._check_thread("join")
        if timeout is not None:
            timeout = check.real("Handle.join", "timeout", timeout, low=0)
        try:
            ended = self._control.wait(timeout)
        except KeyboardInterrupt:
            self.stop()
            self._thread.wait()
            raise
        if not ended:
            raise TimeoutError(
                f"Handle.join: the run must end within timeout ({timeout} s), but is still going. "
                "Call stop first, or wait longer."
            )
        self._joined = True
        self._thread.wait()
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
