"""Compiled programs, kept by key; made in the background where one sees them coming."""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

Build = Callable[[], Any]


@dataclass(frozen=True)
class CompileStats:
    """What the compile cache has done so far.

    Attributes:
        hits: Requests answered at once.
        misses: Requests that waited for a compile.
        ahead: Programs compiled in the background.
        seconds: Seconds spent compiling, waited for and in the background.
        waited_s: Seconds the training loop waited.
    """

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


class CompileCache:
    """Programs by key. Thread-safe: two requests for one key compile once.

    A program is what `build()` returns. `prepare` builds in a background thread that
    exists only while there is something to build.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}
        self._stats = CompileStats()
        self._jobs: queue.SimpleQueue[tuple[_Entry, Build] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._finish = weakref.finalize(self, self._jobs.put, None)

    @property
    def stats(self) -> CompileStats:
        """Counts and seconds so far."""
        with self._lock:
            return self._stats

    def ready(self, key: Hashable) -> bool:
        """Whether the program can be had without waiting."""
        with self._lock:
            entry = self._entries.get(key)
        return entry is not None and entry.done.is_set() and entry.error is None

    def get(self, key: Hashable, build: Build) -> Any:
        """The program of this key; compiles it now where it is not there yet."""
        entry, new = self._claim(key)
        if not new and entry.done.is_set() and entry.error is None:
            self._count(hits=1)
            return entry.program
        begun = time.perf_counter()
        if new or entry.error is not None:
            self._fill(entry, build)
        else:
            entry.done.wait()
        self._count(misses=1, waited_s=time.perf_counter() - begun)
        return entry.result()

    def prepare(self, key: Hashable, build: Build) -> None:
        """Compiles the program of this key in the background; returns at once.

        An error is kept and raised when the program is asked for.
        """
        entry, new = self._claim(key)
        if not new:
            return
        self._jobs.put((entry, build))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._jobs, weakref.ref(self)), daemon=True,
                    name="elche-compile",
                )  # fmt: skip
                self._thread.start()

    def wait(self) -> None:
        """Waits until everything prepared so far is compiled."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            entry.done.wait()

    def _claim(self, key: Hashable) -> "tuple[_Entry, bool]":
        with self._lock:
            if key in self._entries:
                return self._entries[key], False
            self._entries[key] = _Entry()
            return self._entries[key], True

    def _fill(self, entry: "_Entry", build: Build) -> None:
        begun = time.perf_counter()
        entry.fill(build)
        self._count(seconds=time.perf_counter() - begun)

    def _count(self, **more: float) -> None:
        with self._lock:
            fields = {name: getattr(self._stats, name) + by for name, by in more.items()}
            self._stats = CompileStats(**{**vars(self._stats), **fields})


class _Entry:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.program: Any = None
        self.error: BaseException | None = None

    def fill(self, build: Build) -> None:
        self.error = None
        try:
            self.program = build()
        except BaseException as error:  # raised where the program is asked for
            self.error = error
        self.done.set()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.program


def _work(
    jobs: "queue.SimpleQueue[tuple[_Entry, Build] | None]",
    cache: "weakref.ref[CompileCache]",
) -> None:
    while (job := jobs.get()) is not None:
        entry, build = job
        begun = time.perf_counter()
        entry.fill(build)
        owner = cache()
        if owner is None:
            return
        owner._count(ahead=1, seconds=time.perf_counter() - begun)
        del owner
