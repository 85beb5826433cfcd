"""`elche-jax launch`: what the processes are told, what they print, and that all of them end."""

import os
import signal
import sys
import time

import children
import pytest
from marks import slow

FAST = "import os, sys, time; me = int(os.environ['ELCHE_PROCESS_ID'])\n"


def launch(tmp_path, program, *options, count=2):
    """Starts a program in processes."""
    script = tmp_path / "program.py"
    script.write_text(FAST + program, encoding="utf-8")
    return children.started(
        sys.executable,
        "-m",
        "elche_jax",
        "launch",
        "-n",
        count,
        *options,
        script,
        "an argument",
        errors="replace",
    )


def ended(tmp_path, program, *options, count=2):
    """Runs a program in processes to their end: the exit code, and lines of stdout and stderr."""
    with launch(tmp_path, program, *options, count=count) as child:
        out, err = child.communicate(timeout=60)
    return child.returncode, out.splitlines(), err.splitlines()


def gone(pid):
    """Waits until a process has ended, and been waited for or taken over."""
    for _ in range(600):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_what_processes_are_told_and_print(tmp_path):
    code, out, err = ended(
        tmp_path,
        "names = 'ELCHE_NUM_PROCESSES', 'JAX_NUM_CPU_DEVICES', 'JAX_PLATFORMS'\n"
        "print(*[os.environ[name] for name in names], sys.argv[1:])\n"
        "print(os.environ['JAX_COORDINATOR_ADDRESS'].split(':')[0], file=sys.stderr)\n"
        "sys.stdout.buffer.write(b'\\xff' + b'x' * 70000 + b'\\nno end')\n",
        "--cpu-devices", "3", count=3,
    )  # fmt: skip
    assert code == 0
    for at in range(3):
        own = [line.removeprefix(f"[{at}] ") for line in out if line.startswith(f"[{at}] ")]
        assert own[0] == "3 3 cpu ['an argument']"
        assert own[-1] == "no end"
        assert sum(line.count("x") for line in own[1:-1]) == 70000
    assert sorted(err) == [f"[{at}] localhost" for at in range(3)]


def test_the_first_failure_ends_all(tmp_path):
    code, _, err = ended(tmp_path, "time.sleep(60 if me else 0); sys.exit(7)")
    assert code == 7
    assert "elche-jax launch: process 0 ended with exit code 7" in err


def test_a_signal_is_named(tmp_path):
    code, _, err = ended(tmp_path, "os.kill(os.getpid(), 9) if me else time.sleep(60)")
    assert code == 128 + 9
    assert "elche-jax launch: process 1 ended with SIGKILL" in err


def test_the_others_may_continue(tmp_path):
    program = "sys.exit(3) if me else (time.sleep(1), print('went on'))"
    code, out, err = ended(tmp_path, program, "--on-failure", "continue")
    assert (code, out) == (0, ["[0] went on"])
    assert "elche-jax launch: process 1 ended with exit code 3" in err


STUBBORN = (
    "import signal, subprocess\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    "print(os.getpid(), other.pid)\n"
    "time.sleep(300)\n"
)


def pids(child, count=2):
    """The processes and what they have started, as they print it."""
    found = []
    for _ in range(count):
        found += map(int, child.stdout.readline().split("] ")[1].split())
    return found


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGTERM, 1, 143), slow(signal.SIGINT, 1, 130), (signal.SIGINT, 2, 130)],
)
def test_signals_end_all_that_was_started(number, times, code, tmp_path):
    with launch(tmp_path, STUBBORN) as child:
        found = pids(child)
        for _ in range(times):
            child.send_signal(number)
            time.sleep(0.2)
        assert child.wait(60) == code
        assert all(map(gone, found))


def test_killing_the_launcher_ends_its_processes(tmp_path):
    with launch(tmp_path, STUBBORN) as child:
        found = pids(child)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(60)
        # what these have started is left to them: they had no moment to end it
        assert gone(found[0]) and gone(found[2])
        for pid in (found[1], found[3]):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0", "a.py"], "argument -n/--processes: must be an integer of at least 1, got '0'"),
        (["-n", "2", "no.py"], "SCRIPT must be a file, got 'no.py'; a module needs -m"),
        (["a.py"], "the following arguments are required: -n/--processes"),
    ],
)
def test_wrong_usage(options, message, capsys):
    from elche_jax.cli import main

    assert main(["launch", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_jobs_at_once_train(tmp_path):
    program = (
        "import elche_jax as elche; elche.distributed.initialize()\n"
        "import jax, numpy as np, optax\n"
        "x = np.ones((64, 2), 'float32')\n"
        "loss = lambda params, batch, rng: ((batch['x'] @ params['w'] - 1) ** 2).mean()\n"
        "train = elche.build_train_step(loss, optax.sgd(0.1))\n"
        "state = train.init({'w': np.zeros(2, 'float32')})\n"
        "for window in train.windows({'x': x}, 8, epochs=2):\n"
        "    state, metrics = train(state, window)\n"
        "print(train.world_size, float(metrics['loss']) < 1)\n"
    )
    options = "--cpu-devices", "2"
    with launch(tmp_path, program, *options) as one, launch(tmp_path, program, *options) as other:
        for child in (one, other):
            out, err = child.communicate(timeout=120)
            assert child.returncode == 0, err
            lines = [line for line in out.splitlines() if "Gloo" not in line]
            assert sorted(lines) == ["[0] 4 True", "[1] 4 True"]
