"""What `import elche_jax` gives, and that it does nothing else."""

import inspect
import sys
from pathlib import Path

import children
import pytest

import elche_jax as elche

ROOT = Path(__file__).parents[1]
PUBLIC = elche.__all__
MODULES = {name for name in PUBLIC if inspect.ismodule(getattr(elche, name))}
NAMES = [name for name in PUBLIC if name not in MODULES]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(elche, name))]

SILENT = """
import logging, os, signal, sys, threading
import elche_jax
assert not {"jax", "numpy"} & set(sys.modules)  # each name is loaded when it is used first
import flax, jax, optax
environment, threads = dict(os.environ), set(threading.enumerate())
handlers, hook = logging.getLogger().handlers[:], sys.excepthook
interrupt = signal.getsignal(signal.SIGINT)
from elche_jax import *
assert dict(os.environ) == environment
assert set(threading.enumerate()) == threads
assert logging.getLogger().handlers == handlers
assert logging.getLogger("elche_jax").handlers == []
assert sys.excepthook is hook and signal.getsignal(signal.SIGINT) is interrupt
assert not {"matplotlib", "sklearn", "elche_jax.lab"} & set(sys.modules)
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend is up
assert len(jax.devices("cpu")) == 3
"""


def test_import_has_no_side_effects(tmp_path):
    done = children.run(sys.executable, "-c", SILENT, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_and_modules_are_found_when_they_are_used():
    assert set(elche.__all__) <= set(dir(elche))
    assert elche.lab.__name__ == "elche_jax.lab"
    for name in ("nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"'elche_jax' has no attribute '{name}'"):
            getattr(elche, name)


def test_the_names_of_the_design():
    fixed = """
        build_train_step TrainStep TrainState DDPConfig Weighted Window WindowReport Cursor
        ElChe Balanced FixedTotal EveryBatch Replay Verdict clamp_counts shard_sizes apportion
        replicate unreplicate check_replicas device_summary DDP weighted_psum
    """
    assert set(fixed.split()) <= set(NAMES)


def test_public_names_are_documented():
    things = {name: getattr(elche, name) for name in NAMES}
    documented = {n: has_docstring(t if callable(t) else type(t)) for n, t in things.items()}
    assert [name for name, whether in documented.items() if not whether] == []


def test_public_members_are_documented():
    undocumented = [
        f"{name}.{member}"
        for name in CLASSES
        for member, value in inspect.getmembers(getattr(elche, name))
        if not member.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and getattr(value, "__module__", "elche_jax").startswith("elche_jax")
        and not inspect.getdoc(value)
    ]
    assert undocumented == []


def test_public_names_are_in_the_reference():
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"::: elche_jax.{name}\n" not in reference] == []


def has_docstring(thing):
    doc = inspect.getdoc(thing) or ""
    made_up = inspect.isclass(thing) and doc.startswith(f"{thing.__name__}(")  # by dataclass
    return bool(doc) and not made_up


def test_version():
    major, minor, patch = elche.__version__.split(".")
    assert all(part.isdigit() for part in (major, minor, patch))


def test_typed():
    assert (Path(elche.__file__).parent / "py.typed").exists()
