"""`elche-jax launch` with real processes: what they print, how they end, and that none is left."""

import contextlib
import os
import re
import signal
import sys
from collections import Counter
from math import inf
from pathlib import Path

import children
import pytest
from waits import eventually

from elche_jax.cli import main
from elche_jax.launch import generation, launcher
from elche_jax.launch.elastic import Elastic
from elche_jax.launch.ends import End, Ends
from elche_jax.launch.output import LONGEST, Lines

COMMAND = [sys.executable, "-W", "error", "-m", "elche_jax", "launch"]
HEAD = """
import os, signal, subprocess, sys, time
me = int(os.environ["ELCHE_PROCESS_ID"])
out, err = sys.stdout.buffer, sys.stderr.buffer
"""
FAMILY = """
idle = "import time; print('up', flush=True); time.sleep(600)"
relatives = [subprocess.Popen([sys.executable, "-c", idle], stdout=subprocess.PIPE,
                              start_new_session=apart) for apart in (False, True)]
for one in relatives:
    one.stdout.readline()
print("pids", os.getpid(), *(one.pid for one in relatives))
"""
"""With a child in the same session, and one that has its own."""


@pytest.fixture
def launched(tmp_path):
    """Writes a script; gives what starts it in some processes."""

    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def launched(script, *options, arguments=(), before=(), **how):
        (tmp_path / "script.py").write_text(HEAD + script)
        program = "script" if "-m" in options else "script.py"
        return children.started(
            *before, *COMMAND, *options, program, *arguments, cwd=tmp_path, limit=60,
            env={"TMPDIR": str(temporary)}, **how,
        )  # fmt: skip

    yield launched
    assert not [*temporary.iterdir()], "a folder of the launcher is left"


def outcome(process):
    out, err = process.communicate()
    return process.returncode, out, err


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def family(process, size):
    """The numbers of all processes of a job, as they have printed them."""
    pids = []
    while len(pids) < 3 * size:
        pids += [int(pid) for pid in process.stdout.readline().split("pids")[1].split()]
    assert all(map(lives, pids))
    return pids


def gone(pids):
    return not any(map(lives, pids))


SAYS = """
names = "JAX_COORDINATOR_ADDRESS ELCHE_NUM_PROCESSES JAX_NUM_CPU_DEVICES JAX_PLATFORMS".split()
print(*(os.environ.get(name) for name in names), *sys.argv[1:])
print("open", me, end="", file=sys.stderr)
sys.exit(me and 2 + me)
"""


def test_processes_get_their_numbers_and_their_lines_a_prefix(launched):
    with launched(SAYS, "-n", "3", "--cpu-devices", "2", arguments=("-n", "--debug")) as process:
        code, out, err = outcome(process)
    assert code in (3, 4)
    lines = re.findall(r"^\[(\d)\] localhost:(\d+) 3 2 cpu -n --debug$", out, re.MULTILINE)
    assert str(code - 2) in dict(lines), "others may be ended before they say something"
    assert len(set(dict(lines).values())) == 1
    assert re.search(rf"^\[{code - 2}\] open {code - 2}$", err, re.MULTILINE), "it got an end"
    says = rf"elche-jax launch: process {code - 2} ended with exit code {code}"
    assert re.search(rf"^{says}(, ending the others)?$", err, re.MULTILINE)


def test_a_module_on_one_of_several_hosts(launched):
    hosts = ["--num-processes", "12", "--first-id", "9", "--coordinator", "10.0.0.1:7"]
    script = SAYS.replace("me and 2 + me", 'int(os.environ["ELCHE_LOCAL_ID"]) != me - 9')
    with launched(script, "-n", "2", *hosts, "-m", arguments=["-m"]) as process:
        code, out, _ = outcome(process)
    rest = "10.0.0.1:7 12 None cpu -m"
    assert (code, sorted(out.splitlines())) == (0, [f"[ 9] {rest}", f"[10] {rest}"])


MIXED = """
for number in range(300):
    for stream in out, err:
        line = b"%d %d " % (me, number) + bytes([97 + me]) * (number * 37)
        stream.write(line[:3]); stream.flush(); stream.write(line[3:] + b"\\n"); stream.flush()
out.write(b"\\xff\\x00\\r\\x1b garbage\\n" + b"x" * 3_000_000)
"""


