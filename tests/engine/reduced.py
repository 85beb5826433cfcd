"""Contributions of devices made one mean, by devices among themselves and on the host."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.axis import DeviceAxis, HostAxis
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.reduce import Contribution

TRANSPORTS = ("devices", "host")


def contribution(payload, amount, state=(), own=True, loss=0.0, size=0.0):
    """What a device brings; `payload` as it travels."""
    row = jnp.stack([jnp.float32(x) for x in (amount, own, loss, amount, size, amount)])
    sums = {
        "loss": jnp.float32(loss) * row[0], "weight": row[0], "metrics": {},
        "bad": 1 - jnp.float32(own),
    }  # fmt: skip
    return Contribution(payload, row, sums, list(state))


@cache
def program(reduction, world):
    """The devices' reduction, compiled once for each number of them."""

    def of(one, window):
        return reduction(DeviceAxis(world), one, window)

    return jax.jit(jax.vmap(of, in_axes=(0, None), axis_name=AXIS), static_argnums=1)


def reduced(transport, reduction, contributions, window=0):
    """The mean and the metrics, on the host; checks that all devices have the same bits."""
    world = len(contributions)
    if transport == "host":
        brought = [jax.tree.map(np.asarray, one) for one in contributions]
        with np.errstate(all="ignore"):
            return reduction(HostAxis(world, range(world)), brought, window)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *contributions)
    out = program(reduction, world)(stacked, window)
    for leaf in map(np.asarray, jax.tree.leaves(out)):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], out)
