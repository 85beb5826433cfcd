"""`elche-jax launch --elastic` with processes without JAX: which generation follows which."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import children
import pytest
from waits import eventually

from elche_jax._progress import AGAIN
from elche_jax.cli import main
from elche_jax.launch import launcher, memory
from elche_jax.launch.elastic import Elastic, Ended, Failure, Outcome, parsed
from elche_jax.launch.marked import descendants, state_of
from elche_jax.launch.memory import IN_MEMORY

COMMAND = [sys.executable, "-W", "error", "-m", "elche_jax", "launch"]
HEAD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from elche_jax import _progress
me, place = int(os.environ["ELCHE_PROCESS_ID"]), int(os.environ["ELCHE_LOCAL_ID"])
size, here = int(os.environ["ELCHE_NUM_PROCESSES"]), Path(".")
generation = len([*here.glob(f"started-{me}-*")]) + 1
(here / f"started-{me}-{generation}").touch()

def train():
    _progress.joined(me, several=size > 1)
    _progress.opened(7, [me], me)
    _progress.completed(7, trains=True)
    (here / f"trained-{me}-{generation}").touch()

def wait_for_all():
    while len([*here.glob(f"trained-*-{generation}")]) < size:
        time.sleep(0.01)

def leave():
    while not _progress.asked():
        time.sleep(0.01)
    sys.exit(75)
"""
SAID = "elche-jax launch: "
needs_memory = pytest.mark.skipif(
    not os.access(IN_MEMORY, os.W_OK), reason="no file system in memory"
)


@pytest.fixture
def launched(tmp_path):
    """Writes a script; gives what starts it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def launched(script, *options, env=(), **how):
        (tmp_path / "script.py").write_text(HEAD + script)
        return children.started(
            *COMMAND, *options, "script.py", cwd=tmp_path, limit=60,
            env={"TMPDIR": str(temporary)} | dict(env), **how,
        )  # fmt: skip

    yield launched
    assert not [*temporary.iterdir()], "a folder of the launcher is left"


def outcome(process):
    """The exit code, what the processes printed, and what the launcher said."""
    out, err = process.communicate()
    said = [line[len(SAID) :] for line in err.splitlines() if line.startswith(SAID)]
    return process.returncode, sorted(out.splitlines()), said


@needs_memory
def test_a_folder_in_memory_is_there_for_all_generations(launched):
    script = """
memory = Path(os.environ["ELCHE_MEMORY"])
train()
if generation == 1:
    (memory / "state").write_text("one")
    sys.exit(3)
