"""How parameters that the devices have trained apart become one: a synchronisation.

With `x` the parameters of the last one, `y[d]` the device's own and `w[d]` its share,

    delta = sum over d of w[d] * (x - y[d])
    mean  = x - delta
    x     = mean + (u + delta)        with u the outer optimizer's update for delta

which is `x + u`, written so that `u = -delta` gives the mean to the last bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from elche_jax.averaging.rules import Averaging, Exponent
from elche_jax.averaging.wire import sum_differences, wire_bytes
from elche_jax.engine.mapped import AXIS

Leaves = list[Any]


class Share(NamedTuple):
    """This device's part in an average.

    Attributes:
        own: Its share, 0 for a device that has no part in it.
        good: Whether any device has.
        sound: Whether the exponent is finite.
    """

    own: Any
    good: Any
    sound: Any


def share_of(steps: Any, ok: Any, exponent: Exponent, window: Any, world_size: int) -> Share:
    """Shares in proportion to `steps ** exponent`.

    Args:
        steps: This device's optimizer steps, float32.
        ok: Whether the device may take part.
        exponent: The exponent, or a schedule of the window's number.
        window: Number of the window.
        world_size: Number of devices.
    """
    worked = ok & (steps > 0)
    power = exponent(window) if callable(exponent) else exponent
    if power is exponent and power in (0.0, 1.0):
        raw = steps if power else jnp.ones_like(steps)
    else:  # by logarithms, as a power of a count may be too large for a float
        logs = jnp.where(worked, power * jnp.log(jnp.maximum(steps, 1.0)), -jnp.inf)
        highest = jax.lax.pmax(logs, AXIS) if world_size > 1 else logs
        raw = jnp.exp(logs - jnp.where(jnp.isfinite(highest), highest, 0))
    raw = jnp.where(worked, raw, 0)
    total = jax.lax.psum(raw, AXIS) if world_size > 1 else raw
    return Share(raw / jnp.where(total > 0, total, 1), total > 0, jnp.isfinite(power))


class Joined(NamedTuple):
    """What a synchronisation of some arrays gives.

    Attributes:
        params: The new parameters, the same on all devices, in their dtypes.
        outer: The outer optimizer's state.
        error: What this device's differences have lost to compression.
        numbers: What `distances` is made of, float32, shape `(5,)`.
        sent: Bytes this device has put in.
    """

    params: Leaves
    outer: Any
    error: Leaves
    numbers: Any
    sent: int


@dataclass(frozen=True)
class Join:
    """One synchronisation of some arrays; inside a mapped function.

    Attributes:
        averaging: The rule.
        world_size: Number of devices.
    """

    averaging: Averaging
    world_size: int

    def __call__(
        self, base: Leaves, own: Leaves, outer: Any, error: Leaves, share: Share
    ) -> Joined:
        """Joins the devices' arrays.

        Args:
            base: Those of the last synchronisation, the same on all devices.
            own: This device's.
            outer: State of the outer optimizer for these arrays.
            error: What earlier differences have lost.
            share: The device's share.
        """
        x, y = ([leaf.astype(jnp.float32) for leaf in leaves] for leaves in (base, own))
        differences = _minus(x, y)
        sent = 0
        if self.world_size == 1:
            delta, middle = differences, y
        else:
            compression = self.averaging.compression
            delta, error = sum_differences(
                differences, error, share.own, compression, AXIS, self.world_size
            )
            middle = _minus(x, delta)
            sent = wire_bytes(x, compression)
        new = middle
        if self.averaging.outer is not None:
            tx = optax.with_extra_args_support(self.averaging.outer)
            updates, outer = tx.update(delta, outer, x)  # in float32 whatever the parameters
            leaves = jax.tree.leaves(updates)
            new = [m + (u + d) for m, u, d in zip(middle, leaves, delta, strict=True)]
        numbers = _distances(differences, y, new, delta)
        params = [a.astype(leaf.dtype) for a, leaf in zip(new, base, strict=True)]
        return Joined(params, outer, error, numbers, sent)


def mean(base: Leaves, own: Leaves, share: Share) -> Leaves:
    """`base - sum over devices of share * (base - own)`, in the dtypes of `base`."""
    x, y = ([leaf.astype(jnp.float32) for leaf in leaves] for leaves in (base, own))
    sums, _ = sum_differences(_minus(x, y), [], share.own, None, AXIS, 0)
    return [(a - s).astype(leaf.dtype) for a, s, leaf in zip(x, sums, base, strict=True)]


def _distances(differences: Leaves, own: Leaves, new: Leaves, delta: Leaves) -> Any:
    """Sums of squares and products, for `distances`."""
    return jnp.stack(
        [
            _dot(_minus(own, new), _minus(own, new)),
            _dot(new, new),
            _dot(differences, differences),
            _dot(delta, delta),
            _dot(differences, delta),
        ]
    )


def _minus(a: Leaves, b: Leaves) -> Leaves:
    return [x - y for x, y in zip(a, b, strict=True)]


def _dot(a: Leaves, b: Leaves) -> Any:
    return sum((jnp.vdot(x, y) for x, y in zip(a, b, strict=True)), jnp.float32(0))


def distances(numbers: Any) -> dict[str, Any]:
    """What a window's metrics say of the devices, from the sums that `Join` gives.

    With `a` the parameters after the synchronisation,

        distance    = |y - a| / |a|       how far the device had to move
        update_norm = |x - y|             how far it had gone on its own
        cosine      = (x - y) . delta / (|x - y| |delta|)      0 where one of them is 0
    """
    moved, size, own, mean, product = numbers
    scale = jnp.sqrt(own) * jnp.sqrt(mean)
    return {
        "distance": jnp.sqrt(moved) / jnp.sqrt(size),
        "update_norm": jnp.sqrt(own),
        "cosine": jnp.where(scale > 0, product / jnp.where(scale > 0, scale, 1), 0),
    }


def pick(leaves: Leaves, members: Sequence[int]) -> Leaves:
    """Some of the leaves."""
    return [leaves[i] for i in members]


def put(leaves: Leaves, members: Sequence[int], new: Leaves) -> Leaves:
    """The leaves with some of them replaced; none where there are none."""
    if not leaves:
        return leaves
    out = list(leaves)
    for i, leaf in zip(members, new, strict=True):
        out[i] = leaf
    return out


def switch(index: Any, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """`jax.lax.switch`, without a branch where there is no choice."""
    return branches[0](*args) if len(branches) == 1 else jax.lax.switch(index, branches, *args)
