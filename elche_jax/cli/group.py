"""A group of processes that are one job: started together, ended together, nothing left behind."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, NamedTuple

from elche_jax.distributed import COUNT, ID

GRACE_S = 5.0
"""Seconds that processes have to end after each signal, before the next, stronger one."""

LONGEST = 1 << 16
"""Bytes after which a line is broken, so that output without line ends needs no memory."""

STRONGER = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGKILL,
    signal.SIGKILL: signal.SIGKILL,
}
"""The signal that follows if processes do not end."""


class _Ended(NamedTuple):
    process: int
    code: int


class Group:
    """The processes of a job on this machine.

    Each is the leader of a session of its own, so that a signal also reaches what it has started,
    and a Ctrl-C of the terminal reaches this process alone, which passes it on.

    Args:
        command: The program and its arguments.
        count: Number of processes.
        env: Variables beside those of this process and of the job.
    """

    def __init__(self, command: Sequence[str], count: int, env: Mapping[str, str]):
        self._command, self._count, self._env = command, count, env
        self._children: list[subprocess.Popen[bytes]] = []
        # a queue whose `put` a signal handler may call at any moment
        self._events: queue.SimpleQueue[_Ended | signal.Signals] = queue.SimpleQueue()
        self._writing = threading.Lock()

    def run(self, ends_together: bool = True) -> int:
        """Run the processes to their end; return the exit code of the job.

        Args:
            ends_together: Whether all are ended if one fails.

        Returns:
            0 if all ended well, or if only process 0 has to. Otherwise the code of the first that
            failed, 128 plus its number for a signal; or that of a signal that this process got.
        """
        readers: list[threading.Thread] = []
        try:
            with self._signals():
                readers = self._start()
                return self._wait(ends_together)
        finally:
            self._signal(signal.SIGKILL)  # also what the processes have started
            for child in self._children:
                child.wait()
            for reader in readers:  # a program that left the session may hold the pipe
                reader.join(GRACE_S)

    def _start(self) -> list[threading.Thread]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        job = {"JAX_COORDINATOR_ADDRESS": address, COUNT: str(self._count)}
        readers: list[threading.Thread] = []
        for process in range(self._count):
            child = subprocess.Popen(
                self._command, env=os.environ | self._env | job | {ID: str(process)},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
            self._children.append(child)
            for stream, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                assert stream is not None
                reader = threading.Thread(target=self._pass, args=(process, stream, out.buffer))
                readers.append(reader)
            readers.append(threading.Thread(target=self._watch, args=(process, child)))
        for reader in readers:
            reader.daemon = True
            reader.start()
        return readers

    def _wait(self, ends_together: bool) -> int:
        """Wait for the processes; end them after a signal or a failure."""
        running, first = set(range(self._count)), 0
        asked: signal.Signals | None = None  # the last signal that was passed on
        deadline: float | None = None
        while running:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:  # they did not end
                assert asked is not None
                asked, deadline = self._stronger(asked)
                continue
            if isinstance(event, _Ended):
                running.discard(event.process)
                failed = event.code != 0 and asked is None
                if failed and (ends_together or event.process == 0):
                    first = first or _shell_code(event.code)
                if failed:
                    self._say(f"process {event.process} ended with {_named(event.code)}")
                if running and failed and ends_together:
                    asked, deadline = self._stronger(signal.SIGINT)
            elif asked is None:
                asked, deadline, first = event, time.monotonic() + GRACE_S, first or 128 + event
                self._signal(asked)
            else:  # a second one does not wait
                asked, deadline = self._stronger(signal.SIGTERM)
        return first

    def _stronger(self, last: signal.Signals) -> tuple[signal.Signals, float]:
        self._signal(STRONGER[last])
        return STRONGER[last], time.monotonic() + GRACE_S

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

    @contextmanager
    def _signals(self) -> Generator[None]:
        """Let SIGINT and SIGTERM be events meanwhile, also if they were ignored before."""
        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, lambda got, _: self._events.put(signal.Signals(got)))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, process: int, child: "subprocess.Popen[bytes]") -> None:
        self._events.put(_Ended(process, child.wait()))

    def _pass(self, process: int, stream: IO[bytes], out: IO[bytes]) -> None:
        """Write each line of a process with its number; lines of several are never mixed."""
        with stream:
            while line := stream.readline(LONGEST):
                self._write(out, b"[%d] %s" % (process, line))

    def _say(self, text: str) -> None:
        self._write(sys.stderr.buffer, f"elche-jax launch: {text}\n".encode())

    def _write(self, out: IO[bytes], line: bytes) -> None:
        with self._writing, contextlib.suppress(BrokenPipeError):  # the reader has gone
            out.write(line if line.endswith(b"\n") else line + b"\n")
            out.flush()


def _shell_code(code: int) -> int:
    """Return an exit code as shells report it."""
    return 128 - code if code < 0 else code


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end_with_parent() -> None:
    """Let the kernel end this process if its parent is killed; on Linux only."""
    if sys.platform != "linux":
        return
    import ctypes  # here, as only a new process needs it

    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
