"""What a process makes of others that leave or come back, with a made-up service of JAX's."""

import math
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

import jax
import pytest

from elche_jax import ProcessLostError, RestartRequested, _coordinator, _leaving, _progress
from elche_jax._processes import (
    LEFT,
    MET,
    NO_COORDINATOR,
    OTHER_CALL,
    REPLACED,
    ExchangeLost,
    Processes,
    multihost_utils,
    of_process,
)
from elche_jax.engine import talk
from elche_jax.engine.job import Job


class Service:
    """Two processes of which the second one is not the same any more after the first barrier."""

    def __init__(self, devices):
        self.devices, self.calls = devices, 0

    @contextmanager
    def __call__(self, asked):
        self.calls += 1
        if self.calls > 1:
            raise multihost_utils.ProcessFailureError({LEADS[1]})
        yield asked


class Device:
    def __init__(self, process):
        self.process_index = process


LEADS = [Device(0), Device(1)]


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(Processes, "recoverable", True)
    made = Processes()
    made._asked = tuple(LEADS)  # nothing is to be told at the end of this program
    return made


def test_a_process_that_another_one_replaced_ends_the_job(monkeypatch, processes):
    monkeypatch.setattr(multihost_utils, "live_devices", Service(LEADS))
    with pytest.raises(ProcessLostError) as found:
        processes.together(LEADS, lambda: None)
    assert str(found.value) == REPLACED and not processes.gone


def test_one_that_is_started_again_after_its_end_was_noticed_ends_the_job(monkeypatch, processes):
    processes.gone = frozenset({1})
    monkeypatch.setattr(multihost_utils, "live_devices", Service(LEADS))
    with pytest.raises(ProcessLostError) as found:
        processes.together(LEADS, lambda: None)
    assert str(found.value) == REPLACED


def test_one_that_seems_to_have_come_back_as_its_end_is_told_is_gone(monkeypatch, processes):
    """Who tells it joins in its name, and leaves: others may find it there for this moment."""
    monkeypatch.setattr(multihost_utils, "live_devices", Service(LEADS))
    monkeypatch.setattr(
        _coordinator, "told", lambda _, key: "" if key.endswith("ended/1") else None
    )
    with pytest.raises(ExchangeLost):
        processes.together(LEADS, lambda: None)
    assert processes.gone == {1}


def test_a_process_that_is_gone_without_a_word_is_a_loss(monkeypatch, processes):
    monkeypatch.setattr(multihost_utils, "live_devices", Service(LEADS[:1]))
    with pytest.raises(ExchangeLost):
        processes.together(LEADS, lambda: None)
    assert processes.gone == {1}


def test_an_error_of_jax_that_is_no_loss_stays_one(monkeypatch, processes):
    def fail(asked):
        raise jax.errors.JaxRuntimeError("out of memory")

    monkeypatch.setattr(multihost_utils, "live_devices", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        processes.together(LEADS, lambda: None)


NOT_FOUND_BY_GLOO = (
    "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with "
    "key: cpu:gloo/0,2048/1 [type.googleapis.com/tensorflow.CoordinationServiceError='']"
)


@pytest.mark.parametrize(
    ("answers", "kind", "said"),
    [(True, RuntimeError, OTHER_CALL), (False, ProcessLostError, NO_COORDINATOR)],
)
def test_process_0_has_ended_only_if_its_coordinator_does_not_answer(
    monkeypatch, processes, answers, kind, said
):
    def fail(asked):
        raise jax.errors.JaxRuntimeError(NOT_FOUND_BY_GLOO)

    monkeypatch.setattr(multihost_utils, "live_devices", fail)
    monkeypatch.setattr(_coordinator, "answers", lambda client: answers)
    with pytest.raises(kind) as found:
        processes.together(LEADS, lambda: None)
    assert type(found.value) is kind and str(found.value) == said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("1 gather uint32(2,)", "exchanged"),
        ("1 gather uint32(4,)", MET),  # another call
        ("0 gather uint32(2,)", MET),  # that of before: it is in a window
    ],
)
def test_one_in_another_call_is_found_before_the_exchange(monkeypatch, processes, other, said):
    told = {"1": other}

    def tell(client, key, text, anew):
        assert anew
        told[key.removeprefix("elche_jax/call/")] = text

    monkeypatch.setattr(multihost_utils, "live_devices", lambda _: nullcontext(LEADS))
    monkeypatch.setattr(_coordinator, "tell", tell)
    monkeypatch.setattr(_coordinator, "told_in", lambda _, folder: told)

    def exchange():
        return processes.together(LEADS, lambda: "exchanged", "gather uint32(2,)")

    if said == "exchanged":
        assert exchange() == said
        return
    with pytest.raises(RuntimeError) as found:
        exchange()
    assert str(found.value) == said.format(1, 0)


