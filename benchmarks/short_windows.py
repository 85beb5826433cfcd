"""Two equal devices, short windows, streamed data, beside a hand-written fused pmap step.

    python benchmarks/short_windows.py [--ms 50] [--repeats 5] [--out FILE]

A transformer of two layers (Flax linen, 38 arrays, Adam). Both read their examples from the host
in a shuffled order, and take turns. If the devices are the machine's processors, all other
threads of a loop take time from them. *Per processor time* divides by the time of all threads, and
hardly depends on what else is running. Every repeat is a separate process: the ratio of the same
two loops varies by some percent between processes, and by less within one.
"""

import json
import subprocess
import sys
import time
from statistics import median

import jax
import numpy as np
import setup_devices  # noqa: F401  (before the backend starts)
from baselines import OPTIMIZER, PlainPmap, shuffled
from first_window import transformer
from loops import Loop, Meter, steps_rate
from measure import Result, interleave, options_of, ratios, result, show

import elche_jax as elche

BATCH = 8
TURNS, TURN_S = 7, 1.0
PATIENCE_S = 120  # for a program that is compiled in the background
LEAST = {50: 0.98}
"""Required share of the hand-written step, by the length of a window in ms."""


class StreamingPmap(PlainPmap):
    """The hand-written step with examples from the host, in a new order every epoch."""

    def __init__(self, params, devices, count: int, loss, data):
        counts = (count,) * len(devices)
        super().__init__(params, devices, counts, BATCH, loss=loss)
        self._shape = len(devices), count
        self._read = shuffled(data, sum(counts), BATCH)

    def __call__(self):
        self._batches = jax.tree.map(
            lambda a: a.reshape(*self._shape, *a.shape[1:]), next(self._read)
        )
        return super().__call__()


def shares(ms: float) -> tuple[int, float, float]:
    """Measure windows of about `ms` ms, relative to the hand-written step.

    Returns:
        The microbatches of a device in a window; the ratio of the speeds by the clock, and by the
        processor time of all threads.
    """
    params, loss_fn, data = transformer(layers=2)
    data = jax.tree.map(lambda a: np.tile(a, (128, 1)), data)
    devices = jax.devices()[:2]

    def by_hand(count: int) -> StreamingPmap:
        return StreamingPmap(params, devices, count, loss_fn, data)

    count = 8
    for _ in range(2):  # again with more microbatches, which share the cost of a step
        count = max(1, round(ms * steps_rate(by_hand(count), count, TURN_S)))
    plain = by_hand(count)
    cadence = elche.Replay([(count, count)] * 100_000)
    train = elche.build_train_step(loss_fn, OPTIMIZER, devices=devices, cadence=cadence)
    ours = Loop(train, params, data, BATCH, placement="stream")
    ours.warm(20)
    begun = time.perf_counter()
    # most later windows are one program, compiled in the background meanwhile (docs/design/0018)
    while not train.report().compiled_ahead:
        if time.perf_counter() - begun > PATIENCE_S:
            raise SystemExit(f"the program of a window is not there after {PATIENCE_S} s")
        ours.warm(10)
    ours.warm(10)
    measures = {
        "ours": lambda: ours.rate(TURN_S),
        "by hand": lambda: steps_rate(plain, 2 * count, TURN_S),
    }
    meter = Meter()
    rates = interleave(meter.on(measures), TURNS)
    of_speed, of_time = (
        median(ratios(found["ours"], found["by hand"])) for found in (rates, meter.rates())
    )
    return count, of_speed, of_time


def case(ms: float, repeats: int) -> list[Result]:
    """Measure windows of about `ms` milliseconds, each repeat in its own process."""
    command = [sys.executable, __file__, "--only", str(ms)]
    found = [json.loads(subprocess.check_output(command)) for _ in range(repeats)]
    counts, of_speed, of_time = zip(*found, strict=True)
    asked = {"least": LEAST[ms]} if ms in LEAST else {}
    name = f"{ms:g} ms, {median(counts):g} microbatches: "
    return [
        result("short", f"{name}of the speed by hand", of_speed, **asked),
        result("short", f"{name}per processor time", of_time),
    ]


def main() -> None:
    parser = options_of(__doc__, "benchmarks/out/short_windows.json", 5)
    parser.add_argument("--ms", type=float, action="append", help="length of a window")
    parser.add_argument("--only", type=float, help="print the figures of one process")
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(shares(args.only)))
        return
    results = [one for ms in args.ms or [5, 14, 50, 200] for one in case(ms, args.repeats)]
    show(results, args.out)


if __name__ == "__main__":
    main()
