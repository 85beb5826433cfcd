"""What a process notes of its work, how a watchdog reads it, and whom it holds to be stuck."""

import os
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace

import children
import pytest

from elche_jax import _progress, distributed
from elche_jax._progress import Noted, Phase, ProgressFile
from elche_jax.launch import watcher
from elche_jax.launch.judge import MORE, Judge, Seen, Stuck
from elche_jax.launch.watchdog import Watchdog
from elche_jax.launch.watcher import PROGRESS_FILE

T = 30.0
"""The timeout of the judges here."""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """The file in which this process notes what it does."""
    notes = ProgressFile.create(tmp_path / "0")
    monkeypatch.setattr(_progress, "_file", notes)
    return notes


def test_nothing_is_noted_if_nobody_watches():
    assert not _progress.watched()
    with _progress.phase("data", 3) as noted:
        assert noted is None
    _progress.joined(1, several=True)
    _progress.opened(3, [0], 1)
    _progress.completed(3, trains=True)
    _progress.closed()
    assert _progress.told() == []


def test_a_process_is_asked_to_start_again(notes, tmp_path, monkeypatch):
    monkeypatch.setattr(_progress, "_asked", False)
    launcher = ProgressFile(tmp_path / "0")
    assert not _progress.asked()
    launcher.ask()
    assert _progress.asked()
    assert launcher.read() == Noted(), "that is nothing it has noted itself"
    monkeypatch.setattr(_progress, "_file", None)
    assert not _progress.asked()
    distributed.request_restart()
    assert _progress.asked()


def test_a_launcher_that_only_asks_is_no_watchdog(notes, tmp_path, monkeypatch):
    assert _progress.watched() and _progress.noting()
    monkeypatch.setattr(_progress, "_file", ProgressFile.create(tmp_path / "1", watched=False))
    assert _progress.noting() and not _progress.watched()


def test_phases_of_several_threads(notes, tmp_path):
    others = ProgressFile(tmp_path / "0")  # as another process has it
    inside, go_on = threading.Barrier(4), threading.Event()

    def work(kind):
        with _progress.phase(kind, 7):
            inside.wait()
            go_on.wait()

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("data", "data", "compile")]
    for thread in threads:
        thread.start()
    inside.wait()
    _progress.joined(2, several=True)
    _progress.opened(5, [4, 6], 2)
    phases = others.read().phases
    assert sorted((one.kind, one.window) for one in phases) == [
        ("compile", 7), ("data", 7), ("data", 7),
    ]  # fmt: skip
    assert len(set(phases)) == 3
    noted = others.read()
    assert (noted.process, noted.several, noted.ranks) == (2, True, "ranks 4 and 6")
    assert (noted.running, noted.first, noted.window) == (True, 5, 5)
    go_on.set()
    for thread in threads:
        thread.join()
    _progress.completed(5, trains=True)
    _progress.closed()
    after = others.read()
    assert (after.phases, after.running, after.window) == ((), False, 6)
    assert after.notes > noted.notes


def test_a_phase_ends_with_an_error_and_its_place_is_free_again(notes):
    for _ in range(1000):
        with pytest.raises(KeyError), _progress.phase("window"):
            assert [one.kind for one in notes.read().phases] == ["window"]
            raise KeyError
    assert notes.read().phases == ()


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([0, 1, 5], "ranks 0, 1 and 5")]
)
def test_ranks(notes, ranks, text):
    _progress.opened(0, ranks, 0)
    assert notes.read().ranks == text
    _progress.closed()


def test_very_many_ranks_are_cut(notes):
    _progress.opened(0, range(500), 0)
    assert notes.read().ranks.startswith("ranks 0, 1, 2, ")
    _progress.closed()


