"""`Trainer.fit`, timeline and all, against the user's own loop over the same work.

    python benchmarks/trainer.py [--repeats 7] [--out FILE]

Both train the same model on the same data, in turn, the loop with and without a timeline of its
own; the trainer records its timeline, its table and its checkpoints in a run folder (the
checkpoint once, at the end of the epoch).
The time is that of one epoch with everything compiled: the loop's own, and the `seconds` that
the trainer gives for its epoch. The last row is what a timeline takes to record a window.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
import optax
from baselines import examples, mlp_params
from evaluation import outputs
from measure import Result, interleave, ratios, result, show

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds
from elche_jax.observe.events import LossEvent

BATCH = 16
FLEET = [5, 5, 10, 20]


def loss_fn(params, batch, rng):
    """Cross-entropy per example."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, batch), batch["y"])


class Switch:
    """A recorder that hands everything to the timeline of the present run."""

    to: elche.Timeline

    def window(self, record):
        self.to.window(record)

    def add(self, kind, **values):
        self.to.add(kind, **values)


class Work:
    """One epoch of some work, by the user's loop and by the trainer.

    Args:
        params: The model's.
        microbatches: Microbatches of the epoch.
        options: What both training steps are built with.
    """

    def __init__(self, params, microbatches: int, **options):
        self._params, self._data = params, examples(BATCH * microbatches)
        self._options = options
        self._train = elche.build_train_step(loss_fn, optax.adam(1e-3), **self._fresh())
        self._recorded = None
        self._trainer = elche.Trainer(loss_fn, optax.adam(1e-3), **self._fresh())

    @property
    def train(self) -> elche.TrainStep:
        """The loop's training step."""
        return self._train

    def _fresh(self):
        ms = self._options.get("ms")
        found = {name: value for name, value in self._options.items() if name != "ms"}
        return found | ({} if ms is None else {"emulate": EmulatedSpeeds(ms)})

    def loop(self) -> float:
        """Microbatches per second of the second epoch of the user's loop."""
        return self._rate(self._train)

    def recorded(self) -> float:
        """The same with a timeline in a file."""
        timeline = Switch()
        if self._recorded is None:
            config = elche.DDPConfig(timeline=timeline)
            self._recorded = (
                elche.build_train_step(loss_fn, optax.adam(1e-3), config=config, **self._fresh()),
                timeline,
            )
        train, timeline = self._recorded
        with tempfile.TemporaryDirectory() as folder, elche.Timeline(f"{folder}/a") as timeline.to:
            return self._rate(train)

    def _rate(self, train: elche.TrainStep) -> float:
        state, begun, done = train.init(self._params), None, 0
        for window in train.windows(self._data, BATCH, 2):
            if window.epoch == 1 and begun is None:
                jax.block_until_ready(state)
                begun = time.perf_counter()
            state, _ = train(state, window)
            done += sum(window.counts) if window.epoch == 1 else 0
        jax.block_until_ready(state)
        return done / (time.perf_counter() - begun)

    def fit(self) -> float:
        """The same of the trainer's."""
        with tempfile.TemporaryDirectory() as folder:
            run = self._trainer.fit(
                self._params, self._data, BATCH, 2, run_dir=folder, progress=False,
                checkpoints=elche.Checkpoints(every_epochs=2),
            )  # fmt: skip
        last = run.history[-1]
        return last.examples / BATCH / last.seconds


def measure(repeats: int) -> list[Result]:
    """All cases, the two systems in turn."""
    devices = jax.devices()
    small, large = mlp_params(width=32, depth=1), mlp_params(width=512, depth=3)
    cases = {
        "5:5:10:20 ms emulated": Work(
            small, 600, devices=devices[:4], cadence=elche.ElChe(anchor=4), ms=FLEET
        ),
        "two real devices": Work(large, 600, devices=devices[:2], cadence=elche.FixedTotal(16)),
        "one real device": Work(large, 600, devices=devices[:1]),
    }
    results = []
    for name, work in cases.items():
        calls = {"fit": work.fit, "loop": work.loop, "recorded loop": work.recorded}
        for call in calls.values():  # compiles
            call()
        found = interleave(calls, repeats)
        for other in ("recorded loop", "loop"):
            values = ratios(found["fit"], found[other])
            results.append(result("fit", f"{name}: over the {other}", values, least=0.98))
    work = cases["5:5:10:20 ms emulated"]
    results.append(
        result("time", "recording a window, share of its own time",
               tuple(100 * recording(work) for _ in range(repeats)), "%", most=1.0)
    )  # fmt: skip
    return results


def recording(work: Work, windows: int = 2000) -> float:
    """What a timeline takes for a window and its loss, as a share of the window."""
    records = work.train.records
    with tempfile.TemporaryDirectory() as folder, elche.Timeline(f"{folder}/run.jsonl") as timeline:
        begun = time.perf_counter()
        for at in range(windows):
            timeline.window(records[at % len(records)])
            timeline.add(LossEvent, window=at, epoch=0, loss=1.0)
        taken = 1e3 * (time.perf_counter() - begun) / windows
        timeline.flush()
    return taken / median(record.wall_ms for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/trainer.json"))
    args = parser.parse_args()
    show(measure(args.repeats), args.out)


if __name__ == "__main__":
    main()
