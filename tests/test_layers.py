"""Who may import whom, read from the source with `ast`.

The check is of the import *graph*: `import elche_jax.cadence` always runs the package's
`__init__`, which loads JAX, so looking at `sys.modules` would show nothing.
"""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "elche_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 500  # lines

# Layer (a folder or file of the package): the layers it may import besides itself.
BELOW = {
    "_check": set(),
    "_exit": set(),
    "cadence": {"_check"},
    "observe": {"_check"},
    "config": {"_check", "cadence"},
    "data": {"_check", "cadence"},
    "engine": {"_check", "cadence", "data"},
    "distributed": {"_check", "cadence", "data", "engine"},
    "averaging": {"_check", "cadence", "data", "engine"},
    "train": {
        "_check",
        "averaging",
        "cadence",
        "config",
        "data",
        "distributed",
        "engine",
        "observe",
    },
    "lab": {"_check", "_exit", "cadence", "data", "distributed", "engine", "observe"},
}
BELOW["checkpoint"] = BELOW["train"] | {"train", "_exit"}
BELOW["trainer"] = BELOW["checkpoint"] | {"checkpoint"}
BELOW["adapters"] = {"_check", "engine", "train"}
BELOW["advice"] = BELOW["train"] | {"train"}
BELOW["cli"] = set(BELOW)
BELOW["__main__"] = {"cli"}
# Packages a file may import when it is loaded. Others only inside a function.
AT_IMPORT = {"jax", "flax", "optax", "numpy"}
# Files that are themselves loaded inside a function, as their classes are of those packages.
LATE = {"checkpoint/handler.py": {"orbax", "tensorstore"}}
NO_JAX = ("cadence", "observe", "_check", "config")
JAX = {"jax", "jaxlib", "flax", "optax"}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree):
    """Dotted names a file imports, wherever in the file it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            if node.module == "elche_jax":
                yield from (f"elche_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def names(tree):
    """Every name and attribute a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")


@pytest.fixture(params=FILES, ids=name_of)
def path(request):
    return request.param


@pytest.fixture
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_imports_run_one_way(path, tree):
    layer = layer_of(path)
    if layer == "__init__":
        allowed = set(BELOW) - {"lab", "cli", "__main__"}
    else:
        assert layer in BELOW, f"{layer} has no rule yet: give it one in BELOW"
        allowed = BELOW[layer] | {layer}
    used = {name.split(".")[1] for name in imports(tree) if name.startswith("elche_jax.")}
    assert used <= allowed


def test_jax_stays_out_of_the_plain_layers(path, tree):
    if layer_of(path) in NO_JAX:
        assert not {name.split(".")[0] for name in imports(tree)} & JAX


def test_loading_needs_only_the_dependencies(path, tree):
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    top = {name.split(".")[0] for node in nodes for name in imports(node)}
    allowed = AT_IMPORT | LATE.get(name_of(path), set()) | {"elche_jax"}
    assert top - set(sys.stdlib_module_names) <= allowed


def test_no_private_jax(tree):
    assert "_src" not in names(tree)


def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


def test_one_file_names_pmap():
    naming = [p for p in FILES if "pmap" in names(ast.parse(p.read_text(encoding="utf-8")))]
    assert list(map(name_of, naming)) == ["engine/mapped.py"]


def test_the_rules_can_fail():
    # source text and names that the rules forbid, to see that they are found
    tree = ast.parse("def f():\n    from elche_jax import lab\n    import jax._src.core\njax.pmap")
    assert set(imports(tree)) == {"elche_jax.lab", "jax._src.core"}
    assert {"_src", "pmap"} <= set(names(tree))
