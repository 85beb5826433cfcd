"""An NNX module with BatchNorm and dropout learns handwritten digits with `Trainer`.

    python examples/03_nnx.py [--epochs 15] [--devices 4] [--folder out/nnx] [--resume]

`elche.from_nnx` makes a loss function from the module and a loss. `elche.Trainer` trains it on
all devices, evaluates it after each epoch, and keeps checkpoints. Stop it with Ctrl-C; with
`--resume` the same command resumes from the last checkpoint in the folder.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from _digits import integer, labelled
from flax import nnx

import elche_jax as elche

BATCH = 16  # examples per microbatch
EPOCHS = 15
WANTED = 0.95  # test accuracy required after `EPOCHS` epochs


class CNN(nnx.Module):
    """Two convolutions with BatchNorm, dropout, a dense layer; 10 logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.out(self.drop(x.reshape(len(x), -1)))


def loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return cross-entropy and hits, one of each per example."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, hits(logits, batch)


def hits(logits: jax.Array, batch: Any) -> dict[str, jax.Array]:
    """Return whether each digit is classified correctly."""
    return {"accuracy": logits.argmax(-1) == batch["label"]}


def main() -> int:
    """Train and evaluate; return 1 if the model is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "epochs in total (%(default)s)"
    parser.add_argument("--epochs", type=integer(1), default=EPOCHS, metavar="N", help=text)
    text = "number of CPU devices to train on; by default all devices of this machine"
    parser.add_argument("--devices", type=integer(1, 64), metavar="N", help=text)
    text = "where the run's files go, including checkpoints (%(default)s)"
    parser.add_argument("--folder", type=Path, default=Path("out/nnx"), help=text)
    text = "resume from the last checkpoint in the folder"
    parser.add_argument("--resume", action="store_true", help=text)
    options = parser.parse_args()
    if options.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)

    train_data, test_data = labelled()
    module = CNN(nnx.Rngs(0))
    model = elche.from_nnx(module, loss)
    trainer = elche.Trainer(model, optax.adam(2e-3), has_aux=True, merge="pooled")
    result = trainer.fit(
        model.params,
        train_data,
        BATCH,
        options.epochs,
        model_state=model.model_state,
        evaluation=elche.Evaluation(model.metric_fn(hits), test_data, batch_size=64),
        checkpoints=elche.Checkpoints(every_windows=50),
        resume="auto" if options.resume else "never",
        run_dir=options.folder,
    )

    model.update(result.params, result.model_state)  # the module is trained; use it as usual
    module.eval()
    guess = module(test_data["image"]).argmax(-1)
    accuracy = float((guess == test_data["label"]).mean())
    print(f"{len(result.history)} epochs, test accuracy {accuracy:.1%}")
    if options.epochs >= EPOCHS and accuracy < WANTED:
        print(f"test accuracy must be at least {WANTED:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
