"""The iterator of windows that the user loops over."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from elche_jax.data.prefetch import Prefetch
from elche_jax.train.run import Run, Window


class Windows(Iterator[Window]):
    """Iterator of windows; closes itself at the end, on errors and when dropped.

    Examples:
        ```python
        with train.windows(data, batch_size=32) as windows:
            for window in windows:
                state, metrics = train(state, window)
        ```
    """

    def __init__(self, run: Run, world_size: int):
        self._run = run
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


def _weakly(run: Run, method: str) -> Any:
    """A method that the threads may hold without keeping the run alive."""
    reference = weakref.ref(run)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*arguments)

    return call
