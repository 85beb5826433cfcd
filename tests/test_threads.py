"""Threads at the end of a process: it waits for them, and they drop nothing too late."""

import signal
import sys
import threading
from itertools import product

import children
import pytest
from marks import slow

from elche_jax import _threads
from elche_jax._threads import BackgroundThread, wait_at_exit

PROGRAM = """
import os
import signal
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

def interrupted(call):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        call()
    except KeyboardInterrupt:
        return
    raise AssertionError

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
    "interrupted while it is closed": ("", "interrupted(owners[0].close)"),
}


ROWS = {("prefetch", "interrupted while it is closed"), ("pool", "dropped by its thread")}
"""Those of `make test`."""


@pytest.mark.parametrize(
    ("owner", "end"),
    [row if row in ROWS else slow(*row) for row in product(("prefetch", "pool"), ENDS)],
)
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


COMPILE = """
import os
import signal
import threading
import jax
import jax.numpy as jnp
from elche_jax.engine.compile_cache import CompileCache

def build():
    begun.set()
    threading.main_thread().join()
    if {ctrl_c}:
        os.kill(os.getpid(), signal.SIGINT)
    for _ in range({calls}):  # in the runtime of JAX, as a compile is
        jnp.ones(3) + 1
    print("over", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)
begun, cache = threading.Event(), CompileCache()
cache.{how}("key", build)
assert begun.wait(60)
"""


@pytest.mark.parametrize("how", ["begin", slow("prepare")])
def test_a_process_waits_for_a_compile_until_ctrl_c_ends_it(how):
    """At once, and not by a crash: the wait is over, but not the compile."""
    for ctrl_c, calls, ended in ((False, 1000, (0, "over\n")), (True, 10**8, (-signal.SIGINT, ""))):
        program = COMPILE.format(ctrl_c=ctrl_c, calls=calls, how=how)
        done = children.run(sys.executable, "-c", program)
        assert (done.returncode, done.stdout, done.stderr) == (*ended, "")


def test_a_wait_goes_on_after_one_that_was_interrupted():
    """On Python 3.11 `Thread.join` would take the thread for ended."""

    class Stop(Exception):
        pass

    def stop(number, frame):
        raise Stop

    def work():
        while not interrupted.wait(0.01):  # a signal is not noticed just before a wait begins
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert may.wait(60)

    interrupted, may = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGUSR1, stop)
    thread = BackgroundThread(work, name="waited for")
    try:
        with pytest.raises(Stop):
            thread.start()
            thread.wait()
    finally:
        interrupted.set()
        signal.signal(signal.SIGUSR1, before)
    assert thread.running and not thread.wait(0)
    may.set()
    assert thread.wait(60) and not thread.running


def test_a_fork_does_not_wait_for_threads_that_it_lacks():
    """JAX's runtime has not begun: it would not survive the end of a fork."""
    program = """
import os, sys, threading
from elche_jax._threads import BackgroundThread, wait_at_exit
from elche_jax.data.prefetch import Prefetch
from elche_jax.engine.threads import DeviceThreads

may = threading.Event()
pool = DeviceThreads("test", 1, print)
pool.put(0, may.wait)
prefetch = Prefetch(lambda stop: iter([may.wait()]), lambda: None)
bare = BackgroundThread(may.wait, name="bare")
wait_at_exit(bare)
bare.start()
if not os.fork():
    assert not bare.running and bare.wait()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
may.set()
"""
    done = children.run(sys.executable, "-W", "ignore", "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_a_process_waits_for_a_thread_also_if_nobody_reads_its_output():
    program = PROGRAM.format(owner="pool", drop="owners.clear()", end="").replace(
        'print("over", flush=True)', 'os.write(2, b"over")'
    )
    begin = "import sys, signal\nsys.stdout = None\nsignal.signal(2, signal.default_int_handler)\n"
    done = children.run(sys.executable, "-c", begin + program)
    assert (done.returncode, done.stderr) == (0, "over")


def test_threads_that_begin_one_another_are_all_waited_for():
    """The first is registered again by nobody, and the list is pruned while it is waited for."""
    program = """
import threading, time
from elche_jax._threads import BackgroundThread, wait_at_exit

def begin(left):
    if left == 2:
        threading.main_thread().join()
    time.sleep(0.05)
    if left:
        started(left - 1)
    else:
        print("over", flush=True)

def started(left):
    thread = BackgroundThread(begin, (left,), name=str(left))
    wait_at_exit(thread)
    thread.start()

started(2)
"""
    done = children.run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_a_thread_that_is_not_started_yet_stays_registered():
    first, second = (BackgroundThread(int, name=name) for name in ("first", "second"))
    for thread in (first, second):
        wait_at_exit(thread)
    assert {first, second} <= {one.thread for one in _threads._running}
    for thread in (first, second):
        thread.start()
        assert thread.wait(60)
