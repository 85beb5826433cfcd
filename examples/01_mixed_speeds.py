"""Four devices of unequal speed train one Flax model: plain `pmap`, then `elche_jax`.

    python examples/01_mixed_speeds.py [--short] [--plot out/mixed_speeds.png]

The devices are CPU devices emulated to take 5, 5, 10 and 20 ms per microbatch; the model
and the data (1,797 handwritten digits) are real. Both loops see the same number of
examples. The limit is the sum of the devices' own speeds, 4,400 examples/s.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import elche_jax as elche
from elche_jax.cadence.window import WindowRecord
from elche_jax.lab import EmulatedSpeeds
from elche_jax.observe.plots import plot_run

MS = (5.0, 5.0, 10.0, 20.0)  # emulated milliseconds per microbatch of each device
DEVICES = len(MS)
BATCH = 8  # examples per microbatch
ANCHOR = 4  # microbatches of the slowest device in a window: windows of 80 ms
LIMIT = 1e3 * BATCH * sum(1 / ms for ms in MS)  # examples per second
EPOCHS, SHORT_EPOCHS = 40, 4
WANTED = 0.97  # test accuracy required of both


def set_up_devices() -> None:
    """Create one single-threaded CPU device per entry of `MS`; call it before JAX is used."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


class CNN(nn.Module):
    """Two convolutions, dropout, two dense layers; 10 logits."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x)).reshape(len(x), -1)
        x = nn.relu(nn.Dense(64)(nn.Dropout(0.1, deterministic=not train)(x)))
        return nn.Dense(10)(x)


def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    """Return the mean cross-entropy over one microbatch, with smoothed labels."""
    logits = CNN().apply(params, batch["image"], train=True, rngs={"dropout": rng})
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
    return optax.softmax_cross_entropy(logits, labels).mean()


def adam(examples: float) -> optax.GradientTransformation:
    """Return Adam; its learning rate grows with the square root of the examples per update."""
    return optax.adam(2.5e-3 * (examples / 32) ** 0.5)


class Meter:
    """Times a run and shows its progress, in the same way for both loops.

    It waits for every loss one window late, so that the devices never wait for the loop. The
    clock starts after the first window, which compiles the programs.
    """

    def __init__(self, name: str, examples: int, progress: Progress):
        self.ends: list[float] = []
        self.examples = 0
        self._pending: list[tuple[Any, int, Sequence[int]]] = []
        self._progress = progress
        self._task = progress.add_task(f"{name:<11}", total=examples, now="compiling")

    def add(self, loss: Any, examples: int, counts: Sequence[int]) -> None:
        """Take the results of the newest window."""
        self._pending.append((loss, examples, counts))
        if len(self._pending) == 2:
            self.finish()

    def finish(self) -> None:
        """Wait for the oldest window."""
        loss, examples, counts = self._pending.pop(0)
        shown = f"loss {float(loss):.3f}  counts {counts}"
        self.ends.append(time.perf_counter())
        if len(self.ends) > 1:
            self.examples += examples
            shown += f"  {self.examples / self.seconds:,.0f} examples/s"
        self._progress.update(self._task, advance=examples, now=shown)

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.ends[0]


def train_plain(params: Any, data: Any, epochs: int, meter: Meter) -> tuple[Any, list[Any]]:
    """Train with the usual loop and equal shares: all devices wait for the slowest."""
    emulate, share = EmulatedSpeeds(MS), BATCH * DEVICES
    tx = adam(share)

    @partial(jax.pmap, axis_name="devices", out_axes=(0, 0, None), donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: Any, number: Any) -> Any:
        device = jax.lax.axis_index("devices")
        rng = jax.random.fold_in(jax.random.key(0), number * DEVICES + device)

        begun = emulate.begin(device, number, True)  # the same emulation as in `train_elche`
        rng = jax.random.fold_in(rng, begun.astype("uint32"))
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, rng)
        waited = emulate.end(device, 1, grads)
        grads = jax.tree.map(lambda g: g + waited, grads)
        loss, grads = jax.lax.pmean((loss, grads), "devices")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    number, rng = 0, np.random.default_rng(0)
    params, opt_state = elche.replicate((params, tx.init(params)), jax.devices())
    for _ in range(epochs):
        order = rng.permutation(len(data["label"]))
        for rows in order[: len(order) // share * share].reshape(-1, DEVICES, BATCH):
            batch = {name: leaf[rows] for name, leaf in data.items()}
            numbers = np.full(DEVICES, number)
            params, opt_state, loss = train_step(params, opt_state, batch, numbers)
            meter.add(loss, share, (1,) * DEVICES)
            number += 1
    meter.finish()
    walls = [1e3 * wall for wall in np.diff(meter.ends)]
    records = [
        WindowRecord(i + 1, 0, (1,) * DEVICES, share, MS, wall, 0.0, 0.0, True)
        for i, wall in enumerate(walls)
    ]
    return elche.unreplicate(params), records


def train_elche(params: Any, data: Any, epochs: int, meter: Meter) -> tuple[Any, list[Any]]:
    """Train the same model with `elche_jax`, whose counts follow the speeds."""
    train = elche.build_train_step(
        loss_fn,
        adam(LIMIT * ANCHOR * max(MS) / 1e3),
        cadence=elche.ElChe(anchor=ANCHOR),
        emulate=EmulatedSpeeds(MS),
    )
    state = train.init(params)
    for window in train.windows(data, batch_size=BATCH, epochs=epochs):
        state, metrics = train(state, window)
        meter.add(metrics["loss"], window.examples, window.counts)
    meter.finish()
    return elche.unreplicate(state.params), train.records[1:]


@dataclass
class Outcome:
    """The result of a run."""

    meter: Meter
    records: list[WindowRecord]
    accuracy: float

    @property
    def speed(self) -> float:
        """Examples per second."""
        return self.meter.examples / self.meter.seconds

    def column(self) -> list[str]:
        """Return the run's column of the table."""
        busy_ms = np.sum([record.busy_ms for record in self.records], axis=0)
        return [
            f"{self.meter.seconds:.1f} s",
            f"{self.speed:,.0f}",
            "  ".join(f"{ms / 1e3 / self.meter.seconds:.0%}" for ms in busy_ms),
            f"{self.speed / LIMIT:.1%}",
            f"{self.accuracy:.1%}",
        ]


