"""`Checkpointer`: when it saves, what it says, and what happens where it cannot."""

import dataclasses
import fcntl
import logging
import math
import os
import resource
import signal
import threading
from contextlib import nullcontext
from unittest.mock import Mock

import jax
import numpy as np
import optax
import pytest
from marks import slow
from resumed import EVERY, GRADIENTS, PLAIN, Case, content, data, plain_loss, raw, run, steps

import elche_jax as elche
from elche_jax._threads import BackgroundThread
from elche_jax.checkpoint.store import Store
from elche_jax.train.in_flight import Run
from elche_jax.train.wishes import Wishes

CASE = Case(plain_loss, PLAIN)
TINY = data(16)
"""Eight windows on one device."""


@pytest.fixture(scope="module")
def train():
    return CASE.build(1, elche.EveryBatch())


@dataclasses.dataclass(frozen=True)
class Past:
    """Stands for a run in which a window was the last one."""

    trained: int
    runner: object
    wishes: Wishes = dataclasses.field(default_factory=lambda: Wishes(True, 2))

    def finish(self):
        pass


def test_a_folder_is_free_again_if_it_cannot_be_opened(train, tmp_path, monkeypatch):
    """Also while somebody holds the exception, as a notebook does."""
    checkpoints = elche.Checkpoints(tmp_path, every_windows=1)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "__init__", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as held:
            elche.Checkpointer(train, checkpoints)
    with elche.Checkpointer(train, checkpoints) as saver:
        assert saver.written is None
    assert held.value.__traceback__ is not None


@pytest.fixture(scope="module")
def windows8(train):
    """A state after eight windows, and the windows, each as if it were the last one."""
    state, found = CASE.init(train), []
    for window in train.windows(TINY, 2):
        state, _ = train(state, window)
        found.append(dataclasses.replace(window, run=Run()))
        past = Past(window.index, train.pipeline_of(window, "test").runner)
        train._pipelines[found[-1].run] = past
    return state, found


def loop(train, saver, resume="auto", epochs=1):
    state, cursor = saver.restore(CASE.init(train), resume)
    with train.windows(TINY, 2, epochs=epochs, cursor=cursor) as windows:
        for window in windows:
            state, _ = train(state, window)
            saver.save(state, window)
    return state


def saver_in(train, folder, **options):
    return elche.Checkpointer(train, elche.Checkpoints(folder, **({"every_windows": 3} | options)))


# -- when


def test_every_so_many_windows(train, tmp_path):
    with saver_in(train, tmp_path, keep_last=9) as saver:
        assert saver.written is None
        loop(train, saver)
        saver.wait()
        assert saver.written == 6
    assert steps(tmp_path) == [3, 6]


