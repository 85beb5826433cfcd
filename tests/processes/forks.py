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
HOURS = 3600.0
"""Seconds that a suite may take."""


class Fork:
    """A process, as far as the tests need it, as one of `subprocess`."""

    stdin = None

    def __init__(self, channel: socket.socket, arguments: list[str], environment: dict[str, str]):
        self.stdout = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `children.ended`
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as well
        said, theirs = os.pipe()
        try:
            program = json.dumps([arguments, environment, os.getcwd()]).encode()
            socket.send_fds(
                channel, [program], [self.stdout.fileno(), self.stderr.fileno(), theirs]
            )
        finally:
            os.close(theirs)
        self.said = os.fdopen(said)
        self.pid, self.returncode = int(self.said.readline()), None

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
        channel = self._channel = self._channel or self._begin()
        environment = os.environ | children.COMMON | env
        fork = Fork(channel, [*map(str, command)], environment)
        with fork.said, children.ended(fork, limit):
            yield fork

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # OpenBLAS has no threads then: a fork would not take them along
            env = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, PATHS))}
            server = children.started(
                sys.executable, PATHS[-1] / "forking.py", env=env, limit=HOURS, stdin=theirs,
                stdout=None, stderr=None,
            )  # fmt: skip
            self._open.enter_context(server)
        return self._open.enter_context(ours)

    def end(self) -> None:
        """Ends it."""
        self._channel = None
        self._open.close()
