"""Who may import whom, read from the source with `ast`.

The check is of the import *graph*, so that imports inside of functions count, too.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "elche_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 500  # lines

# Layer (a folder or file of the package): the layers it may import besides itself.
BELOW = {
    "_check": set(),
    "_exit": set(),
    "_lazy": set(),
    "_log": set(),
    "_coordinator": set(),
    "_leaving": {"_coordinator"},
    "_neighbours": {"_coordinator", "_leaving", "_log"},
    "_progress": {"_log"},
    "_settings": set(),
    "_threads": {"_settings", "_waiting"},
    "_turns": {"_log"},
    "_waiting": set(),
    "cadence": {"_check"},
    "launch": {"_progress"},
    "_processes": {
        "_coordinator",
        "_exit",
        "_leaving",
        "_log",
        "_neighbours",
        "_progress",
        "_turns",
        "_waiting",
    },
    "distributed": {"_check", "_exit", "_log", "_processes", "_progress", "launch"},
    "observe": {"_check", "_log", "_waiting", "cadence"},
    "config": {"_check", "averaging", "cadence"},
    "data": {"_check", "_log", "_settings", "_threads", "cadence"},
    "averaging": {"_check"},
    "engine": {
        "_check",
        "_log",
        "_processes",
        "_progress",
        "_settings",
        "_threads",
        "_turns",
        "_waiting",
        "averaging",
        "cadence",
        "data",
    },
    "train": {
        "_check",
        "_log",
        "_processes",
        "_progress",
        "_settings",
        "_turns",
        "_waiting",
        "averaging",
        "cadence",
        "config",
        "data",
        "engine",
        "observe",
    },
    "lab": {"_check", "_exit", "_log", "_waiting", "cadence", "data", "engine", "observe"},
}
BELOW["checkpoint"] = BELOW["train"] | {"train", "_exit", "_threads"}
BELOW["trainer"] = BELOW["checkpoint"] | {"checkpoint"}
BELOW["adapters"] = {"_check", "engine", "train"}
BELOW["advice"] = BELOW["train"] | {"train"}
BELOW["cli"] = set(BELOW)
BELOW["__main__"] = {"cli"}
# Packages a file may import when it is loaded. Others only inside a function.
AT_IMPORT = {"jax", "flax", "optax", "numpy"}
# Files that are themselves loaded inside a function, as their classes are of those packages.
LATE = {"checkpoint/handler.py": {"orbax", "tensorstore"}}
# What is private to others and used: where, what, and why.
PRIVATE = {
    ("engine/mapped.py", "jax._src.pmap"): "nothing public lets go of what `jax.pmap` keeps",
    ("engine/mapped.py", "_cached_shard_map"): "what it keeps; without it programs stay",
    ("_coordinator.py", "jax._src.distributed"): "nothing public tells others why a process leaves",
    ("_exit.py", "_register_atexit"): "`atexit` is later than the end of pools of threads",
}
NO_JAX = (
    "__init__",
    "_lazy",
    "_log",
    "_progress",
    "_waiting",
    "launch",
    "cadence",
    "observe",
    "_check",
    "config",
)
JAX = {"jax", "jaxlib", "flax", "optax"}


@cache
def trees():
    """The source of each file; parsed by the worker that looks at it."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def found(wrong):
    """The files in which something was found."""
    return {name: what for name, what in wrong.items() if what}


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


def test_imports_run_one_way():
    wrong = {}
    for path, tree in trees().items():
        layer = layer_of(path)
        if layer == "__init__":
            allowed = set(BELOW) - {"lab", "cli", "__main__"}
        else:
            assert layer in BELOW, f"{name_of(path)}: give {layer} a rule in BELOW"
            allowed = BELOW[layer] | {layer}
        used = {name.split(".")[1] for name in imports(tree) if name.startswith("elche_jax.")}
        wrong[name_of(path)] = used - allowed
    assert found(wrong) == {}