def test_lines_are_never_mixed(launched):
    with launched(MIXED, "-n", "3", text=False) as process:
        code, out, err = outcome(process)
    assert code == 0
    for said in (out, err):
        lines = Counter(line for line in said.split(b"\n") if len(line) < 100_000)
        for me in range(3):
            for number in range(300):
                text = b"[%d] %d %d " % (me, me, number) + bytes([97 + me]) * (number * 37)
                assert lines[text] == 1
    for me in range(3):
        assert b"[%d] \xff\x00\r\x1b garbage\n" % me in out
        long = re.findall(rb"^\[%d\] (x+)$" % me, out, re.MULTILINE)
        assert sum(map(len, long)) == 3_000_000, "in parts, each a line"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_they_are_read(size):
    data, lines = b"one\n\ntwo\rthree\nfour", Lines(b"> ")
    parts = [lines.add(data[at : at + size]) for at in range(0, len(data), size)]
    assert b"".join(parts) + lines.rest() == b"> one\n> \n> two\rthree\n> four\n"
    assert lines.rest() == b""
    assert lines.add(bytes(LONGEST + 1)) == b"> " + bytes(LONGEST + 1) + b"\n"


def test_a_failure_ends_all_with_their_children(launched):
    fails = (
        FAMILY
        + """
if me == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    )
    with launched(fails, "-n", "2", "--grace", "0.3") as process:
        pids = family(process, 2)
        code, _, err = outcome(process)
        assert code == 128 + signal.SIGSEGV
        assert gone(pids)
    assert "elche-jax launch: process 1 ended with SIGSEGV, ending the others" in err


def test_what_a_process_leaves_behind_is_ended_with_success(launched):
    with launched(FAMILY, "-n", "2") as process:
        code, out, _ = outcome(process)
    pids = [int(pid) for line in out.splitlines() for pid in line.split("pids")[1].split()]
    assert (code, len(pids), gone(pids)) == (0, 6, True)


POLITE = f"""
def end(*_):
    os.write(1, b"interrupted\\n")
    os._exit(0)
signal.signal(signal.SIGINT, end)
{FAMILY}
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_all(launched, number, code):
    with launched(POLITE, "-n", "2", "--grace", "30") as process:
        pids = family(process, 2)
        process.send_signal(number)
        got, out, _ = outcome(process)
        assert (got, gone(pids)) == (code, True)
    asked = sorted(out.splitlines())
    assert asked == (["[0] interrupted", "[1] interrupted"] if number == signal.SIGINT else [])


STUBBORN = (
    """
def refuse(number, frame):
    os.write(1, b"refused %s\\n" % signal.Signals(number).name.encode())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, refuse)
"""
    + FAMILY
    + """
while True:
    time.sleep(600)
"""
)


def test_every_further_ctrl_c_is_the_next_step(launched):
    with launched(STUBBORN, "-n", "1", "--grace", "600") as process:
        pids = family(process, 1)
        for name in ("SIGINT", "SIGTERM"):
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == f"[0] refused {name}\n"
        process.send_signal(signal.SIGINT)
        assert outcome(process)[0] == 130
        assert gone(pids)


def test_what_refuses_is_killed_after_a_while(launched):
    with launched(STUBBORN, "-n", "1", "--grace", "0.1") as process:
        pids = family(process, 1)
        os.kill(pids[0], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert outcome(process)[0] == 130
        assert gone(pids)


def test_all_end_if_the_launcher_is_killed(launched, tmp_path):
    with launched(STUBBORN, "-n", "2") as process:
        pids = family(process, 2)
        process.kill()
        process.wait()
        eventually(lambda: gone(pids))
        eventually(lambda: not [*(tmp_path / "tmp").iterdir()])


def test_all_end_if_nobody_reads(launched):
    with launched(STUBBORN + "    print('more')\n", "-n", "2", "--grace", "0.2") as process:
        pids = family(process, 2)
        process.stdout.close()
        for pid in pids[::3]:
            with contextlib.suppress(ProcessLookupError):  # ended since the first one printed
                os.kill(pid, signal.SIGINT)
        assert process.wait() == 141
        assert gone(pids)


FAILS_UNREAD = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which comes as soon as nobody reads
os.write(1, b"begun\\n")
while not os.path.exists("unread"):
    time.sleep(0.01)
for stream, line in [(2, b"why\\n"), (1, b"more\\n"), (2, b"where\\n")] * 2:
    os.write(stream, line)
sys.exit(3)
"""


def test_errors_are_passed_on_if_nobody_reads_the_output(launched, tmp_path):
    """As with `| head`, and a failure at that moment."""
    with launched(FAILS_UNREAD, "-n", "1") as process:
        assert process.stdout.readline() == "[0] begun\n"
        process.stdout.close()
        (tmp_path / "unread").touch()
        err = process.stderr.read()
        assert process.wait() in (3, 141), "whichever is seen first"
    errors = [line for line in err.splitlines() if line.startswith("[0] ")]
    assert errors == ["[0] why", "[0] where"] * 2


SAVES = """
def save(*_):
    for line in range(9):
        os.write(1, b"saving\\n")  # none of them can be written, either
    open("saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


def test_it_runs_without_an_input_and_an_output(launched):
    """As a daemon may start it."""
    closed = "bash", "-c", '"$@" <&- >&-', "bash"
    script = 'print("out"); print("err", file=sys.stderr)'
    with launched(script, "-n", "1", before=closed) as process:
        assert outcome(process) == (0, "", "[0] err\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's device that is full")
def test_all_end_if_a_disk_is_full(launched, tmp_path):
    with (
        open("/dev/full", "w") as full,
        launched(SAVES, "-n", "1", "--grace", "600", stdout=full) as process,
    ):
        said = process.stderr.read()
        assert "the output cannot be written ([Errno 28] No space left on device)" in said
        assert process.wait() == 1
    assert (tmp_path / "saved").exists(), "it had the time to save"


SAVES_SLOWLY = """
def save(*_):
    for _ in range(9):
        os.write(1, b"saving\\n")
        time.sleep(0.02)
    open("saved", "w").close()
    os._exit(0)
signal.signal(signal.{begins}, save)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_those_that_are_ended_may_save_if_the_reader_ends_too(launched, tmp_path, number, code):
    """As `tee` does on Ctrl-C, and a terminal that is closed."""
    begins = "SIGINT" if number == signal.SIGINT else "SIGTERM"
    with launched(SAVES_SLOWLY.format(begins=begins), "-n", "1", "--grace", "600") as process:
        assert process.stdout.readline() == "[0] begun\n"
        process.stdout.close()
        process.send_signal(number)
        assert process.wait() == code
    assert (tmp_path / "saved").exists()


def test_the_time_to_end_may_be_as_long_as_one_likes(launched, tmp_path):
    with launched(SAVES, "-n", "1", "--grace", "1e300") as process:
        assert process.stdout.readline() == "[0] begun\n"
        process.send_signal(signal.SIGTERM)
        assert outcome(process)[::2] == (143, "")
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_what_means_something_to_scripts_is_passed_on(launched, number):
    """To each of them, not to what they have started, which it would end."""
    script = f"""
idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
print("ready", flush=True)
signal.sigwait([{int(number)}])
idle.terminate()  # after the other signal, if it got that
print("asked", me, idle.wait(), flush=True)
"""
    with launched(script, "-n", "2") as process:
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(number)
        code, out, err = outcome(process)
        assert (code, err) == (0, "")
        assert sorted(line.split("asked")[1].split() for line in out.splitlines()) == [
            ["0", str(-signal.SIGTERM)],
            ["1", str(-signal.SIGTERM)],
        ]


def test_a_signal_that_no_script_handles_ends_the_job(launched):
    with launched('print("ready", flush=True); time.sleep(600)', "-n", "2") as process:
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        code, _, err = outcome(process)
        assert code == 128 + signal.SIGUSR1 and "ended with SIGUSR1" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_only_ctrl_c_hurries(launched, tmp_path, number):
    """A terminal that is closed sends SIGHUP twice, GNU's `timeout` SIGTERM."""
    with launched(SAVES_SLOWLY.format(begins="SIGTERM"), "-n", "1", "--grace", "600") as process:
        assert process.stdout.readline() == "[0] begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "[0] saving\n"
        process.send_signal(number)
        assert outcome(process)[0] == 143
    assert (tmp_path / "saved").exists()


def test_the_end_of_a_terminal_is_ignored_where_it_was(launched):
    with launched(POLITE, "-n", "1", before=["nohup"]) as process:
        family(process, 1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def test_what_is_ignored_is_not_passed_on(launched):
    """What started the launcher ignores it: so do the launcher and its processes."""
    script = """
os.kill(os.getpid(), signal.SIGUSR1)
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
"""
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    ignoring = "import os, signal, sys; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    ignoring += "os.execv(sys.argv[1], sys.argv[1:])"
    with launched(blocked + script, "-n", "1", before=[sys.executable, "-c", ignoring]) as process:
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert outcome(process)[0] == 128 + signal.SIGTERM


def test_a_reader_that_is_slow_does_not_keep_it_from_ending(launched):
    floods = FAMILY + "while True:\n    print('x' * 1000)\n"
    with launched(floods, "-n", "1", "--grace", "0.2") as process:
        pids = family(process, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143, "what nobody reads is dropped after a while"
        assert gone(pids)


def test_the_others_may_go_on(launched):
    text = """
if me == 1:
    sys.exit(7)
time.sleep(0.3)
print("done", me)
sys.exit(me)
"""
    with launched(text, "-n", "3", "--on-failure", "continue") as process:
        code, out, err = outcome(process)
    assert (code, sorted(out.splitlines())) == (0, ["[0] done 0", "[2] done 2"])
    assert "elche-jax launch: process 1 ended with exit code 7, the others go on" in err
    with launched("sys.exit(5 - me)", "-n", "2", "--on-failure", "continue") as process:
        assert outcome(process)[0] == 5, "that of process 0"


@pytest.mark.slow
@pytest.mark.further  # it is said after ten seconds
def test_for_whom_it_waits_after_the_end_of_the_first_is_said(launched, tmp_path):
    """One that is stopped never ends, and has no heartbeat that is missed then."""
    text = """
from pathlib import Path
while me and not Path("end").exists():
    time.sleep(0.05)
"""
    with launched(text, "-n", "3", "--on-failure", "continue") as process:
        line = process.stderr.readline()
        (tmp_path / "end").touch()
        assert outcome(process) == (0, "", "")
    assert line == "elche-jax launch: process 0 has ended, waiting for process 1, 2\n"


@pytest.mark.parametrize("asked", [{}, {"go_on": True}, {"elastic": Elastic(2, 2, 2)}])
def test_for_whom_it_waits_is_said_in_every_job(asked, tmp_path, monkeypatch, capfd):
    said, end = [], tmp_path / "end"
    monkeypatch.setattr(generation, "LATE_S", 0.0)
    monkeypatch.setattr(generation, "say", lambda _, text: said.append(text) or end.touch())
    waits = f"""
import os, time
waits = 300 * int(os.environ["ELCHE_PROCESS_ID"])
while waits and not os.path.exists({str(end)!r}):
    time.sleep(0.01)
    waits -= 1
"""
    job = generation.Asked([sys.executable, "-c", waits], processes=2, total=2, **asked)
    assert launcher.launch(job) == 0
    assert said == ["process 0 has ended, waiting for process 1"]


def test_one_that_asks_to_be_started_again_is_no_failure(launched):
    text = """
try:
    sys.exit({codes}[me])
finally:
    while me == 0 and sum(map(os.path.exists, ["left-1", "left-2"])) < 2:
        time.sleep(0.01)
    print("left", me)
    open(f"left-{me}", "w").close()
"""
    with launched(text.replace("{codes}", "(75, 75, 75)"), "-n", "3") as process:
        code, out, err = outcome(process)
    left = [f"[{me}] left {me}" for me in range(3)]
    assert (code, sorted(out.splitlines()), err) == (75, left, "")
    with launched(text.replace("{codes}", "(0, 75, 7)"), "-n", "3") as process:
        code, _, err = outcome(process)
    assert code == 7
    assert err.startswith("elche-jax launch: process 2 ended with exit code 7")


BLAMES = """
from pathlib import Path
from elche_jax import _progress

def reaped(process):  # the launcher has seen its end
    path = Path(f"pid-{process}")
    while not path.exists() or Path("/proc", path.read_text()).exists():
        time.sleep(0.01)

Path("new").with_suffix(f".{me}").write_text(str(os.getpid()))
os.rename(f"new.{me}", f"pid-{me}")
if me == 0:
    _progress.blame(1)
    sys.exit(5)
if me == 1:
    _progress.blame(1)
    reaped(0)
    sys.exit(7)
reaped(1)
"""
"""Process 0 ends because of process 1, and before it."""


def test_the_one_whose_error_ended_another_is_blamed(launched):
    with launched(BLAMES + "time.sleep(600)\n", "-n", "3") as process:
        code, _, err = outcome(process)
    assert code == 7
    assert err == "elche-jax launch: process 1 ended with exit code 7, ending the others\n"


def test_one_that_is_aborted_before_it_can_say_because_of_whom(launched):
    """As JAX does with those that have not trained yet, when an error has ended process 0."""
    script = BLAMES.replace("    _progress.blame(1)\n    sys.exit(5)", ABORTS, 1)
    script = script.replace("    reaped(0)", "    Path('blamed').touch()\n    reaped(0)")
    with launched(script + "time.sleep(600)\n", "-n", "3") as process:
        code, _, err = outcome(process)
    assert code == 7
    assert err == "elche-jax launch: process 1 ended with exit code 7, ending the others\n"


ABORTS = """
    while not Path("blamed").exists():
        time.sleep(0.01)
    os.abort()
"""


def test_that_nobody_goes_on_without_the_first_process_of_a_job_is_said(launched):
    begin, _, _ = BLAMES.partition("if me == 0:")
    script = (
        begin
        + """
_progress.joined(me, several=True)
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
reaped(0)
sys.exit(me)
"""
    )
    with launched(script, "-n", "3", "--on-failure", "continue") as process:
        code, _, err = outcome(process)
    assert code == 137
    first, *others = err.splitlines()
    assert first == "elche-jax launch: process 0 ended with SIGKILL, the job ends with it"
    # they cannot go on without it, and that they do is not said
    said = [f"elche-jax launch: process {one} ended with exit code {one}" for one in (1, 2)]
    assert sorted(others) == said


def test_that_others_go_on_is_not_said_of_an_error_that_they_are_told(launched):
    with launched(BLAMES, "-n", "3", "--on-failure", "continue") as process:
        code, _, err = outcome(process)
    assert code == 5, "that of process 0"
    assert err.splitlines() == [
        "elche-jax launch: process 1 ended with exit code 7, the others are told why",
        "elche-jax launch: process 0 ended with exit code 5 because of process 1",
    ]


def test_the_one_that_is_to_blame_is_waited_for_only_for_a_while(launched):
    script = BLAMES.replace("sys.exit(7)", "time.sleep(600)")
    with launched(script, "-n", "2", "--grace", "0.2") as process:
        code, _, err = outcome(process)
    assert code == 5
    assert err == (
        "elche-jax launch: process 0 ended with exit code 5 because of process 1, ending the "
        "others\n"
    )


def test_ends_of_which_one_comes_from_the_other():
    ends = Ends(patience=10.0)
    first, second, last = End(0, 1, because=1), End(1, 1, because=2), End(2, 1)
    assert ends.after(first, alive=[1, 2], now=0.0) == []
    assert ends.after(second, alive=[2], now=1.0) == [] and ends
    assert ends.due == 10.0
    assert ends.after(last, alive=[], now=2.0) == [last, second, first] and not ends
    assert ends.due == inf


def test_nobody_waits_for_one_that_has_ended_or_is_elsewhere():
    ends = Ends(patience=10.0)
    one, other = End(0, 1, because=1), End(1, 1, because=0)
    assert ends.after(one, alive=[2], now=0.0) == [one]
    assert ends.after(one, alive=[1, 2], now=0.0) == []
    assert ends.after(other, alive=[2], now=0.0) == [other, one], "each because of the other"


@pytest.mark.parametrize(
    ("given", "program"),
    [
        ("here.py -- x -- y", "here.py -- x -- y"),
        ("-- here.py -n 3 --", "here.py -n 3 --"),
        ("-m here -- -m", "-m here -- -m"),
        ("-m -- here --help", "-m here --help"),
    ],
)
def test_a_script_gets_all_that_stands_behind_it(given, program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    asked = []
    monkeypatch.setattr(launcher, "launch", lambda one: asked.append(one) or 0)
    assert main(["launch", "-n", "1", *given.split()]) == 0
    assert asked[0].command == [sys.executable, *program.split()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0 here.py", "argument -n/--processes: must be an integer of at least 1, got '0'"),
        ("-n 2", "the following arguments are required: SCRIPT"),
        ("-n 2 nowhere.py", "SCRIPT must be a file, got nowhere.py"),
        ("-n 2 --timeout 0 here.py", "argument --timeout: must be a number above 0, got '0'"),
        (
            "-n 1 --num-processes 2 --first-id 0 --coordinator host0 here.py",
            "argument --coordinator: must be a host and a port, got 'host0'",
        ),
        ("-n 2 --on-failure wait here.py", "invalid choice: 'wait'"),
        (
            "-n 2 --first-id 1 here.py",
            "--num-processes, --first-id and --coordinator must be given together",
        ),
        (
            "-n 2 --num-processes 3 --first-id 2 --coordinator a:1 here.py",
            "--first-id must be at least 0 and at most --num-processes minus -n (1), got 2",
        ),
    ],
)
def test_usage(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    assert main(["launch", *options.split()]) == 2
    assert re.match(f"elche-jax launch: .*{re.escape(message)}", capsys.readouterr().err)


def test_it_loads_no_jax():
    program = "import sys; from elche_jax.cli import main; main(['launch', 'x', '-n', '1'])"
    check = "assert not {'jax', 'numpy'} & set(sys.modules)"
    assert children.run(sys.executable, "-c", f"{program}; {check}").returncode == 0
