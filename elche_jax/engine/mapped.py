"""Functions mapped over a group of devices; the only file that names `jax.pmap`.

Every array of a group is *stacked*: it has a leading axis with one entry per device, each
entry on its device. With one device the program is a plain `jit` that strips this axis inside.
This is only a reshape, but it may keep XLA from reusing the buffer of a donated argument.
`entries.py` keeps the stacked arrays for code inside that can use them.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from elche_jax._log import logger
from elche_jax._turns import TURNS
from elche_jax.engine.entries import traced_entries
from elche_jax.engine.shapes import shapes_of

PyTree = Any
PerDevice = Callable[..., tuple[PyTree, PyTree]]
"""A function of per-device values that returns a stacked and a replicated result."""

AXIS = "devices"
"""Name of the mapped axis, for collectives in the user's own code."""


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_command_buffer": (
            "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL"
        ),
        # without it, the dispatch still waited for the whole loop
        "xla_gpu_graph_min_graph_size": 1,
    }
}
"""Compiler options by platform. On a GPU, a loop with a dynamic trip count returns to the host
before every iteration, and the dispatching thread waits for all iterations; inside a CUDA graph
the loop stays on the device (docs/design/0017-on-a-gpu.md has the figures)."""


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
        self._sharding: Sharding | None = stacked_sharding(self._devices)
        if len(self._devices) > 1 and jax.process_count() > 1:
            # `pmap` takes the shapes of arrays to be global, over all processes
            self._jitted: Any = _over_mesh(fn, self._devices, donate)
        elif len(self._devices) > 1:
            # `pmap` keeps its programs permanently unless they are evicted; `jit` does not
            traced = _weakly(self)
            self._sharding = None  # `pmap` places arguments itself
            self._jitted = jax.pmap(
                traced,
                axis_name=AXIS,
                devices=self._devices,
                donate_argnums=donate,
                out_axes=(0, None),
            )
            weakref.finalize(self, _forget, traced).atexit = False
        else:
            self._jitted = jax.jit(_on_one(fn), donate_argnums=donate)

    def on(self, device: jax.Device) -> "Mapped":
        """Return the function, which must be mapped over one device, on a different device."""
        other = copy(self)
        other._devices, other._sharding = (device,), stacked_sharding([device])
        return other

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
        """Trace and lower for these arguments, under the JAX settings of this thread."""
        return self._jitted.lower(*shapes_of(args, self._sharding))

    def finish(self, lowered: jax.stages.Lowered) -> PerDevice:
        """Compile a lowered program; may be called in any thread."""
        return _compiled(lowered, self._devices[0].platform)


def _weakly(mapped: Mapped) -> Callable[..., Any]:
    """Wrap the function of a `Mapped` without keeping it alive, as `pmap` caches the wrapper."""
    owner = weakref.ref(mapped)

    def traced(*args: PyTree) -> tuple[PyTree, PyTree]:
        mapped = owner()
        assert mapped is not None, "traced in a method of it"
        return mapped._fn(*args)  # pyright: ignore[reportPrivateUsage]  # of this file

    return traced


def _forget(traced: Callable[..., Any]) -> None:
    """Evict what `pmap` has compiled for a function from JAX's cache.

    The cache holds functions by weak references, but its values refer back to them, so nothing is
    ever evicted. After some thousand programs, each with up to a hundred memory mappings, the
    process reaches the kernel's limit on mappings.
    """
    pmap = sys.modules.get("jax._src.pmap")  # the cache has no public name
    cache: Any = getattr(pmap, "_cached_shard_map", None)  # if absent, programs stay
    evict = getattr(cache, "evict_function", None)
    if evict is not None:  # `test_engine_mapped` fails on a JAX without it
        evict(traced)


class MappedAcross:
    """A function mapped over one device of each process, in which the processes exchange data.

    Arguments and results are those of this process's device, leaves `(1, ...)`. Every process must
    call it.

    Args:
        fn: Function of per-device values, as for `Mapped`.
        devices: One device of each process.
    """

    _last: jax.Array | None = None  # the smallest result of the last launch, of any instance

    def __init__(self, fn: PerDevice, devices: Sequence[jax.Device]):
        self._devices, self._sharding = tuple(devices), _mesh_sharding(devices)
        # `pmap` would convert between the arrays of one and of all processes in every call
        self._jitted = _over_mesh(fn, self._devices)

    def __call__(self, *args: PyTree) -> tuple[PyTree, PyTree]:
        """Call the function; it compiles at the first call with these shapes."""
        return self._run(self._jitted, args)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Trace and lower for these arguments, under the JAX settings of this thread."""
        return self._jitted.lower(
            *jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(self._over(x), x.dtype, sharding=self._sharding),
                args,
            )
        )

    def finish(self, lowered: jax.stages.Lowered) -> PerDevice:
        """Compile a lowered program; may be called in any thread."""
        program = _compiled(lowered, self._devices[0].platform)
        return lambda *args: self._run(program, args)

    def _run(self, program: Any, args: PyTree) -> tuple[PyTree, PyTree]:
        TURNS.wait()
        whole = jax.tree.map(
            lambda x: jax.make_array_from_single_device_arrays(self._over(x), self._sharding, [x]),
            args,
        )
        results = jax.tree.map(lambda x: x.addressable_data(0), program(*whole))
        if not TURNS.in_thread_of_windows:  # that thread waits for its results
            MappedAcross._last = min(jax.tree.leaves(results), key=lambda leaf: leaf.nbytes)
        return results

    @staticmethod
    def settle() -> None:
        """Wait for the last launch, as programs without common data may run in any order.

        If it failed, the error is not raised here but where its results are read.
        """
        if MappedAcross._last is not None and not MappedAcross._last.is_deleted():
            # an exchange that fails in gloo may also raise a ValueError
            with suppress(jax.errors.JaxRuntimeError, ValueError):
                MappedAcross._last.block_until_ready()

    def _over(self, own: Any) -> tuple[int, ...]:
        return (len(self._devices), *own.shape[1:])


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


def _over_mesh(fn: PerDevice, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()) -> Any:
    """Map a function over devices with `jit` and `shard_map`, see `Mapped`."""
    mapped = jax.shard_map(
        _on_one(fn),
        mesh=Mesh(np.array(devices), (AXIS,)),
        in_specs=PartitionSpec(AXIS),
        out_specs=(PartitionSpec(AXIS), PartitionSpec()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=donate)


def _on_one(fn: PerDevice) -> Callable[..., Any]:
    def on_one(*args: PyTree) -> tuple[PyTree, PyTree]:
        with traced_entries() as entries:
            own: Any = jax.tree.map(entries.take, args)
            stacked, shared = fn(*own)
            return jax.tree.map(entries.stack, stacked), shared

    return on_one


def stacked_sharding(devices: Sequence[jax.Device]) -> Sharding:
    """Return the sharding of arrays with one entry per device on the leading axis."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return _mesh_sharding(devices)


def _mesh_sharding(devices: Sequence[jax.Device]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS))
