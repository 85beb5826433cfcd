"""Digests, with which processes compare values without sending them."""

import hashlib
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from elche_jax.engine.bits import raw

PyTree = Any

MOST = 400
"""Largest number of characters of a value that a message shows."""


class Described(NamedTuple):
    """A value compared by a digest, with the text that a message can show of it.

    Attributes:
        text: Text to show if the values differ.
        digest: Digest of all that is compared.
    """

    text: str
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "Described":
        """Return a text that is itself all that is compared, and is shown without quotes."""
        return cls(text, text.encode())


def settings_of(value: Any, without: Collection[str] = ()) -> Described:
    """Return what processes can compare of a user's object.

    Plain values and sequences are compared as they are, dataclasses by class and fields, other
    objects by class alone: the `repr` of most holds an address.

    Args:
        value: The object.
        without: Names of fields that are not compared, if it is a dataclass.

    Examples:
        >>> settings_of([2, None, max]).text
        "[2, None, 'builtin_function_or_method']"
    """
    return Described.of(_settings(value, without))


def _settings(value: Any, without: Collection[str] = ()) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        items: list[Any] = list(value)
        return f"[{', '.join(map(_settings, items))}]"
    name = type(value).__name__
    if not is_dataclass(value):
        return repr(name)
    names = [field.name for field in fields(value) if field.name not in without]
    return f"{name}({', '.join(f'{one}={_settings(getattr(value, one))}' for one in names)})"


def shown(value: Any) -> str | None:
    """Return a compared value as text for a message; None if it is a digest or too long.

    Examples:
        >>> shown([2, ["prob"]])
        "[2, ['prob']]"
        >>> shown(b"a digest")
        >>> shown(Described("64 examples", b"a digest"))
        '64 examples'
    """
    if isinstance(value, bytes):
        return None
    text = value.text if isinstance(value, Described) else repr(value)
    return None if len(text) > MOST else text


def difference(told: Mapping[int, str | None], one: int, other: int) -> str:
    """Return the text of a message for how two processes differ.

    Args:
        told: Text for each process, by its index; None, or equal texts, if the difference cannot
            be shown.
        one: Index of a process.
        other: Index of the process it differs from.

    Examples:
        >>> difference({0: "4", 1: "5"}, 1, 0)
        '5 in process 1 and 4 in 0'
        >>> difference({0: "4", 1: None}, 1, 0)
        'different values in processes 1 and 0'
    """
    if None in (told.get(one), told.get(other)) or told[one] == told[other]:
        return f"different values in processes {one} and {other}"
    return f"{told[one]} in process {one} and {told[other]} in {other}"


def number_of(data: bytes) -> int:
    """Return a 24-bit digest of these bytes, a number that is exact in float32."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=3).digest(), "big")


def digest_of(tree: PyTree) -> bytes:
    """Return a digest of the arrays of a pytree, including their names, shapes and dtypes."""
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(raw(leaf))
        found.update(f"{jax.tree_util.keystr(path)}{array.shape}{array.dtype}".encode())
        found.update(array.tobytes())
    return found.digest()


def digests_of(values: Mapping[str, Any]) -> np.ndarray:
    """Return a digest of each value, `(values, 2)`."""
    return np.stack([_digest(value) for value in values.values()])


def digest_of_host(device: jax.Device) -> np.ndarray:
    """Return a digest of what determines the bits that a CPU device of this host computes."""
    own = device.client.platform_version, jax.__version__, os.environ.get("XLA_FLAGS")
    return _digest((*own, os.cpu_count(), _processor()))


def _processor() -> str:
    """Return the model and features of the processor on Linux; elsewhere its name."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = "model name", "flags", "Features", "CPU part"
    return "".join(next((line for line in told if line.startswith(name)), "") for name in names)


def _digest(value: Any) -> np.ndarray:
    """Return a 64-bit digest as two 32-bit integers: JAX has no larger ones by default."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)
