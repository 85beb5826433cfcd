"""`DDP`: data parallelism by hand, for loops that do not fit a training step.

With adversarial optimizers, rollouts or growing models, the loop and its `jax.pmap` belong to
the user. This module provides the communication between devices, as pure functions of
replicated pytrees that compile once per set of shapes, and the times that a cadence needs.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.data.convert import check_plain
from elche_jax.engine.bits import check_numbers, is_float, raw, with_type_of
from elche_jax.engine.devices import fleet_of, select_job
from elche_jax.engine.lane import Lanes
from elche_jax.engine.laned import StackedArray
from elche_jax.engine.loss import describe
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.reductions import broadcaster, weighted_averager
from elche_jax.engine.replicas import replicate_over
from elche_jax.engine.returned import named_leaves
from elche_jax.engine.shapes import difference, one_of, signature
from elche_jax.engine.timed import Watches, WindowTimer
from elche_jax.engine.traced import no_named_axis

PyTree = Any

NO_AXIS = "as devices of several {} have none in common"
INSTEAD = (
    "Exchange outside of it, with DDP.weighted_all_reduce_gradients, and pass ranks as "
    "np.array(ddp.ranks)."
)


class DDP:
    """Collectives over the devices of a job, for a user-written loop.

    All trees are *stacked*: leaves `(world_size,) + shape`, entry `d` on device `d`, as
    `replicate` makes them and `jax.pmap` takes and returns them. Subtrees that are None or
    `optax.MaskedNode()`, such as frozen parameters, are skipped.

    In a job of several processes, trees have one entry per device of this process, leaves
    `(len(ranks),) + shape`, and all processes must make the same calls. Reductions and times cover
    all devices of the job. Once a process is known to have ended, exchanges and the end of a
    `timed` block raise `ProcessLostError`.

    Wait for a result once per step (`jax.block_until_ready`): several CPU devices in one
    process deadlock when a loop dispatches dozens of collectives ahead of them.

    Run your own functions on the devices with `map`, or with `jax.pmap` if all devices are of one
    kind. With `timed`, a cadence decides how much work each device does.

    Attributes:
        devices: The devices of the job, in rank order.
        world_size: Number of devices.
        ranks: The ranks of this process's devices; all ranks if there is one process.
        axis_name: Pass this axis name to your own `jax.pmap`: its outputs then have the same
            sharding as the results here, so no program compiles twice.

    Args:
        devices: At least two devices, of any kinds; None for all devices of the job.

    Raises:
        TypeError: If `devices` is not a sequence of devices.
        ValueError: If there are fewer than two devices, duplicates, or a process without a device.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import elche_jax as elche
        >>> ddp = elche.DDP(jax.devices()[:2])
        >>> params = ddp.replicate({"w": jnp.ones(3)})
        >>> gradient = ddp.map(jax.grad(lambda p, x: (p["w"] * x).sum()))
        >>> grads = gradient(params, jnp.array([[1.0, 1, 1], [3, 3, 3]]))
        >>> elche.unreplicate(ddp.all_reduce_gradients(grads))["w"].tolist()
        [2.0, 2.0, 2.0]
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        self.devices = select_job(devices, "DDP")
        self.world_size, self.axis_name = len(self.devices), AXIS
        if self.world_size < 2:
            rule, todo = "hold at least two devices", "A single device needs no exchange."
            raise ValueError(check.message("DDP", "devices", rule, self.world_size, todo))
        self.fleet = fleet_of("DDP", self.devices)
        self.ranks = self.fleet.job.ranks
        self._broadcast, self._mean = broadcaster(self.fleet), weighted_averager(self.fleet)
        self._watches = Watches(self.fleet)

    @classmethod
    def wrap(
        cls, replicas: Sequence[PyTree], devices: Sequence[jax.Device] | None = None
    ) -> "tuple[DDP, PyTree]":
        """Stack existing replicas, one per device of this process.

        The replicas are not synchronized; call `sync_params` for that.

        Args:
            replicas: One pytree of arrays, typed PRNG keys or scalars per device, equal in
                structure, shapes and dtypes.
            devices: The devices; None for all devices of the job.

        Returns:
            The `DDP`, and the stacked pytree.

        Raises:
            TypeError: If a leaf is not an array of numbers.
            ValueError: If the number of replicas is not the number of devices, or a replica
                differs from the first one, or an integer does not fit; the message names the leaf.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import elche_jax as elche
            >>> ddp, params = elche.DDP.wrap([{"w": jnp.zeros(2)}, {"w": jnp.ones(2)}],
            ...                              jax.devices()[:2])
            >>> params["w"].tolist()
            [[0.0, 0.0], [1.0, 1.0]]
        """
        ddp = cls(devices)
        replicas = check.items("DDP.wrap", "replicas", replicas, "pytrees")
        check.per_device("DDP.wrap", "replicas", len(replicas), len(ddp.ranks))
        for path, leaf in named_leaves("DDP.wrap", "replicas", replicas):
            check_plain(path, leaf, "DDP.wrap: replicas")
        for rank, replica in enumerate(replicas[1:], start=1):
            differs = difference(*jax.tree.map(_as_array, (replica, replicas[0])))
            if differs:
                rule = "have the same structure, shapes and dtypes"
                got = f"different ones for replicas {rank} and 0: {differs}"
                raise ValueError(check.message("DDP.wrap", "all replicas", rule, got))

        def stack(path: Any, *rows: Any) -> StackedArray:
            stacked = np.stack([raw(row) for row in rows])
            check_numbers("DDP.wrap", jax.tree_util.keystr(path) or "replicas", stacked)
            return with_type_of(rows[0], ddp.fleet.put(stacked))

        # leaf by leaf: the host holds one stacked leaf at a time
        return ddp, jax.tree_util.tree_map_with_path(stack, *replicas)

    def replicate(self, tree: PyTree) -> PyTree:
        """Copy a pytree to every device; see `elche_jax.replicate`."""
        return replicate_over(self.fleet, tree)

    def map(
        self, fn: Callable[..., PyTree], donate_argnums: int | Sequence[int] = ()
    ) -> Callable[..., PyTree]:
        """Map a function of one device's values over the devices, which may be of several kinds.

        With devices of one kind this is `jax.pmap`, and `fn` may use collectives over
        `axis_name`. Devices of several kinds have one program per kind and share no axis; neither
        do devices of several processes.

        Args:
            fn: Function of pytrees of arrays, one device's, without the leading axis. It is
                traced and compiled at the first call with arguments of these shapes.
            donate_argnums: Positions of arguments whose buffers may be reused.

        Returns:
            A function of stacked pytrees that returns the stacked result. Arguments may be host
            arrays with one entry for each of `ranks`, such as
            `np.array(counts)[list(ddp.ranks)]`. A call raises ValueError if there is no leaf, if a
            leaf is not stacked, was donated before, or is donated and passed twice, if a donated
            argument is not passed, or if `fn` uses a named axis over devices of several kinds or
            processes.

        Raises:
            TypeError: If `fn` is not callable, or a position is not an integer.
            ValueError: If a position is below 0.

        Examples:
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import elche_jax as elche
            >>> ddp = elche.DDP(jax.devices()[:2])
            >>> power = ddp.map(lambda x, n: x**n)
            >>> power(ddp.replicate(jnp.float32(3)), np.array([1, 2])).tolist()
            [3.0, 9.0]
        """
        if not callable(fn):
            raise TypeError(check.message("DDP.map", "fn", "be a function", describe(fn)))
        given = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
        donated = check.integers("DDP.map", "donate_argnums", given, low=0)
        mapped = self.fleet.mapped(lambda *args: (fn(*args), None), donated)
        known: set[Hashable] = set()

        def call(*args: PyTree) -> PyTree:
            if not jax.tree.leaves(args):
                rule, got = "get at least one array", "none"
                raise ValueError(check.message("DDP.map", "the mapped function", rule, got))
            self._check("map", args, "Make it with replicate, or as an np.array of one per device.")
            _check_donated(args, donated)
            if isinstance(self.fleet, Lanes):
                args = self.fleet.place(args)
                if (key := signature(args)) not in known:
                    _refuse_axes(self.fleet, fn, args)
                    known.add(key)
            return mapped(*args)[0]

        return call

    def timed(self, counts: Sequence[int]) -> AbstractContextManager[WindowTimer]:
        """Time a window: each device's own work, and the synchronization.

        In the block, `clock.worked(grads)` marks what each device computed on its own, and
        `clock.synced(params)` what it has after the exchange; both return their argument. The end
        of the block waits for the devices. Then `clock.report` is what `Cadence.update` takes: the
        busy milliseconds of every device, from the start of the block or the end of the device's
        previous window, whichever is later; and the milliseconds of the synchronization, the
        shortest wait of any device. A training step reports the same.

        In a job of several processes, the end of the block exchanges the times of all devices, so
        the report is the same everywhere. No process leaves the block before all have reached its
        end.

        Work of the host in the block counts, too, so prepare the data before it. A block in which
        a program is compiled, such as the first, is not measured: its times are 0, which cadences
        ignore. To a cadence that follows the loss, pass
        `dataclasses.replace(clock.report, loss=loss)`.

        One thread per device waits for it. The threads end with this object, or with a block that
        raises.

        Args:
            counts: Microbatches of each device of the job in this window, at least 0 each.

        Returns:
            A context manager that yields the clock, an `elche_jax.engine.timed.WindowTimer`.

        Raises:
            TypeError: If `counts` is not a sequence of integers.
            ValueError: If it has the wrong length, an entry below 0, or no entry above 0.
            RuntimeError: At the end of the block, if `worked` or `synced` was not called.

        Examples:
            A cadence drives a loop; every device takes the first `count` of its examples.

            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import elche_jax as elche
            >>> ddp = elche.DDP(jax.devices()[:2])
            >>> def loss_fn(params, x, count):
            ...     used = jnp.arange(len(x)) < count
            ...     return jnp.where(used, (params - x) ** 2, 0).sum() / used.sum()
            >>> gradient = ddp.map(jax.grad(loss_fn))
            >>> descend = ddp.map(lambda params, grads: params - 0.1 * grads)
            >>> params = ddp.replicate(jnp.float32(0))
            >>> cadence = elche.ElChe(anchor=4)
            >>> state = cadence.init(ddp.world_size)
            >>> for step in range(3):
            ...     x, counts = np.ones((2, 1000), "float32"), state.counts
            ...     with ddp.timed(counts) as clock:
            ...         grads = clock.worked(gradient(params, x, np.array(counts)))
            ...         mean = ddp.weighted_all_reduce_gradients(grads, counts)
            ...         params = clock.synced(descend(params, mean))
            ...     state = cadence.update(state, clock.report)
            >>> round(float(params[0]), 3)
            0.488
            >>> state.calibrated
            True
        """
        counts = check.integers("DDP.timed", "counts", counts, low=0)
        self._check_counts("DDP.timed", "counts", counts)
        return self._watches.timed(counts)

    def sync_params(self, params: PyTree) -> PyTree:
        """Broadcast the parameters of rank 0 to every device, bit for bit.

        Args:
            params: Stacked pytree of arrays of any dtype.

        Returns:
            The stacked pytree, with every entry equal to that of rank 0.

        Raises:
            ValueError: If a leaf is not stacked over these devices.
        """
        return self._sync("sync_params", params)

    def sync_buffers(self, buffers: PyTree) -> PyTree:
        """Broadcast the buffers of rank 0, such as BatchNorm statistics, to every device.

        The same operation as `sync_params`, under the name PyTorch users expect.
        """
        return self._sync("sync_buffers", buffers)

    def all_reduce_gradients(self, grads: PyTree) -> PyTree:
        """Compute the mean of the devices' gradients, on every device.

        Sums are taken in float32 (in float64 for float64 leaves).

        Args:
            grads: Stacked pytree of float arrays.

        Returns:
            The mean, stacked, with equal entries.

        Raises:
            ValueError: If a leaf is not stacked over these devices.
            TypeError: If a leaf is not a float array.
        """
        return self._reduce("all_reduce_gradients", grads, np.ones(self.world_size, np.float32))

    def weighted_all_reduce_gradients(self, grads: PyTree, batch_counts: Sequence[float]) -> PyTree:
        """Compute the mean of the devices' gradients, weighted by their batch counts.

            out = sum over d of batch_counts[d] * grads[d] / sum over d of batch_counts[d]

        With the number of microbatches (examples, tokens) behind each device's mean
        gradient, this is the exact mean gradient over all of them.

        Args:
            grads: Stacked pytree of float arrays, for instance `(loss, grads)`.
            batch_counts: One number per device of the job, as a cadence plans them, at least 0,
                not all 0; the same in all processes. A device with count 0 contributes nothing,
                even if its gradients are NaN.

        Returns:
            The mean, stacked, with equal entries.

        Raises:
            ValueError: If `batch_counts` has the wrong length, an entry below 0, or no entry
                above 0, or if a leaf is not stacked over these devices.
            TypeError: If a count is not a number, or a leaf is not a float array.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import elche_jax as elche
            >>> ddp = elche.DDP(jax.devices()[:2])
            >>> grads = {"w": jnp.array([[1.0], [4.0]])}
            >>> ddp.weighted_all_reduce_gradients(grads, (2, 1))["w"].tolist()
            [[2.0], [2.0]]
        """
        name = "weighted_all_reduce_gradients"
        counts = check.reals(f"DDP.{name}", "batch_counts", batch_counts, low=0)
        self._check_counts(f"DDP.{name}", "batch_counts", counts)
        # scaled by a power of 2, which is exact: products and sums then neither overflow nor vanish
        most = math.frexp(max(counts))[1] + (len(counts) - 1).bit_length()
        wide = jax.dtypes.canonicalize_dtype(np.float64)
        weights = np.array([math.ldexp(count, -most) for count in counts], wide)
        return self._reduce(name, grads, weights)

    def _check_counts(self, where: str, argument: str, counts: Sequence[float]) -> None:
        check.per_device(where, argument, len(counts), self.world_size)
        if not any(counts):
            raise ValueError(check.message(where, argument, "have an entry above 0", counts))

    def _sync(self, name: str, tree: PyTree) -> PyTree:
        self._check(name, tree)
        self.fleet.job.check_all()
        # an optimizer's state may hold no arrays, and pmap needs at least one
        return self._broadcast(tree) if jax.tree.leaves(tree) else tree

    def _reduce(self, name: str, grads: PyTree, weights: np.ndarray) -> PyTree:
        self._check(name, grads)
        self.fleet.job.check_all()
        for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
            if not is_float(leaf):
                raise TypeError(
                    f"DDP.{name}: every leaf of grads must be a float array, but leaf "
                    f"{jax.tree_util.keystr(path) or 'grads'} is {describe(leaf)}."
                )
        return self._mean(grads, self.fleet.put(weights[list(self.ranks)]))

    def _check(
        self, name: str, tree: PyTree, todo: str = "Make it with replicate, or in a pmap."
    ) -> None:
        for path, leaf in named_leaves(f"DDP.{name}", "tree", tree):
            if np.shape(leaf)[:1] != (len(self.ranks),) or not hasattr(leaf, "dtype"):
                raise ValueError(
                    f"DDP.{name}: every leaf must be stacked, with one entry per device "
                    f"({len(self.ranks)}), but leaf {jax.tree_util.keystr(path) or 'tree'} is "
                    f"{describe(leaf)}. {todo}"
                )
            # a deleted array would crash the process in a JAX program
            if isinstance(leaf, StackedArray) and leaf.is_deleted():
                raise ValueError(
                    f"DDP.{name}: every leaf must still be there, but the buffer of leaf "
                    f"{jax.tree_util.keystr(path) or 'tree'} was donated to an earlier call. Use "
                    "what that call returned, or pass it a copy (leaf.copy())."
                )
            check_plain(path, leaf, f"DDP.{name}: tree")
            if isinstance(leaf, np.ndarray):  # arrays on a device are converted already
                check_numbers(f"DDP.{name}", jax.tree_util.keystr(path) or "tree", leaf)