def test_every_so_many_seconds(train, windows8, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("elche_jax.checkpoint.checkpointer.time.monotonic", lambda: now[0])
    state, windows = windows8
    saved = []
    with saver_in(train, tmp_path, every_windows=None, every_seconds=10.0) as saver:
        for window, at in zip(windows, (100, 109.9, 110, 111, 119.9, 125, 130, 135), strict=True):
            now[0] = float(at)
            if saver.save(state, window):
                saved.append(window.index)
    assert saved == [2, 5, 7]


def test_by_force_and_never_twice(train, windows8, tmp_path):
    state, windows = windows8
    with saver_in(train, tmp_path, every_windows=None) as saver:
        assert not saver.save(state, windows[0])
        assert saver.save(state, windows[1], force=True)
        assert not saver.save(state, windows[1], force=True)
    assert steps(tmp_path) == [2]
    with saver_in(train, tmp_path) as saver:
        saver.restore(CASE.init(train), "must")
        assert not saver.save(state, windows[1], force=True)  # it is what was taken up


def test_another_run_is_not_taken_for_the_one_that_was_saved(train, tmp_path):
    """Its last window has the same number, so nothing would show that it is not on disk."""
    with saver_in(train, tmp_path, every_windows=None) as saver:
        for saved in False, True:
            state = CASE.init(train)
            for window in train.windows(TINY, 2):
                state, _ = train(state, window)
            if not saved:
                assert saver.save(state, window, force=True)
                assert not saver.save(state, window, force=True)
        with pytest.raises(
            ValueError,
            match=r"must hold no checkpoint of the window to be saved \(8\) or a later one, got "
            r"one after 8\. Call restore before the loop",
        ):
            saver.save(state, window, force=True)


def test_a_folder_that_has_later_ones(train, windows8, tmp_path):
    """A new run would fall behind those of the old one, and be the first to be deleted."""
    state, windows = windows8
    with saver_in(train, tmp_path, keep_last=1) as saver:
        saver.save(state, windows[5])
    with saver_in(train, tmp_path, keep_last=1) as saver:
        for window in windows[2], windows[5]:
            with pytest.raises(
                ValueError,
                match=rf"checkpoints: .* must hold no checkpoint of the window to be saved "
                rf"\({window.index + 1}\) or a later one, got one after 6\. Call restore before ",
            ):
                saver.save(state, window, force=True)
        assert saver.save(state, windows[6], force=True)
    assert steps(tmp_path) == [7]


def test_a_folder_in_the_place_of_a_checkpoint(train, windows8, tmp_path):
    """Said by the loop, before anything is copied or written, whatever `on_error` is."""
    state, windows = windows8
    (tmp_path / "3").mkdir()
    with saver_in(train, tmp_path, on_error="end") as saver:
        assert saver.restore(state) == (state, None)
        with pytest.raises(ValueError, match=r"/3 must not exist .*, got something that is not"):
            saver.save(state, windows[2])
        assert saver.save(state, windows[3], force=True)
    assert steps(tmp_path) == [3, 4] and not list((tmp_path / "3").iterdir())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_by_score(mode, train, windows8, tmp_path):
    state, windows = windows8
    scores = [0.5, None, 0.2, math.nan, 0.9, np.float32(0.4), 0.3, 0.6]
    with saver_in(train, tmp_path, keep_last=1, keep_best=2, mode=mode) as saver:
        for window, score in zip(windows, scores, strict=True):
            saver.save(state, window, force=True, score=score)
    assert steps(tmp_path) == ([3, 7, 8] if mode == "min" else [5, 8])
    assert content(saver.best(CASE.init(train))) == content(state)  # also when it is closed


def test_notes_go_and_come(train, windows8, tmp_path):
    state, windows = windows8
    inside = []

    def notes():
        inside.append(threading.current_thread().name)
        return {"best": 1.5, "history": [1, 2]}

    with saver_in(train, tmp_path) as saver:
        saver.save(state, windows[2], notes=notes)
    assert inside == ["elche-checkpoint"]
    with saver_in(train, tmp_path) as saver:
        restored, cursor, kept = saver.restore_all(CASE.init(train))
    assert kept == {"best": 1.5, "history": [1, 2]}
    assert cursor == windows[2].cursor and content(restored) == content(state)


# -- resume


def test_resume(train, tmp_path, caplog):
    caplog.set_level(logging.INFO, "elche_jax")
    with saver_in(train, tmp_path) as saver:
        with pytest.raises(
            ValueError,
            match=r"checkpoints: .* must hold a whole checkpoint with resume='must', got none\. "
            r"Pass resume='auto' to start without one\.",
        ):
            saver.restore(CASE.init(train), "must")
        for words in ((), ("auto",), ("never",)):
            first = CASE.init(train)
            state, cursor = saver.restore(first, *words)
            assert state is first and cursor is None
        loop(train, saver, "never")
    with saver_in(train, tmp_path) as saver:
        with pytest.raises(
            ValueError,
            match=r"checkpoints: .* must be empty with resume='never', got a checkpoint after 6 "
            r"windows\. Pass resume='auto' to go on, or another folder\.",
        ):
            saver.restore(CASE.init(train), "never")
        for word in "auto", "must":
            state, cursor = saver.restore(CASE.init(train), word)
            assert cursor.window == int(state.step[0]) == 6
        assert f"elche: resumed after window 6 from {tmp_path}." in caplog.messages


def test_a_run_that_must_be_there_leaves_no_folder(train, tmp_path):
    text = "must hold a whole checkpoint with resume='must', got none"
    folder = tmp_path / "runs" / "mine"
    with pytest.raises(ValueError, match=text), saver_in(train, folder) as saver:
        saver.restore(CASE.init(train), "must")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    with saver_in(train, folder) as saver:
        with pytest.raises(ValueError, match=text):
            saver.restore(CASE.init(train), "must")
        loop(train, saver)  # begins all the same
    assert steps(folder)[-1] == 6


def test_the_home_folder(train, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert elche.Checkpoints("~/runs").path == tmp_path / "runs"
    assert str(elche.Checkpoints("~nobody-of-this-name/runs").path) == "~nobody-of-this-name/runs"
    with saver_in(train, "~/runs") as saver:
        loop(train, saver)
    assert steps(tmp_path / "runs")[-1] == 6


@pytest.mark.parametrize("word", ["Auto", None, True])
def test_resume_is_one_of_three_words(word, train, tmp_path):
    with (
        saver_in(train, tmp_path) as saver,
        pytest.raises(
            ValueError,
            match=r"^Checkpointer.restore: resume must be one of 'never', 'auto', 'must', got ",
        ),
    ):
        saver.restore(CASE.init(train), word)


def test_a_damaged_one_is_passed_over(train, tmp_path, caplog):
    with saver_in(train, tmp_path) as saver:
        loop(train, saver)
    (tmp_path / "6" / "manifest" / "metadata").write_text("{}")
    with saver_in(train, tmp_path) as saver:
        state = loop(train, saver, "must")
    assert any(f"renamed to {tmp_path / 'damaged-6-0'}" in text for text in caplog.messages)
    assert steps(tmp_path) == [3, 6]
    with saver_in(train, tmp_path) as saver:
        again = loop(train, saver, "must")
    assert content(again) == content(state)


# -- arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"folder": 3}, TypeError, r"folder must be a path or None, got "),
        ({"folder": "runs/\udcff"}, ValueError,
         r"folder must be valid UTF-8, got '.*/runs/\\udcff'\. Orbax can write to no other\."),
        ({"every_windows": 0}, ValueError, r"every_windows must be at least 1, got 0\."),
        ({"every_windows": 1.5}, TypeError, r"every_windows must be an integer, got 1\.5"),
        ({"every_epochs": 0}, ValueError, r"every_epochs must be at least 1, got 0\."),
        ({"every_seconds": 0}, ValueError, r"every_seconds must be above 0, got 0"),
        ({"every_seconds": "1"}, TypeError, r"every_seconds must be a number, got "),
        ({"keep_last": 0}, ValueError, r"keep_last must be at least 1, got 0\."),
        ({"keep_best": -1}, ValueError, r"keep_best must be at least 0, got -1\."),
        ({"monitor": 1}, TypeError, r"monitor must be .*str.*, got "),
        ({"mode": "least"}, ValueError, r"mode must be one of 'min', 'max', got 'least'\."),
        ({"on_error": "never"}, ValueError,
         r"on_error must be one of 'now', 'end', got 'never'\."),
    ],
)  # fmt: skip
def test_arguments(options, error, message):
    with pytest.raises(error, match=rf"^Checkpoints: {message}"):
        elche.Checkpoints(**options)


