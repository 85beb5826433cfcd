"""Times of a window written by hand, as the report that a cadence takes.

The loop marks two moments of a window: the end of each device's own work, and the end of the
synchronization. One thread per device waits for that device's entries of the marked arrays, see
`elche_jax.engine.timing`.
"""

import queue
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from elche_jax import _check as check
from elche_jax.cadence import WindowReport
from elche_jax.engine.lane import Fleet
from elche_jax.engine.laned import Stacked
from elche_jax.engine.loss import describe
from elche_jax.engine.shapes import named
from elche_jax.engine.timing import ENDS, Stopwatch, WindowTimes

T = TypeVar("T")
_Named = list[tuple[str, Any]]
"""Leaves of a pytree, with their paths."""

_MARKS = "worked", "synced"

COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event that JAX records when it has compiled a program or read it from a cache."""


class WindowTimer:
    """The clock of one window, which `DDP.timed` yields.

    Attributes:
        compiled: Whether a program was compiled in the block, so that its times are meaningless.
    """

    def __init__(self, fleet: Fleet, counts: Sequence[int], watch: "_Watch"):
        self.compiled = False
        self._job, self._devices, self._counts = fleet.job, fleet.devices, tuple(counts)
        self._watch: _Watch | None = watch
        """None after the block: a report that is kept must not keep threads alive."""
        self._marked: list[_Named] = []
        self._report: WindowReport | None = None
        self._begun = time.perf_counter()

    def worked(self, out: T) -> T:
        """Mark the end of the devices' own work, before any exchange.

        A device's busy time ends when all its entries of `out` are ready.

        Args:
            out: Stacked pytree of arrays, such as the gradients. They must not be donated in
                the block.

        Returns:
            The argument.

        Raises:
            RuntimeError: If it was called before in the block, or the block has ended.
            ValueError: If a leaf is not stacked over the devices or was donated, or there is none.
        """
        return self._mark(0, out)

    def synced(self, out: T) -> T:
        """Mark the end of the synchronization.

        Pass what the update returns rather than the mean gradients: otherwise the update, which is
        still running, counts as work of the next window.

        Args:
            out: Stacked pytree of arrays that are ready after the exchange, such as the new
                parameters. They must not be donated in the block.

        Returns:
            The argument.

        Raises:
            RuntimeError: If `worked` was not called before, `synced` was, or the block has ended.
            ValueError: If a leaf is not stacked over the devices or was donated, or there is none.
        """
        return self._mark(1, out)

    @property
    def report(self) -> WindowReport:
        """The times of the window, for `Cadence.update`.

        All times are 0, which means not measured, if a program was `compiled` in the block: a
        cadence then keeps what it knows.

        Raises:
            RuntimeError: If the block has not ended, or has ended with an exception.
        """
        if self._report is None:
            rule, todo = "be read after the block", "A block that raised has none."
            raise RuntimeError(check.message("DDP.timed", "report", rule, "none yet", todo))
        return self._report

    def _mark(self, at: int, out: T) -> T:
        name = _MARKS[at]
        if self._watch is None or len(self._marked) != at:
            rule = "be called once in the block" + (", after worked" if at else "")
            got = "a second call" if len(self._marked) > at else "a call without worked"
            got = "a call after its end" if self._watch is None else got
            raise RuntimeError(check.message("DDP.timed", name, rule, got))
        leaves = named(out, "out")
        _refuse_donated(name, leaves)
        self._watch.mark(at, self._begun, _Entries(name, leaves, self._devices))
        self._marked.append(leaves)
        return out

    def _end(self, watch: "_Watch") -> None:
        """Wait for the window, and make its report."""
        if len(self._marked) < 2:
            rule, got = "both be called in the block", ("neither", "worked only")[len(self._marked)]
            raise RuntimeError(check.message("DDP.timed", "worked and synced", rule, got))
        try:
            times = watch.result()
        except jax.errors.JaxRuntimeError:
            self._refuse_any_donated()
            raise
        # even if no thread has noticed, which is a matter of timing
        self._refuse_any_donated()
        free = ENDS.before(self._devices, times.arrived)
        ENDS.note(self._devices, times.combined)
        # the processes leave the block together, with the same report
        told = self._job.exchange((times.busy_ms(free), times.sync_ms, self.compiled))
        own, syncs, compiled = zip(*told, strict=True)
        self._job.check_all()
        busy, sync, self.compiled = self._job.by_rank(own, 0.0), min(syncs), any(compiled)
        if self.compiled:
            busy, sync = (0.0,) * len(busy), 0.0
        # a device whose thread is late may seem to have ended before it began
        self._report = WindowReport([max(0.0, ms) for ms in busy], self._counts, sync)

    def _close(self) -> None:
        self._watch = None
        self._marked.clear()  # hold no arrays

    def _refuse_any_donated(self) -> None:
        for name, leaves in zip(_MARKS, self._marked, strict=False):
            _refuse_donated(name, leaves)


def _refuse_donated(mark: str, leaves: _Named) -> None:
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array | Stacked) and leaf.is_deleted():
            rule, got = "get arrays that are not donated in the block", f"leaf {path}"
            todo = "Leave out its donate_argnums, or donate it after the block."
            raise ValueError(check.message("DDP.timed", mark, rule, got, todo))


class _Entries:
    """Stacked arrays that `Stopwatch` treats as one."""

    def __init__(self, mark: str, leaves: _Named, devices: Sequence[jax.Device]):
        if not leaves:
            raise ValueError(check.message("DDP.timed", mark, "get at least one array", "none"))
        self._rows = [_shards(mark, path, leaf, devices) for path, leaf in leaves]

    def addressable_data(self, rank: int) -> Sequence[jax.Array]:
        return [row[rank] for row in self._rows]


def _shards(mark: str, path: str, leaf: Any, devices: Sequence[jax.Device]) -> Sequence[jax.Array]:
    """Check a leaf; return the devices' entries."""
    shards: list[jax.Array] = []
    if isinstance(leaf, jax.Array | Stacked) and leaf.devices() == set(devices):
        shards = [leaf.addressable_data(rank) for rank in range(len(devices))]
    placed = [shard.shape[:1] == (1,) and shard.devices() for shard in shards]
    if placed != [{device} for device in devices]:
        rule = f"get arrays stacked over the devices, entry d of {len(devices)} on device d"
        got = f"{describe(leaf)} as leaf {path}"
        todo = "Pass what a mapped function or an exchange returns."
        raise ValueError(check.message("DDP.timed", mark, rule, got, todo))
    return shards