def test_jax_stays_out_of_the_plain_layers():
    plain = {path: tree for path, tree in trees().items() if layer_of(path) in NO_JAX}
    assert {layer_of(path) for path in plain} == set(NO_JAX)
    top = {name_of(p): {name.split(".")[0] for name in imports(t)} for p, t in plain.items()}
    assert found({name: packages & JAX for name, packages in top.items()}) == {}


def test_loading_needs_only_the_dependencies():
    wrong, allowed = {}, AT_IMPORT | {"elche_jax"} | set(sys.stdlib_module_names)
    for path, tree in trees().items():
        nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        top = {name.split(".")[0] for node in nodes for name in imports(node)}
        wrong[name_of(path)] = top - allowed - LATE.get(name_of(path), set())
    assert found(wrong) == {}


def private(tree):
    """What a file takes that is private to another package: by name, or by a string."""
    yield from (name for name in names(tree) if name == "_src")
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"(\w+\.)*_src(\.\w+)*", text):
            yield text
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and re.match(r"_[^_]", name.value):
                yield name.value


def test_what_is_private_is_in_one_list():
    used = {(name_of(path), name) for path, tree in trees().items() for name in private(tree)}
    assert used == set(PRIVATE)


# Where it is asked whether there is one device: which cadence and which exchange are chosen.
ONE_DEVICE = {
    ("config.py", "cadence_for"): "without others to wait for every microbatch is a step",
    ("train/averaging.py", "cadence_of"): "an outer optimizer needs windows to step after",
    ("train/options.py", "host"): "there is nobody to exchange with",
    ("train/options.py", "late"): "nobody is waited for",
    ("train/build.py", "_warn_of_knobs"): "a knob without effect is named",
    ("train/live_scheduler.py", "knows"): "its cadence hears of no times",
    ("train/feed.py", "__init__"): "one microbatch needs no loop, and windows seldom grow",
    ("train/sweep.py", "__init__"): "there are no shares to balance",
    ("train/runners.py", "exchanged_bytes"): "nothing is exchanged",
    ("train/runners.py", "rule"): "nothing is exchanged",
    ("train/outside.py", "check_mesh"): "it is the same in any mesh",
}


def functions(tree):
    """Every function with its name, the innermost one of a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, list(ast.walk(node))


def asks_for_one(node):
    """Whether a number of devices is compared with 1, or a lane is asked for it."""
    if isinstance(node, ast.Attribute):
        return node.attr == "alone"
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    text = " ".join(map(ast.unparse, sides))
    one = any(isinstance(side, ast.Constant) and side.value == 1 for side in sides)
    return one and re.search(r"world_size|\bsize\b|len\(\S*(devices|chosen|counts)\)", text)


def test_above_a_lane_nobody_asks_for_one_device():
    above = {path: tree for path, tree in trees().items() if layer_of(path) in ("train", "config")}
    found = {
        (name_of(path), function)
        for path, tree in above.items()
        for function, nodes in functions(tree)
        if any(map(asks_for_one, nodes))
    }
    assert found == set(ONE_DEVICE)


def test_files_stay_short():
    lines = {name_of(path): len(path.read_text("utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_one_file_names_pmap():
    naming = [name_of(path) for path, tree in trees().items() if "pmap" in names(tree)]
    assert naming == ["engine/mapped.py"]


def test_one_file_starts_the_processes_of_the_suite():
    """The one that ends them, whatever happens."""
    starting, used = {"subprocess", "multiprocessing", "Popen", "posix_spawn"}, {}
    for path in Path(__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        if any(word in text for word in starting):
            used[path.name] = starting & set(names(ast.parse(text)))
    assert found(used) == {"children.py": {"subprocess", "Popen"}}


def test_the_rules_can_fail():
    # source text and names that the rules forbid, to see that they are found
    tree = ast.parse("def f():\n    from elche_jax import lab\n    import jax._src.core\njax.pmap")
    assert set(imports(tree)) == {"elche_jax.lab", "jax._src.core"}
    assert {"_src", "pmap"} <= set(names(tree))
    tree = ast.parse("sys.modules.get('jax._src.x')\ngetattr(threading, '_y')\nimport jax._src")
    assert set(private(tree)) == {"jax._src.x", "_y", "_src"}
