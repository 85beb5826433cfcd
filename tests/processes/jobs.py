"""Jobs of several processes that tests start, and what their programs have in common."""

import json
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import children

LIMIT = 240
"""Seconds after which the processes of a job are killed."""


def run(program: str, devices: Sequence[int], *arguments: object) -> list:
    """Runs a program of this folder in one process per entry of `devices`, to their end.

    Args:
        program: Name of the file.
        devices: CPU devices of each process.
        arguments: Its arguments.

    Returns:
        For each process what it printed last, read as JSON.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = Path(__file__).parent / program
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                children.started(
                    sys.executable, path, *arguments, limit=LIMIT,
                    env={
                        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                        "ELCHE_NUM_PROCESSES": str(len(devices)),
                        "ELCHE_PROCESS_ID": str(at),
                        "JAX_NUM_CPU_DEVICES": str(count),
                        "PYTHONPATH": ":".join(map(str, PATHS)),
                    },
                )
            )
            for at, count in enumerate(devices)
        ]  # fmt: skip
        # all at once: one whose pipe is full would keep the others waiting
        with ThreadPoolExecutor(len(processes)) as pool:
            said = list(pool.map(lambda process: process.communicate(), processes))
        for process, (out, err) in zip(processes, said, strict=True):
            assert process.returncode == 0, f"{out}\n{err}"
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


TESTS = Path(__file__).parents[1]
PATHS = [children.ROOT, TESTS, TESTS / "averaging", TESTS / "processes"]
