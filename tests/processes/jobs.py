"""Jobs of several processes that tests start, and what their programs have in common."""

import json
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import children
import pytest
from forks import PATHS, Forks

LIMIT = 600
"""Seconds after which the processes of a job are killed."""

FORKS = Forks(), Forks()
"""What every other process of a job is a fork of, so that neighbours have other hashes."""


class Host(NamedTuple):
    """Where a process runs: how a command begins there, and the address of the host."""

    command: Sequence[str] = ()
    address: str = "localhost"


@contextmanager
def started(
    program: str,
    devices: Sequence[int],
    *arguments: object,
    hosts: Sequence[Host] = (),
    fresh: bool = False,
) -> Iterator[list]:
    """Starts a program of this folder in one process per entry of `devices`; kills them at the end.

    Args:
        program: Name of the file.
        devices: CPU devices of each process.
        arguments: Its arguments.
        hosts: Where each process runs; on this host if there are none.
        fresh: Whether each has an interpreter of its own. If not, they are forks, on Linux, if
            they all run on this host.
    """
    hosts = hosts or [Host()] * len(devices)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = PATHS[-1] / program, *arguments
    forked = not (fresh or any(host.command for host in hosts)) and sys.platform == "linux"
    for forks in FORKS if forked else ():  # all at once, as each takes a second
        forks.begin()
    with ExitStack() as stack:
        processes = []
        for at, (count, host) in enumerate(zip(devices, hosts, strict=True)):
            env = {
                "JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{port}",
                "ELCHE_NUM_PROCESSES": str(len(devices)),
                "ELCHE_PROCESS_ID": str(at),
                "JAX_NUM_CPU_DEVICES": str(count),
                "PYTHONPATH": ":".join(map(str, PATHS)),
            }
            if forked:
                one = FORKS[at % 2].started(*command, env=env, limit=LIMIT)
            else:
                interpreter = *host.command, sys.executable
                one = children.started(*interpreter, *command, env=env, limit=LIMIT)
            processes.append(stack.enter_context(one))
        yield processes


def outcomes(program: str, devices: Sequence[int], *arguments: object, **options: Any) -> list:
    """Runs a program to its end, see `started`; returns exit codes and what was printed."""
    with started(program, devices, *arguments, **options) as processes:
        # all at once: one whose pipe is full would keep the others waiting
        with ThreadPoolExecutor(len(processes)) as pool:
            said = list(pool.map(lambda process: process.communicate(), processes))
        return [(one.returncode, *texts) for one, texts in zip(processes, said, strict=True)]


def run(
    program: str,
    devices: Sequence[int],
    *arguments: object,
    killed: Sequence[int] = (),
    **options: Any,
) -> list:
    """Runs a program to its end, see `started`.

    Args:
        program: Name of the file.
        devices: CPU devices of each process.
        arguments: Its arguments.
        killed: Processes that kill themselves.
        options: See `started`.

    Returns:
        For each process what it printed last, read as JSON; None for those that were killed.
    """
    said = []
    for at, (code, out, err) in enumerate(outcomes(program, devices, *arguments, **options)):
        want = -signal.SIGKILL if at in killed else 0
        assert code == want, f"{at}: {code}\n{out[-2000:]}\n{err}"
        said.append(None if at in killed else json.loads(out.strip().splitlines()[-1]))
    return said


def asked(request: pytest.FixtureRequest, *names: str) -> list:
    """What the tests of a file are run for: `make test` has jobs do no more than it looks at.

    Args:
        request: That of a fixture of the file.
        names: Arguments of its tests.

    Returns:
        Each value of the argument once, or each tuple of values of several.
    """
    found = {}
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and all(name in given for name in names):
            row = tuple(given[name] for name in names)
            found[row if len(names) > 1 else row[0]] = True
    return list(found)
