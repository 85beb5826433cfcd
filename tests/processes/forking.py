"""Runs programs of this folder in forks of this process, which has imported what they import.

A job of several processes that trains a few windows takes most of its time to import JAX. Whoever
starts this program gives it one end of a socket as its standard input. A message there is the
arguments and the environment of a program, as JSON, with three file descriptors: its standard
output, its standard error, and a pipe that gets its number, and at last its exit code.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import types
import warnings
from pathlib import Path

import advising  # noqa: F401  (for what it imports)
import every_rule  # noqa: F401  (for what it imports)
import flax.training.dynamic_scale  # noqa: F401  (which a program imports)
import held  # noqa: F401  (which a program imports)
import jax
import losing  # noqa: F401  (for what it imports)
import raising  # noqa: F401  (for what it imports)
from jax._src import xla_bridge
from scenes import collect_seldom

import elche_jax.advice
import elche_jax.train.evaluate
import elche_jax.trainer  # noqa: F401  (these are imported when they are used)

LATER = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_CPU_DEVICES"}
"""Variables that each process of a job has of its own."""


def forked(channel):
    """Answers messages for ever. In a fork of a fork, returns what it is to run."""
    while True:
        message, files, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            sys.exit()
        if not os.fork():
            break
        for file in files:
            os.close(file)
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *outputs, said = files
    if not (child := os.fork()):
        os.setsid()
        os.write(said, b"%d\n" % os.getpid())
        os.close(said)
        for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *outputs]):
            os.dup2(file, number)
            os.set_inheritable(number, True)  # also where it had the number already
            if file != number:
                os.close(file)
        return json.loads(message)
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its number is still its own
    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    with contextlib.suppress(BrokenPipeError):  # whoever asked for it has ended
        os.write(said, b"%d\n" % code)
    closed = select.poll()
    closed.register(said, 0)
    closed.poll()  # until whoever asked for it needs its number no longer
    os.waitpid(child, 0)
    os._exit(0)


def settings(environment):
    """The variables that JAX has read when it was imported."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith("JAX_") and name not in LATER
    }


def run(arguments, environment, folder):
    """Runs a program as Python would, but for what was imported before."""
    if settings(environment) != settings(os.environ):
        raise ValueError("JAX has read its variables; start the job with fresh=True")
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # looked up anew
    jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
    sys.argv = arguments
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = arguments[0]
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), vars(module))


if __name__ == "__main__":
    assert not xla_bridge.backends_are_initialized(), "a fork cannot use the devices of another"
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes no thread along"
    collect_seldom()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what starts the programs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, that a fork takes no thread along
        program = forked(socket.socket(fileno=0))
    run(*program)
