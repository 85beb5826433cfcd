"""Threads at the end of a process: it waits for them, and they drop nothing too late."""

import sys

import children
import pytest
from marks import slow

PROGRAM = """
import threading
import jax.numpy as jnp
from elche_jax.data.prefetch import Prefetch
from elche_jax.engine.threads import DeviceThreads

owners, may, dropped = [], threading.Event(), threading.Event()

def work():
    assert may.wait(60)
    {drop}
    dropped.set()
    threading.main_thread().join()
    for _ in range(100):  # lets go of the interpreter, and takes it again
        kept = jnp.ones(3) + 1
        del kept
    print("over", flush=True)

def make(stop):
    work()
    yield

def prefetch():
    return Prefetch(make, lambda: None)

def pool():
    threads = DeviceThreads("test", 1, lambda error: None)
    threads.put(0, work)
    return threads

jnp.ones(3) + 1
owners.append({owner}())
may.set()
assert dropped.wait(60)
{end}
"""
ENDS = {
    "dropped by its thread": ("owners.clear()", ""),
    "closed before": ("", "owners[0].close()"),
    "in use": ("", ""),
}


@pytest.mark.parametrize("end", [next(iter(ENDS)), *map(slow, [*ENDS][1:])])
@pytest.mark.parametrize("owner", ["prefetch", "pool"])
def test_a_process_waits_for_a_thread_that_is_in_the_runtime(owner, end):
    drop, last = ENDS[end]
    program = PROGRAM.format(owner=owner, drop=drop or "pass", end=last)
    done = children.run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


@pytest.mark.slow
def test_a_process_does_not_wait_for_a_source_that_is_stuck():
    program = PROGRAM.format(owner="prefetch", drop="owners.clear()", end="").replace(
        "threading.main_thread().join()", "threading.Event().wait()"
    )
    done = children.run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
