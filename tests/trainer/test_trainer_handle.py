"""A run in the background: followed, stopped, joined; and programs that do not wait for it."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import children
import pytest
from fitting import DATA, PARAMS, own_loop, same_bits, shared, steps, trainer
from marks import slow

import elche_jax as elche
from elche_jax.trainer.control import Control, interrupts

HERE = Path(__file__).parent


class Gate(elche.Callback):
    """Holds the run at the end of an epoch until it is opened."""

    def __init__(self, epoch):
        self.epoch, self.there, self.open = epoch, threading.Event(), threading.Event()

    def on_epoch(self, context, metrics):
        if metrics.epoch == self.epoch:
            self.there.set()
            assert self.open.wait(60)


def test_a_handle_follows_the_run():
    _, state, _ = own_loop()
    gate = Gate(1)
    handle = shared().start(PARAMS, DATA, 8, 3, callbacks=[gate], progress=False)
    assert gate.there.wait(60) and handle.running
    polled = handle.poll()  # two epochs are over, the third has not begun
    assert [m.epoch for m in polled] == [0, 1] and handle.poll() == ()
    gate.open.set()
    followed = list(handle.metrics())
    assert [m.epoch for m in followed] == [0, 1, 2] and followed[:2] == list(polled)
    assert [m.epoch for m in handle.poll()] == [2]
    result = handle.join()
    assert not handle.running and same_bits(result.state, state)
    assert result.history == tuple(followed) and handle.join() is result


@pytest.mark.parametrize("devices", [slow(1), 4])
def test_stop_ends_it_at_the_next_window_with_a_checkpoint(devices, tmp_path):
    gate = Gate(0)
    saving = elche.Checkpoints(tmp_path, every_epochs=None)
    options = {"checkpoints": saving, "progress": False}
    handle = shared(devices).start(PARAMS, DATA, 8, 50, callbacks=[gate], **options)
    assert gate.there.wait(60)
    handle.stop()
    gate.open.set()
    result = handle.join()
    _, _, seen = own_loop(devices, epochs=1)
    assert (result.stopped, result.windows) == ("stop", len(seen))
    again = shared(devices).fit(PARAMS, DATA, 8, 3, resume="must", **options)
    _, state, _ = own_loop(devices)
    assert same_bits(again.state, state)


def test_after_join_there_is_the_history():
    handle = shared().start(PARAMS, DATA, 8, 1, progress=False)
    assert len(handle.join().history) == 1
    with pytest.raises(RuntimeError, match=r"^Handle\.metrics: must be called before join; "):
        handle.metrics()
    with pytest.raises(RuntimeError, match=r"^Handle\.poll: must be called before join; "):
        handle.poll()


def test_one_run_at_a_time():
    gate, one = Gate(0), shared()
    handle = one.start(PARAMS, DATA, 8, 2, callbacks=[gate], progress=False)
    assert gate.there.wait(60)
    for begin in (one.fit, one.start):
        with pytest.raises(
            RuntimeError, match=r"^Trainer\.fit: a trainer must do one run at a time, but this"
        ):
            begin(PARAMS, DATA, 8, 1)
    gate.open.set()
    assert len(handle.join().history) == 2
    assert len(one.fit(PARAMS, DATA, 8, 1, progress=False).history) == 1


def test_a_run_that_is_over_makes_room_for_the_next(monkeypatch):
    one, finish, more = shared(), Control.finish, []

    def go_on(self, *arguments, **options):
        finish(self, *arguments, **options)
        if not more:
            more.append("begun")
            more.append(one.fit(PARAMS, DATA, 8, 1, progress=False))

    monkeypatch.setattr(Control, "finish", go_on)
    assert len(one.start(PARAMS, DATA, 8, 1, progress=False).join().history) == 1
    assert len(more[1].history) == 1


def test_join_waits_as_long_as_it_is_told():
    gate = Gate(0)
    handle = shared().start(PARAMS, DATA, 8, 1, callbacks=[gate], progress=False)
    assert gate.there.wait(60)
    with pytest.raises(TimeoutError, match=r"^Handle\.join: the run must end within timeout \(0"):
        handle.join(timeout=0)
    gate.open.set()
    assert [m.epoch for m in handle.metrics()] == [0]  # not joined yet
    handle.join()


@pytest.mark.parametrize("timeout", [threading.TIMEOUT_MAX, 1e10, 1e300])
def test_join_waits_longer_than_a_lock_can(timeout, monkeypatch):
    gate = Gate(0)
    handle = shared().start(PARAMS, DATA, 8, 1, callbacks=[gate], progress=False)
    assert gate.there.wait(60)
    changed = handle._control._changed
    wait = changed.wait

    def opening(timeout=None):
        gate.open.set()
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", opening)
    assert len(handle.join(timeout).history) == 1


def test_a_run_does_not_wait_for_itself():
    heard = []

    class Ask(elche.Callback):
        def on_epoch(self, context, metrics):
            for ask in (handle.join, handle.metrics):
                with pytest.raises(RuntimeError, match="must not be called by the run itself"):
                    ask()
                heard.append(ask)

    gate = Gate(0)
    handle = shared().start(PARAMS, DATA, 8, 1, callbacks=[gate, Ask()], progress=False)
    gate.open.set()
    assert handle.join() and len(heard) == 2


@pytest.mark.parametrize("timeout", ["5", -1])
def test_a_wrong_timeout(timeout):
    handle = shared().start(PARAMS, DATA, 8, 1, progress=False)
    with pytest.raises((TypeError, ValueError), match=r"^Handle\.join: timeout must be "):
        handle.join(timeout)
    handle.poll()  # it is not joined
    handle.join()


def test_a_thread_that_cannot_be_had(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    one = shared()
    with monkeypatch.context() as patch:
        patch.setattr("elche_jax.trainer.handle.threading.Thread.start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            one.start(PARAMS, DATA, 8, 1, progress=False)
    assert one.fit(PARAMS, DATA, 8, 1, progress=False).windows > 0


def test_what_goes_wrong_is_raised_wherever_one_looks():
    data = {"x": DATA["x"][:4], "y": DATA["y"][:4]}  # smaller than a microbatch
    handle = trainer().start(PARAMS, data, 8, 1, progress=False)
    for look in (lambda: list(handle.metrics()), handle.join, handle.join):
        with pytest.raises(ValueError, match=r"batch_size must be at most the number of examples"):
            look()
    other = trainer().start(PARAMS, data, 8, 1, progress=False)
    with pytest.raises(ValueError, match="batch_size must be at most"):
        list(other.metrics())
    with pytest.raises(ValueError, match="batch_size must be at most"):
        other.poll()


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from fitting import DATA, PARAMS, trainer
import elche_jax as elche

class Say(elche.Callback):
    def on_epoch(self, context, metrics):
        print("epoch", metrics.epoch, flush=True)

saving = elche.Checkpoints({folder!r}, every_epochs=None)
options = dict(callbacks=[Say()], checkpoints=saving, progress=False)
{body}
"""


