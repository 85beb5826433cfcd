"""A Flax CNN learns handwritten digits with `Trainer`; a page shows the run.

    python examples/02_trainer.py [--epochs 20] [--emulate 5,5,10,20] [--folder F] [--resume]

`elche.from_linen` makes a loss function from a module and a loss. `elche.Trainer` trains it on
all devices in proportion to their speeds, evaluates it after each epoch, stops when it no longer
improves, and keeps the best checkpoint. The folder holds the run: open its `report.html`. Stop it
with Ctrl-C, or kill it; with `--resume` the same command resumes from the last checkpoint.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import optax
from _digits import integer, labelled

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

BATCH = 16  # examples per microbatch
EPOCHS = 20
WANTED = 0.95  # test accuracy required after `EPOCHS` epochs


class CNN(nn.Module):
    """Two convolutions, BatchNorm, dropout, a dense layer; 10 logits."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


def loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return cross-entropy and hits, one of each per example."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, hits(logits, batch)


def hits(logits: jax.Array, batch: Any) -> dict[str, jax.Array]:
    """Return whether each digit is classified correctly."""
    return {"accuracy": logits.argmax(-1) == batch["label"]}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "most epochs in total (%(default)s)"
    parser.add_argument("--epochs", type=integer(1), default=EPOCHS, metavar="N", help=text)
    text = "train on CPU devices emulated to take these milliseconds per microbatch, as 5,5,10,20"
    parser.add_argument("--emulate", type=speeds, metavar="MS,MS,...", help=text)
    text = "where the run's files go (%(default)s)"
    parser.add_argument("--folder", type=Path, default=Path("out/trainer"), help=text)
    text = "resume from the last checkpoint in the folder"
    parser.add_argument("--resume", action="store_true", help=text)
    return parser.parse_args()


def speeds(text: str) -> list[float]:
    """Convert the argument of `--emulate`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < float("inf") for each in found):
        raise argparse.ArgumentTypeError(f"must be comma-separated numbers above 0, got {text!r}")
    return found


def main() -> int:
    """Train and evaluate; return 1 if the model is not good enough."""
    options = arguments()
    if options.emulate is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", len(options.emulate))

    train_data, test_data = labelled()
    model = elche.from_linen(CNN(), loss, inputs="image")
    params, model_state = model.init(0, {"image": train_data["image"][:1]})
    trainer = elche.Trainer(
        model,
        optax.adam(2e-3),
        has_aux=True,
        merge="pooled",  # BatchNorm statistics as if one device had seen everything
        config=elche.DDPConfig(policy="cadence", anchor=1, max_anchor=2),
        emulate=None if options.emulate is None else EmulatedSpeeds(options.emulate),
    )
    result = trainer.fit(
        params,
        train_data,
        BATCH,
        options.epochs,
        model_state=model_state,
        evaluation=elche.Evaluation(model.metric_fn(hits), test_data, batch_size=64),
        early_stopping=elche.EarlyStopping("accuracy", mode="max", patience=8),
        checkpoints=elche.Checkpoints(keep_last=2, keep_best=1, monitor="accuracy", mode="max"),
        resume="auto" if options.resume else "never",
        run_dir=options.folder,
    )

    print(result.report)
    best = max(metrics.evaluation["accuracy"] for metrics in result.history)
    page = options.folder / "report.html"
    print(f"{len(result.history)} epochs ({result.stopped}), best test accuracy {best:.1%}; {page}")
    if options.epochs >= EPOCHS and best < WANTED:
        print(f"test accuracy must reach {WANTED:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
