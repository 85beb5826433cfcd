"""A process that is killed, whenever, and started again, ends with the same bits."""

import pickle
import random
import sys
import time

import children
import jax
import pytest
from marks import slow

EVERY = 3
SEED = 5

CHILD = """
import pickle, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np, optax
import elche_jax as elche

folder, out, epochs = sys.argv[1:]
rng = np.random.default_rng(0)
x = rng.normal(size=(4096, 256)).astype("float32")
data = {"x": x, "y": np.sin(x).sum(1)}
params = {"a": rng.normal(size=(256, 256)).astype("float32") / 16, "b": np.ones(256, "float32")}

def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["a"]) * jax.random.bernoulli(rng, 0.9, (256,))
    return (hidden @ params["b"] - batch["y"]) ** 2

def say(*words):
    print(*words, flush=True)

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
"""


class Life:
    """A process, and the lines it has printed."""

    def __init__(self, folder, out, epochs):
        self.begun, self.lines, self.at = time.perf_counter(), [], []
        # programs of their own, as a kill may leave half of one
        env = {"JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled")}
        command = (sys.executable, "-c", CHILD, folder, out, epochs)
        self._started = children.started(*command, stderr=None, env=env)

    def __enter__(self):
        self._process = self._started.__enter__()
        return self

    def __exit__(self, *error):
        self._started.__exit__(*error)

    def until(self, word, number=1):
        """Reads until the so many-th line that begins with a word, or the end."""
        while sum(line[0] == word for line in self.lines) < number:
            line = self._process.stdout.readline()
            if not line:
                return False
            self.lines.append(line.split())
            self.at.append(time.perf_counter())
        return True

    def kill(self, seconds):
        """Kills it so many seconds later; False where it had ended before."""
        try:
            self._process.wait(seconds)
        except children.TimeoutExpired:
            self._process.kill()
        self.rest()
        return self._process.returncode == -9

    def rest(self):
        """Reads what is left, and waits for the end."""
        self.until("nothing more")
        return self._process.wait(60)

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


@pytest.mark.parametrize(("kills", "epochs"), [(1, 2), slow(20, 14)])
def test_kills(kills, epochs, tmp_path):
    with Life(tmp_path / "apart", tmp_path / "whole", epochs) as whole:
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
        with Life(folder, out, epochs) as life:
            assert word == "begun" or life.until(word, number), life.lines
            assert life.kill(share * takes[word]), "it ended before it was killed"
        assert not out.exists()
        for start in life.numbers("from"):
            starts.append(start)
            assert start >= reported and start % EVERY == 0
        reported = max([reported, *life.numbers("written")])
    assert len(set(starts)) > kills // 4, "it got on, in spite of the kills"
    with Life(folder, out, epochs) as last:
        assert last.rest() == 0
    assert last.numbers("from")[0] >= reported > 0
    (state, counts), (wanted, history) = (
        pickle.loads(path.read_bytes()) for path in (out, tmp_path / "whole")
    )
    assert counts == history and len(history) == len(whole.numbers("window"))
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == like.dtype and leaf.tobytes() == like.tobytes()
    assert not list(folder.glob("damaged-*")), "what a kill leaves is whole or absent"