def test_what_was_told_is_logged_once_with_the_next_note(notes, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_progress, "_logged", 0)
    for line in ("process 1 was killed", "process 2 was killed"):
        with (tmp_path / "told").open("a") as file:
            print(line, file=file)
        notes.tell()
        for _ in range(3):
            with _progress.phase("data"):
                pass
    assert [record.message for record in caplog.records] == [
        "elche: process 1 was killed", "elche: process 2 was killed",
    ]  # fmt: skip
    assert _progress.told() == ["process 1 was killed", "process 2 was killed"]


def test_what_cannot_be_told_ends_nobody(notes, tmp_path, caplog):
    watchdog = Watchdog({0: notes}, timeout=1.0)
    watchdog.tell(tmp_path / "cleared", "process 1 was killed", alive=[0])
    with _progress.phase("data"):
        pass
    assert not caplog.records


BLAMES = """
import os, subprocess, sys
from elche_jax import _progress
if sys.argv[1:]:
    if not os.fork():
        _progress.blame(3)
        os._exit(0)
    os.wait()
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
    _progress.blame(0)
else:
    _progress.blame(2)
print(_progress.noting())
"""


@pytest.mark.parametrize("noted", [False, True])
def test_because_of_whom_a_process_ends_is_always_noted(noted, tmp_path):
    notes = ProgressFile.create(tmp_path / "0", watched=False, noted=noted)
    assert notes.because is None
    done = children.run(
        sys.executable, "-c", BLAMES, BLAMES, env={_progress.VARIABLE: str(notes.path)}
    )
    assert (done.stdout.split(), done.stderr) == (["False", str(noted)], "")
    assert notes.because == 0, "not what those have said that it has started"


WRITES = """
import os, sys
from elche_jax import _progress
print(_progress.watched(), flush=True)  # before it is killed
with _progress.phase("data", 3):
    if sys.argv[1:]:
        import subprocess
        subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
        if not os.fork():
            with _progress.phase("compile"):
                os._exit(0)
        os.wait()
        os.kill(os.getpid(), 9)
"""


def test_only_the_process_itself_notes(tmp_path):
    """Not those that it starts, which inherit the variable or the memory; and notes outlive it."""
    notes = ProgressFile.create(tmp_path / "0")
    done = children.run(
        sys.executable, "-c", WRITES, WRITES, env={_progress.VARIABLE: str(notes.path)}
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (-9, ["True", "False"], "")
    assert [one.kind for one in notes.read().phases] == ["data"]
    assert notes.read().pid


# -- the judge: what is noted, its state and how much time has passed


def noted(*kinds, window=9, first=0, **more):
    phases = tuple(Phase(kind, begun=at + 1) for at, kind in enumerate(kinds))
    one = Noted(notes=1, running=True, window=window, first=first, several=True, phases=phases)
    return one._replace(**more)


def stuck_after(timeline, processes=2):
    """When a judge blames whom: the timeline has (seconds, what is seen of each process)."""
    judge, now = Judge(T, processes), 0.0
    for seconds, seen in timeline:
        seen = {
            at: one if isinstance(one, Seen) else Seen(one)
            for at, one in enumerate(seen)
            if one is not None
        }
        for _ in range(int(seconds)):
            judge, stuck = judge.observe(seen, 1.0)
            now += 1
            if stuck:
                return now, stuck[0]
    return None


WAITS = noted("exchange", "window")
LIMITS = [
    ("data", 1), ("window", 1), ("compile", MORE), ("restore", MORE), ("checkpoint", MORE),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "limit"), LIMITS)
def test_the_one_that_is_stuck_is_blamed_not_those_that_wait(kind, limit):
    when, stuck = stuck_after([(10 * MORE * T, [WAITS, noted(kind)])])
    assert (stuck.process, stuck.kind, stuck.window) == (1, kind, 9)
    assert limit * T < when <= limit * T + 2


@pytest.mark.parametrize(("kind", "limit"), LIMITS)
def test_no_process_is_blamed_up_to_its_limit(kind, limit):
    assert stuck_after([(limit * T, [WAITS, noted(kind)])]) is None


