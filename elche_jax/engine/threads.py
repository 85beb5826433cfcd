"""Threads that wait for devices, one per device, so that the training loop need not wait."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from elche_jax._threads import BackgroundThread, wait_at_exit, wait_for_end

Job = Callable[[], object]


class DeviceThreads:
    """One thread per device, which calls its jobs in the order they are put.

    The threads end when the pool is closed or dropped. Jobs, `failed` and `also` must therefore
    not refer to the owner of the pool.

    Args:
        name: Purpose of the threads, part of their names.
        world_size: Number of devices.
        failed: Called with the exception that a job raised; its thread then ends.
        end: Called on close before waiting for the threads; it tells those that wait elsewhere to
            stop.
        also: Further functions, each run in a thread of its own, by the purpose of the thread.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        failed: Callable[[BaseException], None],
        end: Callable[[], None] = lambda: None,
        also: Mapping[str, Callable[[], None]] | None = None,
    ):
        stop = threading.Event()
        self._queues = [queue.SimpleQueue[Job | None]() for _ in range(world_size)]
        threads = [
            BackgroundThread(_run, (jobs, failed, stop), name=f"elche-{name}-{rank}")
            for rank, jobs in enumerate(self._queues)
        ]
        threads += [
            BackgroundThread(fn, name=f"elche-{purpose}") for purpose, fn in (also or {}).items()
        ]
        # `_close` gets the parts: a finalizer that refers to `self` would keep it alive
        self._finish = weakref.finalize(self, _close, threads, self._queues, stop, end)
        for thread in threads:
            wait_at_exit(thread, self._finish)
            thread.start()

    def put(self, rank: int, job: Job) -> None:
        """Give the thread of a device its next job."""
        self._queues[rank].put(job)

    def close(self) -> None:
        """End the threads and drop the remaining jobs. Idempotent.

        A thread that waits for a device cannot be interrupted. After half a second it is left
        to end on its own as soon as the device is done.
        """
        self._finish()


def _run(
    jobs: "queue.SimpleQueue[Job | None]",
    failed: Callable[[BaseException], None],
    stop: threading.Event,
) -> None:
    while (job := jobs.get()) is not None and not stop.is_set():
        try:
            job()
        except BaseException as error:  # the training loop raises it
            failed(error)
            return
        del job  # hold no arrays while waiting


def _close(
    threads: Sequence[BackgroundThread],
    queues: "Sequence[queue.SimpleQueue[Job | None]]",
    stop: threading.Event,
    end: Callable[[], None],
) -> None:
    # before None is queued, so that jobs in front of it are dropped, not run
    stop.set()
    for jobs in queues:
        jobs.put(None)
    end()
    deadline = time.monotonic() + 0.5
    # one of the pool's threads may drop the last reference to it, and cannot wait for itself
    here = threading.current_thread()
    others = [thread for thread in threads if thread.running and thread is not here]
    for thread in others:
        # a process that exits while a thread waits in the JAX runtime would crash
        wait_for_end(thread, max(0.0, deadline - time.monotonic()))
