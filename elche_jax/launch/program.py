"""How the small programs beside a launcher or a job are started: without JAX, at once."""

import os
import sys
from pathlib import Path

MARK = "ELCHE_LAUNCH_"
"""How the variable begins that a launcher's processes carry."""

ROOT = Path(__file__).parents[2]


def start(module: str, *arguments: object) -> int:
    """Start a module of this package as a program in a session of its own; return its number.

    It has this process's stderr, and is nobody's to wait for: it ends by itself, so it does not
    carry the mark of a launcher, which would kill it before it has cleared up.
    """
    # neither the folder of a script nor that of the user may hide a module of Python's
    command = [sys.executable, "-P", "-S", "-m", f"elche_jax.launch.{module}"]
    null = [(os.POSIX_SPAWN_OPEN, at, os.devnull, os.O_RDWR, 0) for at in (0, 1)]
    return os.posix_spawn(
        sys.executable, [*command, str(os.getpid()), *map(str, arguments)],
        {name: value for name, value in os.environ.items() if not name.startswith(MARK)}
        | {"PYTHONPATH": str(ROOT)},
        file_actions=null, setsid=True,
    )  # fmt: skip
