"""What a late exchange hides: milliseconds per window with `delay=0`, `delay=1`, and on the host.

    python benchmarks/late_exchange.py [--megabytes 20 60] [--windows 24]

Two emulated devices wait 160 ms per window and compute almost nothing, so any time above
160 ms is the exchange of a large array. Whether the exchange overlaps with the steps
depends on the backend; the medians show it.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import argparse
import time
from statistics import median

import jax
import numpy as np
import optax

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

STEPS, STEP_MS, BATCH, WARM = 4, 40.0, 8, 8
RULES = {
    "delay=0": (elche.ParameterAveraging(optimizer_state="keep"), elche.DDPConfig()),
    "delay=1": (elche.ParameterAveraging(optimizer_state="keep", delay=1), elche.DDPConfig()),
    "host, cadence": (
        elche.ParameterAveraging(optimizer_state="keep"),
        elche.DDPConfig(exchange="host"),
    ),
    "host, async": (
        elche.ParameterAveraging(optimizer_state="keep"),
        elche.DDPConfig(policy="async", exchange="host"),
    ),
}


def loss_fn(params, batch, rng):
    return (params["w"][:8] * batch["x"].mean()).sum()


def window_ms(name: str, megabytes: float, windows: int) -> float:
    """Return the median milliseconds from window to window, after the first `WARM` windows."""
    rule, config = RULES[name]
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:2], averaging=rule, config=config,
        guard=elche.NoGuard(), cadence=elche.Replay([(STEPS, STEPS)] * (WARM + windows)),
        emulate=EmulatedSpeeds([STEP_MS, STEP_MS]),
    )  # fmt: skip
    state = train.init({"w": np.ones(int(megabytes * 1e6 / 4), "float32")})
    data = {"x": np.ones((BATCH * 2 * STEPS * (WARM + windows), 4), "float32")}
    ends = []
    for window in train.windows(data, BATCH):
        state, _ = train(state, window)
        ends.append(time.perf_counter())
    return 1e3 * median(np.diff(ends)[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20.0, 60.0])
    parser.add_argument("--windows", type=int, default=24)
    args = parser.parse_args()
    print(f"jax {jax.__version__}, steps of {STEPS * STEP_MS:.0f} ms per window\n")
    print(f"| parameters | {' | '.join(RULES)} |\n|---|{'---|' * len(RULES)}")
    for size in args.megabytes:
        times = [f"{window_ms(name, size, args.windows):.0f} ms" for name in RULES]
        print(f"| {size:.0f} MB | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
