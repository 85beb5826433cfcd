"""Devices, fixtures and checks of the whole suite: `tests` and the package's doctests.

The only file that sets devices: eight virtual CPU devices, one thread each, chosen
before the backend starts.
"""

import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

DEVICES = 8
FLAGS = "--xla_cpu_multi_thread_eigen=false"
# What `make test` asks of JAX, programs that are compiled quickly. Without XLA's emitters of
# fusions and threads of LLVM a program is compiled in a third of the time; later releases have no
# such switch. Shardy takes a fifth of what is left, where nothing is left to partition; later
# releases warn where it is off.
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") and version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["JAX_USE_SHARDY_PARTITIONER"] = "false"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):  # a process of xdist has them already
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()

# Many tests compile the same programs: what one has compiled, the next one reads, in whatever
# process it is.
COMPILED = "JAX_COMPILATION_CACHE_DIR"
if COMPILED not in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="elche-tests-")
    os.environ[COMPILED] = folder.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Noting where in the source each operation comes from takes a tenth of the time of lowering.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import hypothesis  # noqa: E402  # after the settings above, as the next two
import jax  # noqa: E402
import pytest  # noqa: E402

MANY_MAPS = 20_000
GIVE_UP = 60
"""Seconds after which a thread that should end counts as left; a good run waits for none."""


def _gpu_usable() -> bool:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    there = any(importlib.util.find_spec(name) is not None for name in plugins)
    return there and Path("/dev/nvidiactl").exists()


def _twin() -> Path | None:
    """A second CPU client, whose devices are of another kind than those of JAX's own."""
    found = importlib.util.find_spec("xla_plugins")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return next((so for folder in folders for so in Path(folder).glob("xla_cpu_pjrt/*.so")), None)


GPU, TWIN = _gpu_usable(), _twin()
platforms = ["cpu", *["cuda"] * GPU, *["twin"] * (TWIN is not None)]
jax.config.update("jax_platforms", ",".join(platforms))  # the first is the default
jax.config.update("jax_num_cpu_devices", DEVICES)
if TWIN is not None:  # not for the processes that tests start: it takes a while to load
    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"twin:{TWIN}"
    experimental = logging.getLogger("jax._src.xla_bridge")
    experimental.disabled = True  # else its warning is the last line of every run of the suite
    jax.devices()
    experimental.disabled = False
    del os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"]

hypothesis.settings.register_profile("elche", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "quick", parent=hypothesis.settings.get_profile("elche"), max_examples=20
)


def pytest_configure(config: pytest.Config) -> None:
    """Tries fewer examples in `make test`, where a test does not say how many."""
    quick = config.getoption("markexpr") == "not slow"
    hypothesis.settings.load_profile("quick" if quick else "elche")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Has the second of two workers import the files of tests from the last to the first.

    In a new clone pytest rewrites the assertions of each file, for seconds in all, and the next
    process reads what it wrote. Two workers that begin with the same file would both rewrite all.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") != "gw1":
        return
    asked, ignored = (
        [Path(each).resolve() for each in paths or ()]
        for paths in (session.config.args, session.config.getoption("ignore"))
    )
    for file in sorted((Path(__file__).parent / "tests").rglob("test_*.py"), reverse=True):
        if not any(map(file.is_relative_to, asked)) or any(map(file.is_relative_to, ignored)):
            continue
        if str(file.parent) not in sys.path:  # it imports its neighbours by their names
            sys.path.insert(0, str(file.parent))
        with suppress(Exception, pytest.skip.Exception), warnings.catch_warnings():
            warnings.simplefilter("error")  # as pytest will have it, which tells of what is wrong
            importlib.import_module(file.stem)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `further` each slow row of a test of which another row comes before, or is quick."""

    def function(item: pytest.Item) -> str:
        return item.nodeid.split("[")[0]

    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    shown = {function(item) for item in {*items}.difference(slow)}
    for item in slow:
        if function(item) in shown:
            item.add_marker("further")
        shown.add(function(item))


def pytest_collection_finish() -> None:
    """Lets the garbage collector look less often, and never at what has been imported.

    Tracing makes so many objects that collecting would take a tenth of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is not None and not GPU:
        pytest.skip("needs a GPU and JAX's CUDA plugin (pip install 'elche_jax[cuda12]')")


@pytest.fixture
def twins() -> list[jax.Device]:
    """The devices of a second client, of another kind."""
    if TWIN is None:
        pytest.skip("needs a second client, the plugin xla_cpu_pjrt (Linux x86-64 only)")
    return jax.devices("twin")


@pytest.fixture
def mixed(twins: list[jax.Device]) -> list[jax.Device]:
    """Two devices of JAX's own client, and one of another between them."""
    cpus = jax.devices("cpu")
    return [cpus[0], twins[0], cpus[1]]


@pytest.fixture
def sigint() -> Iterator[None]:
    """Ctrl-C interrupts, also in a suite that was started with it ignored (`nohup`)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def devices4() -> list[jax.Device]:
    """The first four devices."""
    return jax.devices()[:4]


@pytest.fixture(autouse=True, scope="module")
def programs_of_files_go() -> Iterator[None]:
    """Lets go of what the tests of the last files have compiled, where it has become much.

    A program for eight devices takes up some thirty maps of the process's memory. Linux
    grants a process 65 530, and the runtime crashes where it gets no more.

    A test that collects garbage looks only at what its file has made, as what JAX keeps of all
    files would take it half a second.
    """
    gc.collect(1)
    gc.freeze()
    yield
    if _maps() > MANY_MAPS:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()


def _maps() -> float:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else float("inf")


@pytest.fixture(autouse=True)
def files_of_examples_go(request: pytest.FixtureRequest) -> None:
    """Examples in docstrings have no `tmp_path`; what they write goes where pytest removes it."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = str(request.getfixturevalue("tmp_path"))
        request.getfixturevalue("monkeypatch").setattr(tempfile, "tempdir", folder)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fails a test that leaves one of the library's threads running."""
    before = set(threading.enumerate())
    yield
    for thread in _left(before):
        if thread.name == "elche-compile":  # it ends by itself, with the program that it compiles
            thread.join(GIVE_UP)
    for generation in (1, 2):  # what closes itself when dropped may be part of a cycle
        if not _left(before):
            return
        gc.collect(generation)  # that of all objects takes a second, and is seldom needed
        for thread in _left(before):
            thread.join(GIVE_UP if generation == 2 else 0.05)
    names = sorted(thread.name for thread in _left(before))
    assert not names, f"threads left running: {', '.join(names)}"


def _left(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("elche-") and thread not in before
    ]
