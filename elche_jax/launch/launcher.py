"""Starts the processes of a job, restarts them if needed, passes on their output, and ends them."""

import os
import secrets
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path

from elche_jax.launch.elastic import Elastic, Ended, Outcome, parsed
from elche_jax.launch.generation import Asked, Generation, Shared, say
from elche_jax.launch.marked import MARK, end_marked, kill, start
from elche_jax.launch.memory import Folder, make_memory, remove_memory
from elche_jax.launch.output import Output, Unwritable

ENDING = {signal.SIGINT: 0, signal.SIGTERM: 1, signal.SIGHUP: 1}
"""Signals that end the launcher, and the index in `STEPS` at which it begins."""

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose meaning is up to the script, as in other launchers."""

IGNORED = (signal.SIGHUP, *PASSED_ON)
"""Signals that stay ignored, here and in processes, if they were, such as SIGHUP by `nohup`."""

BROKEN_PIPE = 141

LONGEST_S = 3600.0
"""Longest single wait; the system refuses to wait for weeks."""

READ_S = 0.5
"""Seconds between two looks at the file that holds the wanted number of processes."""


def launch(asked: Asked) -> int:
    """Run a job to its end; return its exit code.

    This is the code of the first failure, or 128 plus the number of the signal that ended it; for
    an elastic job, of the first failure in its last generation; with `go_on`, of the first process
    here. However the job ends, no process that it started is left.
    """
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.PollSelector())
        signals = stack.enter_context(_signals(selector))
        output = Output(selector)
        guarded = stack.enter_context(_guarded(asked.elastic is not None))
        launcher = _Launcher(asked, Shared(selector, output, *guarded), signals)
        if asked.elastic is None:
            launcher.run(range(asked.processes))
        else:
            launcher.run_elastic(asked.elastic)
        launcher.flush()
        return launcher.code


class _Launcher:
    """The generations of a job, one at a time.

    Attributes:
        code: The exit code so far.
    """

    def __init__(self, asked: Asked, shared: Shared, signals: list[int]):
        self._asked, self._shared, self._output = asked, shared, shared.output
        self._signals = signals
        self._number = 0  # of the generation
        self._generation: Generation | None = None
        self._elastic: Elastic | None = None
        self._text = ""  # of the number file, and when to read it again
        self._due = inf if asked.number_file is None else 0.0
        self.code = 0
        self._failed = self._signalled = self._unwritable = False

    def run_elastic(self, elastic: Elastic) -> None:
        """Run one generation after another until the job has ended."""
        self._elastic = elastic
        self._look()
        while True:
            elastic = self._elastic
            places = elastic.places
            several = "es" if len(places) > 1 else ""
            fewer = f" ({elastic.wanted} wanted)" if len(places) < elastic.wanted else ""
            text = f"generation {self._number + 1}: {len(places)} process{several}{fewer}"
            self._say(f"{text}, resuming" if self._number else text)
            outcome = self.run(places)
            if self._failed:  # a signal came, or the output cannot be written
                return
            following = self._elastic.after(outcome)
            if isinstance(following, Ended):
                self._failed, self.code = following.code != 0, following.code
                if following.why:
                    self._say(following.why)
                return
            self._elastic = following

    def run(self, places: Sequence[int]) -> Outcome:
        """Run a generation to its end; return how it ended."""
        self._number += 1
        folder = self._shared.folder / str(self._number)
        folder.mkdir(parents=True)  # with parents: a cleanup of old files may have removed them
        try:
            self._generation = generation = Generation(self._asked, places, self._shared, folder)
            while not generation.over:
                generation.read()
                self._select(min(generation.due, self._due))
                self._take_signals()
                generation.go_on()
                if self._look():
                    generation.ask()
        finally:
            # kill what they left behind, even in sessions of their own, then read their output
            end_marked(self._shared.mark)
            if self._generation is not None:
                self._generation.close()
        self._failed, self.code = generation.failed, generation.code
        self._generation = None
        return generation.outcome

    def flush(self) -> None:
        """Write what is left; after a signal, for at most the grace period."""
        deadline = inf
        while not self._output.empty:
            self._take_signals()
            if self._signalled:
                deadline = min(deadline, time.monotonic() + self._asked.grace)
                if time.monotonic() >= deadline:
                    return
            self._select(deadline)

    def _select(self, due: float) -> None:
        """Read and write what is ready; wait for it until `time.monotonic` reaches `due`."""
        selector, seconds = self._shared.selector, max(0.0, due - time.monotonic())
        try:
            for key, _ in selector.select(min(seconds, LONGEST_S)):
                if key.fileobj in selector.get_map():  # not closed by an earlier one
                    key.data()
        except Unwritable as raised:
            self._output.drop()
            self._take_signals()  # a Ctrl-C also ends `| tee`
            if not self._unwritable:  # once: the processes have time to end
                self._unwritable = True
                broken = isinstance(raised.__cause__, BrokenPipeError)
                if not broken:
                    self._say(f"the output cannot be written ({raised}), ending all processes")
                # processes that are being ended keep their grace period
                ending = self._generation is not None and self._generation.ending
                self._stop(BROKEN_PIPE if broken else 1, 0 if ending else 1)

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number in ENDING:
                self._signalled = True
                # others may come more than once on their own, as when a terminal is closed
                hurry = number == signal.SIGINT
                self._stop(128 + number, ENDING[signal.Signals(number)], hurry)
            elif number in PASSED_ON and self._generation is not None:
                self._generation.pass_on(number)

    def _stop(self, code: int, step: int, hurry: bool = False) -> None:
        if self._generation is not None:
            self._generation.stop(code, step, hurry)
        elif not self._failed:
            self._failed, self.code = True, code

    def _look(self) -> bool:
        """Read how many processes are wanted; return whether that number has changed."""
        path, elastic = self._asked.number_file, self._elastic
        if path is None or elastic is None or time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + READ_S
        try:
            if not path.is_file():  # reading a pipe would block
                return False
            text = path.read_text("utf-8", "replace").strip()
        except OSError:  # not there yet, or being replaced
            return False
        if text == self._text:
            return False
        self._text, number = text, parsed(text, elastic)
        if number is None:
            bounds = f"{elastic.low} to {elastic.high}"
            self._say(
                f"{path} must hold a number from {bounds}, got {text[:50]!r}; the number wanted "
                f"stays {elastic.wanted}"
            )
            return False
        if number == elastic.wanted:
            return False
        self._elastic = elastic.resized(number)
        self._say(f"{number} {'processes are' if number > 1 else 'process is'} wanted ({path})")
        return True

    def _say(self, text: str) -> None:
        say(self._output, text)


@contextmanager
def _signals(selector: selectors.BaseSelector) -> Generator[list[int]]:
    """Collect the signals that end the launcher, are passed on, or report the end of a process.

    Those of `IGNORED` stay ignored if they were.
    """
    reader, writer = os.pipe()
    found: list[int] = []
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {
        number: signal.signal(number, lambda number, _: found.append(number))
        for number in (*ENDING, *PASSED_ON, signal.SIGCHLD)
        if number not in IGNORED or signal.getsignal(number) != signal.SIG_IGN
    }
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
    try:
        yield found
    finally:
        selector.unregister(reader)
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextmanager
def _guarded(with_memory: bool) -> Generator[tuple[Path, Folder | None, str]]:
    """Provide a private folder, one in memory, and a mark.

    If this process is killed, a guard kills the processes with the mark and removes the folders.
    """
    mark = f"{MARK}{secrets.token_hex(8)}"
    folder, memory = Path(tempfile.mkdtemp(prefix="elche-launch-")), None
    try:
        memory = make_memory() if with_memory else None
        guard = start("guard", mark, folder, memory.path if memory else "")
        try:
            yield folder, memory, mark
        finally:
            kill(guard)
            os.waitpid(guard, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if memory is not None:
            remove_memory(memory.path)
            os.close(memory.lock)