def test_a_folder_is_needed(train):
    with pytest.raises(
        ValueError,
        match=r"^Checkpoints: folder must be a path, got None\. Write Checkpoints\('runs/name'\)",
    ):
        elche.Checkpointer(train, elche.Checkpoints())


# -- what cannot be written


def broken(monkeypatch, until=None):
    """Saves fail, up to a step."""
    save = Store.save

    def fails(self, saved):
        if until is None or saved.step <= until:
            raise OSError(28, "No space left\non device")  # said in one line
        return save(self, saved)

    monkeypatch.setattr(Store, "save", fails)


FULL = (
    r"^checkpoints: .* must take checkpoints, but OSError: \[Errno 28\] No space left on device\. "
    r"Fix that, or use another folder\.$"
)


def test_what_is_no_fault_of_the_folder_gets_no_advice_about_it(train, tmp_path):
    saver = saver_in(train, tmp_path)
    state = CASE.init(train)
    with train.windows(TINY, 2) as windows:
        window = next(windows)
        saver.save(train(state, window)[0], window, force=True, notes=lambda: {"a": {1}})
    with pytest.raises(elche.CheckpointError, match=r"of type set is not JSON serializable$"):
        saver.close()


def test_at_once(train, tmp_path, monkeypatch, caplog):
    broken(monkeypatch)
    done = []
    with pytest.raises(elche.CheckpointError, match=FULL), saver_in(train, tmp_path) as saver:
        state = CASE.init(train)
        for window in train.windows(TINY, 2):
            state, _ = train(state, window)
            saver.save(state, window)
            saver.wait()
            done.append(window.index)
    assert done == [0, 1, 2]  # said at the next window
    assert any("the checkpoint of window 3 was not written" in text for text in caplog.messages)


