"""Accuracy on the digits with every policy of averaging, and with gradients.

Devices step once per microbatch with averaging, and once per window with gradients. With
gradients, the learning rate scales with the square root of the microbatches in a window, the rule
for Adam. The rates for one microbatch were chosen from 0.001, 0.002, 0.005 and 0.01 on seeds 100 to
102.

    python benchmarks/policies.py [--epochs 30] [--seeds 5] [--out FILE]

Four emulated devices of 1, 1, 2 and 4 ms per microbatch. The seed determines the initial
parameters, the order of the examples and the split into training and test data.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

from statistics import mean, stdev

import jax
import numpy as np
import optax
from baselines import mlp_loss, mlp_params, outputs
from measure import options_of, write
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

FLEET = [1.0, 1.0, 2.0, 4.0]
BATCH, WIDTH = 8, 64
AVERAGE = elche.ParameterAveraging(optimizer_state="keep")
# Options, the learning rate for one microbatch, and the number of microbatches per step.
POLICIES = {
    "gradients, sync": ({"config": elche.DDPConfig(policy="sync")}, 1e-2, len(FLEET)),
    "gradients, cadence": ({"config": elche.DDPConfig(policy="cadence")}, 5e-3, 80),
} | {
    f"averaging, {policy}, {where}": (
        {"config": elche.DDPConfig(policy=policy, exchange=where), "averaging": AVERAGE},
        1e-2,
        1,
    )
    for where in ("device", "host")
    for policy in ("sync", "cadence", "async")
}


def accuracy(
    options: dict, epochs: int, seed: int, rate: float, per_step: int
) -> tuple[float, int]:
    """Return the accuracy on the test set after training, and the number of windows."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(
        (x / 16).astype("float32"), y.astype("int32"), test_size=0.25, random_state=seed, stratify=y
    )
    rate *= elche.learning_rate_factor(per_step, "sqrt")
    tx = elche.schedule_by_work(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(rate, epochs * len(parts[0]) // BATCH)
    )
    train = elche.build_train_step(
        mlp_loss, tx, devices=jax.devices()[: len(FLEET)], emulate=EmulatedSpeeds(FLEET), **options
    )
    state = train.init(mlp_params(WIDTH, 1, seed, gain=2.0))
    windows = train.windows({"x": parts[0], "y": parts[2]}, BATCH, epochs=epochs, seed=seed)
    for window in windows:
        state, _ = train(state, window)
    params = jax.device_get(train.average(state))
    right = np.asarray(outputs(params, {"x": parts[1]})).argmax(axis=1) == parts[3]
    return float(right.mean()), window.index + 1


def main() -> None:
    parser = options_of(__doc__, "benchmarks/out/policies.json")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in POLICIES}
    for seed in range(args.seeds):
        for name, (options, rate, per_step) in POLICIES.items():
            found[name].append(accuracy(options, args.epochs, seed, rate, per_step))
    print(f"jax {jax.__version__}\n\n| policy | test accuracy | windows |\n|---|---|---|")
    for name, runs in found.items():
        rates = [100 * rate for rate, _ in runs]
        spread = stdev(rates) if len(rates) > 1 else 0.0
        windows = mean(windows for _, windows in runs)
        print(f"| {name} | {mean(rates):.2f} % ± {spread:.2f} | {windows:.0f} |")
    base = [rate for rate, _ in found["gradients, sync"]]
    for name, runs in found.items():
        rates = [rate for rate, _ in runs]
        pairs = [a - b for a, b in zip(rates, base, strict=True)]
        print(f"{name}: {100 * mean(pairs):+.2f} points, seed by seed against gradients, sync")
    write(found, args.out)


if __name__ == "__main__":
    main()
