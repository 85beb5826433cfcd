"""Two threads per lane: one dispatches its programs, the other waits for arrays and moves them.

One more, for all lanes, dispatches what they agree on if windows are pending.

A lane has threads of its own because both may block. `jax.device_put` to a device of another
client waits until the array is computed, and some backends dispatch a program that takes
donated buffers only once it may run. Neither must delay another lane.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import jax

from elche_jax._settings import setting
from elche_jax.engine.threads import DeviceThreads
from elche_jax.engine.timing import Done, Failed, Stopwatch

T = TypeVar("T")


class Drivers:
    """The threads of the lanes of a run.

    Args:
        lanes: Number of lanes.
    """

    def __init__(self, lanes: int):
        self._dispatching, self._moving = (
            DeviceThreads(name, lanes, _raise) for name in ("lane", "move")
        )
        self._agreeing = DeviceThreads("agree", 1, _raise)

    def dispatch(self, lane: int, call: Callable[[], T]) -> "Future[T]":
        """Call a function in the thread that dispatches a lane's programs."""
        return _put(self._dispatching, lane, call)

    def move(self, lane: int, call: Callable[[], T]) -> "Future[T]":
        """Call a function in the thread that waits for a lane's arrays and moves them."""
        return _put(self._moving, lane, call)

    def agree(self, call: Callable[[], T]) -> "Future[T]":
        """Call a function in the thread that dispatches what the lanes agree on."""
        return _put(self._agreeing, 0, call)

    def close(self) -> None:
        """End the threads, all of them also if a Ctrl-C ends the wait for some. Idempotent."""
        with ExitStack() as stack:
            for threads in (self._agreeing, self._moving, self._dispatching):  # the last one first
                stack.callback(threads.close)


class LanesClock(Stopwatch):
    """Times the windows of one run over several lanes, and owns the lanes' threads.

    Attributes:
        drivers: The threads.
        failed: Called with an exception that the loop is to raise.

    Args:
        world_size: Number of devices.
        lanes: Number of lanes.
        done: Called in one of the threads with the times of every window, in order.
        failed: Called with an exception that waiting for a device raised.
    """

    def __init__(self, world_size: int, lanes: int, done: Done, failed: Failed):
        super().__init__(world_size, done, failed)
        self.drivers, self.failed = Drivers(lanes), failed

    def close(self) -> None:
        """End the threads; a window that is still running is not measured. Idempotent."""
        self.release()  # a lane's thread may wait for times
        try:
            self.drivers.close()
        finally:
            super().close()


def _put(threads: DeviceThreads, lane: int, call: Callable[[], T]) -> "Future[T]":
    result = Future[T]()
    # JAX keeps per thread whether 64-bit types are enabled
    threads.put(lane, partial(_work, call, result, setting("enable_x64")))
    return result


def _work(call: Callable[[], T], result: "Future[T]", x64: bool) -> None:
    try:
        with jax.enable_x64(x64):
            found = call()
        result.set_result(found)
    except BaseException as error:  # raised by whoever waits for the result
        result.set_exception(error)


def _raise(error: BaseException) -> None:
    raise error
