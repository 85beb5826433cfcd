"""`elche-jax launch`: the processes of a job on this machine."""

import argparse
import os
import shutil
import sys

from elche_jax.cli import arguments
from elche_jax.cli.errors import UsageError
from elche_jax.cli.group import Group

NAME = "launch"
HELP = "run a script in several processes on this machine, as one job"
EPILOG = """\
Every process gets the variables that elche.distributed.initialize() reads. Lines of output begin
with the number of the process. Ctrl-C, SIGTERM and the failure of one process end all, with
whatever they have started. The exit code is that of the first process that failed; 128 plus the
signal if it was ended by one.

example:
  elche-jax launch -n 4 train.py --epochs 10
  elche-jax launch -n 2 --cpu-devices 2 -m package.train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "-n", "--processes", type=arguments.count, required=True, metavar="N",
        help="number of processes",
    )  # fmt: skip
    parser.add_argument(
        "--cpu-devices", type=arguments.count, metavar="K",
        help="create K virtual CPU devices in each process",
    )  # fmt: skip
    parser.add_argument(
        "--on-failure", choices=("end", "continue"), default="end",
        help="end all processes if one fails (default), or let the others continue",
    )  # fmt: skip
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", type=arguments.words)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if not options.module and not os.path.isfile(options.script):
        raise UsageError(f"SCRIPT must be a file, got {options.script!r}; a module needs -m")
    python = sys.executable or shutil.which("python3") or "python3"
    script = ["-m", options.script] if options.module else [options.script]
    own = {"PYTHONUNBUFFERED": "1"}
    if options.cpu_devices is not None:
        own |= {"JAX_NUM_CPU_DEVICES": str(options.cpu_devices), "JAX_PLATFORMS": "cpu"}
    group = Group([python, *script, *options.arguments], options.processes, own)
    return group.run(ends_together=options.on_failure == "end")
