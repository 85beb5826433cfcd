"""Load the function that describes a training step to `elche-jax advise`."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from elche_jax.cli.errors import CommandError, UsageError

REQUIRED = "loss_fn", "optimizer", "params", "data"


def load_target(target: str) -> dict[str, Any]:
    """Call the function that a target names.

    Args:
        target: `module:function` or `path/to/file.py:function`. Modules are also searched
            for in the current folder.

    Returns:
        What the function returned: arguments of `elche.advise`.

    Raises:
        UsageError: The target has neither form.
        CommandError: There is no such module or function, or the function returns something else.
    """
    place, colon, name = target.rpartition(":")
    module_or_file = place.endswith(".py") or all(map(str.isidentifier, place.split(".")))
    if not (colon and module_or_file and name.isidentifier()):
        raise UsageError(
            f"TARGET must be module:function or path/to/file.py:function, got {target!r}"
        )
    module = _load_file(place) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise CommandError(f"{place} must have a function {name}, but has none")
    job = function()
    if not isinstance(job, Mapping):
        kind = type(job).__name__
        raise CommandError(f"{target} must return a dict of arguments of elche.advise, got {kind}")
    missing = [key for key in REQUIRED if key not in job]
    if missing:
        raise CommandError(f"{target} must return a dict with {', '.join(missing)}")
    return dict(job)


def _load_module(name: str) -> ModuleType:
    # as `python -m` does; for an installed command, `sys.path` begins with the command's folder
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise CommandError(f"{name} must be a module, but there is none of this name") from error


def _load_file(place: str) -> ModuleType:
    path = Path(os.path.expanduser(place))
    if not path.is_file():
        raise CommandError(f"{path} must be a file, but there is none")
    # as `python path/to/file.py` does
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # always so for a name ending in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module
