"""A cache of compiled programs, which can also compile ahead of need in the background."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from elche_jax import _progress
from elche_jax._settings import settings, with_settings
from elche_jax._waiting import interruptible

logger = logging.getLogger("elche_jax")

Build = Callable[[], Any]
_Key = tuple[tuple[Hashable, ...], Hashable]
"""The settings of JAX, and the key of a program."""

_MISSING = object()

OnCompile = Callable[[Hashable, float, bool], None]
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

    A program belongs to the settings of JAX that hold where it is requested (`jax.enable_x64`,
    ...), which its build in another thread gets, too. Under others it is compiled anew.

    Args:
        on_compile: Called after each compile; None for no callback.
    """

    def __init__(self, on_compile: OnCompile | None = None) -> None:
        self._on_compile = on_compile
        self._changed = threading.Condition()
        self._programs: dict[_Key, Future[Any]] = {}
        # what `get` answers at once; read without the lock, as every window does it
        self._built: dict[_Key, Any] = {}
        self._hits = 0
        self._jobs: dict[_Key, Build] = {}  # prepared, not started
        self._begun: set[_Key] = set()  # by `begin`, not requested since
        self._stats = CompileStats()
        self._working = False
        self._waited_for = 0

    @property
    def stats(self) -> CompileStats:
        """The statistics so far."""
        with self._changed:
            return replace(self._stats, hits=self._hits)

    @property
    def misses(self) -> int:
        """Requests that waited for a compile so far."""
        # no lock: `_stats` is replaced as a whole
        return self._stats.misses

    def ready(self, key: Hashable) -> bool:
        """Return whether the program is available without waiting."""
        return (settings(), key) in self._built

    def get(self, key: Hashable, build: Build) -> Any:
        """Return the program for a key, compiling it now if needed.

        A compile error is raised once and then forgotten: the next request tries again.
        """
        at = settings(), key
        built = self._built.get(at, _MISSING)
        if built is not _MISSING:
            with self._changed:
                self._hits += 1
            return built
        start = time.perf_counter()
        waits = 0  # an interrupt may come before it is counted
        try:
            with self._changed:  # once: `clear` in between would leave nobody to build it
                new = at not in self._programs
                program = self._programs.setdefault(at, Future())
                self._waited_for, waits = self._waited_for + 1, 1
                self._begun.discard(at)
                if at in self._jobs:  # prepared, but not started: build it here
                    new, build = True, self._jobs.pop(at)
            if new:
                self._fill(at, program, build)
            with interruptible():
                error = program.exception()
        finally:
            with self._changed:
                self._waited_for -= waits
                self._changed.notify_all()
        self._count(misses=1, waited_s=time.perf_counter() - start)
        with self._changed:
            if self._programs.get(at) is program:  # not dropped in the meantime
                if error is None:
                    self._built[at] = program.result()
                else:
                    del self._programs[at]
        return program.result()

    def begin(self, key: Hashable, build: Build) -> None:
        """Start compiling a program that is about to be requested.

        That request counts as a miss even if the compile has finished by then.
        """
        at, build = (settings(), key), with_settings(build)
        with self._changed:
            if at in self._programs:
                return
            self._programs[at] = program = Future[Any]()
            self._begun.add(at)
        self._start(lambda: self._fill(at, program, build))

    def prepare(self, key: Hashable, build: Build) -> None:
        """Compile a program in the background; return immediately.

        An error is logged, and raised when the program is requested.
        """
        at, build = (settings(), key), with_settings(build)
        with self._changed:  # program and job together: a `get` in between would wait forever
            if at in self._programs:
                return
            self._programs[at], self._jobs[at] = Future(), build
            if self._working:
                return
            self._working = True
        self._start(self._work)

    def _start(self, work: Callable[[], None]) -> None:
        # not a daemon: a process that exits in the middle of a compile would crash
        threading.Thread(target=work, name="elche-compile", daemon=False).start()

    def wait(self) -> None:
        """Wait until everything prepared so far is compiled."""
        with self._changed:
            programs = list(self._programs.values())
        wait(programs)

    def clear(self) -> None:
        """Drop all programs; one that is being compiled is dropped once it is done."""
        with self._changed:
            for at in self._jobs:  # they will not be built: end a `wait` for them
                self._programs[at].set_result(None)
            for kept in (self._programs, self._built, self._jobs, self._begun):
                kept.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._waited_for or not self._jobs)
                # begin no further compile at the end of the process, which waits for this thread
                if not self._jobs or not threading.main_thread().is_alive():
                    self._working = False
                    return
                at = next(iter(self._jobs))
                program, build = self._programs[at], self._jobs.pop(at)
            self._fill(at, program, build, ahead=1)
            if (error := program.exception()) is not None:
                logger.warning(
                    "elche: a program could not be compiled ahead of need (%s: %s); windows go on "
                    "without it where they can.",
                    type(error).__name__,
                    error,
                )

    def _fill(self, at: _Key, program: "Future[Any]", build: Build, ahead: int = 0) -> None:
        start, built, error = time.perf_counter(), None, None
        try:
            with _progress.phase("compile"):
                built = build()
        except BaseException as raised:  # raised by `get`
            error, ahead = raised, 0
        seconds = time.perf_counter() - start
        self._count(ahead=ahead, seconds=seconds)  # before a waiting `get` goes on
        if error is not None:
            program.set_exception(error)
            return
        with (
            self._changed
        ):  # before the result, as `wait` returns with it and `ready` must then hold
            # not if it was begun: the `get` to come must count as a miss
            if self._programs.get(at) is program and at not in self._begun:
                self._built[at] = built
        program.set_result(built)
        if self._on_compile is not None:
            self._on_compile(at[1], seconds, bool(ahead))

    def _count(self, **more: float) -> None:
        with self._changed:
            counts = {name: getattr(self._stats, name) + by for name, by in more.items()}
            self._stats = replace(self._stats, **counts)
