"""The iterator of windows that the user loops over."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from elche_jax import _check as check
from elche_jax.data.prefetch import Prefetch
from elche_jax.train.run import Run, Window
from elche_jax.train.runners import Runners


def _ignore(window: Window, run: Run) -> None:
    del window, run


class Windows(Iterator[Window]):
    """Iterator of windows; closes itself at the end, on errors and when dropped.

    Args:
        run: Plans the windows.
        world_size: Number of devices.
        hand_out: Told of every window that the loop gets, and who runs it.

    Examples:
        ```python
        with train.windows(data, batch_size=32) as windows:
            for window in windows:
                state, metrics = train(state, window)
        ```
    """

    def __init__(
        self, run: Run, world_size: int, hand_out: Callable[[Window, Run], None] = _ignore
    ):
        self._run, self._hand_out = run, hand_out
        self._stop = threading.Event()
        self._ended = False
        self._prefetch: Prefetch[Window] | None = None
        if world_size == 1:
            self._items: Iterator[Window] = run.plan(self._stop)
        else:
            run.stopwatch = run.runner.watch(
                *(_weakly(run, method) for method in ("over", "learned", "failed"))
            )
            self._prefetch = Prefetch(run.plan, run.wake)
            self._items = self._prefetch
        self._finish = weakref.finalize(self, run.close)

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Window:
        if self._ended:
            raise StopIteration
        try:
            self._run.asked()
            window = next(self._items, None)
            if window is None:
                self._run.finish()
        except BaseException:
            self._run.told = True  # whatever a thread ran into, the loop hears it now
            self.close()
            raise
        if window is None:
            self.close()
            raise StopIteration
        self._run.handed_out(window)
        self._hand_out(window, self._run)
        return window

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        try:
            if kind is None:
                self._run.finish()
        finally:
            self.close()

    def drain(self) -> None:
        """Waits until the windows handed to the devices so far are over.

        Raises:
            NonFiniteError, ReplicaMismatch: One of them was not as it must be.
        """
        self._run.finish()

    def close(self) -> None:
        """Ends the threads of this run. Idempotent; windows handed out stay usable."""
        self._ended = True
        self._stop.set()
        if self._prefetch is not None:
            self._prefetch.close()
        self._finish()


class HandedOut:
    """Knows which run every window is of. A window that somebody has keeps its run."""

    def __init__(self) -> None:
        self._runs: weakref.WeakKeyDictionary[Window, Run] = weakref.WeakKeyDictionary()

    def note(self, window: Window, run: Run) -> None:
        """The loop gets a window of a run."""
        self._runs[window] = run

    def run_of(self, window: Window, where: str, runners: Runners) -> Run:
        """The run that a window is of.

        Args:
            window: A window.
            where: Who asks, for messages.
            runners: Those of the training step.

        Raises:
            TypeError: `window` is none.
            ValueError: It is another training step's.
        """
        if not isinstance(window, Window):
            rule, got = "come from TrainStep.windows", type(window).__name__
            raise TypeError(check.message(where, "window", rule, got))
        run = self._runs.get(window)
        if run is None or run.runner not in runners:
            rule, got = "come from this training step's windows", "one of another step's"
            raise ValueError(check.message(where, "window", rule, got))
        return run


def _weakly(run: Run, method: str) -> Any:
    """A method that the threads may hold without keeping the run alive."""
    reference = weakref.ref(run)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*arguments)

    return call
