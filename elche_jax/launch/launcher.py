"""Starts the processes of a job, passes on what they print, and ends all of them."""

import os
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from elche_jax._progress import VARIABLE, Board
from elche_jax.launch.child import Child
from elche_jax.launch.marked import end_marked, kill
from elche_jax.launch.output import Output
from elche_jax.launch.program import start
from elche_jax.launch.watchdog import Watchdog

NAME = "elche-jax launch"
STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""How processes are asked to end, one after the other."""

ENDING = {signal.SIGINT: 0, signal.SIGTERM: 1, signal.SIGHUP: 1}
"""Signals that end the launcher, and with which step it begins."""

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # else JAX's service takes SIGTERM for a notice, and the process does not end
    "JAX_ENABLE_PREEMPTION_SERVICE": "0",
}
"""Variables that processes have unless the environment says something else."""

BROKEN_PIPE = 141


@dataclass(frozen=True)
class Asked:
    """What is to be launched.

    Attributes:
        command: The program and its arguments.
        processes: How many are started here.
        total: How many the job has.
        first: Number of the first one here.
        coordinator: Address of process 0; None for a free port of this machine.
        cpu_devices: Virtual CPU devices of each; None for the devices there are.
        go_on: Whether the others go on when one fails.
        timeout: Seconds that a window may take; None for no watchdog.
        grace: Seconds between two steps of ending processes.
    """

    command: Sequence[str]
    processes: int
    total: int
    first: int = 0
    coordinator: str | None = None
    cpu_devices: int | None = None
    go_on: bool = False
    timeout: float | None = None
    grace: float = 10.0


def launch(asked: Asked) -> int:
    """Run a job to its end; return its exit code.

    It is that of the first failure, 128 plus the number of the signal that ended it. Whatever the
    end is, nothing that was started is left.
    """
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.PollSelector())
        signals = stack.enter_context(_signals(selector))
        output = Output(selector)
        folder, mark = stack.enter_context(_guarded())
        launcher = _Launcher(asked, selector, output, signals, folder)
        try:
            launcher.start(stack, mark)
            launcher.run()
        finally:
            launcher.close(mark)
        launcher.flush()
        return launcher.code


class _Launcher:
    """The processes of a job.

    Attributes:
        code: The exit code so far.
    """

    def __init__(
        self,
        asked: Asked,
        selector: selectors.BaseSelector,
        output: Output,
        signals: list[int],
        folder: Path,
    ):
        self._asked, self._selector, self._output = asked, selector, output
        self._signals, self._folder = signals, folder
        self._children: list[Child] = []
        self._alive: dict[int, Child] = {}
        self._step: int | None = None  # of ending all, and when the next one is due
        self._due = 0.0
        self._watchdog: Watchdog | None = None
        self._killed: set[int] = set()  # by it
        self.code = 0
        self._failed = self._signalled = False

    def start(self, stack: ExitStack, mark: str) -> None:
        """Start the processes."""
        asked = self._asked
        address = asked.coordinator or f"localhost:{stack.enter_context(_free_port())}"
        common = os.environ | {
            "JAX_COORDINATOR_ADDRESS": address,
            "ELCHE_NUM_PROCESSES": str(asked.total),
            mark: "1",
        }
        for name, value in DEFAULTS.items():
            common.setdefault(name, value)
        common.pop(VARIABLE, None)
        if asked.cpu_devices is not None:
            common |= {"JAX_NUM_CPU_DEVICES": str(asked.cpu_devices), "JAX_PLATFORMS": "cpu"}
        numbers = range(asked.first, asked.first + asked.processes)
        width = len(str(numbers[-1]))
        if asked.timeout is not None:
            boards = {at: Board.create(self._folder / str(at)) for at in numbers}
            self._watchdog = Watchdog(boards, asked.timeout, asked.total)
        for at in numbers:
            own = {"ELCHE_PROCESS_ID": str(at)}
            if asked.timeout is not None:
                own[VARIABLE] = str(self._folder / str(at))
            prefix = f"[{at:{width}}] ".encode()
            child = Child(at, asked.command, common | own, prefix, self._output, self._selector)
            self._children.append(child)
            self._alive[at] = child

    def run(self) -> None:
        """Wait until all processes have ended."""
        while self._alive:
            for child in self._children:
                child.read(not self._output.full)
            self._select(self._wait_s())
            self._take_signals()
            for child in [*self._alive.values()]:
                if (code := child.ended()) is not None:
                    del self._alive[child.number]
                    self._on_end(child, code)
            if self._step is not None and time.monotonic() >= self._due:
                self._end(self._step + 1)
            if self._watchdog is not None and self._step is None:
                self._look(self._watchdog)

    def close(self, mark: str) -> None:
        """End what is left, grandchildren in sessions of their own included."""
        for child in self._alive.values():
            child.signal(signal.SIGKILL)
        end_marked(mark)
        for child in self._children:
            child.close()

    def flush(self) -> None:
        """Write what is not written yet; if a signal ends all, only for a while."""
        deadline = None
        while not self._output.empty:
            self._take_signals()
            if self._signalled:
                deadline = deadline or time.monotonic() + self._asked.grace
                if time.monotonic() >= deadline:
                    return
            self._select(None if deadline is None else deadline - time.monotonic())

    def _select(self, seconds: float | None) -> None:
        try:
            for key, _ in self._selector.select(seconds):
                if key.fileobj in self._selector.get_map():  # not closed by one before
                    key.data()
        except BrokenPipeError:
            self._output.drop()
            self._stop(BROKEN_PIPE, 1)

    def _wait_s(self) -> float | None:
        if self._step is not None:
            return max(0.0, self._due - time.monotonic()) if self._step < len(STEPS) - 1 else None
        return None if self._watchdog is None else self._watchdog.every

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number in ENDING:
                self._signalled = True
                self._stop(128 + number, ENDING[signal.Signals(number)])

    def _stop(self, code: int, step: int) -> None:
        """End all with an exit code, or hurry if they are being ended."""
        if not self._failed:
            self._failed, self.code = True, code
        self._end(step if self._step is None else max(step, self._step + 1))

    def _end(self, step: int) -> None:
        self._step = min(step, len(STEPS) - 1)
        self._due = time.monotonic() + self._asked.grace
        for child in reversed(self._alive.values()):  # the coordinator last: the others need it
            child.signal(STEPS[self._step])

    def _on_end(self, child: Child, code: int) -> None:
        """Take note of the end of a process."""
        asked = self._asked
        if asked.go_on and child.number == asked.first and self._step is None:
            self.code = code
        if not code or self._step is not None:
            return
        how = f"exit code {code}"
        if code > 128 and code - 128 in set(signal.Signals):
            how = signal.Signals(code - 128).name
        if asked.go_on:
            self._say(f"process {child.number} ended with {how}, the others go on")
        else:
            others = ", the others are ended" if self._alive else ""
            self._say(f"process {child.number} ended with {how}{others}")
            self._stop(code, 1)

    def _look(self, watchdog: Watchdog) -> None:
        alive = {n: child.pid for n, child in self._alive.items() if n not in self._killed}
        for stuck in watchdog.look(alive, time.monotonic()):
            ended = [*alive] if stuck.process is None else [stuck.process]
            line = f"{NAME}: {stuck}"
            self._output.put(2, f"{line}\n".encode())
            watchdog.tell(self._folder, line, alive.keys() - set(ended))
            self._killed.update(ended)
            for number in ended:
                self._alive[number].signal(signal.SIGKILL)

    def _say(self, text: str) -> None:
        self._output.put(2, f"{NAME}: {text}\n".encode())


@contextmanager
def _signals(selector: selectors.BaseSelector) -> Generator[list[int]]:
    """Collect the signals that end the launcher or tell of the end of a process."""
    reader, writer = os.pipe()
    found: list[int] = []
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {
        number: signal.signal(number, lambda number, _: found.append(number))
        for number in (*ENDING, signal.SIGCHLD)
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
def _guarded() -> Generator[tuple[Path, str]]:
    """Give a private folder, and a mark whose processes end if this process is killed."""
    mark = f"ELCHE_LAUNCH_{secrets.token_hex(8)}"
    folder = tempfile.mkdtemp(prefix="elche-launch-")
    try:
        guard = start("guard", folder, mark)
        try:
            yield Path(folder), mark
        finally:
            kill(guard)
            os.waitpid(guard, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _free_port() -> Generator[int]:
    """Give a port that no other launcher takes meanwhile.

    It is bound, but nobody listens: the coordinator may bind it, too, as it also allows others to.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]
