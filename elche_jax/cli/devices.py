"""`elche-jax devices`: list the devices and measure their speeds."""

import argparse
import json
import os
from typing import Any

import jax

from elche_jax.cli import arguments, table
from elche_jax.cli.probe import probe
from elche_jax.engine.devices import device_summary, free_bytes
from elche_jax.observe.report import counted

HELP = "show the devices, and probe how fast each is alone and with all others busy"
EPILOG = """\
The probe multiplies float32 matrices and adds to a large array, on each device alone and
then on all at once: virtual CPU devices share the host's cores and are slower together.
The speed hint is for elche.ElChe(speed_hint=...). Use `elche-jax advise` to measure the
devices on your own model.

example:
  elche-jax devices
  elche-jax devices --cpu-devices 4 --seconds 1 --json
"""

GB = 1e9
"""Bytes per GB, decimal as in GB/s."""

RATES = {
    "gflops_alone": "GFLOP/s",
    "gflops_together": "with all",
    "gb_per_s_alone": "GB/s",
    "gb_per_s_together": "with all",
}
"""Column headers of the rates that the probe measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--seconds",
        type=arguments.duration,
        default=2.0,
        help="how long the whole probe lasts, excluding compilation (2)",
    )
    parser.add_argument("--no-probe", action="store_true", help="only list the devices")
    arguments.add_devices(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    arguments.make_cpu_devices(options.cpu_devices)
    devices = arguments.chosen_devices(options)
    result: dict[str, Any] = {
        "summary": device_summary(devices),
        "devices": [_describe(rank, device) for rank, device in enumerate(devices)],
        "cores": os.cpu_count() or 1,
    }
    if not options.json:
        print(result["summary"], flush=True)
    if not options.no_probe:
        found = probe(devices, options.seconds)
        for row, rates in zip(result["devices"], found, strict=True):
            row |= rates
        slowest = min(rates["gflops_together"] for rates in found)
        result["speed_hint"] = [round(rates["gflops_together"] / slowest, 2) for rates in found]
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)
    return 0


def _describe(rank: int, device: jax.Device) -> dict[str, Any]:
    stats = device.memory_stats() or {}  # None on a CPU
    free = free_bytes([device])
    limit = stats.get("bytes_limit")
    return {
        "rank": rank,
        "name": str(device),
        "kind": device.device_kind,
        "platform": device.platform,
        "memory_gb": None if limit is None else round(limit / GB, 2),
        "free_gb": None if free is None else round(free / GB, 2),
    }


def _show(result: dict[str, Any]) -> None:
    rates = RATES if "speed_hint" in result else {}
    rows: list[list[str]] = []
    for row in result["devices"]:
        free = "-" if row["free_gb"] is None else f"{row['free_gb']:.1f} GB"
        cells = [f"{row[name]:,.1f}" for name in rates]
        rows.append([row["name"], row["kind"], free, *cells])
    table.show(["device", "kind", "free memory", *rates.values()], rows)
    if any(row["platform"] == "cpu" for row in result["devices"]):
        cores = counted(result["cores"], "core")
        print(f"CPU devices share the host's {cores} and its memory.")
    if len(result.get("speed_hint", ())) > 1:
        alone = sum(row["gflops_alone"] for row in result["devices"])
        together = sum(row["gflops_together"] for row in result["devices"])
        print(f"all together: {together:,.1f} GFLOP/s, {together / alone:.0%} of the sum alone")
        print(f"speed_hint={result['speed_hint']}")
