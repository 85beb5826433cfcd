"""Placing the data of a window on the devices.

Streamed data is transferred without padding: a device's share consists of pieces whose
lengths are the binary digits of its count (`data.split`). If a device has no piece of some
length, the program gets a block of zeros that was placed once and is never read. Every device
holds a full copy of resident data, and only example numbers are transferred.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import dtypes

from elche_jax import _check as check
from elche_jax._settings import setting
from elche_jax.data.reader import IndexedReader, Partial, Reader
from elche_jax.data.source import ArraySource, Source
from elche_jax.data.split import Range, piece_lengths
from elche_jax.engine.bits import check_integers
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.lane import Fleet

PyTree = Any
Placement = Literal["resident", "stream"]

TOGETHER = 4 << 20
"""Largest size, in bytes over all devices, at which a piece that all of them have is read from
arrays and transferred for all at once: the cost of small arrays is their number, not their bytes.
From about ten megabytes on, one block of memory for all devices takes longer than one for each, as
the system allocates it anew."""

RESIDENT_SHARE = 0.25
"""Largest share of the free memory that `placement="auto"` uses for the data."""

RESIDENT_EXAMPLES = np.iinfo(np.int32).max
"""Largest number of examples in resident data, whose numbers programs get as int32."""


def choose_placement(placement: str, source: Source, free: int | None) -> Placement:
    """Return where the data is kept.

    Args:
        placement: `"resident"`, `"stream"`, or `"auto"`: resident if the source is a pytree of
            arrays, of at most `RESIDENT_EXAMPLES`, that fits into a quarter of the free memory.
        source: The data.
        free: Free bytes for a copy on the fullest device; None if unknown, in which case
            `"auto"` streams.

    Raises:
        ValueError: If `placement` is none of these, or `"resident"` for data that is not a
            pytree of arrays, or has more than `RESIDENT_EXAMPLES`.
    """
    check.one_of("data", "placement", placement, ("auto", "resident", "stream"))
    if placement == "stream":
        return "stream"
    if isinstance(source, ArraySource):
        if placement == "resident":
            what, todo = "the number of examples", "Use placement='stream'."
            rule = f"be at most {RESIDENT_EXAMPLES} with placement='resident'"
            if source.size > RESIDENT_EXAMPLES:
                raise ValueError(check.message("data", what, rule, source.size, todo))
            return "resident"
        fits = free is not None and source.nbytes <= RESIDENT_SHARE * free
        return "resident" if fits and source.size <= RESIDENT_EXAMPLES else "stream"
    if placement == "auto":
        return "stream"
    raise ValueError(
        "data: placement='resident' needs data that is a pytree of arrays, got "
        f"a {type(source).__name__}. Use placement='stream'."
    )


def placing(fleet: Fleet) -> AbstractContextManager[None]:
    """Return a context for program calls in which a transfer guard lets their data pass.

    With several devices the data is placed explicitly, which a guard against implicit transfers
    allows. With one device the call itself places it, see `Placer`, which is intended, too.

    Args:
        fleet: The devices.
    """
    if fleet.alone and setting("transfer_guard_host_to_device") in ("log", "disallow"):
        return jax.transfer_guard_host_to_device("allow")
    return nullcontext()


class Placer:
    """Places the data of program calls on the devices.

    With one device, arrays stay on the host and are transferred when the program is called:
    there is no thread that could place them ahead, and a separate transfer takes longer than
    a small step.

    Args:
        fleet: The devices.
    """

    def __init__(self, fleet: Fleet):
        self._fleet, self._devices = fleet, fleet.devices
        self._single = fleet.alone
        self._blanks: dict[tuple[Any, ...], _Blank] = {}

    def pieces(
        self, reader: Reader, first: int, ranges: Sequence[Range], capacity: int, spec: PyTree,
        call_args: np.ndarray,
    ) -> tuple[Pieces, CallArgs]:  # fmt: skip
        """Place the pieces of one call, longest first, and its arguments.

        Args:
            reader: Reader of the epoch.
            first: Number of the window's first microbatch in the epoch.
            ranges: Microbatches of each device, counted within the window.
            capacity: Capacity of the program.
            spec: Shapes and dtypes of one microbatch.
            call_args: What `call_args` returned.

        Returns:
            The pieces, one for each length, leaves `(world_size, length, batch, ...)`; and the
            arguments.

        Raises:
            ValueError: If a microbatch does not match `spec`.
        """
        shares, lengths = [share.pieces() for share in ranges], piece_lengths(capacity)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))
        together: dict[int, PyTree] = {}  # by length: rows of all devices
        apart: dict[tuple[int, int], PyTree] = {}  # by length and rank: one row
        for length in lengths if reader.of_arrays and not self._single else ():
            starts = [first + own[length] for own in shares if length in own]
            if len(starts) == len(ranges) and size * length * len(starts) <= TOGETHER:
                together[length] = _read(reader, starts, length, spec)
        for rank, own in enumerate(shares):
            for length, start in own.items():
                if length not in together:
                    apart[length, rank] = _read(reader, [first + start], length, spec)
        placed, args = self.rows((together, call_args))
        if apart:
            placed = placed | self._apart(apart, spec)
        found = tuple(
            placed[length]
            if length in placed
            else jax.tree.map(lambda leaf, n=length: self._blank(n, leaf).whole, spec)
            for length in lengths
        )
        return Pieces(found), CallArgs(args)

    def index(
        self, reader: IndexedReader, first: int, ranges: Sequence[Range], capacity: int,
        call_args: np.ndarray,
    ) -> tuple[Any, CallArgs]:  # fmt: skip
        """Place the example numbers of one call, and its arguments, see `pieces`.

        Returns:
            The numbers, `(world_size, capacity, batch)`, int32; and the arguments.
        """
        width = reader.index(first, 0).shape[1]
        # 0 where a device has less work: any example will do, as it is not read
        numbers = np.zeros((len(ranges), capacity, width), np.int32)
        for rank, share in enumerate(ranges):
            numbers[rank, : share.count] = reader.index(first + share.start, share.count)
        placed, args = self.rows((numbers, call_args))
        return placed, CallArgs(args)

    def call_args(
        self,
        ranges: Sequence[Range],
        first: int,
        fresh: bool,
        partial: Partial | None,
        totals: tuple[int, int],
    ) -> np.ndarray:
        """Return the call's arguments for each device, `(world_size, 10)`, int32, on the host.

        Args:
            ranges: Microbatches of each device, counted within the window.
            first: Number of the window's first microbatch in the epoch.
            fresh: Whether this is the first call of the window.
            partial: The microbatch of the epoch with fewer valid examples, if any.
            totals: Microbatches and valid examples of the window.
        """
        place, valid = -1, 0  # no microbatch has place -1, so none is masked
        if partial is not None:
            place, valid = partial.microbatch - first, partial.valid
        numbers = [
            (r.count, r.start, int(fresh), place, valid, *totals, rank, 0, r.count)
            for rank, r in zip(self._fleet.job.ranks, ranges, strict=True)
        ]
        return np.array(numbers, np.int32)

    def rows(self, arrays: PyTree) -> Any:
        """Place row `d` of host arrays on device `d`."""
        return arrays if self._single else self._fleet.put(arrays)

    def _apart(self, rows: dict[tuple[int, int], PyTree], spec: PyTree) -> dict[int, PyTree]:
        """Place rows by their length and rank, all in one transfer; other devices get zeros."""
        if self._single:  # the program expects the dtypes that `device_put` would give
            return {
                length: jax.tree.map(
                    lambda x: x.astype(dtypes.canonicalize_dtype(x.dtype), copy=False), row
                )
                for (length, _), row in rows.items()
            }
        leaves, structure = jax.tree.flatten(spec)
        shards = {
            length: [list(self._blank(length, leaf).shards) for leaf in leaves]
            for length in dict.fromkeys(length for length, _ in rows)
        }
        devices = [self._devices[rank] for _, rank in rows]
        placed = jax.device_put([*rows.values()], devices)
        for (length, rank), row in zip(rows, placed, strict=True):
            for shard, leaf in zip(shards[length], jax.tree.leaves(row), strict=True):
                shard[rank] = leaf
        return {
            length: structure.unflatten(map(self._fleet.stack, own))
            for length, own in shards.items()
        }

    def _blank(self, length: int, leaf: jax.ShapeDtypeStruct) -> "_Blank":
        shape, dtype = (length, *leaf.shape), np.dtype(leaf.dtype)
        if (shape, dtype) not in self._blanks:
            shards: list[Any] = [np.zeros((1, *shape), dtype)] * len(self._devices)
            if not self._single:
                shards = jax.device_put(shards, list(self._devices))
            whole = shards[0] if self._single else self._fleet.stack(shards)
            self._blanks[shape, dtype] = _Blank(shards, whole)
        return self._blanks[shape, dtype]


class _Blank(NamedTuple):
    """Blocks of zeros, one per device, that no program reads: as a list, and stacked."""

    shards: list[Any]
    whole: Any


def _read(reader: Reader, starts: Sequence[int], length: int, spec: PyTree) -> PyTree:
    """Read blocks, leaves `(starts, length, batch, ...)`, and check that they match `spec`."""
    blocks = reader.blocks(starts, length)
    _check_like(spec, blocks, starts[0])
    return blocks


def _check_like(spec: PyTree, block: PyTree, first: int) -> None:
    """Raise `ValueError` if a block, whose first microbatch is `first`, does not match `spec`."""
    want, got = jax.tree.structure(spec), jax.tree.structure(block)
    if got != want:
        raise ValueError(
            f"data: every microbatch must have the structure of the first one "
            f"({want}), but microbatch {first} has {got}."
        )
    for like, leaf in zip(jax.tree.leaves(spec), jax.tree.leaves(block), strict=True):
        dtype = dtypes.canonicalize_dtype(leaf.dtype)
        if leaf.shape[2:] != like.shape or dtype != like.dtype:
            raise ValueError(
                f"data: every microbatch must have the shapes and dtypes of the "
                f"first one ({like.shape}, {like.dtype}), but microbatch {first} has "
                f"{leaf.shape[2:]}, {dtype}. Pad them, or call windows for each shape."
            )
        check_fits(leaf)


def check_fits(leaf: Any) -> None:
    """Raise `ValueError` if integers of data would be truncated, see `check_integers`."""
    check_integers("data", "integers", "", leaf, "Encode them, or switch jax_enable_x64 on.")
