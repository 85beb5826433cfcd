"""Pytrees by name: what a checkpoint calls the leaves, and whether they are still the same."""

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

PyTree = Any

PLAIN = "biufc"
"""Kinds of dtypes that are written as they are; the bytes of others are."""


@dataclass(frozen=True)
class LeafSpec:
    """What is known of a saved leaf.

    Attributes:
        shape: Its shape; with the devices' axis first where each device has its own.
        dtype: Name of its dtype.
        own: Whether each device has its own.
        digest: Of its bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    own: bool
    digest: str

    @classmethod
    def of(cls, array: np.ndarray, own: bool) -> "LeafSpec":
        """That of an array."""
        return cls(array.shape, array.dtype.name, own, digest(array))


def names_of(tree: PyTree) -> list[str]:
    """Names of the leaves, in their order: `"params/dense/kernel"`.

    Raises:
        ValueError: Two leaves have one name, as under the keys `1` and `"[1]"` of a dict.
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
    # a dot separates names in the files
    return text.replace("%", "%25").replace("/", "%2F").replace(".", "%2E") or "%"


def digest(content: np.ndarray | bytes) -> str:
    """Tells whether bytes are still the same; an array of zero size has one too."""
    data: Any = content
    if isinstance(content, np.ndarray):
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def written(array: np.ndarray) -> np.ndarray:
    """What is written of an array: itself, or its bytes if the dtype is not a standard one."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind in PLAIN and array.dtype.isbuiltin == 1:
        return array
    return array.reshape(-1).view(np.uint8)


def unwritten(array: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """The inverse of `written`."""
    dtype = np.dtype(spec.dtype)
    if array.dtype != dtype:
        array = np.ascontiguousarray(array).view(dtype)
    return array.reshape(spec.shape)
