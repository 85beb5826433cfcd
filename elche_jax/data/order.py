"""The order of the examples, a function of (seed, epoch) only, and the position in it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields as _fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elche_jax import _check as check

FIELDS = ("epoch", "microbatch", "window")


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the shuffled order of `size` examples for one epoch.

    The order ranks raw 64-bit words of the counter-based generator Philox keyed by
    `(seed, epoch)`. NumPy guarantees these words for all versions, unlike the output of
    samplers such as `permutation`, so the order is the same on any machine and release.

    Args:
        size: Number of examples, at least 0.
        seed: Seed of the run, 0 to 2**64 - 1.
        epoch: Number of the epoch, 0 to 2**64 - 1.

    Returns:
        Permutation of `0 .. size - 1`, shape `(size,)`, int64.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is out of range.

    Examples:
        >>> from elche_jax.data.order import epoch_order
        >>> sorted(epoch_order(5, seed=0, epoch=3).tolist())
        [0, 1, 2, 3, 4]
    """
    # Python integers, as a NumPy integer would lose the bits of the epoch
    size = check.integer("epoch_order", "size", size, low=0)
    seed = check.integer("epoch_order", "seed", seed, low=0, high=2**64 - 1)
    epoch = check.integer("epoch_order", "epoch", epoch, low=0, high=2**64 - 1)
    # Philox takes one key of 128 bits; equal words are ranked by position
    words = np.random.Philox(key=seed | (epoch << 64)).random_raw(size)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True)
class Reading:
    """How data is read: a position in the data is valid only for the same settings.

    Attributes:
        batch_size: Examples per microbatch.
        examples: Number of examples; None for an iterable.
        shuffle: Whether the order is shuffled.
        seed: Seed of the order; None if the order is not shuffled.
        drop_last: Whether examples that do not fill a microbatch are left out.
    """

    batch_size: int
    examples: int | None = None
    shuffle: bool = False
    seed: int | None = None
    drop_last: bool = True

    def difference(self, now: "Reading") -> tuple[str, Any, Any] | None:
        """Return the name of the first differing field, its value here and its value in `now`."""
        others = asdict(now)
        changes = ((k, v, others[k]) for k, v in asdict(self).items() if v != others[k])
        return next(changes, None)


@dataclass(frozen=True)
class Cursor(check.CheckedFields):
    """Position in a run's data, as plain numbers that a checkpoint can hold.

    Attributes:
        epoch: Epoch of the next window, from 0.
        microbatch: Microbatches of this epoch used so far.
        window: Windows since the start of the run.
        reading: How the data was read, to detect that it is read differently; None if
            unknown. Ignored in comparisons.
        first: Checksum of the first microbatch of this epoch of an iterable, to detect that it
            has a different order; None if unknown. Ignored in comparisons.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 0.

    Examples:
        >>> from elche_jax import Cursor
        >>> Cursor.from_dict(Cursor(1, 40, 12).to_dict())
        Cursor(epoch=1, microbatch=40, window=12)
    """

    epoch: int = field(default=0, metadata={"low": 0})
    microbatch: int = field(default=0, metadata={"low": 0})
    window: int = field(default=0, metadata={"low": 0})
    reading: Reading | None = field(default=None, compare=False, repr=False)
    first: int | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the cursor as a dict of numbers, with `"reading"` and `"first"` if known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Cursor":
        """Return the cursor that `to_dict` was called on.

        Raises:
            TypeError: If `fields` is not a dict.
            ValueError: If the keys are not those of a cursor.
        """
        where, rule = "Cursor.from_dict", "be a dict of `to_dict`"
        check.instance(where, "fields", fields, Mapping, rule, brief=True)
        if set(fields) - {"reading", "first"} != set(FIELDS):
            rule = f"have the keys {sorted(FIELDS)}"
            raise ValueError(check.message(where, "fields", rule, sorted(fields)))
        reading = fields.get("reading")
        numbers = {name: value for name, value in fields.items() if name != "reading"}
        # missing in checkpoints of earlier versions
        if reading is None:
            return cls(**numbers)
        known = [field.name for field in _fields(Reading)]
        if not isinstance(reading, Mapping) or set(reading) != set(known):
            got = sorted(reading) if isinstance(reading, Mapping) else repr(reading)
            rule = f"be a dict with the keys {sorted(known)}"
            raise ValueError(check.message(where, "fields['reading']", rule, got))
        return cls(**numbers, reading=Reading(**reading))

    def advance(self, microbatches: int) -> "Cursor":
        """Return the cursor after a window of `microbatches` in the same epoch."""
        return replace(self, microbatch=self.microbatch + microbatches, window=self.window + 1)

    def next_epoch(self) -> "Cursor":
        """Return the cursor at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, microbatch=0, first=None)
