"""Training with averaging, window by window, and devices that go wrong in it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference import BATCH, LEARNING_RATE, LEAVES, MOMENTUM, data, loss_fn, params

import elche_jax as elche

COUNTS = [(3, 1), (2, 2), (4, 1), (1, 3), (5, 2), (3, 1), (1, 1), (6, 2), (2, 0), (3, 2)]
THREE = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (5, 2, 2), (3, 1, 1), (1, 1, 1), (0, 2, 6),
         (2, 1, 3), (3, 2, 1)]  # fmt: skip
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
TX = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)


def train_on(
    averaging,
    counts,
    *,
    tx=TX,
    loss=loss_fn,
    rows=None,
    window_bytes=2**28,
    devices=None,
    wide=False,
    **options,
):  # fmt: skip
    """Each device's parameters after every window, the metrics, and the rest.

    With `wide` parameters and data are float64, under `jax.enable_x64`.
    """
    start, rows = params(), rows or data()
    if wide:
        start, rows = jax.tree.map(lambda leaf: leaf.astype("d"), (start, rows))
    train = elche.build_train_step(
        loss, tx, devices=devices or jax.devices()[: len(counts[0])], averaging=averaging,
        cadence=elche.Replay(counts), **options,
    )  # fmt: skip
    state, history, metrics = train.init(start), [], []
    with train.windows(
        rows, BATCH, shuffle=False, placement="stream", window_bytes=window_bytes
    ) as windows:
        for window in windows:
            assert window.counts == counts[window.index]
            state, said = train(state, window)
            history.append(jax.device_get(state.params))
            metrics.append(jax.device_get(said))
            if len(history) == len(counts):
                break
    return history, metrics, state, train


def assert_history(got, want, rtol=2e-5, atol=1e-6):
    assert len(got) == len(want)
    for stacked, devices in zip(got, want, strict=True):
        for rank, mine in enumerate(devices):
            for name in LEAVES:
                np.testing.assert_allclose(stacked[name][rank], mine[name], rtol=rtol, atol=atol)


# of sizes 1, 2 and 3 the largest goes to the first part
PARTS = {1: (LEAVES,), 2: (("w",), ("b", "v")), 3: (("w",), ("v",), ("b",))}

BAD = (4, 1)  # window and device
FIRST_OF_BAD = sum(map(sum, THREE[:4])) + THREE[4][0]  # its first microbatch


def poisoned(microbatches=(FIRST_OF_BAD,)):
    """A loss that is not a number for some microbatches; data that number them."""
    rows = data()
    rows["at"] = np.arange(len(rows["x"]), dtype="int32") // BATCH

    def loss(p, batch, rng):
        bad = jnp.isin(batch["at"][0], jnp.array(microbatches))
        return loss_fn(p, batch, rng) * jnp.where(bad, jnp.nan, 1.0)

    return {"loss": loss, "rows": rows}
