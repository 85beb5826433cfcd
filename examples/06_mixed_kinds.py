"""A network learns handwritten digits on devices of two kinds at once.

    python examples/06_mixed_kinds.py [--short]

On a machine with NVIDIA GPUs these are one or two of them and the CPU. On any other machine, a
second client stands in for the GPU: the CPU plugin `xla_cpu_pjrt`, whose devices JAX treats as
those of a different backend (`pip install xla_cpu_pjrt`, Linux x86-64). Nothing is emulated: both
kinds really compute.
"""

import argparse
import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import flax.linen as nn
import jax
import optax
from _digits import labelled

import elche_jax as elche

BATCH = 32  # examples per microbatch
EPOCHS, SHORT = 20, 3
WANTED = 0.95  # test accuracy required after `EPOCHS` epochs


class MLP(nn.Module):
    """Two hidden layers; 10 logits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        for width in (1024, 512):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def two_kinds() -> list[jax.Device]:
    """Return the devices to train on; must be called before anything else uses JAX."""
    plugin = importlib.util.find_spec("xla_plugins")
    for folder in plugin.submodule_search_locations if plugin else ():
        for library in Path(folder).glob("xla_cpu_pjrt/*.so"):
            os.environ.setdefault("PJRT_NAMES_AND_LIBRARY_PATHS", f"twin:{library}")
    others = []
    for backend in ("cuda", "twin"):
        with contextlib.suppress(RuntimeError):  # no such backend
            others = others or jax.devices(backend)
    if not others:
        sys.exit("needs a GPU, or a second CPU client: pip install xla_cpu_pjrt")
    return [*others[:2], jax.devices("cpu")[0]]


def main() -> int:
    """Train and evaluate; return 1 if the model is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = f"only {SHORT} epochs, and no required accuracy"
    parser.add_argument("--short", action="store_true", help=text)
    options = parser.parse_args()

    devices = two_kinds()
    print(elche.device_summary(devices))
    model, (data, test) = MLP(), labelled()

    def loss_fn(params, batch, rng):
        logits = model.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def metric_fn(params, batch):
        return {"accuracy": model.apply(params, batch["image"]).argmax(-1) == batch["label"]}

    train = elche.build_train_step(
        loss_fn, optax.adam(1e-3), devices=devices, cadence=elche.FixedTotal(16)
    )
    evaluate = elche.build_eval_step(metric_fn, devices=devices)
    state = train.init(model.init(jax.random.key(0), data["image"][:1]))
    for window in train.windows(data, BATCH, epochs=SHORT if options.short else EPOCHS):
        state, metrics = train(state, window)
    accuracy = evaluate(state, test, batch_size=64)["accuracy"]
    elche.check_replicas(state)  # bitwise equal, although the kinds round differently
    print(train.report())
    print(f"loss {metrics['loss']:.4f}, test accuracy {accuracy:.1%}, counts {train.counts}")
    if not options.short and accuracy < WANTED:
        print(f"test accuracy must be at least {WANTED:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