def test_ten_times_the_timeout_is_no_hang():
    for kind in ("compile", "restore"):
        assert stuck_after([(10 * T, [WAITS, noted(kind, "window", "data")])]) is None
    assert stuck_after([(10 * T, [WAITS, Noted()])]) is None, "start-up"
    for kind in ("data", "window", "exchange"):
        first = noted(kind, window=4, first=4)
        assert stuck_after([(10 * T, [noted("exchange", window=4, first=4), first])]) is None
    outside = noted("exchange", running=False)
    assert stuck_after([(10 * T, [outside, outside])]) is None, "the program of its first exchange"


@pytest.mark.parametrize("one", [Noted(), noted()])
def test_start_up_and_the_loop_are_no_notes_of_their_own(one):
    when, stuck = stuck_after([(100 * T, [WAITS, one])])
    assert (stuck.process, stuck.kind) == (1, "loop" if one.running else "start-up")
    assert when > MORE * T


def test_outside_of_a_run_a_process_may_do_what_it_wants():
    assert stuck_after([(100 * T, [WAITS, noted(running=False)])]) is None


def test_progress_is_a_phase_that_is_another_one():
    timeline = [
        (0.9 * T, [WAITS, noted(phases=(Phase("data", begun=at),))]) for at in range(1, 100)
    ]
    assert stuck_after(timeline) is None
    timeline = [(0.9 * T, [WAITS, noted(notes=at)]) for at in range(1, 100)]
    assert stuck_after(timeline) is None


def test_time_in_which_a_process_could_not_go_on_does_not_count():
    work = noted(phases=WAITS.phases[1:])  # the same phase without the exchange
    assert stuck_after([(0.9 * T, [work]), (100 * T, [WAITS]), (0.1 * T, [work])], 4) is None
    assert stuck_after([(0.9 * T, [work]), (10 * T, [noted("window", "compile")])], 1) is None
    assert stuck_after([(100 * T, [Seen(work, "t")])], 1) is None, "in a debugger"
    assert stuck_after([(0.9 * T, [work]), (10 * T, [WAITS]), (0.2 * T, [work])], 4)[0]


@pytest.mark.parametrize("one", [noted("compile"), noted(), Noted(), WAITS])
def test_a_process_that_is_stopped(one):
    when, stuck = stuck_after([(10 * T, [WAITS, Seen(one, "T")])])
    assert (stuck.process, stuck.stopped, T < when <= T + 2) == (1, True, True)


def test_a_collective_in_which_all_wait():
    when, stuck = stuck_after([(T, [WAITS, noted("compile")]), (10 * T, [WAITS, WAITS])])
    assert (stuck.process, stuck.kind, stuck.window) == (None, "exchange", 9)
    assert 2 * T < when <= 2 * T + 2
    assert str(stuck) == (
        'all processes waited for each other for 31 s in window 9, phase "exchange": killed'
    )


def test_a_collective_in_which_all_wait_outside_of_a_run():
    outside = noted("exchange", running=False)
    when, stuck = stuck_after([(100 * T, [outside, outside])])
    assert (stuck.process, stuck.window, MORE * T < when <= MORE * T + 2) == (None, None, True)


def test_not_all_wait():
    assert stuck_after([(100 * T, [WAITS, WAITS])], processes=3) is None, "some on another host"
    assert stuck_after([(100 * T, [WAITS, None])]) is None, "one has ended"
    assert stuck_after([(100 * T, [WAITS])], processes=1) is None, "its own watchdog knows no more"
    alone = WAITS._replace(several=False)
    assert stuck_after([(100 * T, [alone])], processes=1)[1].process == 0, "its own devices"


def test_a_watchdog_that_was_asleep_blames_nobody():
    judge, _ = Judge(T).observe({0: Seen(noted("data"))}, 1.0)
    _, stuck = judge.observe({0: Seen(noted(phases=(Phase("data", begun=77),)))}, 1000 * T)
    assert stuck == []