@pytest.mark.parametrize("lost", [False, True])
def test_a_ctrl_c_waits_for_the_end_of_an_exchange(lost, sigint, monkeypatch, processes):
    """The others are in it, or will be: one that left before would keep them waiting."""
    seen = []

    def exchange():
        signal.raise_signal(signal.SIGINT)
        seen.append("exchanged")
        if lost:
            raise ExchangeLost

    monkeypatch.setattr(multihost_utils, "live_devices", lambda _: nullcontext(LEADS))
    monkeypatch.setattr(
        multihost_utils.live_devices, "devices", LEADS[:1] if lost else LEADS, raising=False
    )
    with pytest.raises(KeyboardInterrupt):
        processes.together(LEADS, exchange)
    assert seen == ["exchanged"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_between_exchanges_is_told_however_the_script_ends(monkeypatch, processes):
    monkeypatch.setattr(talk, "PROCESSES", processes)
    with suppress(KeyboardInterrupt), talk.Talk(Job(tuple(jax.devices()[:1])), "predict"):
        raise KeyboardInterrupt
    assert processes._why == ("raised KeyboardInterrupt: without a message", None)


class Coordinator:
    """A client of JAX's coordinator, which ends after so many questions."""

    def __init__(self, told, answers=10**9):
        self.told, self.answers, self.asked = told, answers, []

    def key_value_try_get(self, key):
        self.asked.append(key)
        if len(self.asked) > self.answers:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        if key not in self.told or self.asked.count(key) < self.told[key]:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return "left"


@pytest.fixture
def standing(monkeypatch):
    """Waits on a clock that stands still; no more than ten."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        assert len(waits) < 10, "it waits for ever"

    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep)
    monkeypatch.setattr(_leaving, "time", clock)
    return waits


def test_the_first_process_waits_until_the_others_have_left():
    client = Coordinator({"elche_jax/left/1": 3, "elche_jax/left/3": 5})
    _leaving.wait_for_others(client, [1, 3], nobody, math.inf)
    assert [client.asked.count(f"elche_jax/left/{one}") for one in (1, 2, 3)] == [7, 0, 5]


def nobody(process):
    return False


def test_nor_for_one_that_it_saw_end():
    client = Coordinator({"elche_jax/left/1": 3})
    _leaving.wait_for_others(client, [1, 2], lambda one: one == 2, math.inf)
    assert client.asked.count("elche_jax/left/1") == 3


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(_leaving, "PATIENCE_S", 0.05)
    _leaving.wait_for_others(Coordinator({}), [1], nobody, 0.05)
    _leaving.wait_for_first(Coordinator({}))


def test_the_coordinator_stays_when_the_first_process_leaves(monkeypatch):
    state = SimpleNamespace(process_id=0, num_processes=3, service="coordinator", client=None)
    seen = []
    state.client = SimpleNamespace(key_value_set=lambda *told, **_: seen.append(told))
    monkeypatch.setattr(_coordinator, "state", lambda: state)
    monkeypatch.setattr(_leaving, "_kept", [])
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: seen.append(state.service))
    assert _leaving.disconnect() is state.client
    assert seen == [None, ("elche_jax/left/0", "left")], "first it leaves, then it says so"
    assert _leaving._kept == ["coordinator"] and _coordinator.others() == [1, 2]


def test_the_others_let_the_first_one_end_before():
    client = Coordinator({}, answers=4)
    _leaving.wait_for_first(client)
    assert len(client.asked) == 5


def test_the_first_one_does_not_wait_for_what_nobody_can_tell(standing):
    client = Coordinator({"elche_jax/left/1": 1}, answers=9)
    _leaving.wait_for_others(client, [1, 2], nobody, math.inf)
    assert len(standing) == 3, "three answers a round"


def test_without_a_coordinator_nobody_waits(standing):
    _leaving.wait_for_first(None)
    _leaving.wait_for_others(None, [1], nobody, math.inf)
    assert standing == []
    assert _leaving.reason_of(0) is None


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("one\n  line"), "raised ValueError: one"),
        (OSError(), "raised OSError: without a message"),
        (RestartRequested(7), LEFT),  # which all raise
        (ExchangeLost(), LEFT),
    ],
)
def test_why_a_process_leaves(error, why, processes):
    processes.loop_begins(Loop())
    processes.raised(error)
    assert processes._why == (why, None)


class Loop:
    pass


@pytest.mark.parametrize("left", [False, True], ids=["to its end", "before"])
def test_the_end_of_a_loop_within_another_one_is_not_that_of_the_other(left, processes):
    outer, inner = Loop(), Loop()
    processes.loop_begins(outer)
    processes.loop_begins(inner)
    processes.loop_ends(inner)
    assert processes._why == (LEFT, None)
    if left:  # and then there is one that ends
        processes.loop_closes(outer)
        assert processes._why == (LEFT, None)
        processes.loop_begins(inner)
        processes.loop_ends(inner)
    else:
        processes.loop_ends(outer)
    assert processes._why is None


def chained(cause, error):
    error.__cause__ = cause
    return error


def met(context, error):
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (ValueError("a mistake"), 3),
        (ProcessLostError("it raised", [2]), 2),
        (ProcessLostError("another one took its place"), 3),
        (of_process(RuntimeError("the disk of the first is full"), 0), 0),
        (chained(of_process(OSError("full"), 0), RuntimeError("not saved")), 0),
        (met(ProcessLostError("it raised", [2]), KeyError("as it cleans up")), 2),
        (met(ValueError("one"), KeyError("two")), 3),
    ],
)
def test_because_of_whom_a_process_leaves(error, whose, monkeypatch, processes):
    blamed = []
    monkeypatch.setattr(_progress, "blame", blamed.append)
    monkeypatch.setattr(_coordinator, "index", lambda: 3)
    monkeypatch.setattr(_leaving, "tell_reason", lambda why: None)
    monkeypatch.setattr(_leaving, "disconnect", lambda: None)
    processes.raised(error)  # and the script ends in another way
    processes.leave()
    assert blamed == [whose]


@pytest.mark.parametrize(("error", "seconds"), [(None, math.inf), (ValueError("a mistake"), 30)])
def test_how_long_the_first_process_waits(error, seconds, monkeypatch, processes):
    waits, told = [], []
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(_coordinator, "index", lambda: 0)
    monkeypatch.setattr(_coordinator, "others", lambda: [1, 2, 3])
    monkeypatch.setattr(_leaving, "tell_reason", told.append)
    monkeypatch.setattr(_leaving, "disconnect", lambda: "client")
    monkeypatch.setattr(_leaving, "wait_for_others", lambda *given: waits.append(given))
    processes.gone = frozenset([2])
    processes.raised(ValueError("a mistake"))
    processes.leave()
    assert waits == [("client", {1, 3}, processes._ended, seconds)]
    assert told == ["raised ValueError: a mistake"]
