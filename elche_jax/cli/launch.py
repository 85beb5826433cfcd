"""`elche-jax launch`: start the processes of a job on this machine."""

import argparse
import os
import sys
from pathlib import Path

from elche_jax.cli import arguments
from elche_jax.cli.errors import CommandError, UsageError
from elche_jax.launch.elastic import RESTARTS, Elastic

HELP = "start the processes of a job on this machine, watch them, and end all of them"
EPILOG = """\
The script calls elche.distributed.initialize(), without arguments, before it uses JAX.

example:
  elche-jax launch -n 2 --cpu-devices 2 train.py --epochs 3
  elche-jax launch -n 4 --timeout 60 -m package.train
  elche-jax launch -n 3 --elastic 2:4 --number-file number.txt train.py
  elche-jax launch -n 2 --num-processes 4 --first-id 2 --coordinator 10.0.0.1:1234 train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "-n", "--processes", type=arguments.count, required=True, metavar="N",
        help="processes to start here",
    )  # fmt: skip
    add("--cpu-devices", type=arguments.count, metavar="N", help="virtual CPU devices per process")
    add(
        "--timeout", type=arguments.duration, metavar="SECONDS",
        help="kill a process if a window, or reading its data, takes longer, or if a compile, a "
        "restore or the start takes more than twenty times as long (never)",
    )  # fmt: skip
    add(
        "--on-failure", choices=("end", "continue"), default="end",
        help="what becomes of the others when one fails (end)",
    )  # fmt: skip
    add(
        "--elastic", type=_bounds, metavar="MIN:MAX",
        help="when one fails or another number is wanted, start all again from the last window, "
        "with MIN to MAX processes",
    )  # fmt: skip
    add(
        "--max-restarts", type=arguments.number, metavar="K",
        help="how many times to start again after a failure (3)",
    )  # fmt: skip
    add(
        "--number-file", type=arguments.path, metavar="FILE",
        help="file with the number of processes that are wanted; read again and again",
    )  # fmt: skip
    add(
        "--grace", type=arguments.duration, default=10.0, metavar="SECONDS",
        help="how long processes may take to end before they are killed (10)",
    )  # fmt: skip
    group = parser.add_argument_group("several hosts, with a launch on each")
    group.add_argument(
        "--num-processes", type=arguments.count, metavar="N", help="processes of all hosts"
    )
    group.add_argument(
        "--first-id", type=int, metavar="ID", help="number of the first process here"
    )
    group.add_argument(
        "--coordinator", type=arguments.address, metavar="HOST:PORT", help="where process 0 listens"
    )
    add("-m", action="store_true", dest="module", help="run a module, not a file")
    # one argument: with two, argparse would take a `--` of the script for its own
    add(
        "program", nargs=argparse.PARSER, metavar="SCRIPT",
        help="the script, or with -m the module, and its arguments",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if os.name != "posix":
        raise CommandError("launch needs the signals and sessions of POSIX, which Windows lacks")
    from elche_jax.launch.generation import Asked
    from elche_jax.launch.launcher import launch

    own = options.program[0] == "--"  # a separator after the launcher's options
    script, *args = options.program[own:]
    if not options.module and not Path(script).is_file():
        raise UsageError(f"SCRIPT must be a file, got {script}")
    hosts = options.num_processes, options.first_id, options.coordinator
    if None in hosts and hosts != (None, None, None):
        raise UsageError("--num-processes, --first-id and --coordinator must be given together")
    total, first = options.num_processes or options.processes, options.first_id or 0
    if not 0 <= first <= total - options.processes:
        raise UsageError(
            f"--first-id must be at least 0 and at most --num-processes minus -n "
            f"({total - options.processes}), got {first}"
        )
    elastic = _elastic(options)
    module = ["-m"] if options.module else []
    asked = Asked(
        command=[sys.executable, *module, script, *args],
        processes=options.processes,
        total=total,
        first=first,
        coordinator=options.coordinator,
        cpu_devices=options.cpu_devices,
        go_on=options.on_failure == "continue",
        timeout=options.timeout,
        grace=options.grace,
        elastic=elastic,
        number_file=options.number_file,
    )
    return launch(asked)


def _elastic(options: argparse.Namespace) -> Elastic | None:
    """Return how many processes generations may have; None for a single generation."""
    if options.elastic is None:
        for name in ("max_restarts", "number_file"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} must not be given without --elastic")
        return None
    path = options.number_file
    if path is not None and path.exists() and not path.is_file():
        # reading a pipe would wait for a writer, and handle no signal meanwhile
        kind = "the folder " if path.is_dir() else ""
        raise UsageError(f"--number-file must be a regular file, got {kind}{path}")
    low, high = options.elastic
    if not low <= options.processes <= high:
        raise UsageError(
            f"-n must be from {low} to {high} with --elastic {low}:{high}, got {options.processes}"
        )
    if options.num_processes is not None:
        raise UsageError("--elastic must be given without --num-processes: it is for one machine")
    if options.on_failure == "continue":
        raise UsageError(
            "--elastic must be given without --on-failure, as it starts all processes again"
        )
    restarts = RESTARTS if options.max_restarts is None else options.max_restarts
    return Elastic(low, high, options.processes, restarts)


def _bounds(text: str) -> tuple[int, int]:
    """Return the two numbers of MIN:MAX, or a single number twice."""
    low, _, high = text.partition(":")
    try:
        bounds = arguments.count(low), arguments.count(high or low)
    except argparse.ArgumentTypeError:
        bounds = 1, 0
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(
            f"must be MIN:MAX, two integers of at least 1 in ascending order, got {text!r}"
        )
    return bounds
