"""Two threads per lane: one dispatches its programs, the other waits for arrays and moves them.

With pending windows, one more thread, shared by all lanes, dispatches what they agree on.

A lane has its own threads because both may block. `jax.device_put` to a device of another client
waits until the array is computed, and some backends dispatch a program with donated buffers only
once it can run. Neither must delay another lane.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Literal, TypeVar

import jax

from elche_jax._settings import setting
from elche_jax.engine.threads import DeviceThreads
from elche_jax.engine.timing import Done, Failed, Stopwatch

T = TypeVar("T")
Purpose = Literal["lane", "move", "agree"]


class Drivers:
    """The threads of the lanes of a run.

    Args:
        lanes: Number of lanes.
    """

    def __init__(self, lanes: int):
        numbers: dict[Purpose, int] = {"agree": 1, "move": lanes, "lane": lanes}
        self._threads = {name: DeviceThreads(name, n, _raise) for name, n in numbers.items()}

    def put(
        self, name: Purpose, lane: int, call: Callable[[], T], failed: Failed = lambda error: None
    ) -> "Future[T]":
        """Call a function in one of the threads.

        Args:
            name: `"lane"` for the thread that dispatches a lane's programs, `"move"` for the one
                that waits for a lane's arrays and moves them, `"agree"` for the one that
                dispatches what the lanes agree on.
            lane: Index of the lane; 0 for `"agree"`.
            call: The function.
            failed: Called in the thread with an exception that `call` raised, before the result
                holds it.
        """
        result = Future[T]()
        # in JAX, each thread has its own setting of `enable_x64`
        work = partial(_work, call, failed, result, setting("enable_x64"))
        self._threads[name].put(lane, work)
        return result

    def close(self) -> None:
        """End all threads, even if a Ctrl-C interrupts the wait for some of them. Idempotent."""
        with ExitStack() as stack:
            for threads in self._threads.values():  # closed in reverse order
                stack.callback(threads.close)


class LanesClock(Stopwatch):
    """Times the windows of one run over several lanes, and owns the lanes' threads.

    Attributes:
        drivers: The threads.
        failed: Called with an exception, which the loop then raises.

    Args:
        world_size: Number of devices.
        lanes: Number of lanes.
        done: Called in one of the threads with the times of every window, in order.
        failed: Called with an exception raised while waiting for a device.
    """

    def __init__(self, world_size: int, lanes: int, done: Done, failed: Failed):
        super().__init__(world_size, done, failed)
        self.drivers, self.failed = Drivers(lanes), failed

    def close(self) -> None:
        """End the threads; a window that is still running is not measured. Idempotent."""
        self.release()  # a lane's thread may be waiting for times
        try:
            self.drivers.close()
        finally:
            super().close()


def _work(call: Callable[[], T], failed: Failed, result: "Future[T]", x64: bool) -> None:
    try:
        with jax.enable_x64(x64):
            found = call()
        result.set_result(found)
    except BaseException as error:  # raised again where the result is awaited
        failed(error)
        result.set_exception(error)


def _raise(error: BaseException) -> None:
    raise error
