"""Names of a package that are imported when they are first used.

The command line starts and watches processes without loading JAX, and it is in this package.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def lazily(
    package: ModuleSpec | None, names: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose imports wait for their use.

    What it offers is written once, as `from module import name as name` for type checkers, and read
    from its source. Its modules are offered, too.

    Args:
        package: The package's `__spec__`.
        names: Its `globals()`, where what was imported is kept.
    """
    assert package is not None and isinstance(package.loader, InspectLoader)
    own = package.name
    source = package.loader.get_source(own) or ""
    homes = {
        alias.asname: node.module or own
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }

    def get(name: str) -> Any:
        home = homes.get(name, own)
        if home != own:
            names[name] = getattr(import_module(home), name)
        elif name.startswith("_") or find_spec(f"{own}.{name}") is None:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        else:
            names[name] = import_module(f"{own}.{name}")
        return names[name]

    public = sorted(homes)
    return get, lambda: sorted({*names, *public}), public
