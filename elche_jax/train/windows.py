"""The iterator of windows that the user loops over."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic

from elche_jax import _check as check
from elche_jax.data.prefetch import Prefetch
from elche_jax.train.pipeline import Pipeline, R, Window
from elche_jax.train.runners import Runners


def _ignore(window: Window, pipeline: Pipeline[Any]) -> None:
    del window, pipeline


class Windows(Iterator[Window]):
    """Iterator of windows; closes itself at the end, on errors and when dropped.

    Args:
        pipeline: Plans the windows.
        hand_out: Told of every window that the loop gets, and who runs it.

    Examples:
        ```python
        with train.windows(data, batch_size=32) as windows:
            for window in windows:
                state, metrics = train(state, window)
        ```
    """

    def __init__(
        self,
        pipeline: Pipeline[R],
        hand_out: Callable[[Window, Pipeline[R]], None] = _ignore,
    ):
        self._pipeline: Pipeline[Any] = pipeline
        self._hand_out: Callable[[Window, Any], None] = hand_out
        self._stop = threading.Event()
        self._ended = False
        self._prefetch: Prefetch[Window] | None = None
        pipeline.clock = clock = pipeline.runner.watch(
            *(_weakly(pipeline, method) for method in ("over", "learned", "failed"))
        )
        if not clock.inline:
            self._prefetch = Prefetch(pipeline.plan, pipeline.wake)
        self._items: Iterator[Window] = self._prefetch or pipeline.plan(self._stop)
        self._finish = weakref.finalize(self, pipeline.close)

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Window:
        if self._ended:
            raise StopIteration
        try:
            self._pipeline.asked()
            window = next(self._items, None)
            if window is None:
                self._pipeline.finish()
        except BaseException:
            self._pipeline.told = True  # whatever a thread ran into, the loop hears it now
            self.close()
            raise
        if window is None:
            self.close()
            raise StopIteration
        self._pipeline.handed_out(window)
        self._hand_out(window, self._pipeline)
        return window

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        try:
            if kind is None:
                self._pipeline.finish()
        finally:
            self.close()

    def drain(self) -> None:
        """Waits until the windows handed to the devices so far are over.

        Raises:
            NonFiniteError, ReplicaMismatch: One of them was not as it must be.
        """
        self._pipeline.finish()

    def close(self) -> None:
        """Ends the threads of this run. Idempotent; windows handed out stay usable."""
        self._ended = True
        self._stop.set()
        if self._prefetch is not None:
            self._prefetch.close()
        self._finish()


class HandedOut(Generic[R]):
    """Knows which pipeline runs a window. A window that somebody has keeps its pipeline."""

    def __init__(self) -> None:
        self._pipelines: weakref.WeakKeyDictionary[Window, Pipeline[R]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, window: Window, pipeline: Pipeline[R]) -> None:
        """The loop gets a window of a pipeline."""
        self._pipelines[window] = pipeline

    def pipeline_of(self, window: Window, where: str, runners: Runners) -> Pipeline[R]:
        """The pipeline that runs a window.

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
        pipeline = self._pipelines.get(window)
        if pipeline is None or pipeline.runner not in runners:
            rule, got = "come from this training step's windows", "one of another step's, or a copy"
            raise ValueError(check.message(where, "window", rule, got))
        return pipeline


def _weakly(pipeline: Pipeline[Any], method: str) -> Any:
    """A method that the threads may hold without keeping the pipeline alive."""
    reference = weakref.ref(pipeline)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            getattr(target, method)(*arguments)

    return call