def program(body, folder):
    text = PROGRAM.format(here=str(HERE), folder=str(folder), body=body)
    return children.started(sys.executable, "-c", text)


def ended(child):
    out, err = child.communicate(timeout=120)
    return child.returncode, out, err


def test_a_program_that_ends_stops_its_run(tmp_path):
    body = """
handle = trainer(1, cadence=elche.EveryBatch()).start(PARAMS, DATA, 8, None, **options)
next(handle.metrics())
"""
    with program(body, tmp_path) as child:
        code, out, err = ended(child)
    assert (code, err) == (0, "") and out.startswith("epoch 0\n")
    (kept,) = steps(tmp_path)
    assert kept >= 6  # whole, of the last window


@pytest.mark.slow  # test_a_program_that_ends_stops_its_run ends one in a thread, too
def test_a_run_in_the_users_thread_ends_with_the_program(tmp_path):
    body = """
import threading
one, said = trainer(cadence=elche.EveryBatch()), threading.Event()

class First(elche.Callback):
    def on_epoch(self, context, metrics):
        said.set()

options["callbacks"].append(First())
threading.Thread(target=lambda: one.fit(PARAMS, DATA, 8, None, **options)).start()
said.wait()
"""
    with program(body, tmp_path) as child:
        code, out, err = ended(child)
    assert (code, err) == (0, "") and out.startswith("epoch 0\n")
    assert steps(tmp_path)[-1] >= 6


def test_what_fails_while_an_interrupted_run_ends_is_said(sigint):
    control = Control()
    with pytest.raises(KeyboardInterrupt) as raised, interrupts(control, say=False):
        signal.raise_signal(signal.SIGINT)
        assert control.reason == "interrupt"
        control.finish(error=OSError("the disk is full"))
    assert str(raised.value.__cause__) == "the disk is full"


def test_an_interrupt_that_nobody_can_be_told_of(sigint, monkeypatch):
    """As in `train.py 2>&1 | tee log`, where it has ended `tee` first."""
    unread, written = os.pipe()
    os.close(unread)
    with open(written, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        control = Control()
        with pytest.raises(KeyboardInterrupt), interrupts(control, say=True):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            stderr.close()
    assert control.reason == "interrupt"


@pytest.mark.slow  # test_an_interrupt_of_one_process_ends_all_with_a_checkpoint
@pytest.mark.parametrize("how", ["fit", "join"])
def test_an_interrupt_ends_it(how, tmp_path):
    body = "one = trainer(cadence=elche.EveryBatch())\n"
    body += {
        "fit": "one.fit(PARAMS, DATA, 8, None, **options)",
        "join": "one.start(PARAMS, DATA, 8, None, **options).join()",
    }[how]
    with program(body, tmp_path) as child:
        assert child.stdout.readline() == "epoch 0\n"
        child.send_signal(signal.SIGINT)
        code, _, err = ended(child)
    assert code == -signal.SIGINT or code == 130, err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert steps(tmp_path)[-1] >= 6
