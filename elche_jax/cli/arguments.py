"""Arguments shared by several commands, and the devices they select."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elche_jax import _check as check
from elche_jax.cli.errors import UsageError

if TYPE_CHECKING:
    import jax


def _number(kind: Callable[[str], float], rule: str, holds: Callable[[float], bool]) -> Any:
    """Return a parser that rejects numbers that break the rule."""

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
number = _number(int, "an integer of at least 0", lambda value: value >= 0)
rank = _number(int, "integers of at least 0", lambda value: value >= 0)
duration = _number(float, "a number above 0", lambda value: 0 < value < math.inf)


def words(text: str) -> str:
    """Return a text that must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def address(text: str) -> str:
    """Return an address that must be a host and a port."""
    if not check.is_address(text):
        raise argparse.ArgumentTypeError(f"must be a host and a port, got {text!r}")
    return text


def path(text: str) -> Path:
    """Return a path with `~` expanded, which shells do not expand after an `=`."""
    return Path(os.path.expanduser(words(text)))


def listed(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Return a parser of comma-separated numbers."""
    return lambda text: [parse(part) for part in text.split(",")]


def add_run(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the run to read and the file to write; `output` is the latter's help text."""
    parser.add_argument("path", metavar="RUN", type=path, help="folder of a run, or a timeline")
    parser.add_argument("--output", type=path, help=output)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add the selection of devices and the number of virtual ones."""
    parser.add_argument(
        "--devices", type=listed(rank), metavar="0,2", help="use only the devices of these ranks"
    )
    parser.add_argument(
        "--cpu-devices",
        type=count,
        metavar="N",
        help="create N virtual CPU devices, whatever the environment says; they share the cores",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add machine-readable output."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def make_cpu_devices(number: int | None) -> None:
    """Create virtual CPU devices; must be called before a backend starts.

    The devices share the host's cores. The platform and the number override the environment;
    None changes neither.
    """
    if number is not None:
        import jax

        jax.config.update("jax_num_cpu_devices", number)
        jax.config.update("jax_platforms", "cpu")


def chosen_devices(options: argparse.Namespace) -> "list[jax.Device]":
    """Return the devices that the arguments select; starts the backend."""
    import jax

    try:
        available = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it knows a CUDA plugin
        asked = f"the platforms {jax.config.values['jax_platforms']!r}"
        said = str(error) or "their plugin is not installed"
        raise UsageError(f"JAX must have devices of {asked}, got an error: {said}") from error
    ranks: Sequence[int] = range(len(available)) if options.devices is None else options.devices
    if len(set(ranks)) < len(ranks):
        raise UsageError("--devices must name no device twice")
    if max(ranks) >= len(available):
        raise UsageError(f"--devices must be ranks below {len(available)}, got {max(ranks)}")
    return [available[rank] for rank in ranks]
