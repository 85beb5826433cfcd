"""`elche-jax demo`: train on four unequal devices with equal counts and with `ElChe`."""

import argparse
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

import elche_jax as elche
from elche_jax.cli import arguments, table
from elche_jax.cli.models import cross_entropy
from elche_jax.lab import EmulatedSpeeds

HELP = "train on four emulated devices of 5, 5, 10 and 20 ms: equal counts against ElChe"
EPILOG = """\
Trains a small Flax model on synthetic data twice, on the same number of examples. The
devices are CPU devices kept busy for that long per microbatch; the limit is the sum of
their own speeds. Needs no accelerator.

example:
  elche-jax demo --short
"""

MS = (5.0, 5.0, 10.0, 20.0)
BATCH = 8  # examples per microbatch
ANCHOR = 4  # windows of 80 ms
EXAMPLES, SHORT = 16_000, 3_200
CLASSES = 4
ROWS = "training time", "examples/s", "busy share", "share of the limit", "updates", "accuracy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--short", action="store_true", help="a fifth of the data")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    arguments.make_cpu_devices(len(MS))
    print(elche.device_summary(), flush=True)
    examples = SHORT if options.short else EXAMPLES
    limit = 1e3 * BATCH * sum(1 / ms for ms in MS)
    print(f"{examples:,} examples, limit {limit:,.0f} examples/s", flush=True)
    runs = {
        "equal counts": (elche.EveryBatch(), BATCH * len(MS)),
        "ElChe": (elche.ElChe(anchor=ANCHOR), limit * ANCHOR * max(MS) / 1e3),
    }
    columns: list[list[str]] = []
    speeds: list[float] = []
    for name, (cadence, per_update) in runs.items():
        train, accuracy = _train(cadence, per_update, examples)
        report = train.report()
        seconds = examples / report.examples_per_s
        print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        speeds.append(report.examples_per_s)
        columns.append(
            [
                f"{seconds:.1f} s",
                f"{report.examples_per_s:,.0f}",
                "  ".join(f"{device.busy_share:.0%}" for device in report.devices),
                f"{report.examples_per_s / limit:.1%}",
                f"{len(train.counts_history)}",
                f"{accuracy:.1%}",
            ]
        )
    table.show(["", *runs], [list(row) for row in zip(ROWS, *columns, strict=True)])
    print(f"{speeds[1] / speeds[0]:.1f} times as fast on the same four devices")
    return 0


def _train(cadence: Any, per_update: float, examples: int) -> tuple[elche.TrainStep, float]:
    """Train one epoch and return the training step and the accuracy on held-out data.

    Adam's learning rate grows with the square root of the examples per update, as the windows of
    `ElChe` have more examples.
    """
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(CLASSES)])
    data, test = _make_data(examples, seed=1), _make_data(2_000, seed=2)
    optimizer = optax.adam(8e-3 * (per_update / 32) ** 0.5)
    train = elche.build_train_step(
        cross_entropy(model), optimizer, cadence=cadence, emulate=EmulatedSpeeds(MS)
    )
    state = train.init(model.init(jax.random.key(0), data["x"][:1]))
    for window in train.windows(data, BATCH):
        state, _ = train(state, window)
    logits: Any = model.apply(elche.unreplicate(state.params), test["x"])
    return train, float(np.mean(np.argmax(logits, axis=1) == test["y"]))


def _make_data(examples: int, seed: int) -> dict[str, np.ndarray]:
    """Return points in eight dimensions, labelled by the largest of four synthetic functions."""
    weights = np.random.default_rng(0).normal(size=(8, CLASSES))
    x = np.random.default_rng(seed).normal(size=(examples, 8))
    return {"x": x.astype("float32"), "y": np.argmax(np.sin(x) @ weights, axis=1).astype("int32")}
