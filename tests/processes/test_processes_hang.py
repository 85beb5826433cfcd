"""Jobs in which a process hangs: the watchdog outside of it names it and kills it alone."""

import json
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import children
import jobs
import pytest
from marks import slow
from waits import eventually

PROGRAM = Path(__file__).parent / "hanging.py"
ENV = {"PYTHONPATH": ":".join(map(str, jobs.PATHS))}


def launched(folder, timeout, moments, *options):
    """What `elche-jax launch` makes of two processes with two devices each."""
    return children.run(
        sys.executable, "-m", "elche_jax", "launch", "-n", "2", "--cpu-devices", "2",
        "--timeout", timeout, *options, PROGRAM, json.dumps(moments), cwd=folder, env=ENV,
    )  # fmt: skip


@pytest.mark.slow  # test_a_process_that_hangs_comes_back, and test_processes_lost
def test_the_others_say_what_happened_and_go_on(tmp_path):
    moments = {"1": {"data": 0}}
    done = launched(tmp_path, 1, moments, "--on-failure", "continue")
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^(elche-jax launch: .* no progress .*)$", done.stderr, re.MULTILINE)
    assert re.fullmatch(
        r"elche-jax launch: process 1 \(ranks 2 and 3\) made no progress for 1 s in window \d+, "
        'phase "data": killed',
        line,
    )
    assert f"elche: {line}\n" in done.stderr, "process 0 logs the same line"
    assert "elche-jax launch: process 1 ended with SIGKILL, the others go on" in done.stderr
    assert "[1] hangs\n" in done.stdout
    assert "[0] trained 450\n" in done.stdout


HANGS = {
    "stop": (2, '[23] s in window 4, phase "loop", stopped by a signal'),
    "window": (2, '[23] s in window [0-9]+, phase "window"'),
    "loop": (1, '2[0-9] s in window 4, phase "loop"'),
    "restore": (0.3, '6 s in phase "restore"'),
    "compile": (0.3, '6 s in window 0, phase "compile"'),
    "start-up": (0.3, '6 s in phase "start-up"'),
}
"""By the moment the timeout, and what is said of process 0."""


@pytest.mark.parametrize("moment", [*map(slow, HANGS)])
def test_who_is_stuck_is_named_and_killed(moment, tmp_path):
    timeout, said = HANGS[moment]
    done = launched(tmp_path, timeout, {"0": {moment: 0.1 if moment == "stop" else 0}})
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    lines = re.findall(r"^elche-jax launch: (.*) no progress for (.*)$", done.stderr, re.MULTILINE)
    ((who, where),) = lines
    assert re.fullmatch(r"process 0( \(ranks 0 and 1\))? made", who)
    assert re.fullmatch(f"{said}: killed", where)


@pytest.mark.slow  # one of ten moments that are known is tested by `make test`
@pytest.mark.further  # two are by `.ci/run`
@pytest.mark.parametrize("seeds", [(0, 3, 4, 5), (1, 6, 7), (2, 8, 9)], ids=str)
def test_stopped_at_random_moments(seeds, tmp_path):
    """One process after the other: in the first window, whose programs are compiled, or later."""
    moments = {}
    for process, seed in enumerate(seeds, 1):
        chance = random.Random(seed)
        moment = [0, chance.uniform(0, 0.5)] if seed < 3 else [chance.randrange(3, 40), 0.005]
        moments[str(process)] = {"any": moment}
    count = "-n", 1 + len(seeds), "--cpu-devices", 1
    done = launched(tmp_path, 1, moments, *count, "--on-failure", "continue")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[(\d)\] trained 450$", done.stdout, re.MULTILINE) == ["0"]
    lines = re.findall(r"^elche-jax launch: (.* no progress .*)$", done.stderr, re.MULTILINE)
    for process, line in zip(moments, sorted(lines), strict=True):
        assert line.startswith(f"process {process} (rank {process}) made no progress for "), line
        assert line.endswith("stopped by a signal: killed"), line


@pytest.mark.slow
def test_a_collective_in_which_all_wait(tmp_path):
    done = launched(tmp_path, 2, {"0": {"exchange": 0}, "1": {"exchange": 0}})
    assert done.returncode == 128 + signal.SIGKILL
    said = r'all processes waited for each other for [23] s in window \d+, phase "exchange": killed'
    assert re.search(f"^elche-jax launch: {said}$", done.stderr, re.MULTILINE)
    assert "no progress" not in done.stderr


@pytest.mark.slow  # test_progress.py has what each phase may take
@pytest.mark.further  # half a minute of waiting
def test_what_takes_ten_times_as_long_is_no_hang(tmp_path):
    timeout, long = 1.2, 12.0
    first = {name: long for name in ("restore", "compile", "loop")}
    second = {name: long for name in ("start-up", "first batch")}
    done = launched(tmp_path, timeout, {"0": first, "1": second})
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\[\d\] hangs$", done.stdout, re.MULTILINE)) == 4
    assert len(re.findall(r"^\[\d\] trained 450$", done.stdout, re.MULTILINE)) == 2
    assert "elche-jax launch" not in done.stderr


@pytest.mark.slow
def test_processes_that_are_watched_without_a_launcher(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.chdir(tmp_path)
    first, second = jobs.outcomes(
        PROGRAM.name, (2, 1), json.dumps({"1": {"data": 0}}), 1, fresh=True
    )
    assert (first[0], second[0]) == (0, -signal.SIGKILL), first[2]
    assert "trained 450" in first[1]
    assert re.search(
        r'^elche-jax watch: process 1 \(rank 2\) made no progress for 1 s in window \d+, phase '
        r'"data": killed$',
        second[2], re.MULTILINE,
    )  # fmt: skip
    assert "elche-jax watch" not in first[2]
    eventually(lambda: not [*temporary.iterdir()])  # the watchdogs have ended, too


WATCHED = """
import os, signal, subprocess, sys, threading
import elche_jax as elche
elche.distributed.watch({timeout})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.{signal})
threading.Event().wait()
"""


@pytest.mark.parametrize(("name", "timeout"), [("SIGSTOP", 0.2), slow("SIGKILL", 60)])
def test_a_watchdog_ends_with_its_process(name, timeout, tmp_path):
    program = WATCHED.format(timeout=timeout, signal=name)
    with children.started(
        sys.executable, "-c", program, env={"TMPDIR": str(tmp_path)}
    ) as process:  # fmt: skip
        child = int(process.stdout.readline())
        assert process.wait(60) == -signal.SIGKILL
        eventually(lambda: not [*tmp_path.iterdir()])
        if name == "SIGSTOP":  # what it has started ends with it
            eventually(lambda: not Path(f"/proc/{child}").exists())
            said = 'phase "none", stopped by a signal: killed'
            assert said in process.stderr.read()


@pytest.mark.slow  # test_the_others_say_what_happened_and_go_on launches a training, too
@pytest.mark.further
def test_two_launchers_at_once(tmp_path):
    command = (sys.executable, "-m", "elche_jax", "launch", "-n", "2", "--cpu-devices", "1")
    with ExitStack() as stack:
        both = []
        for name in ("one", "other"):  # a run has its folder of checkpoints to itself
            (tmp_path / name).mkdir()
            job = children.started(*command, PROGRAM, "{}", cwd=tmp_path / name, env=ENV)
            both.append(stack.enter_context(job))
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda process: process.communicate(), both))
    for process, (out, err) in zip(both, said, strict=True):
        assert process.returncode == 0, err
        assert sorted(re.findall(r"^\[\d\] trained 450$", out, re.MULTILINE)) == [
            "[0] trained 450", "[1] trained 450",
        ]  # fmt: skip
