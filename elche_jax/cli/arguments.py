"""Arguments that several commands share, and the devices they select."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from elche_jax.cli.errors import UsageError


def _number(kind: Callable[[str], float], rule: str, holds: Callable[[float], bool]) -> Any:
    """A parser of numbers, which refuses those for which the rule does not hold."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return parse


count = _number(int, "an integer of at least 1", lambda value: value >= 1)
rank = _number(int, "integers of at least 0", lambda value: value >= 0)
duration = _number(float, "a number above 0", lambda value: 0 < value < math.inf)


def words(text: str) -> str:
    """Checks that a text is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def path(text: str) -> Path:
    """A path; `~` is expanded here, as shells leave it alone after an `=`."""
    return Path(os.path.expanduser(words(text)))


def listed(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    """A parser of numbers separated by commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_run(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds the run to read and the file to write, which `output` describes."""
    parser.add_argument("path", metavar="RUN", type=path, help="folder of a run, or a timeline")
    parser.add_argument("--output", type=path, help=output)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds which devices to use, or how many virtual ones."""
    parser.add_argument(
        "--devices", type=listed(rank), metavar="0,2", help="only these of the devices"
    )
    parser.add_argument(
        "--cpu-devices",
        type=count,
        metavar="N",
        help="make N virtual CPU devices, whatever the environment says; they share the cores",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds output for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def make_cpu_devices(number: int | None) -> None:
    """Makes virtual CPU devices, which share the host's cores; call it before a backend starts.

    It overrides what the environment says about the platform and the number. None leaves
    both alone.
    """
    if number is not None:
        jax.config.update("jax_num_cpu_devices", number)
        jax.config.update("jax_platforms", "cpu")


def chosen_devices(options: argparse.Namespace) -> list[jax.Device]:
    """The devices that the arguments ask for; starts the backend."""
    there = jax.local_devices()
    ranks: Sequence[int] = range(len(there)) if options.devices is None else options.devices
    if len(set(ranks)) < len(ranks):
        raise UsageError("--devices must name no device twice")
    if max(ranks) >= len(there):
        raise UsageError(f"--devices must be below {len(there)}, got {max(ranks)}")
    return [there[rank] for rank in ranks]
