"""The prefetch thread: items in order, errors with their traceback, no thread left."""

import gc
import threading
import weakref
from contextlib import suppress
from unittest import mock

import pytest

from elche_jax.data.prefetch import Prefetch

GIVE_UP = 30  # seconds after which a hang is a failure; never waited for in a good run


def producers():
    return [t for t in threading.enumerate() if t.name == "elche-prefetch"]


def nothing():
    pass


def test_items_come_in_order_and_then_the_end():
    prefetch = Prefetch(lambda stop: iter(range(20)), nothing)
    assert iter(prefetch) is prefetch
    assert list(prefetch) == list(range(20))
    assert next(prefetch, "over") == "over"
    assert producers() == []


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_share_it_all_hear_of_its_end(fails):
    def make(stop):
        yield from range(20)
        if fails:
            raise KeyError("mine")

    prefetch, got, errors = Prefetch(make, nothing), [], []

    def loop():
        try:
            for item in prefetch:
                got.append(item)
        except KeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(got) == list(range(20))
    assert len(errors) == fails and producers() == []


def test_it_runs_ahead_and_holds_one_item_ready():
    taken = 0
    most = 0
    filled = threading.Event()

    def make(stop):
        nonlocal most
        for made in range(1, 40):
            most = max(most, made - taken)
            if made == 2:
                filled.set()  # one item lies ready and one waits for room
            yield made

    prefetch = Prefetch(make, nothing)
    assert filled.wait(GIVE_UP)
    while True:
        taken += 1
        if next(prefetch, None) is None:
            break
    assert most == 2


def test_an_error_comes_after_the_items_before_it_with_its_traceback():
    def failing_dataset():
        raise OSError("disk gone")

    def make(stop):
        yield "first"
        failing_dataset()

    prefetch = Prefetch(make, nothing)
    assert next(prefetch) == "first"
    with pytest.raises(OSError, match="disk gone") as caught:
        next(prefetch)
    assert caught.traceback[-1].name == "failing_dataset"
    assert producers() == []
    assert next(prefetch, "over") == "over"


def test_an_error_does_not_keep_the_frames_of_the_source():
    class Held:
        pass

    held, begin = [], threading.Event()

    def make(stop):
        assert begin.wait(GIVE_UP)
        mine = Held()
        held.append(weakref.ref(mine))
        raise OSError("disk gone")
        yield mine

    gc.disable()
    try:
        prefetch = Prefetch(make, nothing)
        (thread,) = producers()
        begin.set()
        with suppress(OSError):
            next(prefetch)
        thread.join(GIVE_UP)
        assert [one() for one in held] == [None]
    finally:
        gc.enable()


def test_an_error_before_the_first_item_is_raised():
    def make(stop):
        raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        next(Prefetch(make, nothing))


def test_even_an_exit_in_the_source_reaches_the_loop():
    def make(stop):
        raise SystemExit(3)
        yield

    with pytest.raises(SystemExit):
        next(Prefetch(make, nothing))


def test_close_while_the_producer_waits_for_room():
    full = threading.Event()

    def make(stop):
        yield 1
        full.set()  # the next item cannot be put any more
        yield 2

    prefetch = Prefetch(make, nothing)
    (thread,) = producers()
    assert full.wait(GIVE_UP)
    prefetch.close()
    thread.join(GIVE_UP)  # `close` waits for what it runs, and not for its very end
    assert not thread.is_alive()
    assert next(prefetch, "over") == "over"


def test_close_wakes_an_iterator_that_waits():
    changed = threading.Condition()
    waiting = threading.Event()
    wakes = []

    def make(stop):
        with changed:
            waiting.set()
            changed.wait_for(stop.is_set)
        return
        yield

    def wake():
        wakes.append(1)
        with changed:
            changed.notify_all()

    prefetch = Prefetch(make, wake)
    (thread,) = producers()
    assert waiting.wait(GIVE_UP)
    prefetch.close()
    thread.join(GIVE_UP)  # `close` waits for what it runs, and not for its very end
    assert not thread.is_alive()
    prefetch.close()
    assert wakes == [1]


def test_what_an_iterator_raises_when_told_to_stop_is_nobodys_concern():
    def make(stop):
        stop.wait()
        raise OSError("interrupted")
        yield

    prefetch = Prefetch(make, nothing)
    prefetch.close()
    assert producers() == []
    assert next(prefetch, "over") == "over"


def test_dropping_it_ends_the_thread():
    closed = threading.Event()

    def make(stop):
        try:
            while True:
                yield 1
        finally:
            closed.set()

    prefetch = Prefetch(make, nothing)
    assert next(prefetch) == 1
    (thread,) = producers()
    del prefetch
    thread.join(GIVE_UP)  # `close` waits for what it runs, and not for its very end
    assert not thread.is_alive()
    assert closed.is_set()


def test_dropping_it_in_its_own_thread_ends_the_thread():
    go = threading.Event()
    box = []

    def make(stop):
        go.wait()
        box.clear()
        assert stop.is_set()
        yield 1

    box.append(Prefetch(make, nothing))
    dropped = weakref.ref(box[0])
    (thread,) = producers()
    go.set()
    thread.join(GIVE_UP)
    assert not thread.is_alive()
    assert dropped() is None


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_loop_that_waits_for_an_item_is_released_by_close(interrupted, monkeypatch):
    def make(stop):
        stop.wait()
        return
        yield

    prefetch = Prefetch(make, nothing)
    got = []
    loop = threading.Thread(target=lambda: got.append(next(prefetch, "over")), daemon=True)
    loop.start()
    if interrupted:  # by a Ctrl-C, while it waits for the thread
        wait = mock.Mock(side_effect=KeyboardInterrupt)
        monkeypatch.setattr("elche_jax.data.prefetch.wait_for_end", wait)
        with pytest.raises(KeyboardInterrupt):
            prefetch.close()
    else:
        prefetch.close()
    loop.join(GIVE_UP)
    assert got == ["over"]


def test_close_does_not_wait_for_a_stuck_source():
    stuck, free = threading.Event(), threading.Event()

    def make(stop):
        stuck.set()
        free.wait()
        yield 1
        raise AssertionError("told to stop, and yet asked for more")

    prefetch = Prefetch(make, nothing)
    (thread,) = producers()
    assert stuck.wait(GIVE_UP)
    prefetch.close()
    assert thread.is_alive()  # nothing can interrupt it, but the loop goes on
    assert next(prefetch, "over") == "over"
    free.set()
    thread.join(GIVE_UP)
    assert not thread.is_alive()
