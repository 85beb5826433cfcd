"""Four devices of unequal speed train one Flax model: plain `pmap`, then `elche_jax`.

    python examples/01_mixed_speeds.py [--short] [--plot out/mixed_speeds.png]

The devices are CPU devices emulated to need 5, 5, 10 and 20 ms per microbatch; the model
and the data (1,797 handwritten digits) are real. Both loops see the same number of
examples. The limit is the sum of the devices' own speeds: 4,400 examples/s.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds
from elche_jax.observe.plots import plot_run
from elche_jax.observe.records import WindowRecord

MS = (5.0, 5.0, 10.0, 20.0)  # emulated milliseconds per microbatch, one entry per device
BATCH = 8  # examples per microbatch
ANCHOR = 4  # microbatches of the slowest device in a window: windows of 80 ms
LIMIT = 1e3 * BATCH * sum(1 / ms for ms in MS)  # examples per second
EPOCHS, SHORT_EPOCHS = 40, 4
WANTED = 0.97  # test accuracy that both loops must reach


def set_up_devices() -> None:
    """Makes one CPU device per entry of `MS`; must come before JAX is used."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", len(MS))


class CNN(nn.Module):
    """Two convolutions, dropout, two dense layers; 10 logits."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x)).reshape(len(x), -1)
        x = nn.relu(nn.Dense(64)(nn.Dropout(0.2, deterministic=not train)(x)))
        return nn.Dense(10)(x)


def loss_fn(params: Any, batch: dict[str, jax.Array], rng: Any) -> jax.Array:
    """Mean cross-entropy over one microbatch."""
    logits = CNN().apply(params, batch["image"], train=True, rngs={"dropout": rng})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def optimizer(examples: int) -> optax.GradientTransformation:
    """Adam; the rate grows with the square root of the examples per update."""
    return optax.adam(1e-3 * (examples / 32) ** 0.5)


@dataclass
class Outcome:
    """A finished run. The clock starts when the first window is over: it compiles."""

    name: str
    params: Any
    records: list[WindowRecord]
    seconds: float

    @property
    def examples_per_s(self) -> float:
        return sum(record.examples for record in self.records[1:]) / self.seconds

    @property
    def busy_share(self) -> list[float]:
        busy_ms = np.sum([record.busy_ms for record in self.records[1:]], axis=0)
        return (busy_ms / 1e3 / self.seconds).tolist()


Show = Callable[[int, tuple[int, ...], Any], None]


def train_plain_pmap(params: Any, data: dict[str, np.ndarray], epochs: int, show: Show) -> Outcome:
    """The usual hand-written loop: every device the same share, all wait for the slowest."""
    world_size, emulate = len(MS), EmulatedSpeeds(MS)
    tx = optimizer(BATCH * world_size)

    @partial(jax.pmap, axis_name="devices", donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any, number: Any) -> Any:
        def microbatch(i: Any, carry: Any) -> Any:
            return jax.value_and_grad(loss_fn)(params, batch, rng)

        device = jax.lax.axis_index("devices")
        rng = jax.random.fold_in(jax.random.key(0), number * world_size + device)
        emulate.begin(device, number, True)  # the same emulation as below
        (loss, grads), waited = emulate.around(microbatch, device, 0, None)
        grads = jax.tree.map(lambda g: g + waited, grads)
        loss, grads = jax.lax.pmean((loss, grads), "devices")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, opt_state = elche.replicate((params, tx.init(params)), jax.devices())
    records: list[WindowRecord] = []
    losses: list[jax.Array] = []
    counts, share = (1,) * world_size, BATCH * world_size
    start = at = time.perf_counter()

    def finish(number: int, epoch: int) -> None:
        nonlocal start, at
        losses[number].block_until_ready()
        now = time.perf_counter()
        wall_ms, at = 1e3 * (now - at), now
        if number == 0:
            start = now
        records.append(
            WindowRecord(number, epoch, counts, share, MS, wall_ms, 0.0, 0.0, number > 0)
        )
        show(share, counts, losses[number][0])

    rng = np.random.default_rng(0)
    for epoch in range(epochs):
        order = rng.permutation(len(data["label"]))
        for rows in order[: len(order) // share * share].reshape(-1, world_size, BATCH):
            batch = {name: values[rows] for name, values in data.items()}
            number = np.full(world_size, len(losses))
            params, opt_state, loss = step(params, opt_state, batch, number)
            losses.append(loss)
            if len(losses) > 1:  # one step behind, so that nothing stalls
                finish(len(losses) - 2, epoch)
    finish(len(losses) - 1, epochs - 1)
    return Outcome("plain pmap", elche.unreplicate(params), records, at - start)


def train_elche(params: Any, data: dict[str, np.ndarray], epochs: int, show: Show) -> Outcome:
    """The same with `elche_jax`: counts follow the speeds."""
    window_size = int(LIMIT * ANCHOR * max(MS) / 1e3)  # examples, once the counts are found
    train = elche.build_train_step(
        loss_fn,
        optimizer(window_size),
        cadence=elche.ElChe(anchor=ANCHOR),
        emulate=EmulatedSpeeds(MS),
    )
    state = train.init(params)
    start, before = 0.0, None
    for window in train.windows(data, batch_size=BATCH, epochs=epochs):
        state, metrics = train(state, window)
        if before is None:
            metrics["loss"].block_until_ready()
            start = time.perf_counter()
        else:  # one window behind, so that nothing stalls
            show(before[0].examples, before[0].counts, before[1]["loss"])
        before = window, metrics
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    return Outcome("elche_jax", elche.unreplicate(state.params), train.records, seconds)
