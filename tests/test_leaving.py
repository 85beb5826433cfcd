"""What a process makes of others that leave or come back, with a made-up service of JAX's."""

from contextlib import contextmanager

import jax
import pytest

from elche_jax import ProcessLostError
from elche_jax._processes import REPLACED, ExchangeLost, Processes, multihost_utils


class Service:
    """Two processes of which the second one is not the same any more after the first barrier."""

    def __init__(self, devices):
        self.devices, self.calls = devices, 0

    @contextmanager
    def __call__(self, asked):
        self.calls += 1
        if self.calls > 1:
            raise multihost_utils.ProcessFailureError("changed")
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
