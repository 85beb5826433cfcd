"""A cache of compiled programs, which can also compile ahead of need in the background."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from elche_jax._waiting import interruptible

logger = logging.getLogger("elche_jax")

Build = Callable[[], Any]

Told = Callable[[Hashable, float, bool], None]
"""Called after each compile with the key, its seconds, and whether it was compiled ahead."""


@dataclass(frozen=True)
class CompileStats:
    """Statistics of a compile cache.

    Attributes:
        hits: Requests answered immediately.
        misses: Requests that waited for a compile.
        ahead: Programs compiled in the background.
        seconds: Seconds spent compiling, in the foreground and in the background.
        waited_s: Seconds the training loop waited for compiles.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


class CompileCache:
    """A thread-safe cache of programs: concurrent requests for one key compile once.

    A program is whatever `build()` returns. `prepare` builds in a shared background thread
    that exists only while there is something to build, `begin` in a thread of its own. A
    request that waits has priority: the background thread starts no new build meanwhile.

    Args:
        told: Called after each compile; None for no callback.
    """

    def __init__(self, told: Told | None = None) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}
        self._stats = CompileStats()
        self._jobs: dict[Hashable, tuple[_Entry, Build]] = {}
        self._working = False
        self._waited_for = 0
        self._changed = threading.Condition(self._lock)

    @property
    def stats(self) -> CompileStats:
        """The statistics so far."""
        with self._lock:
            return self._stats

    def ready(self, key: Hashable) -> bool:
        """Return whether the program is available without waiting."""
        with self._lock:
            entry = self._entries.get(key)
        return entry is not None and entry.done.is_set() and entry.error is None

    def get(self, key: Hashable, build: Build) -> Any:
        """Return the program for a key, compiling it now if needed.

        A compile error is raised once and then forgotten: the next request tries again.
        """
        entry, new = self._claim(key)
        if not new and entry.done.is_set() and entry.error is None and not entry.begun:
            self._count(hits=1)
            return entry.program
        begun = time.perf_counter()
        waits = 0
        try:
            with self._lock:
                self._waited_for, waits = self._waited_for + 1, 1
                entry.begun = False
                if key in self._jobs:  # prepared, but not started: build it here
                    new, (_, build) = True, self._jobs.pop(key)
            if new:
                self._fill(key, entry, build)
            else:
                with interruptible():
                    entry.done.wait()
        finally:
            with self._changed:
                self._waited_for -= waits
                self._changed.notify_all()
        self._count(misses=1, waited_s=time.perf_counter() - begun)
        if entry.error is not None:
            self._forget(key, entry)
            raise entry.error
        return entry.program

    def begin(self, key: Hashable, build: Build) -> None:
        """Start compiling a program that is about to be requested.

        That request counts as a miss even if the compile has finished by then.
        """
        entry, new = self._claim(key)
        if new:
            entry.begun = True
            self._start(lambda: self._fill(key, entry, build))

    def prepare(self, key: Hashable, build: Build) -> None:
        """Compile a program in the background; return immediately.

        An error is logged, and raised when the program is requested.
        """
        with self._lock:  # entry and job together: a `get` in between would wait forever
            if key in self._entries:
                return
            self._entries[key] = entry = _Entry()
            self._jobs[key] = (entry, build)
            if self._working:
                return
            self._working = True
        self._start(self._work)

    def _start(self, work: Callable[[], None]) -> None:
        # not a daemon: a process that exits in the middle of a compile would crash
        threading.Thread(target=work, name="elche-compile", daemon=False).start()

    def wait(self) -> None:
        """Wait until everything prepared so far is compiled."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            entry.done.wait()

    def clear(self) -> None:
        """Drop all programs; one that is being compiled is dropped once it is done."""
        with self._changed:
            self._entries.clear()
            for entry, _ in self._jobs.values():
                entry.done.set()
            self._jobs.clear()
            self._changed.notify_all()

    def _claim(self, key: Hashable) -> "tuple[_Entry, bool]":
        with self._lock:
            if key in self._entries:
                return self._entries[key], False
            self._entries[key] = _Entry()
            return self._entries[key], True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._waited_for or not self._jobs)
                if not self._jobs or not threading.main_thread().is_alive():
                    self._working = False
                    return
                key = next(iter(self._jobs))
                entry, build = self._jobs.pop(key)
            self._fill(key, entry, build, ahead=1)
            if entry.error is not None:
                logger.warning(
                    "elche: a program could not be compiled ahead (%s: %s); larger windows go "
                    "on in several calls.",
                    type(entry.error).__name__,
                    entry.error,
                )

    def _fill(self, key: Hashable, entry: "_Entry", build: Build, ahead: int = 0) -> None:
        begun = time.perf_counter()
        try:
            entry.program = build()
        except BaseException as error:  # raised by `get`
            entry.error, ahead = error, 0
        seconds = time.perf_counter() - begun
        self._count(ahead=ahead, seconds=seconds)
        entry.done.set()
        if self._told is not None and entry.error is None:
            self._told(key, seconds, bool(ahead))

    def _forget(self, key: Hashable, entry: "_Entry") -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]

    def _count(self, **more: float) -> None:
        with self._lock:
            fields = {name: getattr(self._stats, name) + by for name, by in more.items()}
            self._stats = CompileStats(**{**vars(self._stats), **fields})


class _Entry:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.program: Any = None
        self.error: BaseException | None = None
        self.begun = False  # by `begin`, and not requested since
