"""Speed of matrix multiplication and memory access per device, alone and together."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp

SMALLEST, LARGEST = 512, 8192
LONG_ENOUGH = 2e-3
"""Shortest call, in seconds, whose dispatch time is negligible."""

ARRAY_BYTES = {"cpu": 2**26}
OTHER_BYTES = 2**29
"""Larger than any cache."""


@dataclass(frozen=True)
class _Work:
    """A call that keeps a device busy, and the amount of work it does."""

    call: Callable[[], object]
    amount: float  # billions of operations or bytes


def probe(devices: Sequence[jax.Device], seconds: float) -> list[dict[str, float]]:
    """Measure every device alone, then all at once.

    Args:
        devices: The devices.
        seconds: Total duration, excluding compilation. Each call is made at least once,
            however long it takes.

    Returns:
        For each device `gflops_alone` and `gflops_together` (1e9 float32 operations per
        second in a matrix multiplication), `gb_per_s_alone` and `gb_per_s_together` (1e9
        bytes read and written per second).

    Examples:
        >>> import jax
        >>> from elche_jax.cli.probe import probe
        >>> [rates] = probe(jax.devices()[:1], seconds=0.01)
        >>> sorted(rates)
        ['gb_per_s_alone', 'gb_per_s_together', 'gflops_alone', 'gflops_together']
    """
    size = _matrix_size(devices[0])  # one size for all, so that the rates are comparable
    kinds = {
        "gflops": [_multiply(device, size) for device in devices],
        "gb_per_s": [_add(device) for device in devices],
    }
    each = seconds / (2 * len(devices) + 2)
    found: list[dict[str, float]] = [{} for _ in devices]
    for name, works in kinds.items():
        alone = [_rates([work], each)[0] for work in works]
        for rates, solo, team in zip(found, alone, _rates(works, each), strict=True):
            rates |= {f"{name}_alone": solo, f"{name}_together": team}
    return found


def _matrix_size(device: jax.Device) -> int:
    """Double the matrix size until a multiplication takes long enough to be timed."""
    size = SMALLEST
    while size < LARGEST:
        work = _multiply(device, size)
        begun = time.perf_counter()
        work.call()
        if time.perf_counter() - begun >= LONG_ENOUGH:
            break
        size *= 2
    return size


def _multiply(device: jax.Device, size: int) -> _Work:
    matrix = jnp.full((size, size), 1 / size, jnp.float32)
    return _work(device, lambda x: x @ x, matrix, 2e-9 * size**3)


def _add(device: jax.Device) -> _Work:
    size = ARRAY_BYTES.get(device.platform, OTHER_BYTES)
    return _work(device, lambda x: x + 1, jnp.zeros(size // 4, jnp.float32), 2e-9 * size)


def _work(
    device: jax.Device,
    function: Callable[[jax.Array], jax.Array],
    array: jax.Array,
    amount: float,
) -> _Work:
    """Return work that is ready to be timed: data on the device, function compiled."""
    placed, compiled = jax.device_put(array, device), jax.jit(function)

    def call() -> object:
        return compiled(placed).block_until_ready()

    call()  # compiles
    return _Work(call, amount)


def _rates(works: Sequence[_Work], seconds: float) -> list[float]:
    """Return the amount per second of each piece of work, with all running at once."""
    ready = threading.Barrier(len(works))

    def repeat(work: _Work) -> float:
        ready.wait()
        begun, calls = time.perf_counter(), 0
        while True:
            work.call()
            calls += 1
            taken = time.perf_counter() - begun
            if taken >= seconds:
                return calls * work.amount / taken

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(repeat, works))
