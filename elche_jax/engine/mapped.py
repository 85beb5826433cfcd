"""Functions mapped over a group of devices; the only file that names `jax.pmap`.

Every array of a group is *stacked*: it has a leading axis with one entry per device, each
entry on its device. With one device the program is a plain `jit` that strips this axis inside;
that is only a reshape, but it may keep XLA from reusing the buffer of a donated argument.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

PyTree = Any
PerDevice = Callable[..., tuple[PyTree, PyTree]]
"""A function of per-device values that returns a stacked and a replicated result."""

logger = logging.getLogger("elche_jax")

AXIS = "devices"
"""Name of the mapped axis, for collectives in the user's own code."""


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL"
        ),
        # without it the dispatch still waited for the whole loop
        "xla_gpu_graph_min_graph_size": 1,
    }
}
"""Compiler options by platform. On a GPU, a loop with a dynamic trip count returns to the host
before every iteration, and the dispatching thread waits for all of them; inside a CUDA graph it
stays on the device (docs/design/0017-on-a-gpu.md has the figures)."""


class Mapped:
    """A function mapped over the devices of one group.

    Args:
        fn: Function of per-device values (without the leading axis) that returns a pair: a
            result to be stacked, and a result that is equal on all devices.
        devices: The devices.
        donate: Positions of arguments whose buffers the program may reuse.
    """

    def __init__(self, fn: PerDevice, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()):
        self._devices, self._fn = tuple(devices), fn
        if len(self._devices) > 1:
            # `pmap` keeps its programs for good unless they are evicted; `jit` lets go of them
            traced = _weakly(self)
            self._jitted: Any = jax.pmap(
                traced,
                axis_name=AXIS,
                devices=self._devices,
                donate_argnums=donate,
                out_axes=(0, None),
            )
            weakref.finalize(self, _forget, traced).atexit = False
        else:
            self._jitted = jax.jit(_on_one(fn), donate_argnums=donate)

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """Call the function; it compiles at the first call with these shapes."""
        return self._jitted(*args)

    def compile(self, *args: PyTree) -> PerDevice:
        """Compile ahead of time for arguments of these shapes and dtypes.

        Args:
            *args: Pytrees of arrays or `jax.ShapeDtypeStruct`, stacked.
        """
        return self.finish(self.lower(*args))

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Trace and lower for such arguments, under the JAX settings of this thread."""
        device = self._devices[0] if len(self._devices) == 1 else None
        return self._jitted.lower(*_shapes(args, device))

    def finish(self, lowered: jax.stages.Lowered) -> PerDevice:
        """Compile a lowered program; may be called in any thread."""
        return _compiled(lowered, self._devices[0].platform)


def _weakly(mapped: Mapped) -> Callable[..., Any]:
    """Wrap the function of a `Mapped` without a reference to it, as `pmap` caches what it gets."""
    owner = weakref.ref(mapped)

    def traced(*args: PyTree) -> tuple[PyTree, PyTree]:
        mapped = owner()
        assert mapped is not None, "traced in a method of it"
        return mapped._fn(*args)  # pyright: ignore[reportPrivateUsage]  # of this file

    return traced


def _forget(traced: Callable[..., Any]) -> None:
    """Evict what `pmap` has compiled for a function from JAX's cache.

    The cache holds functions by weak references, but its values refer back to them, so that
    nothing is ever evicted. After some thousand programs, each with up to a hundred memory
    mappings, the process reaches the kernel's limit on mappings.
    """
    pmap = sys.modules.get("jax._src.pmap")  # the cache has no public name
    cache: Any = getattr(pmap, "_cached_shard_map", None)  # if absent, programs stay
    evict = getattr(cache, "evict_function", None)
    if evict is not None:  # `test_engine_mapped` fails on a JAX without it
        evict(traced)


class PerDeviceJit:
    """A function that each of several devices runs independently, without collectives.

    Args:
        fn: Function of one device's values, as for `Mapped`.
        devices: The devices.
        donate: Positions of arguments whose buffers the program may reuse.
    """

    def __init__(self, fn: PerDevice, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()):
        self._devices = tuple(devices)
        self._jitted = jax.jit(_on_one(fn), donate_argnums=donate)

    def compile(self, rank: int, *args: PyTree) -> PerDevice:
        """Compile for one of the devices, for arguments of these shapes and dtypes.

        Args:
            rank: Rank of the device.
            *args: Pytrees of arrays or `jax.ShapeDtypeStruct`, leaves `(1, ...)`.
        """
        device = self._devices[rank]
        return _compiled(self._jitted.lower(*_shapes(args, device)), device.platform)


def _shapes(tree: PyTree, device: jax.Device | None) -> PyTree:
    """Return shapes and dtypes, on one device or, if None, as the mapping places them."""
    sharding = None if device is None else SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _compiled(lowered: jax.stages.Lowered, platform: str) -> PerDevice:
    """Compile with the options of a platform, or without them if this JAX rejects them."""
    options: Any = OPTIONS.get(platform)
    try:
        return lowered.compile(options and dict(options))
    except jax.errors.JaxRuntimeError as error:
        if options is None or "option" not in str(error):
            raise
        logger.warning(
            "elche: loops on a GPU wait for the host, as JAX rejects compiler options: %s", error
        )
        return lowered.compile()


def _on_one(fn: PerDevice) -> Callable[..., Any]:
    def on_one(*args: PyTree) -> tuple[PyTree, PyTree]:
        own: Any = jax.tree.map(lambda leaf: jax.lax.squeeze(leaf, (0,)), args)
        stacked, shared = fn(*own)
        return jax.tree.map(lambda x: jax.lax.expand_dims(jnp.asarray(x), (0,)), stacked), shared

    return on_one


def stacked_sharding(devices: Sequence[jax.Device]) -> Sharding:
    """Return the sharding of arrays with one entry per device on the leading axis."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))


def stack_shards(
    shards: Sequence[jax.Array], sharding: Sharding, shape: tuple[int, ...]
) -> jax.Array:
    """Assemble a stacked array from per-device arrays `(1, ...)`, without a copy."""
    if len(shards) == 1:
        return shards[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))
