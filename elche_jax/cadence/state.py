"""State: what a cadence knows between two windows, as plain numbers that can be stored."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, cast

import numpy as np

from elche_jax import _check as check


def _to_lists(where: str, name: str, value: Any) -> Any:
    if isinstance(value, np.generic):  # json rejects NumPy's numbers
        return value.item()
    if name == "counts" and isinstance(value, np.ndarray | list):  # counts may be any integers
        value = tuple(np.asarray(value).tolist())
    if isinstance(value, tuple):
        return [_to_lists(where, name, entry) for entry in cast(tuple[Any, ...], value)]
    if value is None or isinstance(value, str | int | float):
        return value
    rule = "be a number, a string, None or a tuple of these"
    todo = "A checkpoint can keep nothing else; convert a list or an array with tuple(...)."
    raise TypeError(check.message(where, name, rule, check.describe(value), todo))


def _to_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_to_tuples(entry) for entry in cast(Sequence[Any], value))
    return value


@dataclass(frozen=True)
class State:
    """Base of all states: frozen fields of plain numbers that can be stored as JSON.

    For every state ``s`` of a class ``S``,
    ``S.from_dict(json.loads(json.dumps(s.to_dict()))) == s`` holds exactly.

    A field with a default and a bound ``low`` in its ``metadata`` was added later. `from_dict`
    checks it, and states saved before that get its default.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that ``json.dumps`` accepts.

        Returns:
            Numbers, strings, ``None`` and lists of them, one key per field.

        Raises:
            TypeError: If a field other than ``counts`` is anything but a number, a string,
                ``None`` or a tuple of these, as an array would come back as a tuple.

        Examples:
            >>> from elche_jax.cadence import EveryBatch
            >>> EveryBatch().init(2).to_dict()
            {'counts': [1, 1]}
        """
        where = f"{type(self).__name__}.to_dict"
        names = [field.name for field in fields(self)]
        return {name: _to_lists(where, name, getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the state that ``to_dict`` was called on.

        Args:
            values: The return value of ``to_dict``, possibly read back from JSON.

        Returns:
            A state equal to the original.

        Raises:
            TypeError: If ``values`` is not a dict, or a field with bounds is of the wrong type.
            ValueError: If the keys are not those of this class, as in the state of a different
                cadence, or if a field with bounds is out of range or for a different number of
                devices.

        Examples:
            >>> from elche_jax.cadence import EveryBatch
            >>> state = EveryBatch().init(2)
            >>> type(state).from_dict({"counts": [1, 1]}) == state
            True
        """
        where = f"{cls.__name__}.from_dict"
        check.instance(where, "values", values, Mapping, "be a dict of `to_dict`", brief=True)
        added = [
            field
            for field in fields(cls)
            if "low" in field.metadata and field.default is not MISSING
        ]
        values = {field.name: field.default for field in added} | dict(values)
        names = [field.name for field in fields(cls)]
        if sorted(values) != sorted(names):
            rule = f"have the keys {sorted(names)}"
            todo = "Resume with the cadence that wrote the state."
            raise ValueError(check.message(where, "values", rule, sorted(values), todo))
        found = {name: _to_tuples(values[name]) for name in names}
        for field in added:
            value = check.rule_of(field)(where, field.name, found[field.name], **field.metadata)
            if isinstance(value, tuple) and value:
                # the first sequence of a state has one entry per device
                size = next(len(own) for own in found.values() if isinstance(own, tuple))
                check.per_device(where, field.name, len(value), size)
            found[field.name] = value
        return cls(**found)
