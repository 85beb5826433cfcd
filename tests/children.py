"""Processes that tests start: each is ended, with whatever it has started, whatever happens."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

__all__ = ["NO_JAX", "PIPE", "ROOT", "TimeoutExpired", "ended", "run", "started"]
ROOT = Path(__file__).parents[1]
NO_JAX = f"""
import sys, types
package = types.ModuleType("elche_jax")
package.__path__ = [{str(ROOT / "elche_jax")!r}]
sys.modules["elche_jax"] = package
"""
"""How a program begins that takes a layer without JAX: quickly, as `elche_jax/__init__.py`, which
loads JAX, is not run."""

COMMON = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_USE_SHARDY_PARTITIONER": "true"}
"""Variables of all children. Where Shardy is off, as in `make test`, XLA warns on stderr."""

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}

LIMIT = 300
"""Seconds after which a child is killed, so that nobody reads from it forever."""


@contextlib.contextmanager
def started(
    *command: object, env: dict[str, str] | None = None, limit: float = LIMIT, **options
) -> Iterator:
    """Starts a process, and kills its group in the end.

    Args:
        command: The program and its arguments.
        env: Variables beside those of this process.
        limit: Seconds after which it is killed.
        options: What else `subprocess.Popen` takes.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given = os.environ | COMMON | (env or {})
    with _interruptible():
        child = subprocess.Popen(
            list(map(str, command)), env=given, start_new_session=True, **pipes | options
        )
    with ended(child, limit):
        yield child


@contextlib.contextmanager
def ended(child: Any, limit: float = LIMIT) -> Iterator[None]:
    """Kills a process's group in the end, or after some seconds; it leads the group."""
    too_late = threading.Timer(limit, _kill, [child])
    too_late.daemon = True
    too_late.start()
    try:
        yield
    finally:
        too_late.cancel()
        _kill(child)
        for stream in filter(None, (child.stdin, child.stdout, child.stderr)):
            with contextlib.suppress(BrokenPipeError):  # what a dead child did not read
                stream.close()
        child.wait()


def run(*command: object, **options) -> subprocess.CompletedProcess:
    """Runs a program to its end; options as those of `started`."""
    with started(*command, **options) as child:
        out, err = child.communicate()
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Gives what is started meanwhile the defaults of SIGINT and SIGHUP back.

    A suite in the background (`nohup make test &`, some CI runners) ignores these signals, and
    what is ignored stays ignored in a new program.
    """
    ignored = [n for n in DEFAULTS if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, DEFAULTS[number])
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _kill(child: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