class _Watch(Stopwatch):
    """Threads that time one window after the other."""

    def __init__(self, world_size: int):
        # the threads must not refer to this object: dropping it ends them
        self._results: queue.SimpleQueue[WindowTimes | BaseException] = queue.SimpleQueue()
        super().__init__(world_size, self._results.put, self._results.put)
        self._window = 0

    def mark(self, at: int, begun: float, entries: _Entries) -> None:
        put = (self.accumulating, self.combining)[at]
        put(self._window, begun, entries)

    def result(self) -> WindowTimes:
        """Wait for the end of the window."""
        times = self._results.get()
        if isinstance(times, BaseException):
            raise times
        self._window += 1
        return times


class Watches:
    """The threads of a `DDP`'s clocks; they end when this object is dropped.

    Args:
        fleet: The devices of this process, in lanes.
    """

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        # threads are kept, as starting and ending them takes milliseconds
        self._idle: list[_Watch] = []

    @contextmanager
    def timed(self, counts: Sequence[int]) -> Generator[WindowTimer, None, None]:
        """Return the context of a window, see `DDP.timed`."""
        watch = self._idle.pop() if self._idle else _Watch(self._fleet.world_size)
        timer = WindowTimer(self._fleet, counts, watch)
        try:
            with _compiling(timer):
                yield timer
            timer._end(watch)  # pyright: ignore[reportPrivateUsage]  # of this file
        except BaseException:
            watch.close()  # its threads may still wait for a part of this window
            raise
        finally:
            timer._close()  # pyright: ignore[reportPrivateUsage]
        self._idle.append(watch)


@contextmanager
def _compiling(timer: WindowTimer) -> Generator[None, None, None]:
    """Note whether a program is compiled, in any thread."""

    def listener(event: str, *_: Any, **__: Any) -> None:
        timer.compiled |= event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
