"""Checks of the objects that a training or evaluation step is put together from."""

from typing import Any

PARTS = {
    "optimizer": (("init", "update"), "an optax optimizer"),
    "cadence": (("init", "update"), "a cadence such as ElChe()"),
    "emulate": (("check", "begin", "around", "end", "settle"), "an emulation of elche_jax.lab"),
}


def check_parts(where: str, **parts: Any) -> None:
    """Checks that objects have the methods of what they stand for; all but the optimizer
    may be None.

    Args:
        where: The function the user called.
        **parts: The objects, by the name of the argument: a key of `PARTS`.

    Raises:
        TypeError: One of them is something else.
    """
    for name, part in parts.items():
        methods, expected = PARTS[name]
        fits = all(callable(getattr(part, method, None)) for method in methods)
        missing = part is None and name != "optimizer"
        if isinstance(part, type) or not (fits or missing):
            raise TypeError(f"{where}: {name} must be {expected}, got {part!r}.")
