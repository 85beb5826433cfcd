"""JAX's thread-local settings, carried over to the threads of a run."""

import contextlib
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

NAMES = (
    "enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "numpy_rank_promotion",
    "default_prng_impl", "threefry_partitionable", "enable_custom_prng", "legacy_prng_key",
    "softmax_custom_jvp", "allow_f16_reductions", "default_device",
)  # fmt: skip
"""The context managers of `jax` that change what a function computes. Those that only watch it
(`log_compiles`, `transfer_guard`, ...) stay in the thread that entered them."""

_VALUES = attrgetter(*[f"jax_{name}" for name in NAMES])  # all values of `jax.config` in one call


def setting(name: str) -> Any:
    """Return the value that a setting of JAX has in this thread.

    Args:
        name: Its name without the prefix `jax_`.

    Examples:
        >>> with jax.disable_jit():
        ...     setting("disable_jit")
        True
    """
    return getattr(jax.config, f"jax_{name}")  # JAX defines these attributes at run time


def settings() -> tuple[Hashable, ...]:
    """Return the values in this thread, in the order of `NAMES`."""
    return _VALUES(jax.config)


def with_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function, to be called in another thread under this thread's settings.

    Examples:
        >>> import threading
        >>> seen = []
        >>> with jax.default_matmul_precision("highest"):
        ...     read = with_settings(lambda: seen.append(jax.config.jax_default_matmul_precision))
        >>> thread = threading.Thread(target=read)
        >>> thread.start(); thread.join()
        >>> seen
        ['highest']
    """
    values = settings()

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for name, value in zip(NAMES, values, strict=True):
                stack.enter_context(getattr(jax, name)(value))
            return fn(*args, **kwargs)

    return called
