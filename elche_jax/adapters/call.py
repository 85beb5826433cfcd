"""Arguments of a module: inputs from a microbatch, and the switch between training and eval."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from elche_jax import _check as check
from elche_jax.engine.loss import describe

Inputs = str | Callable[[Any], Any]

KEYS = ("x", "inputs", "image")
"""Batch entries tried as inputs, in this order."""

SWITCHES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Arguments that select training, with the value that does; its negation selects evaluation."""


class Call:
    """How to call a module: inferred from its signature unless specified.

    Args:
        where: The function that the user called, for error messages.
        module: The module.
        inputs: Key of the inputs, or a function of the batch; None to infer it, see `from_linen`.
        train_kwargs: Keyword arguments in training; None for the switch in the signature.
        eval_kwargs: Keyword arguments in evaluation; None for the negated switch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The signature has several training switches.
    """

    def __init__(self, where: str, module: Any, inputs: Any, train_kwargs: Any, eval_kwargs: Any):
        rule = "be a key of the batch or a function of it"
        check.instance(where, "inputs", inputs, str | Callable | None, rule)
        for name, kwargs in (("train_kwargs", train_kwargs), ("eval_kwargs", eval_kwargs)):
            check.instance(where, name, kwargs, Mapping | None, "be a dict of keyword arguments")
        if train_kwargs is None or eval_kwargs is None:
            on = _switch(where, type(module))
            off = {name: not value for name, value in on.items()}
            train_kwargs = on if train_kwargs is None else train_kwargs
            eval_kwargs = off if eval_kwargs is None else eval_kwargs
        self.where, self.inputs = where, inputs
        self._kwargs = {True: dict(train_kwargs), False: dict(eval_kwargs)}

    def arguments(self, batch: Any, train: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for a microbatch."""
        found = self._inputs(batch)
        switch = self._kwargs[train]
        if isinstance(found, Mapping):
            return (), {**found, **switch}
        # a copy, as the caller may add `rngs` to it
        return (found if isinstance(found, tuple) else (found,)), dict(switch)

    def _inputs(self, batch: Any) -> Any:
        if callable(self.inputs):
            return self.inputs(batch)
        if isinstance(batch, Mapping):
            keys = KEYS if self.inputs is None else (self.inputs,)
            key = next((key for key in keys if key in batch), None)
            if key is None:
                rule = f"have an entry {' or '.join(map(repr, keys))}"
                todo = "Name it with inputs=, a key or a function of the batch."
                got = f"entries {', '.join(map(repr, batch)) or 'none'}"
                raise ValueError(check.message(self.where, "batch", rule, got, todo))
            return (batch[key],)
        if isinstance(batch, tuple | list) and batch and self.inputs is None:
            return (batch[0],)
        if hasattr(batch, "shape"):  # the inputs themselves, e.g. in predict
            return (batch,)
        rule = "be a dict" + ("" if self.inputs else ", a tuple with the inputs first, or an array")
        todo = "Pass inputs=, a function of the batch."
        raise TypeError(check.message(self.where, "batch", rule, describe(batch), todo))


def _switch(where: str, kind: Any) -> dict[str, bool]:
    """Return the training switch in the signature of a module class; empty if it has none."""
    names = inspect.signature(kind.__call__).parameters
    found = {name: value for name, value in SWITCHES.items() if name in names}
    if len(found) > 1:
        rule = f"have one argument that switches to training ({', '.join(SWITCHES)})"
        todo = "Pass train_kwargs= and eval_kwargs=."
        got = f"{kind.__name__} with {' and '.join(found)}"
        raise ValueError(check.message(where, "module", rule, got, todo))
    return found
