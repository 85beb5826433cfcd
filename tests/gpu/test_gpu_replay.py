"""Bits from process to process: XLA chooses and orders on a GPU by what it measures."""

import os
import sys

import children
import pytest

pytestmark = pytest.mark.gpu

RUN = """
import hashlib
import sys
import flax.linen as nn, jax, numpy as np, optax
import elche_jax as elche

device = jax.devices(sys.argv[1])[0]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(50, 32)(x)  # its gradient is added up by whoever comes first
        x = nn.relu(nn.Conv(32, (3, 3))(x))  # and this one's by an algorithm that was fastest
        return nn.Dense(10)(x.reshape(len(x), -1))


def loss_fn(params, batch, rng):
    logits = Model().apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


rng = np.random.default_rng(0)
data = {
    "x": rng.integers(0, 50, (256, 8, 8)).astype("int32"),
    "y": rng.integers(0, 10, 256).astype("int32"),
}
with jax.default_device(jax.devices("cpu")[0]):
    params = jax.device_get(Model().init(jax.random.key(0), data["x"][:1]))
train = elche.build_train_step(
    loss_fn, optax.adam(1e-3), devices=[device], cadence=elche.Replay([(3,), (1,), (4,)] * 8)
)
state = train.init(params)
for window in train.windows(data, 16, epochs=4):
    state, _ = train(state, window)
leaves = jax.tree.leaves(jax.device_get(state))
print(hashlib.sha1(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest())
"""


def bits(flags):
    """The bits that a process of its own ends with."""
    env = {
        "JAX_PLATFORMS": "cuda,cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # else both run what one of them has chosen
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = children.run(sys.executable, "-c", RUN, "cuda", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replay_in_another_process_gives_the_same_bits():
    """C7; on a GPU it takes the flag that docs/numerics.md names."""
    flags = "--xla_gpu_deterministic_ops=true"
    assert bits(flags) == bits(flags)
