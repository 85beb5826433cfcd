"""Leaves of a checkpoint: their names, encodings and checksums."""

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

PyTree = Any

PLAIN = "biufc"
"""Kinds of built-in dtypes written as they are; all others are written as bytes."""


@dataclass(frozen=True)
class LeafSpec:
    """Description of a saved leaf, for the manifest.

    Attributes:
        shape: Shape; if `own`, the first axis is over devices.
        dtype: Name of the dtype.
        own: Whether each device has its own value.
        digest: Checksum of the bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    own: bool
    digest: str

    @classmethod
    def of(cls, array: np.ndarray, own: bool) -> "LeafSpec":
        """Describe an array."""
        return cls(array.shape, array.dtype.name, own, digest(array))


def names_of(tree: PyTree) -> list[str]:
    """Return the names of the leaves in order, such as `"params/dense/kernel"`.

    Raises:
        ValueError: Two leaves have the same name, for example under the dict keys `1` and `"[1]"`.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = ["/".join(map(_part, path)) for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"checkpoint: every leaf must have a name of its own, got {twice!r} twice. Rename a "
            "key of the tree."
        )
    return names


def _part(key: Any) -> str:
    if isinstance(key, DictKey):
        text = key.key if isinstance(key.key, str) else f"[{key.key!r}]"
    elif isinstance(key, GetAttrKey):
        text = key.name
    elif isinstance(key, SequenceKey):
        text = str(key.idx)
    else:
        text = jax.tree_util.keystr((key,))
    # dots are quoted because Orbax joins names with them; an empty key would leave a gap in the
    # path, so it becomes a lone "%", which quoting never gives
    return text.replace("%", "%25").replace("/", "%2F").replace(".", "%2E") or "%"


def digest(content: np.ndarray | bytes) -> str:
    """Return the checksum of bytes or of an array, which may be empty."""
    data: Any = content
    if isinstance(content, np.ndarray):
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode(array: np.ndarray) -> np.ndarray:
    """Return the array to write: the array itself, or its bytes if its dtype is not built in."""
    array = np.ascontiguousarray(array)
    # float8_e5m2 of ml_dtypes also has kind "f", but is not built in
    if array.dtype.kind in PLAIN and array.dtype.isbuiltin == 1:
        return array
    return array.reshape(-1).view(np.uint8)


def decode(array: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """Invert `encode`."""
    dtype = np.dtype(spec.dtype)
    if array.dtype != dtype:
        array = np.ascontiguousarray(array).view(dtype)
    return array.reshape(spec.shape)