print(memory, (memory / "state").read_text())
"""
    with launched(script, "-n", "1", "--elastic", "1:1") as process:
        code, (line,), _ = outcome(process)
    folder, state = line.split("] ")[1].split()
    assert (code, state) == (0, "one")
    assert Path(folder).parent == Path(IN_MEMORY) and not Path(folder).exists()


@needs_memory
def test_a_folder_in_memory_is_gone_after_a_launcher_that_is_killed(launched):
    script = 'print(os.environ["ELCHE_MEMORY"], flush=True)\ntime.sleep(60)'
    with launched(script, "-n", "1", "--elastic", "1:1") as process:
        folder = Path(process.stdout.readline().split("] ")[1].strip())
        assert folder.exists()
        process.kill()
        eventually(lambda: not folder.exists())


def test_a_folder_in_memory_may_be_chosen(launched, tmp_path):
    (tmp_path / "chosen").mkdir()
    script = 'print(repr(os.environ["ELCHE_MEMORY"]))'
    one = "-n", "1", "--elastic", "1:1"
    with launched(script, *one, env={"ELCHE_MEMORY": str(tmp_path / "chosen")}) as process:
        code, (line,), _ = outcome(process)
    assert (code, Path(line.split("'")[1]).parent) == (0, tmp_path / "chosen")
    assert not [*(tmp_path / "chosen").iterdir()]
    with launched(script, *one, env={"ELCHE_MEMORY": "chosen"}) as process:
        code, (line,), _ = outcome(process)
    assert (code, Path(line.split("'")[1]).parent) == (0, tmp_path / "chosen"), "absolute"
    with launched(script, *one, env={"ELCHE_MEMORY": ""}) as process:
        assert outcome(process)[:2] == (0, ["[0] ''"])
    with launched(script, "-n", "1", env={"ELCHE_MEMORY": str(tmp_path)}) as process:
        assert outcome(process)[:2] == (0, ["[0] ''"]), "there is no generation to follow"
    with launched(script, *one, env={"ELCHE_MEMORY": str(tmp_path / "none")}) as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, ["[0] ''"])
    want = "nothing is kept in memory between generations: [Errno 2] No such file or directory"
    assert said[0].startswith(want)


KEEPS = """
place = Path(os.environ["ELCHE_MEMORY"]) / "digest"
(place / "7" / "manifest").mkdir(parents=True)
(place / "folder").write_text("runs/saved")
train()
sys.exit(75)
"""


def test_what_is_on_disk_is_removed_from_memory(launched, tmp_path):
    (tmp_path / "chosen").mkdir()
    (tmp_path / "runs/saved/7/manifest").mkdir(parents=True)
    options = "-n", "1", "--elastic", "1:1", "--max-restarts", "0"
    with launched(KEEPS, *options, env={"ELCHE_MEMORY": str(tmp_path / "chosen")}) as process:
        code, _, said = outcome(process)
    assert code == 75 and "memory" not in said[-1]
    assert not [*(tmp_path / "chosen").iterdir()]


def test_what_was_being_removed_from_memory_is_removed(launched, tmp_path):
    """Its process was killed then; where it would go is no longer known, as it is there."""
    (tmp_path / "chosen").mkdir()
    script = KEEPS.replace("sys.exit(75)", '(place / "folder").unlink()\nsys.exit(3)')
    options = "-n", "1", "--elastic", "1:1", "--max-restarts", "0"
    with launched(script, *options, env={"ELCHE_MEMORY": str(tmp_path / "chosen")}) as process:
        code, _, said = outcome(process)
    assert code == 3 and "memory" not in said[-1]
    assert not [*(tmp_path / "chosen").iterdir()]


READS = """
os.mkfifo("number")
for _ in range(20):  # longer than the launcher looks away
    try:
        os.close(os.open("number", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # nobody reads it
        time.sleep(0.05)
    else:
        print("waits for it")
        break
"""


def test_a_pipe_in_place_of_the_number_file_is_not_waited_for(launched):
    options = "-n", "1", "--elastic", "1", "--number-file", "number"
    with launched(READS, *options) as process:
        assert outcome(process)[:2] == (0, [])


def test_what_is_in_memory_only_is_not_removed(launched, tmp_path):
    """A folder with a number that is not a checkpoint, such as one of a year, is not later."""
    (tmp_path / "chosen").mkdir()
    (tmp_path / "runs/saved/2024").mkdir(parents=True)
    options = "-n", "1", "--elastic", "1:1", "--max-restarts", "0"
    with launched(KEEPS, *options, env={"ELCHE_MEMORY": str(tmp_path / "chosen")}) as process:
        code, _, said = outcome(process)
    (path,) = (tmp_path / "chosen").glob("*/digest/7")
    assert code == 75
    assert said[-1] == (f"the last checkpoint of runs/saved is in memory only: move {path} there")


HOLDS = """
print(os.getpid(), os.environ["ELCHE_MEMORY"], flush=True)
threading.Event().wait()
"""


def killed_with_its_guard(launcher):
    """Ends a launcher and its guard in a way that neither can do anything about."""
    for pid in descendants(launcher.pid):
        if b"elche_jax.launch.guard" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: state_of(pid) in ("", "Z"))
    launcher.kill()
    launcher.wait()


def test_the_next_launcher_removes_what_nobody_uses_any_more(launched, tmp_path):
    (tmp_path / "chosen").mkdir()
    options, env = ("-n", "1", "--elastic", "1:1"), {"ELCHE_MEMORY": str(tmp_path / "chosen")}
    with launched(HOLDS, *options, env=env) as killed:
        pid, held = killed.stdout.readline().split("] ")[1].split()
        try:
            killed_with_its_guard(killed)
            with launched("", *options, env=env) as process:
                assert outcome(process)[0] == 0
            assert Path(held).exists(), "a process of the job may still write to it"
        finally:
            os.kill(int(pid), signal.SIGKILL)
    eventually(lambda: state_of(int(pid)) in ("", "Z"))
    with launched(KEEPS, *options, "--max-restarts", "0", env=env) as process:
        assert outcome(process)[0] == 75
    assert not Path(held).exists()
    (only,) = (tmp_path / "chosen").glob("*/digest/7")
    with launched("", *options, env=env) as process:
        code, _, said = outcome(process)
    want = f"the last checkpoint of runs/saved is in memory only: move {only} there"
    assert (code, said[0], only.exists()) == (0, want, True)
    (tmp_path / "runs/saved/8/manifest").mkdir(parents=True)
    with launched("", *options, env=env) as process:
        assert outcome(process)[0] == 0
    assert not [*(tmp_path / "chosen").iterdir()], "the run has gone on without it"
    shutil.rmtree(*(tmp_path / "tmp").iterdir())  # what the launcher that was killed has left


def test_a_folder_is_not_removed_before_it_is_locked(tmp_path, monkeypatch):
    make, made = memory.tempfile.mkdtemp, []

    def quicker(**options):
        """Lets another launcher look between the two steps, at first."""
        made.append(Path(make(**options)))
        if len(made) == 1:
            memory._remove_abandoned(tmp_path)
        return made[-1]

    monkeypatch.setattr(memory.tempfile, "mkdtemp", quicker)
    folder = memory._new(tmp_path)
    try:
        memory._remove_abandoned(tmp_path)
        assert [*tmp_path.iterdir()] == [folder.path] == made[1:]
    finally:
        os.close(folder.lock)


LOSES = """
train()
wait_for_all()
if me == 1 and generation == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if generation == 1:
    leave()
print("done", size)
"""


def test_the_others_save_when_one_is_lost_and_all_come_back(launched):
    with launched(LOSES, "-n", "3", "--elastic", "2:3") as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, [f"[{me}] done 3" for me in range(3)])
    assert said == [
        "generation 1: 3 processes",
        "process 1 ended with SIGKILL, the others are asked to save and to end",
        "generation 2: 3 processes, resuming",
    ]


STOPS = LOSES.replace("SIGKILL", "SIGSTOP")


def test_a_process_that_hangs_comes_back(launched):
    with launched(STOPS, "-n", "2", "--elastic", "1:2", "--timeout", "1") as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, ["[0] done 2", "[1] done 2"])
    assert re.fullmatch(
        r'process 1 \(rank 1\) made no progress for 1 s in window 8, phase "loop", stopped by a '
        "signal: killed",
        said[1],
    )
    assert said[2:] == [
        "process 1 ended with SIGKILL, the others are asked to save and to end",
        "generation 2: 2 processes, resuming",
    ]


FAILS = """
train()
wait_for_all()
if me == {me}:
    sys.exit(4 + generation)
leave() if {leaves} else time.sleep(600)
"""


@pytest.mark.parametrize(("me", "goes_on"), [(1, True), (0, False)])
def test_restarts_are_counted(me, goes_on, launched):
    script = FAILS.format(me=me, leaves=goes_on)
    with launched(script, "-n", "2", "--elastic", "1:2", "--max-restarts", "1") as process:
        code, _, said = outcome(process)
    rest = "the others are asked to save and to end" if goes_on else "ending the others"
    assert code == 6, "of the first failure in the last generation"
    assert said == [
        "generation 1: 2 processes",
        f"process {me} ended with exit code 5, {rest}",
        "generation 2: 2 processes, resuming",
        f"process {me} ended with exit code 6, {rest}",
        f"all restarts are used up (--max-restarts): process {me} ended with exit code 6",
    ]


RAISES = """
train()
wait_for_all()
if me == 1:
    sys.exit(5)
if me == 2:
    while not _progress.asked():
        time.sleep(0.01)
    sys.exit(6)
leave()
"""


def test_that_the_others_may_raise_is_not_denied(launched):
    with launched(RAISES, "-n", "3", "--elastic", "1:3", "--max-restarts", "0") as process:
        code, _, said = outcome(process)
    assert code == 5
    assert said == [
        "generation 1: 3 processes",
        "process 1 ended with exit code 5, the others are asked to save and to end",
        "process 2 ended with exit code 6",
        "all restarts are used up (--max-restarts): process 1 ended with exit code 5",
    ]


BROKEN = """
if place in {broken}:
    sys.exit(9)
if {low} < size or 0 in {broken}:
    time.sleep(600)
print("done", place)
"""


def test_a_place_at_which_none_can_run_is_left_out(launched):
    script = BROKEN.format(broken=[1], low=2)
    with launched(script, "-n", "3", "--elastic", "2:3") as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, ["[0] done 0", "[1] done 2"])
    assert said == [
        "generation 1: 3 processes",
        "process 1 ended with exit code 9, ending the others",
        "generation 2: 2 processes (3 wanted), resuming",
    ]


BLAMES = """
if generation == 1 and me == 0:
    Path("pid").write_text(str(os.getpid()))
    _progress.blame(1)
    sys.exit(5)
if generation == 1:
    _progress.blame(1)
    while not Path("pid").exists() or Path("/proc", Path("pid").read_text()).exists():
        time.sleep(0.01)
    sys.exit(9)
print("done", place)
"""


def test_the_place_of_the_one_to_blame_is_left_out(launched):
    with launched(BLAMES, "-n", "2", "--elastic", "2:3") as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, ["[0] done 0", "[1] done 2"])
    assert said == [
        "generation 1: 2 processes",
        "process 1 ended with exit code 9",
        "process 0 ended with exit code 5 because of process 1",
        "generation 2: 2 processes, resuming",
    ]


def test_too_few_can_run(launched):
    script = BROKEN.format(broken=[0, 1, 2], low=2)
    with launched(script, "-n", "2", "--elastic", "2:2") as process:
        code, _, said = outcome(process)
    assert code == 9
    assert re.fullmatch(
        r"process [01] ended with exit code 9 before the first window was complete; without its "
        r"place 1 process could run, but at least 2 must \(--elastic\)",
        said[-1],
    )


NUMBER = """
train()
while size != 3:
    leave()
print("done", size)
"""


def test_another_number_is_wanted(launched, tmp_path):
    number = tmp_path / "number"
    number.write_text("1")  # goes before -n
    options = "-n", "2", "--elastic", "1:3", "--number-file", "number", "--max-restarts", "0"
    with launched(NUMBER, *options) as process:
        said = []

        def says(text):
            while not any(text in line for line in said):
                said.append(process.stderr.readline())

        says("generation 1: 1 process\n")
        for bad in ("4", "two"):
            number.write_text(bad)
            says(f"number must hold a number from 1 to 3, got '{bad}'; the number wanted stays 1")
        number.unlink()
        number.write_text(" 3\n")
        says("3 processes are wanted (number)")
        says("generation 2: 3 processes, resuming")
        code, out, _ = outcome(process)
    assert (code, out) == (0, [f"[{me}] done 3" for me in range(3)])
    assert len([line for line in said if line.startswith(SAID)]) == 6, "each is said once"


CLEARS = """
import shutil
train()
if generation == 1:
    shutil.rmtree(Path(os.environ["ELCHE_PROGRESS"]).parents[1])
    sys.exit(75)
print("done")
"""


def test_a_generation_follows_where_the_temporary_files_were_cleared_away(launched):
    with launched(CLEARS, "-n", "1", "--elastic", "1") as process:
        assert outcome(process)[:2] == (0, ["[0] done"])


def test_a_file_may_have_any_name(launched, tmp_path):
    name = os.fsdecode(b"\xff")
    (tmp_path / name).write_text("none")
    with launched("", "-n", "1", "--elastic", "1", "--number-file", name, text=False) as process:
        _, err = process.communicate()
    assert process.returncode == 0
    assert err.startswith(b"elche-jax launch: \xff must hold a number from 1 to 1, got 'none'")


LEAVES = """
from elche_jax.launch.marked import state_of
idle = "import time; time.sleep(600)"
if generation == 1:
    child = subprocess.Popen([sys.executable, "-c", idle], start_new_session=True)
    Path("child").write_text(str(child.pid))
    sys.exit(75)
print("gone" if state_of(int(Path("child").read_text())) in ("", "Z", "X") else "lives")
"""


def test_what_a_generation_leaves_behind_is_ended_before_the_next_one(launched):
    with launched(LEAVES, "-n", "1", "--elastic", "1") as process:
        code, out, said = outcome(process)
    assert (code, out) == (0, ["[0] gone"])
    assert said == ["generation 1: 1 process", "generation 2: 1 process, resuming"]


def test_a_job_that_asks_by_itself_again_and_again(launched):
    with launched("sys.exit(75)", "-n", "1", "--elastic", "1:1", "--max-restarts", "2") as process:
        code, _, said = outcome(process)
    assert code == AGAIN
    assert said[2:] == [
        "generation 3: 1 process, resuming",
        "all restarts are used up (--max-restarts): process 0 ended with exit code 75",
    ]


def test_ctrl_c_ends_the_job_in_any_generation(launched, tmp_path):
    script = "sys.exit(75) if generation == 1 else time.sleep(600)"
    with launched(script, "-n", "2", "--elastic", "1:2") as process:
        eventually(lambda: len([*tmp_path.glob("started-*-2")]) == 2)
        process.send_signal(signal.SIGINT)
        code, _, said = outcome(process)
    assert code == 130
    assert said[-1] == "generation 2: 2 processes, resuming"


def test_the_watchdog_must_be_that_of_the_launcher(launched):
    script = "import elche_jax as elche\nelche.distributed.watch(2.5)"
    with launched(script, "-n", "1", "--elastic", "1:1", "--max-restarts", "0") as process:
        _, err = process.communicate()
    assert (
        "RuntimeError: distributed.watch: under `elche-jax launch --elastic` the launcher must "
        "watch, but it got no --timeout. Pass it --timeout 2.5." in err
    )


THREE = Elastic(low=2, high=4, wanted=3, restarts=1)
LOST = Failure(1, place=1, code=137)


@pytest.mark.parametrize(
    ("outcome", "places", "restarts"),
    [
        (Outcome(AGAIN, asked=True), (0, 1, 2), 1),  # another number is wanted
        (Outcome(AGAIN, [LOST], asked=True), (0, 1, 2), 0),
        (Outcome(1, [LOST, Failure(0, 0, 1)]), (0, 1, 2), 0),  # it began, and will have saved
        (Outcome(137, [LOST], progress=False), (0, 2, 3), 0),
        (Outcome(AGAIN), (0, 1, 2), 0),  # by itself
    ],
)
def test_what_follows(outcome, places, restarts):
    following = THREE.after(outcome)
    assert (following.places, following.restarts) == (places, restarts)
    assert following.resized(4).places == (0, 1, 2, 3), "all places are tried again"


def test_when_nothing_follows():
    assert THREE.after(Outcome(0, [LOST])) == Ended(0), "process 0 has done its work"
    last = THREE.after(Outcome(AGAIN))
    assert last.after(Outcome(3, [Failure(0, 0, 3)])).code == 3
    assert last.after(Outcome(AGAIN, asked=True)) == last, "what was wanted is no restart"
    assert last.after(Outcome(AGAIN, [LOST], asked=True)).code == 137


@pytest.mark.parametrize("text", ["", "1", "5", "-2", "2.0", "٣", "3 3", "9" * 10_000])
def test_a_number_that_is_none(text):
    assert parsed(text, THREE) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 2 --elastic 3:2", "argument --elastic: must be MIN:MAX, two integers of at least 1 in "
         "ascending order, got '3:2'"),
        ("-n 2 --elastic some", "in ascending order, got 'some'"),
        ("-n 2 --elastic 0:2", "in ascending order, got '0:2'"),
        ("-n 5 --elastic 2:4", "-n must be from 2 to 4 with --elastic 2:4, got 5"),
        ("-n 2 --max-restarts 1", "--max-restarts must not be given without --elastic"),
        ("-n 2 --number-file x", "--number-file must not be given without --elastic"),
        (
            "-n 2 --elastic 2 --number-file .",
            "--number-file must be a regular file, got the folder .",
        ),
        (
            "-n 2 --elastic 2 --number-file pipe",
            "--number-file must be a regular file, got pipe",
        ),
        ("-n 2 --elastic 2 --max-restarts -1", "must be an integer of at least 0, got '-1'"),
        ("-n 2 --elastic 2 --on-failure continue", "--elastic must be given without --on-failure"),
        (
            "-n 2 --elastic 2 --num-processes 4 --first-id 0 --coordinator a:1",
            "--elastic must be given without --num-processes: it is for one machine",
        ),
    ],
)  # fmt: skip
def test_usage(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("here.py").touch()
    os.mkfifo("pipe")
    monkeypatch.setattr(launcher, "launch", lambda asked: pytest.fail("it is launched"))
    assert main(["launch", *options.split(), "here.py"]) == 2
    assert re.match(f"elche-jax launch: .*{re.escape(message)}", capsys.readouterr().err)
