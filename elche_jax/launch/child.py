"""A process started by the launcher, and its output."""

import os
import selectors
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from elche_jax.launch.output import Lines, Output

READ = 1 << 16
DRAINED = 1 << 20
"""Most bytes that a pipe may hold."""


class Child:
    """A process in its own session, whose group can be ended as a whole.

    Attributes:
        number: Its number in the job.
        pid: Its process id, which is also that of its group.

    Args:
        number: Its number in the job.
        command: The program and its arguments.
        environment: All its environment variables.
        prefix: Prefix of the lines that it prints.
        output: Where these lines go.
        selector: Waits for its output.
        inherited: Open file descriptors that it inherits.
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
        self._output, self._selector = output, selector
        # by pipe: where its lines go, and the lines themselves
        self._streams = {
            self._popen.stdout.fileno(): (1, Lines(prefix)),
            self._popen.stderr.fileno(): (2, Lines(prefix)),
        }
        for pipe in self._streams:
            os.set_blocking(pipe, False)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group, and continue them if they are stopped."""
        for one in (number, signal.SIGCONT):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, one)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process only: those that it has started do not expect it."""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def ended(self) -> int | None:
        """Return the exit code, or 128 plus the number of a signal; None if it is alive.

        Once it has ended, what is left of its group is killed.
        """
        code = self._popen.poll()
        if code is None:
            return None
        self.signal(signal.SIGKILL)
        self._drain()
        return code if code >= 0 else 128 - code

    def read(self, whether: bool) -> None:
        """Start or stop reading what it prints; it waits once its pipes are full."""
        for pipe in self._streams:
            read = pipe in self._selector.get_map()
            if whether and not read:
                take = partial(self._take, pipe)
                self._selector.register(pipe, selectors.EVENT_READ, take)
            elif read and not whether:
                self._selector.unregister(pipe)

    def close(self) -> None:
        """Kill it, and pass on what it has printed last."""
        if self._popen.poll() is None:
            self.signal(signal.SIGKILL)
            self._popen.wait()
        self._drain()
        for pipe in [*self._streams]:
            self._end(pipe)
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()

    def _take(self, pipe: int) -> int:
        """Read a part; return its size, 0 if there is nothing."""
        try:
            data = os.read(pipe, READ)
        except BlockingIOError:
            return 0
        if data:
            to, lines = self._streams[pipe]
            self._output.put(to, lines.add(data))
        else:
            self._end(pipe)
        return len(data)

    def _drain(self) -> None:
        """Read what is there, but not what a process that escaped goes on to print."""
        for pipe in [*self._streams]:
            left = DRAINED
            while left > 0 and (size := self._take(pipe)):
                left -= size

    def _end(self, pipe: int) -> None:
        """Stop reading from a pipe."""
        to, lines = self._streams.pop(pipe)
        self._output.put(to, lines.rest())
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)
