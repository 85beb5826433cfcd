"""Arguments that several commands have, and the devices they ask for."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from elche_jax.cli.errors import UsageError


def count(text: str) -> int:
    """An integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


def duration(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def words(text: str) -> str:
    """A text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def path(text: str) -> Path:
    """A path; `~` is the home folder, also behind an `=`, where no shell says so."""
    return Path(os.path.expanduser(words(text)))


def listed(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Numbers with commas between."""
    return lambda text: [parse(part) for part in text.split(",")]


def rank(text: str) -> int:
    """An integer of at least 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be integers of at least 0, got {text!r}")
    return int(text)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Which devices, or how many virtual ones."""
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
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def use_cpu_devices(number: int) -> None:
    """Makes virtual CPU devices, which share the host's cores; before a backend has started.

    What the environment says of the platform and the number does not count.
    """
    jax.config.update("jax_num_cpu_devices", number)
    jax.config.update("jax_platforms", "cpu")


def make_devices(options: argparse.Namespace) -> None:
    """Makes the virtual devices that the arguments ask for; before a backend has started."""
    if options.cpu_devices is not None:
        use_cpu_devices(options.cpu_devices)


def chosen_devices(options: argparse.Namespace) -> list[jax.Device]:
    """The devices that the arguments ask for; starts the backend."""
    there = jax.local_devices()
    ranks: Sequence[int] = range(len(there)) if options.devices is None else options.devices
    if len(set(ranks)) < len(ranks):
        raise UsageError("--devices must name no device twice")
    if max(ranks) >= len(there):
        raise UsageError(f"--devices must be below {len(there)}, got {max(ranks)}")
    return [there[rank] for rank in ranks]
