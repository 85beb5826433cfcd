"""A process that the launcher has started, and what it prints."""

import os
import selectors
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from elche_jax.launch.output import Lines, Output

READ = 1 << 16
DRAINED = 1 << 20
"""Bytes that a pipe may hold, at most."""


class Child:
    """A process in a session of its own, whose group can be ended as a whole.

    Attributes:
        number: Its number in the job.
        pid: Its number in the system, and that of its group.

    Args:
        number: Its number in the job.
        command: The program and its arguments.
        environment: All its variables.
        prefix: What the lines that it prints begin with.
        output: Where these go.
        selector: Waits for them.
        inherited: Open files that it has, too.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        prefix: bytes,
        output: Output,
        selector: selectors.BaseSelector,
        inherited: Collection[int] = (),
    ):
        self._popen = subprocess.Popen(
            command, env=environment, bufsize=0, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=inherited,
        )  # fmt: skip
        self.number, self.pid = number, self._popen.pid
        assert self._popen.stdout is not None and self._popen.stderr is not None
        pipes = {1: self._popen.stdout, 2: self._popen.stderr}
        self._streams = [
            _Stream(pipe.fileno(), to, Lines(prefix), output, selector)
            for to, pipe in pipes.items()
        ]

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group, and let them take it if they are stopped."""
        for one in (number, signal.SIGCONT):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, one)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process only: what it has started does not know of it."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def ended(self) -> int | None:
        """Return the exit code, 128 plus the number of a signal; None if it lives.

        What is left of its group is ended, too.
        """
        code = self._popen.poll()
        if code is None:
            return None
        self.signal(signal.SIGKILL)
        for stream in self._streams:
            stream.drain()
        return code if code >= 0 else 128 - code

    def read(self, whether: bool) -> None:
        """Read what it prints, or let it wait."""
        for stream in self._streams:
            stream.read(whether)

    def close(self) -> None:
        """End it, and pass on what it has printed last."""
        if self._popen.poll() is None:
            self.signal(signal.SIGKILL)
            self._popen.wait()
        for stream in self._streams:
            stream.drain()
            stream.close()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


class _Stream:
    """What a process prints to one of its two streams."""

    def __init__(
        self, pipe: int, to: int, lines: Lines, output: Output, selector: selectors.BaseSelector
    ):
        self._pipe, self._to, self._lines = pipe, to, lines
        self._output, self._selector = output, selector
        self._open, self._registered = True, False
        os.set_blocking(pipe, False)

    def read(self, whether: bool) -> None:
        """See `Child.read`."""
        whether = whether and self._open
        if whether and not self._registered:
            self._selector.register(self._pipe, selectors.EVENT_READ, self._take)
        elif self._registered and not whether:
            self._selector.unregister(self._pipe)
        self._registered = whether

    def _take(self) -> int:
        """Read a part; return its size, 0 if there is nothing."""
        try:
            data = os.read(self._pipe, READ)
        except BlockingIOError:
            return 0
        if data:
            self._output.put(self._to, self._lines.add(data))
        else:
            self.close()
        return len(data)

    def drain(self) -> None:
        """Take what is there, but not what a process that escaped goes on to print."""
        left = DRAINED
        while left > 0 and self._open and (size := self._take()):
            left -= size

    def close(self) -> None:
        """Read no more."""
        if self._open:
            self._open = False
            self._output.put(self._to, self._lines.rest())
            self.read(False)
