"""Loading the adapters stays cheap: what Flax does not load itself waits until it is used."""

import sys

import children

LATER = ("flax.nnx", "flax.training", "orbax.checkpoint")
SCRIPT = f"""
import sys
from elche_jax.adapters import convert, head, linen, model, nnx
loaded = [name for name in {LATER} if name in sys.modules]
from flax import linen as nn
linen.from_linen(nn.Dense(1), print)
print(loaded, [name for name in {LATER} if name in sys.modules])
from flax import nnx
assert "flax.nnx" in sys.modules
"""


def test_nnx_and_training_of_flax_are_loaded_when_they_are_used():
    done = children.run(sys.executable, "-c", SCRIPT)
    assert (done.returncode, done.stdout.strip()) == (0, "[] []"), done.stderr