def _check_donated(args: tuple[PyTree, ...], donated: Sequence[int]) -> None:
    """Check that donated arguments are passed, and once: twice would crash the process."""
    if any(at >= len(args) for at in donated):
        rule = f"be positions of fn's arguments, of which {len(args)} were passed"
        raise ValueError(check.message("DDP.map", "donate_argnums", rule, tuple(donated)))
    given = {at: arg for at, arg in enumerate(args) if at in donated}
    times = Counter(map(id, jax.tree.leaves(args))) if given else {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        if isinstance(leaf, StackedArray) and times[id(leaf)] > 1:
            raise ValueError(
                "DDP.map: every leaf of donate_argnums must be an array of its own, got leaf "
                f"{jax.tree_util.keystr(path)}, which is passed twice. Copy it: leaf.copy()."
            )


def _refuse_axes(fleet: Lanes, fn: Callable[..., PyTree], args: PyTree) -> None:
    """Check that a function uses no named axis.

    Mapped over a lane of several devices, it would find one and exchange within the lane only.
    """
    several = "kinds" if fleet.job.one_process else "processes"
    with no_named_axis("DDP.map: fn", (NO_AXIS.format(several), INSTEAD)):
        jax.eval_shape(lambda *own: fn(*own), *one_of(args))  # `fn` itself may have a cached trace


def _as_array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
