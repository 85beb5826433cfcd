"""Processes of this machine: start helpers, kill those with a mark, find states and descendants."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "ELCHE_LAUNCH_"
"""Prefix of the environment variable that a launcher's processes carry."""

ROOT = Path(__file__).parents[2]

PROC = Path("/proc")

PATIENCE_S = 5.0
"""Seconds after which a process that survives SIGKILL, as on a hung disk, is left alone."""


def start(module: str, *arguments: object) -> int:
    """Start a module of this package, without JAX, in its own session; return its process id.

    It shares this process's stderr. It ends on its own, so nothing has to wait for it, and it does
    not carry the mark of a launcher, which would kill it before it has cleaned up.
    """
    # neither a script's folder nor the user's may hide one of Python's modules
    command = [sys.executable, "-P", "-S", "-m", f"elche_jax.launch.{module}"]
    null = [(os.POSIX_SPAWN_OPEN, at, os.devnull, os.O_RDWR, 0) for at in (0, 1)]
    return os.posix_spawn(
        sys.executable, [*command, str(os.getpid()), *map(str, arguments)],
        {name: value for name, value in os.environ.items() if not name.startswith(MARK)}
        | {"PYTHONPATH": str(ROOT)},
        file_actions=null, setsid=True,
    )  # fmt: skip


def end_marked(mark: str) -> None:
    """Kill all processes with a variable in their environment, and those they start meanwhile.

    A process inherits the variable, whatever its session and parent are.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (left := [*_marked(mark)]) and time.monotonic() < deadline:
        for pid in left:
            kill(pid)
        time.sleep(0.01)


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may have ended, or belong to another user, as `sudo` does."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    found = f"\0{mark}=".encode()
    for pid in _pids():
        with suppress(OSError):  # it has ended, or is another user's
            if found in b"\0" + (PROC / str(pid) / "environ").read_bytes():
                yield pid


def _pids() -> Iterator[int]:
    if PROC.is_dir():
        yield from (int(name) for name in os.listdir(PROC) if name.isdigit())


def state_of(pid: int) -> str:
    """Return the state of a process, a letter as in `ps`; empty if it has ended or is unknown."""
    return (_stat(pid) or [""])[0]


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    parents = {child: int(stat[1]) for child in _pids() if (stat := _stat(child))}
    found = [pid]
    for parent in found:
        found += [child for child, own in parents.items() if own == parent]
    return found[1:]


def _stat(pid: int) -> list[str]:
    with suppress(OSError):
        # after the name of the program, which may contain anything
        return (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return []
