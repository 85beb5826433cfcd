"""Who notices that another process of this host has ended, with real processes."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import children
import jax
import pytest
from waits import eventually

from elche_jax import _coordinator, _neighbours
from elche_jax._neighbours import ENDED_KEY, WHERE, Neighbours, Place, _stat

HERE = Place.here()
pytestmark = pytest.mark.skipif(HERE is None, reason="needs Linux, which shows other processes")


class Store:
    """What is told by keys, in place of JAX's coordinator."""

    def __init__(self):
        self.told = {}

    def key_value_set(self, key, text, allow_overwrite):
        if key in self.told and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.told[key] = text

    def key_value_try_get(self, key):
        if key not in self.told:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.told[key]

    def key_value_dir_get(self, folder):
        return [(key, text) for key, text in self.told.items() if key.startswith(f"{folder}/")]


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(_coordinator, "client", lambda: made)
    return made


@pytest.fixture
def disconnected(monkeypatch, store):
    """Whom the coordinator was told of, and whether that was said to the others before."""
    seen = []

    def disconnect(process):
        seen.append((process, ENDED_KEY.format(process) in store.told))

    monkeypatch.setattr(_coordinator, "disconnect", disconnect)
    return seen


@pytest.fixture
def start(store):
    """Starts a process that says where it is under a number; all are killed at the end."""
    with ExitStack() as stack:

        def started(index):
            waiting = children.started(sys.executable, "-c", "input()", stdin=children.PIPE)
            child = stack.enter_context(waiting)
            place = Place(HERE.host, child.pid, _stat(child.pid)[1])
            store.told[f"{WHERE}/{index}"] = json.dumps(place)
            return child

        yield started


@pytest.fixture
def watch():
    """Watches others, and waits until it is known where so many of them are."""
    begun = []

    def watching(others, found):
        begun.append(Neighbours(HERE, others))
        eventually(lambda: len(begun[-1]._places) == found)
        return begun[-1]

    yield watching
    for one in begun:
        one.close()
        assert not one._thread.is_alive()


def test_each_end_is_told_once_by_whoever_sees_it_first(start, watch, disconnected):
    others = {index: start(index) for index in (2, 3, 4)}
    watching = [watch(others, 3), watch(others, 3)]
    others[3].kill()
    eventually(lambda: all(3 not in one._places for one in watching))
    others[2].kill()
    eventually(lambda: all(2 not in one._places for one in watching))
    for one in watching:
        one.close()
    assert disconnected == [(3, True), (2, True)]
    assert _neighbours.found_ended(3) and not _neighbours.found_ended(4)


def test_one_that_nobody_has_waited_for_has_ended(start, watch, disconnected):
    child = start(1)
    watch([1], 1)
    child.kill()  # who started it has not asked for its code: it is a zombie
    eventually(lambda: disconnected == [(1, True)])


def test_one_that_has_left_is_no_matter(start, watch, disconnected, store):
    left, killed = start(1), start(2)
    watch([1, 2], 2)
    store.told["elche_jax/left/1"] = "left"
    left.communicate("\n")
    killed.kill()
    eventually(lambda: disconnected)
    assert disconnected == [(2, True)]


def test_one_that_says_late_where_it_is(start, watch, disconnected):
    neighbours = watch([1], 0)
    child = start(1)
    eventually(lambda: neighbours._places)
    child.kill()
    eventually(lambda: disconnected == [(1, True)])


@pytest.mark.parametrize("wrong", ["another host", "ended", "another one has its number"])
def test_one_that_is_not_seen_alive_is_left_to_the_heartbeat(wrong, start, disconnected, store):
    child = start(1)
    host, pid, began = json.loads(store.told[f"{WHERE}/1"])
    if wrong == "ended":
        child.communicate("\n")
    host = "another" if wrong == "another host" else host
    began = "0" if wrong == "another one has its number" else began
    store.told[f"{WHERE}/1"] = json.dumps((host, pid, began))
    neighbours = Neighbours(HERE, [1])
    eventually(lambda: not neighbours._unknown)
    if child.returncode is None:
        child.communicate("\n")
    neighbours.close()
    assert not neighbours._places and disconnected == []


def test_nobody_is_told_that_the_coordinator_has_ended(start, watch, disconnected):
    first, second = start(0), start(2)
    watch([0, 2], 1)
    first.kill()
    second.kill()
    eventually(lambda: disconnected)
    assert disconnected == [(2, True)]


def test_it_ends_with_the_job(start, watch, monkeypatch):
    start(1)
    neighbours = watch([1], 1)
    monkeypatch.setattr(_coordinator, "client", lambda: None)
    eventually(lambda: not neighbours._thread.is_alive())


@pytest.mark.parametrize("error", [TypeError("recoverable="), RuntimeError("std::bad_cast")])
def test_what_jax_does_not_take_is_known_later(error, start, watch, monkeypatch, caplog):
    def disconnect(process):
        raise error

    monkeypatch.setattr(_coordinator, "disconnect", disconnect)
    caplog.set_level("INFO", "elche_jax")
    child = start(1)
    watch([1], 1)
    child.kill()
    eventually(lambda: caplog.messages)
    assert caplog.messages == [f"elche: the others notice late that process 1 has ended: {error}"]


def test_a_file_that_cannot_be_read_says_nothing(monkeypatch):
    def fail(*_):
        raise PermissionError("hidden")

    monkeypatch.setattr(Path, "read_text", fail)
    assert not HERE.ended() and Place.here() is None


NOBODY = """
import socket
import jax
from elche_jax import _coordinator

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(f"localhost:{port}", 1, 0)
_coordinator.state().coordinator_address = "localhost:1"  # where nobody answers
_coordinator.JOIN_S = 1
try:
    _coordinator.disconnect(0)
except RuntimeError:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.further  # JAX takes six seconds to give up
def test_a_coordinator_that_does_not_answer_ends_nobody():
    done = children.run(sys.executable, "-c", NOBODY)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
