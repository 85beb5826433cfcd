"""A cache of compiled programs that can also compile in the background, ahead of need."""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from elche_jax import _progress
from elche_jax._log import logger
from elche_jax._settings import settings, with_settings
from elche_jax._threads import BackgroundThread, wait_at_exit
from elche_jax._waiting import Condition, interruptible

Build = Callable[[], Any]
_Key = tuple[tuple[Hashable, ...], Hashable]
"""The JAX settings and the key of a program."""

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


class _Program:
    """A program that is compiled or will be, guarded by the lock of its cache.

    Attributes:
        built: What `build()` returned.
        error: What it raised, or None.
        over: Whether the build has ended, or will never start.
    """

    def __init__(self) -> None:
        self.built: Any = None
        self.error: BaseException | None = None
        self.over = False

    def ended(self) -> bool:
        """Return `over`."""
        return self.over


class CompileCache:
    """A thread-safe cache of programs: concurrent requests for one key compile once.

    A program is whatever `build()` returns. `prepare` builds in a shared background thread
    that exists only while there is something to build, `begin` in a thread of its own. A
    waiting request has priority: until it is answered, the background thread starts no new build.

    A program belongs to the JAX settings in effect where it is requested (`jax.enable_x64`,
    ...), which its build in another thread gets, too. Under others it is compiled anew.

    Args:
        on_compile: Called after each compile; None for no callback. What it raises reaches the
            caller of `get`, or is logged if the compile ran in the background.
    """

    def __init__(self, on_compile: OnCompile | None = None) -> None:
        self._on_compile = on_compile
        self._changed = Condition()
        self._programs: dict[_Key, _Program] = {}
        # what `get` returns at once; read without the lock, as every window reads it
        self._built: dict[_Key, Any] = {}
        self._hits = 0
        self._jobs: dict[_Key, Build] = {}  # prepared, not started
        self._begun: set[_Key] = set()  # by `begin`, not requested yet
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
        waits, new, program = 0, False, _Program()  # an interrupt may precede the count
        try:
            with self._changed:  # under one lock: a `clear` in between would leave no builder
                known = self._programs.get(at)
                # one that failed ahead of need, which was logged, is tried again
                if known is None or (known.error is not None and at not in self._begun):
                    new, self._programs[at] = True, program
                else:
                    program = known
                self._waited_for, waits = self._waited_for + 1, 1
                self._begun.discard(at)
                if at in self._jobs:  # prepared but not started: build it here
                    new, build = True, self._jobs[at]
                    del self._jobs[at]
            if new:
                self._fill(at, program, build)
            with interruptible(), self._changed:
                self._changed.wait_for(program.ended)
        finally:
            with self._changed:
                self._waited_for -= waits
                if new and not program.over:
                    self._abandon(at, program)
                self._changed.notify_all()
        self._count(misses=1, waited_s=time.perf_counter() - start)
        with self._changed:
            if self._programs.get(at) is program:  # not dropped in the meantime
                if program.error is None:
                    self._built[at] = program.built
                else:
                    del self._programs[at]
        if program.error is None:
            return program.built
        try:
            raise program.error
        finally:
            del program  # the error refers to this frame: avoid a reference cycle

    def begin(self, key: Hashable, build: Build) -> None:
        """Start compiling a program that is about to be requested, even if it failed before.

        The request counts as a miss even if the compile has finished by then.
        """
        at, build = (settings(), key), with_settings(build)
        with self._changed:
            known = self._programs.get(at)
            if known is not None and known.error is None:
                return
            self._programs[at] = program = _Program()
            self._begun.add(at)
        self._start(at, program, lambda: self._fill_in_background(at, program, build))

    def prepare(self, key: Hashable, build: Build) -> None:
        """Compile a program in the background; return immediately.

        An error is logged; once the program is requested, it is compiled again.
        """
        at, build, program = (settings(), key), with_settings(build), _Program()
        with self._changed:  # program and job together: a `get` in between would wait forever
            if at in self._programs:
                return
            self._programs[at], self._jobs[at] = program, build
            if self._working:
                return
            self._working = True
        self._start(at, program, self._work)

    def _start(self, at: _Key, program: _Program, work: Callable[[], None]) -> None:
        thread = BackgroundThread(work, name="elche-compile")
        try:
            wait_at_exit(thread)  # a process that exits in the middle of a compile would crash
            thread.start()
        except BaseException:  # Ctrl-C, or the system has no thread left
            if not thread.running:
                with self._changed:
                    self._working &= self._jobs.pop(at, None) is None
                    self._abandon(at, program)
            raise

    def _abandon(self, at: _Key, program: _Program) -> None:
        """Give up a program whose build was interrupted; the next request builds it."""
        program.over = True
        program.error = RuntimeError(
            "elche: the compile of a program was interrupted in another thread. Try again."
        )
        if self._programs.get(at) is program:
            del self._programs[at]
        self._changed.notify_all()

    def wait(self) -> None:
        """Wait until everything prepared so far is compiled."""
        with interruptible(), self._changed:
            programs = list(self._programs.values())
            self._changed.wait_for(lambda: all(program.over for program in programs))

    def clear(self) -> None:
        """Drop all programs; one that is being compiled is dropped once it is done."""
        with self._changed:
            for at in self._jobs:  # they will never be built: end a `wait` for them
                self._programs[at].over = True
            for kept in (self._programs, self._built, self._jobs, self._begun):
                kept.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._waited_for or not self._jobs)
                # start no further compile when the process exits: it waits for this thread
                if not self._jobs or not threading.main_thread().is_alive():
                    self._working = False
                    return
                at = next(iter(self._jobs))
                program, build = self._programs[at], self._jobs.pop(at)
            self._fill_in_background(at, program, build, ahead=1)
            if (error := program.error) is not None:
                logger.warning(
                    "elche: a program could not be compiled ahead of need (%s: %s); windows go on "
                    "without it where they can.",
                    type(error).__name__,
                    error,
                )

    def _fill_in_background(
        self, at: _Key, program: _Program, build: Build, ahead: int = 0
    ) -> None:
        try:
            self._fill(at, program, build, ahead)
        except BaseException as error:  # of `on_compile`: the program is there nevertheless
            logger.warning(
                "elche: a program that was compiled in the background could not be recorded "
                "(%s: %s).",
                type(error).__name__,
                error,
            )

    def _fill(self, at: _Key, program: _Program, build: Build, ahead: int = 0) -> None:
        start, built, error = time.perf_counter(), None, None
        try:
            with _progress.phase("compile"):
                built = build()
        except BaseException as raised:  # raised by `get`
            error, ahead = raised, 0
        seconds = time.perf_counter() - start
        self._count(ahead=ahead, seconds=seconds)  # before a waiting `get` continues
        with self._changed:
            program.built, program.error, program.over = built, error, True
            # not if `begin` started it: the next `get` must count as a miss
            wanted = self._programs.get(at) is program and at not in self._begun
            if error is None and wanted:
                self._built[at] = built
            self._changed.notify_all()
        if error is None and self._on_compile is not None:
            self._on_compile(at[1], seconds, bool(ahead))

    def _count(self, **more: float) -> None:
        with self._changed:
            counts = {name: getattr(self._stats, name) + by for name, by in more.items()}
            self._stats = replace(self._stats, **counts)
