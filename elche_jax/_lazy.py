"""Names of a package that are imported on first use.

The command line is in this package, but starts and watches processes without loading JAX.
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
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports names on first use.

    The package lists its names once, as `from module import name as name` for type checkers, and
    this reads them from its source. Its modules can be used in the same way.

    Args:
        package: The package's `__spec__`.
        names: Its `globals()`, which keep what was imported.
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
