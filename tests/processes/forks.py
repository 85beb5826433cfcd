"""Starts programs as forks of a process that has imported what they import, see `forking`."""

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import children

TESTS = Path(__file__).parents[1]
PATHS = [children.ROOT, TESTS, TESTS / "averaging", TESTS / "processes"]
DAY = 86_400.0
"""Seconds; no suite takes as long."""


class Fork:
    """A process, as far as the tests need it, as one of `subprocess`.

    Raises:
        RuntimeError: If there is nothing to fork.
    """

    stdin = None

    def __init__(self, channel: socket.socket, arguments: list[str], environment: dict[str, str]):
        program = json.dumps([arguments, environment, os.getcwd()]).encode()
        said, theirs = os.pipe()
        with ExitStack() as opened:
            self.said = opened.enter_context(os.fdopen(said))
            self.stdout = opened.enter_context(tempfile.TemporaryFile("w+"))
            self.stderr = opened.enter_context(tempfile.TemporaryFile("w+"))
            try:
                outputs = self.stdout.fileno(), self.stderr.fileno()
                socket.send_fds(channel, [program], [*outputs, theirs])
            except ConnectionError:  # the line below is empty, too
                pass
            finally:
                os.close(theirs)
            number = self.said.readline()
            if not number:
                raise RuntimeError("forking.py has ended; see what it says on standard error")
            self.pid, self.returncode = int(number), None
            opened.pop_all()

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        if self.returncode is None:
            self.returncode = int(self.said.readline())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """Waits for the end; returns what was printed on standard output and standard error."""
        self.wait()
        for file in (self.stdout, self.stderr):
            file.seek(0)
        return self.stdout.read(), self.stderr.read()


class Forks:
    """What the programs are forks of. It is started with the first one, and ends when told so."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._channel: socket.socket | None = None

    @contextlib.contextmanager
    def started(self, *command: object, env: dict[str, str], limit: float) -> Iterator[Fork]:
        """Starts a program, and kills its group in the end; see `children.started`."""
        self.begin()
        environment = os.environ | children.COMMON | env
        fork = Fork(self._channel, [*map(str, command)], environment)
        with fork.said, children.ended(fork, limit):
            yield fork

    def begin(self) -> None:
        """Starts it, if it is not there, and does not wait for it."""
        if self._channel is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._open.enter_context(ours)
        with theirs:
            # OpenBLAS has no threads then: a fork would not take them along
            env = {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "random"}
            env["PYTHONPATH"] = ":".join(map(str, PATHS))
            server = children.started(
                sys.executable, PATHS[-1] / "forking.py", env=env, limit=DAY, stdin=theirs,
                stdout=None, stderr=None,
            )  # fmt: skip
            self._open.enter_context(server)
        self._channel = ours

    def end(self) -> None:
        """Ends it."""
        self._channel = None
        self._open.close()
