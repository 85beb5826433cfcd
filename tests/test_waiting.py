"""Ctrl-C while a thread waits for another one."""

import threading

import pytest

from elche_jax._waiting import interruptible


def test_an_interrupt_in_the_middle_of_taking_the_lock_is_an_interrupt():
    changed = threading.Condition(threading.Lock())
    with pytest.raises(KeyboardInterrupt) as raised, interruptible(), changed:
        changed.release()  # as `Condition.wait` leaves it, where the signal comes too soon
        raise KeyboardInterrupt
    assert str(raised.value.__cause__) == "release unlocked lock"


@pytest.mark.parametrize("error", [RuntimeError("mine"), ValueError("mine"), KeyboardInterrupt()])
def test_other_errors_are_what_they_are(error):
    with pytest.raises(type(error)) as raised, interruptible():
        raise error
    assert raised.value is error


def test_an_error_after_another_one_is_what_it_is():
    with pytest.raises(RuntimeError, match="mine"), interruptible():
        try:
            raise ValueError
        except ValueError:
            raise RuntimeError("mine")  # noqa: B904  # its context is what is tested
