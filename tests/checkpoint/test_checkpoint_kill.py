"""A process that is killed, whenever, and started again, ends with the same bits."""

import contextlib
import os
import pickle
import random
import signal
import sys
import time

import children
import jax
import pytest
from marks import slow

EVERY = 3
SEED = 5

LIVES = """
import faulthandler, os, pickle, sys, traceback
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint
import elche_jax as elche

elche.build_train_step, elche.Checkpointer, elche.Replay  # imported when they are looked up

def live(folder, out, epochs):
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 256)).astype("float32")
    data = {"x": x, "y": np.sin(x).sum(1)}
    params = {"a": rng.normal(size=(256, 256)).astype("float32") / 16, "b": np.ones(256, "float32")}

    def loss_fn(params, batch, rng):
        hidden = jnp.tanh(batch["x"] @ params["a"]) * jax.random.bernoulli(rng, 0.9, (256,))
        return (hidden @ params["b"] - batch["y"]) ** 2

    script = [(3, 1, 2, 2), (1, 1, 1, 1)] * 200  # more than twenty lives get done
    train = elche.build_train_step(loss_fn, optax.adam(1e-3), cadence=elche.Replay(script))
    state, written = train.init(params), None
    say("ready")
    saver = elche.Checkpointer(train, elche.Checkpoints(folder, every_windows=3, keep_last=2))
    state, cursor = saver.restore(state, resume="auto")
    say("from", 0 if cursor is None else cursor.window)
    for window in train.windows(data, batch_size=32, epochs=int(epochs), cursor=cursor):
        state, metrics = train(state, window)
        jax.block_until_ready(metrics)
        say("window", window.index)
        if saver.written != written:
            written = saver.written
            say("written", written)
        if saver.save(state, window):
            say("saving", window.index + 1)
    saver.close()
    with open(out, "wb") as file:
        pickle.dump((jax.device_get(state), train.counts_history), file)
    say("done")

def say(*words):
    # in one piece, also where Python does not buffer: a kill may come between the words
    os.write(1, (" ".join(map(str, words)) + os.linesep).encode())

if os.path.isdir("/proc/self/task"):
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes no thread along"
child = None
for line in sys.stdin:
    if child is not None:
        os.waitpid(child, 0)
    child = os.fork()
    if not child:
        say("begun", os.getpid())
        faulthandler.dump_traceback_later(300, exit=True)  # if it hangs, it says where
        try:
            live(*line.rstrip().split("|"))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its number is still its own
    say("ended", end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
os.waitpid(child, 0)
"""
"""Runs one life after the other, each a process of its own: what takes most of a life is the
import of the libraries, which all share."""


class Lives:
    """What starts lives; ends with them."""

    def __init__(self, folder):
        # programs of their own, as a kill may leave half of one; no threads before the fork
        env = {"JAX_COMPILATION_CACHE_DIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        self._started = children.started(
            sys.executable, "-c", LIVES, stderr=None, stdin=children.PIPE, env=env, limit=900
        )

    def __enter__(self):
        self._process = self._started.__enter__()
        return self

    def __exit__(self, *error):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it ends, where the last life has
        with contextlib.suppress(children.TimeoutExpired):
            self._process.wait(0 if any(error) else 60)
        self._started.__exit__(*error)

    def begin(self, *args):
        """Begins a life."""
        print(*args, sep="|", file=self._process.stdin, flush=True)
        return Life(self._process.stdout)


class Life:
    """A process, and the lines it has printed."""

    def __init__(self, stdout):
        self._stdout, self.lines, self.at, self.code = stdout, [], [], None
        assert self.until("begun")
        (self._pid,), self.begun = self.numbers("begun"), self.at[0]

    def until(self, word, number=1):
        """Reads until the so many-th line that begins with a word, or the end."""
        while self.code is None and sum(line[0] == word for line in self.lines) < number:
            line = self._stdout.readline().split()
            assert line, "what starts lives has died"
            self.lines.append(line)
            self.at.append(time.perf_counter())
            if line[0] == "ended":
                self.code = int(line[1])
        return sum(line[0] == word for line in self.lines) >= number

    def kill(self, seconds):
        """Kills it so many seconds later; False where it had ended before."""
        time.sleep(seconds)
        os.kill(self._pid, signal.SIGKILL)
        return self.rest() == -signal.SIGKILL

    def rest(self):
        """Reads what is left, waits for the end, and gives the exit code."""
        assert self.until("ended")
        return self.code

    def numbers(self, word):
        """The numbers after a word."""
        return [int(line[1]) for line in self.lines if line[0] == word]


def moments(rng, kills):
    """When to kill: after which line, the how many-th, and what share of which time later."""
    most = {"begun": 1, "saving": 3, "window": 8, "from": 1, "written": 2, "ready": 1}
    words = ["written", "saving", "window", *most]
    for number in range(kills):
        word = words[number % len(words)]
        yield word, rng.randint(1, most[word]), rng.random()


def is_save(line):
    return line[0] == "saving"


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="on macOS only Python >= 3.13 has it")
@pytest.mark.parametrize(("kills", "epochs"), [(1, 1), slow(20, 6)])
def test_kills(kills, epochs, tmp_path):
    with Lives(tmp_path / "compiled") as lives:
        lived(lives, kills, epochs, tmp_path)


def lived(lives, kills, epochs, tmp_path):
    whole = lives.begin(tmp_path / "apart", tmp_path / "whole", epochs)
    assert whole.rest() == 0
    at = {
        line[0]: moment for line, moment in reversed(list(zip(whole.lines, whole.at, strict=True)))
    }
    saves = [moment for line, moment in zip(whole.lines, whole.at, strict=True) if is_save(line)]
    one = (saves[-1] - saves[0]) / (len(saves) - 1)  # three windows, and the write, for each
    takes = {
        "begun": at["ready"] - whole.begun, "ready": at["from"] - at["ready"],
        "from": at["window"] - at["from"], "window": one / EVERY, "saving": one, "written": one,
    }  # fmt: skip
    folder, out, reported, starts = tmp_path / "run", tmp_path / "out", 0, []
    for word, number, share in moments(random.Random(SEED), kills):
        life = lives.begin(folder, out, epochs)
        assert life.until(word, number), life.lines
        assert life.kill(share * takes[word]), "it ended before it was killed"
        assert not out.exists()
        for start in life.numbers("from"):
            starts.append(start)
            assert start >= reported and start % EVERY == 0
        reported = max([reported, *life.numbers("written")])
    assert len(set(starts)) > kills // 4, "it got on, in spite of the kills"
    last = lives.begin(folder, out, epochs)
    assert last.rest() == 0
    assert last.numbers("from")[0] >= reported > 0
    (state, counts), (wanted, history) = (
        pickle.loads(path.read_bytes()) for path in (out, tmp_path / "whole")
    )
    assert counts == history and len(history) == len(whole.numbers("window"))
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == like.dtype and leaf.tobytes() == like.tobytes()
    assert not list(folder.glob("damaged-*")), "what a kill leaves is whole or absent"