ROWS = "training time", "examples/s", "busy share", "share of the limit", "test accuracy"


def main() -> int:
    """Train twice, print the table, save the plot; return 1 if a model is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help=f"{SHORT_EPOCHS} epochs only")
    parser.add_argument("--plot", default="out/mixed_speeds.png", help="the PNG to write")
    options = parser.parse_args()
    epochs = SHORT_EPOCHS if options.short else EPOCHS
    set_up_devices()
    print(elche.device_summary(), file=sys.stderr)

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int32")
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, train_size=1504, stratify=labels, random_state=0
    )
    data = {"image": train_x, "label": train_y}
    params = CNN().init(jax.random.key(0), train_x[:1], train=False)

    outcomes: dict[str, Outcome] = {}
    columns = ("{task.description}", BarColumn(20), "{task.fields[now]}")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name, train in {"plain pmap": train_plain, "elche_jax": train_elche}.items():
            meter = Meter(name, epochs * len(train_y), progress)
            trained, records = train(params, data, epochs, meter)
            guess = CNN().apply(trained, test_x, train=False).argmax(-1)
            outcomes[name] = Outcome(meter, records, float(np.mean(guess == test_y)))

    table = Table("", *outcomes, title=f"{epochs} epochs on devices of 5, 5, 10 and 20 ms")
    for row in zip(ROWS, *(outcome.column() for outcome in outcomes.values()), strict=True):
        table.add_row(*row)
    Console().print(table)
    plain, ours = outcomes.values()
    path = plot_run(
        ours.records,
        options.plot,
        f"{ours.speed / plain.speed:.1f} times as fast on the same four devices",
        devices=[f"{ms:g} ms" for ms in MS],
        baseline=plain.records,
        names=("elche_jax", "plain pmap, equal shares"),
    )
    print(f"plot: {path}")
    if not options.short and min(plain.accuracy, ours.accuracy) < WANTED:
        print(f"test accuracy must be at least {WANTED:.0%} for both", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