def test_what_is_said():
    judge = replace(Judge(T), since={3: {Phase("restore"): MORE * T}})
    seen = Seen(noted(running=False, phases=(Phase("restore"),)))
    _, (stuck,) = judge.observe({3: seen}, 1.0)
    assert str(stuck) == 'process 3 made no progress for 601 s in phase "restore": killed'
    told = stuck._replace(ranks="rank 4", window=2, stopped=True)
    assert str(told) == (
        'process 3 (rank 4) made no progress for 601 s in window 2, phase "restore", stopped by a '
        "signal: killed"
    )


# -- watch


@pytest.mark.parametrize(
    ("timeout", "error", "message"),
    [
        (0, ValueError, "distributed.watch: timeout must be above 0, got 0"),
        ("soon", TypeError, "distributed.watch: timeout must be a number, got 'soon'"),
    ],
)
def test_a_timeout_that_is_none(timeout, error, message):
    with pytest.raises(error, match=message):
        distributed.watch(timeout)


def test_a_process_that_is_watched(notes, monkeypatch, caplog):
    with pytest.raises(RuntimeError, match=r"distributed\.watch: it must be called once"):
        distributed.watch(30)
    monkeypatch.setenv(_progress.VARIABLE, os.fspath(notes.path))
    caplog.set_level("INFO")
    distributed.watch(30)
    assert "the launcher watches this process, so distributed.watch does nothing" in caplog.text


def test_windows_that_were_trained_stay_counted(notes):
    _progress.opened(5, [0], 0)
    _progress.completed(5, trains=True)
    _progress.opened(0, [0], 0)  # an evaluation
    _progress.completed(0, trains=False)
    assert notes.read().trained == 1


def test_more_phases_than_places_are_not_seen_and_do_no_harm(notes):
    with ExitStack() as stack:
        for window in range(100):
            stack.enter_context(_progress.phase("window", window))
        assert 1 < len(notes.read().phases) < 100
    assert notes.read().phases == ()
    with _progress.phase("data", 3):
        assert [one.kind for one in notes.read().phases] == ["data"]


def test_a_watchdog_after_initialize_is_an_error(monkeypatch):
    """It would take the process for the only one of its job, and kill it while it waits."""
    monkeypatch.setattr(distributed.jax.distributed, "is_initialized", lambda: True)
    rule = "it must be called before initialize, not after it"
    with pytest.raises(RuntimeError, match=rf"^distributed\.watch: {rule}\.$"):
        distributed.watch(60)


HANGS = """
import sys, time
from pathlib import Path
from elche_jax import _progress
from elche_jax.launch.marked import start
from elche_jax.launch.watcher import PROGRESS_FILE
folder = Path(sys.argv[1])
_progress.write_to(_progress.ProgressFile.create(folder / PROGRESS_FILE))
with _progress.phase("data", 3):
    start("watcher", folder, 0.05)
    time.sleep(600)
"""


def test_a_watchdog_ends_a_process_whose_errors_nobody_reads(tmp_path):
    with children.started(sys.executable, "-c", HANGS, tmp_path) as process:
        process.stderr.close()
        assert process.wait() == -signal.SIGKILL


def test_a_watchdog_kills_what_it_may(tmp_path, monkeypatch):
    """A process may have started one of another user, such as `sudo`."""
    ProgressFile.create(tmp_path / PROGRESS_FILE)
    killed, stuck = [], Stuck(0, "rank 0", 1.0, 3, "data")

    def kill(pid, number):
        killed.append(pid)
        if pid == 8:
            raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "getppid", lambda: 0 if killed else 7)
    monkeypatch.setattr(watcher, "descendants", lambda pid: [8, 9])
    monkeypatch.setattr(Watchdog, "look", lambda *_: [stuck])
    watcher.main(7, tmp_path, 1.0)
    assert killed == [8, 9, 7]
