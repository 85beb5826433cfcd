"""What is called when a program ends: in order, once, in the process that asked for it."""

import os
import sys

import children
import pytest


def lines(program):
    """What a program prints, line by line; it must end well."""
    done = children.run(sys.executable, "-c", children.NO_JAX + program)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_last_ones_come_last_whenever_they_were_asked_for():
    program = """
from elche_jax._exit import before_exit

def end(name, *more):
    def say():
        print(name)
        for function in more:
            function()
    return say

before_exit(end("last"), last=True)
before_exit(end("first", lambda: before_exit(end("asked for at the end"))))
forget = before_exit(end("forgotten"))
before_exit(end("second"))
forget()
print("over")
"""
    assert lines(program) == ["over", "first", "second", "asked for at the end", "last"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_fork_calls_only_what_it_asked_for_itself():
    program = """
import os, sys
from elche_jax._exit import before_exit

before_exit(lambda: print("parent", flush=True))
child = os.fork()
if not child:
    before_exit(lambda: print("child", flush=True))
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
    assert lines(program) == ["child", "parent"]
