"""The iterator of windows that the user loops over."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from elche_jax._processes import PROCESSES
from elche_jax.data.prefetch import Prefetch
from elche_jax.train.in_flight import Run, Window
from elche_jax.train.pipeline import Pipeline


class Windows(Iterator[Window]):
    """Iterator of windows; closes itself at the end, on errors and when dropped.

    Args:
        pipeline: Plans the windows.
        run: What its windows have in common.

    Examples:
        ```python
        with train.windows(data, batch_size=32) as windows:
            for window in windows:
                state, metrics = train(state, window)
        ```
    """

    def __init__(self, pipeline: Pipeline[Any], run: Run):
        self._pipeline = pipeline
        PROCESSES.loop_begins(self)  # an earlier error has not ended this process
        self._stop = threading.Event()
        self._prefetch: Prefetch[Window] | None = None
        # the threads must not keep the pipeline alive: it is closed when the loop drops it
        pipeline.clock = clock = pipeline.runner.watch(
            _weakly(pipeline.on_complete),
            _weakly(pipeline.on_late_times),
            _weakly(pipeline.errors.keep),
        )
        if not clock.inline:
            self._prefetch = Prefetch(lambda stop: pipeline.plan(stop, run), pipeline.wake)
        self._items: Iterator[Window] = self._prefetch or pipeline.plan(self._stop, run)
        # when the iterator is dropped, Python prints a Ctrl-C that was held back, and goes on
        self._finish = weakref.finalize(self, pipeline.close)

    def __next__(self) -> Window:
        if self._stop.is_set():
            raise StopIteration
        try:
            self._pipeline.on_request()
            window = next(self._items, None)
            if window is None:
                self._pipeline.end()
        except BaseException as error:
            self._pipeline.errors.raised = True  # any error of a thread reaches the loop here
            PROCESSES.raised(error)
            self.close()
            raise
        if window is None:
            PROCESSES.loop_ends(self)
            self.close()
            raise StopIteration
        self._pipeline.on_handed_out(window)
        return window

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        try:
            if error is None:
                self._pipeline.end()  # the loop may have left early: the others may still go on
            elif not isinstance(error, GeneratorExit):
                PROCESSES.raised(error)
        finally:
            self.close()

    def agreed(self, wish: str | None) -> frozenset[str]:
        """Ask something of all processes; return the wishes that all of them know by now.

        Args:
            wish: One of `elche_jax.train.wishes.NAMES`; None to ask nothing more.
        """
        if wish is not None:
            self._pipeline.wishes.add(wish)
        return self._pipeline.wishes.agreed

    def exclude(self, seconds: float) -> None:
        """Exclude time spent on other work from the window that was handed out last."""
        self._pipeline.on_elsewhere(seconds)

    def drain(self) -> None:
        """Wait until the windows dispatched so far are complete.

        Raises:
            NonFiniteError, ReplicaMismatch: A window was not finite, or replicas differ.
        """
        self._pipeline.finish()

    def close(self) -> None:
        """End the threads of this run. Idempotent; windows handed out stay usable.

        Raises:
            KeyboardInterrupt: If a Ctrl-C was held back in the last window.
        """
        self._stop.set()
        PROCESSES.loop_closes(self)
        try:
            if self._prefetch is not None:
                self._prefetch.close()
        finally:
            self._finish()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            target(*arguments)

    return call