@pytest.mark.parametrize(("until", "written"), [(3, [6]), (None, [])])
def test_at_the_end(until, written, train, tmp_path, monkeypatch, caplog):
    broken(monkeypatch, until)
    saver = saver_in(train, tmp_path, on_error="end")
    state = loop(train, saver)
    with pytest.raises(elche.CheckpointError, match=FULL):
        saver.close()
    assert int(state.step[0]) == 8 and steps(tmp_path) == written  # those that can be
    [said] = [text for text in caplog.messages if "not written" in text]
    assert said == (
        "elche: the checkpoint of window 3 was not written: OSError: [Errno 28] No space left on "
        "device. Later failures are not logged."
    )


def test_what_failed_may_be_tried_again(train, windows8, tmp_path, monkeypatch):
    state, windows = windows8
    saver = saver_in(train, tmp_path, on_error="end")
    with monkeypatch.context() as patch:
        broken(patch)
        assert saver.save(state, windows[2])
        saver.wait()
    assert saver.save(state, windows[2])
    with pytest.raises(elche.CheckpointError, match=FULL):
        saver.close()
    assert steps(tmp_path) == [3] and saver.written == 3


def test_an_error_of_the_loop_goes_first(train, tmp_path, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(KeyError, match="mine") as caught, saver_in(train, tmp_path) as saver:
        state = CASE.init(train)
        for window in train.windows(TINY, 2):
            state, _ = train(state, window)
            saver.save(state, window)
            if window.index == 2:
                raise KeyError("mine")
    assert "No space left on device" in caught.value.__notes__[0]


def test_a_folder_that_became_a_file(train, tmp_path):
    folder = tmp_path / "run"
    saver = saver_in(train, folder)
    state, cursor = CASE.init(train), None
    windows = train.windows(TINY, 2, cursor=cursor)
    with pytest.raises(
        elche.CheckpointError, match=r"^checkpoints: .* must take checkpoints, but "
    ):
        for window in windows:
            state, _ = train(state, window)
            saver.save(state, window)
            saver.wait()
            if window.index == 3:
                folder.rename(tmp_path / "moved")
                folder.write_text("a file")
    windows.close()
    saver.close()
    assert steps(tmp_path / "moved") == [3]
    with saver_in(train, tmp_path / "moved") as saver:
        assert saver.restore(CASE.init(train), "must")[1].window == 3


def test_a_folder_that_cannot_be_made(train, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(
        OSError,
        match=rf"^checkpoints: {folder} must be readable and writable, but NotADirectoryError: .* "
        rf"'{folder}'\. Fix that, or use another folder\.$",
    ):
        saver_in(train, folder)
    saver = saver_in(train, folder, on_error="end")
    assert any(t.startswith("elche: no checkpoints will be written: ") for t in caplog.messages)
    with pytest.raises(ValueError, match="must hold a whole checkpoint with resume='must'"):
        saver.restore(CASE.init(train), "must")
    assert int(loop(train, saver).step[0]) == 8
    with pytest.raises(
        elche.CheckpointError, match=r"^checkpoints: .*/file/run must take checkpoints, but NotADi"
    ):
        saver.close()
    for where in (folder, tmp_path / ("a" * 300)):
        with pytest.raises(elche.CheckpointError), saver_in(train, where, on_error="end") as saver:
            loop(train, saver, "never")


def test_a_full_disk_is_resumed_from(train, tmp_path, monkeypatch, caplog):
    """Not even the process's id can be written; the lock holds all the same."""
    with saver_in(train, tmp_path) as saver:
        loop(train, saver)
    write = os.write

    def full(file, text):
        if str(os.getpid()).encode() == text:
            raise OSError(28, "No space left on device")
        return write(file, text)

    monkeypatch.setattr(os, "write", full)
    broken(monkeypatch)
    saver = saver_in(train, tmp_path, on_error="end")
    with pytest.raises(RuntimeError, match=r"another one \(process unknown, or a fork of it\)"):
        saver_in(train, tmp_path)
    _, cursor = saver.restore(CASE.init(train))
    assert cursor.window == 6
    assert int(loop(train, saver, epochs=2).step[0]) == 16
    with pytest.raises(elche.CheckpointError, match=FULL):
        saver.close()
    assert steps(tmp_path) == [3, 6]


def test_checkpoints_that_cannot_be_opened(train, tmp_path, monkeypatch):
    """A run that began anew would be as if they were not there."""
    with saver_in(train, tmp_path) as saver:
        loop(train, saver)

    def fails(_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("elche_jax.checkpoint.checkpointer.lock", fails)
        with pytest.raises(
            OSError,
            match=rf"^checkpoints: {tmp_path} must be readable and writable, as it may hold "
            r"checkpoints, but PermissionError: .* Permission denied\. Fix that, or use another",
        ):
            saver_in(train, tmp_path, on_error="end")
        new = tmp_path / "new"
        with pytest.raises(elche.CheckpointError), saver_in(train, new, on_error="end") as saver:
            loop(train, saver)  # there are none
        patch.setattr(os, "listdir", fails)
        with pytest.raises(OSError, match="as it may hold"):  # whether it does is not known
            saver_in(train, new, on_error="end")
    with saver_in(train, tmp_path, on_error="end") as saver:
        assert saver.restore(CASE.init(train))[1].window == 6


@pytest.fixture
def small_files_only():
    """Lets this process write no large file any more, until the end."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, heard)


def no_large_file(folder):
    """The message where a file of a checkpoint is too large for the disk."""
    return rf"^checkpoints: {folder} must take checkpoints, but .*File too large"


@pytest.mark.parametrize("on_error", ["now", slow("end")])
def test_a_disk_that_is_full(on_error, small_files_only, tmp_path):
    """As far as the system tells: it takes no file of this size any more."""
    train = elche.build_train_step(
        lambda params, batch, rng: ((batch["x"] @ params["w"]) ** 2).mean(),
        optax.sgd(0.1), devices=jax.devices()[:2],
        cadence=elche.EveryBatch(),  # no program is compiled ahead, and written
    )  # fmt: skip
    state = train.init({"w": np.random.default_rng(0).normal(size=(300, 300)).astype("float32")})
    seen, folder = 0, tmp_path / "run"
    raised = pytest.raises(elche.CheckpointError, match=no_large_file(folder))
    saver = saver_in(train, folder, keep_last=1, on_error=on_error)
    with raised if on_error == "now" else nullcontext():
        for window in train.windows({"x": np.ones((64, 300), "float32")}, 2):
            state, _ = train(state, window)
            saver.save(state, window)
            seen += 1
            if seen == 4:
                saver.wait()
                small_files_only()
    with raised if on_error == "end" else nullcontext():
        saver.close()
    assert (4 < seen < 16) if on_error == "now" else seen == 16
    assert saver.written == 3
    store = Store(folder, elche.Checkpoints())
    assert store.steps == [3] and store.read(3).step == 3


# -- threads, and the state that goes on


class Held:
    """A store's `save` that waits until it is let go."""

    def __init__(self, monkeypatch):
        self.reached, self.go = threading.Event(), threading.Event()
        save = Store.save

        def held(store, saved):
            self.reached.set()
            assert self.go.wait(60)
            return save(store, saved)

        monkeypatch.setattr(Store, "save", held)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_what_was_begun_is_written_when_the_loop_raises(error, train, tmp_path, monkeypatch):
    held = Held(monkeypatch)
    with pytest.raises(error), saver_in(train, tmp_path) as saver:
        state = CASE.init(train)
        for window in train.windows(TINY, 2):
            state, _ = train(state, window)
            saver.save(state, window)
            if window.index == 4:
                assert held.reached.wait(60) and saver.written is None
                threading.Timer(0, held.go.set).start()
                raise error
    assert steps(tmp_path) == [3] and saver.written == 3
    assert not [t for t in threading.enumerate() if t.name == "elche-checkpoint"]


@pytest.mark.parametrize("read", ["restore", "best"])
def test_what_is_being_written_is_waited_for(read, train, windows8, tmp_path, monkeypatch):
    """Not only is it the newest one: an older one may be removed while it is read."""
    held, wait = Held(monkeypatch), BackgroundThread.wait

    def let_go(thread, seconds=None):
        held.go.set()
        return wait(thread, seconds)

    monkeypatch.setattr(BackgroundThread, "wait", let_go)
    state, windows = windows8
    with saver_in(train, tmp_path, keep_last=1, keep_best=1) as saver:
        assert saver.save(state, windows[2], score=0.5)
        assert held.reached.wait(60) and saver.written is None
        if read == "best":
            found = saver.best(CASE.init(train))
        else:
            found, cursor = saver.restore(CASE.init(train))
            assert cursor == windows[2].cursor
        assert content(found) == content(state) and saver.written == 3


@pytest.mark.parametrize("world", [1, 4])
def test_what_is_saved_is_of_its_window(world, tmp_path, monkeypatch):
    """Training goes on with buffers that it gives up, while the copy is not fetched yet."""
    fetch, gate = elche.checkpoint.snapshot.Snapshot.fetch, threading.Event()

    def late(self):
        assert gate.wait(60)
        return fetch(self)

    monkeypatch.setattr(elche.checkpoint.snapshot.Snapshot, "fetch", late)
    case, copy = GRADIENTS["dropout"], None
    train = case.build(world)
    state = case.init(train)
    with elche.Checkpointer(train, elche.Checkpoints(tmp_path, every_windows=2)) as saver:
        for window in train.windows(data(), 2):
            state, _ = train(state, window)
            if window.index == 1:
                copy = {name: bytes(value) for name, value in content(state).items()}
            if window.index < 2:
                assert saver.save(state, window) == (window.index == 1)
            if window.index == 4:
                break
        gate.set()
    assert content(state) != copy
    fresh = case.build(world)
    with elche.Checkpointer(fresh, elche.Checkpoints(tmp_path)) as saver:
        saved, cursor = saver.restore(case.init(fresh), "must")
    assert cursor.window == 2 and content(saved) == copy
    assert len(fresh.counts_history) == 2


@pytest.mark.slow  # test_a_loop_saves_and_goes_on_later
def test_saving_changes_nothing(tmp_path):
    case = GRADIENTS["dropout"]
    saved, train = run(case, tmp_path)
    alone, other = run(case)
    assert content(saved) == content(alone)
    assert train.counts_history == other.counts_history
    assert EVERY in steps(tmp_path)


def test_leaves_do_not_share_memory_with_what_was_read(train, windows8, tmp_path):
    """The CPU would read NumPy's memory in place, and give it up with a donated buffer."""
    state, windows = windows8
    with saver_in(train, tmp_path) as saver:
        saver.save(state, windows[2])
    with saver_in(train, tmp_path) as saver:
        back, _ = saver.restore(CASE.init(train), "must")
    for leaf, like in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == like.sharding and leaf.dtype == like.dtype
        assert raw(leaf).shape == raw(like).shape


def test_a_window_that_is_not_the_last_one(train, tmp_path):
    state, windows = CASE.init(train), train.windows(TINY, 2)
    with windows, saver_in(train, tmp_path, every_windows=1) as saver:
        first, second = next(windows), next(windows)
        message = r"window must be the one that was trained last \({}\), got {}\. Save before"
        with pytest.raises(ValueError, match=message.format(None, 0)):
            saver.save(state, first)
        for window in (first, second):
            state, _ = train(state, window)
        with pytest.raises(ValueError, match=message.format(1, 0)):
            saver.save(state, first)
        assert saver.save(state, second)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("window", [3, None])
def test_something_else_than_a_window(window, train, tmp_path):
    message = (
        r"^Checkpointer\.save: window must come from TrainStep\.windows, got (int|NoneType)\.$"
    )
    with saver_in(train, tmp_path) as saver, pytest.raises(TypeError, match=message):
        saver.save(CASE.init(train), window)


def test_a_window_of_another_training_step(train, tmp_path):
    other = CASE.build(1, elche.EveryBatch())
    state, windows = CASE.init(other), other.windows(TINY, 2)
    message = r"^Checkpointer\.save: window must come from this training step's windows, got a"
    with windows, saver_in(train, tmp_path) as saver:
        window = next(windows)
        state, _ = other(state, window)
        with pytest.raises(ValueError, match=message):
            saver.save(state, window)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("donated", ValueError, r"be the one the last call returned, got leaf .* was given up"),
        ("none", TypeError, r"be a TrainState on the devices .*, got NoneType"),
        ("params", TypeError, r"be a TrainState on the devices .*, got dict"),
        ("one copy", ValueError, r"be replicated over the 1 devices of this training step, got"),
        ("another", ValueError,
         r"have the shapes of the one that TrainStep\.init made last, got another: structure"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_saved(name, error, message, train, tmp_path):
    """Said before anything is written: a state of another model was found out by `restore` only."""
    state, found = CASE.init(train), {"none": None}
    with train.windows(TINY, 2) as windows, saver_in(train, tmp_path) as saver:
        window = next(windows)
        found["donated"] = state
        state, _ = train(state, window)
        found |= {"params": state.params, "one copy": elche.unreplicate(state)}
        found["another"] = state.replace(opt_state=())
        with pytest.raises(error, match=rf"^Checkpointer\.save: state must {message}"):
            saver.save(found[name], window, force=True)
        assert not steps(tmp_path)
        assert saver.save(state, window, force=True)


@pytest.mark.parametrize("name", ["restore", "due", "save"])
def test_one_that_is_closed(name, train, windows8, tmp_path):
    """Another one may have opened the folder, and nobody would hear of a write that fails."""
    state, windows = windows8
    saver = saver_in(train, tmp_path)
    saver.close()
    calls = {
        "restore": lambda: saver.restore(state),
        "due": lambda: saver.due(windows[2]),
        "save": lambda: saver.save(state, windows[2], force=True),
    }
    with pytest.raises(
        ValueError,
        match=rf"^Checkpointer\.{name}: the checkpointer must be open, got a closed one\. Call it "
        "before close, or inside the with block",
    ):
        calls[name]()
    assert not steps(tmp_path)


def test_a_forked_process_has_no_part_in_the_lock(train, tmp_path, monkeypatch):
    """It shares what its parent has opened, as if by a duplicate, for as long as it lives."""
    shared, flock = [], fcntl.flock

    def forks(file, how):
        flock(file, how)
        shared.append(os.dup(file.fileno()))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", forks)
        saver, other = saver_in(train, tmp_path / "run"), saver_in(train, tmp_path / "other")
    saver.close()
    again = saver_in(train, tmp_path / "run")
    again.close()
    again.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        other.close()  # by the forked process
    with pytest.raises(RuntimeError, match=rf"another one \(process {os.getpid()}, or a fork"):
        saver_in(train, tmp_path / "other")
    for file in shared:
        os.close(file)


def test_something_else_than_what_saves(train, tmp_path):
    with pytest.raises(TypeError, match=r"^Checkpointer: checkpoints must be .* Checkpoints, got"):
        elche.Checkpointer(train, str(tmp_path))
    with pytest.raises(TypeError, match=r"^Checkpointer: train must be .* TrainStep, got None"):
        elche.Checkpointer(None, elche.Checkpoints(tmp_path))


def test_an_interrupt_of_the_wait_does_not_give_a_checkpoint_up(train, windows8, tmp_path):
    state, windows = windows8
    saver, go, wait = saver_in(train, tmp_path), threading.Event(), threading.Condition.wait
    here = threading.current_thread()

    def interrupted(condition, timeout=None):
        if threading.current_thread() is here:
            raise KeyboardInterrupt
        return wait(condition, timeout)

    def notes():
        go.wait()
        return {}

    assert saver.save(state, windows[2], notes=notes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
    assert saver.written is None
    go.set()
    saver.close()
    assert saver.written == 3 and steps(tmp_path) == [3]


def test_a_working_directory_whose_name_is_not_valid_utf_8(tmp_path, monkeypatch):
    folder = os.path.join(os.fsencode(tmp_path), b"\xff")
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"folder must be valid UTF-8, got '.*udcff/run'\. Orbax"):
        _ = elche.Checkpoints("run").path
