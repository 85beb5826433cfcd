"""`elche-jax advise`: measure the devices on a model and recommend a cadence."""

import argparse
import json
import sys
from contextlib import redirect_stdout

import elche_jax as elche
from elche_jax import _check as check
from elche_jax.advice import advise
from elche_jax.cli import arguments
from elche_jax.cli.errors import UsageError
from elche_jax.cli.models import MODELS
from elche_jax.cli.target import load_target
from elche_jax.lab import EmulatedSpeeds

HELP = "measure the devices on a model, and say which cadence and which devices to use"
EPILOG = """\
TARGET is module:function or path/to/file.py:function. The function takes no arguments and
returns a dict of the arguments of elche.advise: loss_fn, optimizer, params, data,
batch_size, and whatever else your step needs (has_aux, model_state, trainable, ...).
Arguments given here override them. Without TARGET, a small model with synthetic data is
measured.

example:
  elche-jax advise train.py:job
  elche-jax advise --model cnn --cpu-devices 4
  elche-jax advise --emulate 5,5,10,20 --seconds 1 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="module:function or file.py:function"
    )
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="a small model instead of TARGET (mlp)"
    )
    parser.add_argument("--batch-size", type=arguments.count, help="examples per microbatch")
    parser.add_argument(
        "--seconds", type=arguments.duration, help="how long each measurement lasts (2)"
    )
    parser.add_argument("--anchor", type=arguments.count, help="anchor of ElChe (10)")
    parser.add_argument(
        "--total", type=arguments.count, help="total of FixedTotal (that of ElChe's window)"
    )
    parser.add_argument(
        "--emulate",
        type=arguments.listed(arguments.duration),
        metavar="5,20",
        help="keep each device busy for this many milliseconds per microbatch; creates one "
        "virtual CPU device per entry unless --devices or --cpu-devices is given",
    )
    arguments.add_devices(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.target is not None and options.model is not None:
        raise UsageError("TARGET and --model must not both be given")
    emulate = options.emulate
    if emulate is not None and options.devices is None and options.cpu_devices is None:
        options.cpu_devices = len(emulate)
    arguments.make_cpu_devices(options.cpu_devices)
    # Whatever TARGET prints must not mix with this command's output.
    with redirect_stdout(sys.stderr):
        job = load_target(options.target) if options.target else MODELS[options.model or "mlp"]()
    devices = arguments.chosen_devices(options)  # after TARGET, which may create devices
    given = {name: getattr(options, name) for name in ("batch_size", "seconds", "anchor", "total")}
    job |= {name: value for name, value in given.items() if value is not None}
    if emulate is not None:
        if len(emulate) != len(devices):
            raise UsageError(f"--emulate must have one entry per device ({len(devices)})")
        job["emulate"] = EmulatedSpeeds(emulate)
    chosen = options.devices is not None or options.cpu_devices is not None
    if chosen or job.get("devices") is None:
        job["devices"] = devices
    # the check of `advise`, which would come after the text below
    seconds = check.real("advise", "seconds", job.get("seconds", 2.0), above=0)
    if not options.json:
        print(elche.device_summary(job["devices"]), flush=True)
        alone = "alone and all together " if len(job["devices"]) > 1 else ""
        print(f"measuring each {alone}for {seconds:g} s ...", file=sys.stderr)
    with redirect_stdout(sys.stderr):
        advice = advise(**job)
    print(json.dumps(advice.to_dict(), indent=2) if options.json else f"\n{advice}")
    return 0
