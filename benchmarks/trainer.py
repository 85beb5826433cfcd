"""`Trainer.fit`, including its timeline, against the user's own loop over the same work.

    python benchmarks/trainer.py [--repeats 21] [--out FILE]

All train the same model on the same data, and take turns, several windows at a time: the loop, the
loop again (which shows the noise), the loop with its own timeline, and the trainer, which records
its timeline, its table and its checkpoint in a run folder. A repeat is one run of each; its figure
is the work divided by the time of all turns except the first. It includes the end of an
epoch, but not compilation and the checkpoint. The last row is the cost of recording a window in a
timeline.

The real devices are threads on the machine's processors, so a loop's own computation takes time
from them. This is the hard case; separate devices are not affected.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import tempfile
import time
from statistics import mean, median

import jax
import optax
from baselines import examples, mlp_losses, mlp_params
from measure import Result, options_of, ratios, result, show
from turns import Turns, take_turns

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds
from elche_jax.observe.events import LossEvent
from elche_jax.trainer.callback import CallbackContext
from elche_jax.trainer.control import Control

BATCH = 16
FLEET = [5, 5, 10, 20]


class Switch:
    """A recorder that passes everything to the timeline of the current run."""

    to: elche.Timeline

    def window(self, record):
        self.to.measured(record)  # as a timeline itself would receive it

    def add(self, kind, **values):
        self.to.add(kind, **values)


class Turn(elche.Callback):
    """Makes a loop or the trainer take turns, at the same cost for both."""

    def __init__(self, turns: Turns, name: str):
        self._turns, self._name = turns, name

    def on_window(self, run):
        self._turns.window(self._name, sum(run.window.counts), run.state)


class Work:
    """Several epochs of the same work, by the user's loop and by the trainer.

    Args:
        params: The model's parameters.
        microbatches: Microbatches per epoch.
        epochs: Number of epochs.
        windows: Windows per turn.
        ms: Milliseconds per microbatch of emulated devices.
        options: Arguments of all training steps.
    """

    def __init__(self, params, microbatches: int, epochs: int, windows: int, ms=None, **options):
        self._params, self._data = params, examples(BATCH * microbatches)
        self._epochs, self._windows, self._ms, self._options = epochs, windows, ms, options
        self._timeline = Switch()
        config = elche.DDPConfig(timeline=self._timeline)
        self._loops = {"loop": self._build(), "again": self._build()}
        self._recorded = self._build(config=config)
        self._trainer = elche.Trainer(mlp_losses, optax.adam(1e-3), **self._fresh())

    def _build(self, **options) -> elche.TrainStep:
        return elche.build_train_step(mlp_losses, optax.adam(1e-3), **self._fresh(), **options)

    def _fresh(self):
        emulate = {} if self._ms is None else {"emulate": EmulatedSpeeds(self._ms)}
        return self._options | emulate

    @property
    def train(self) -> elche.TrainStep:
        """The loop's training step."""
        return self._loops["loop"]

    def rates(self, repeat: int) -> dict[str, float]:
        """Return the microbatches per second of each participant."""
        loops = {"loop": self._loop, "again": self._loop, "recorded": self._record}
        return take_turns(loops | {"fit": self._fit}, self._windows, repeat)

    def _loop(self, turns: Turns, name: str) -> None:
        self._run(self._loops[name], turns, name)

    def _record(self, turns: Turns, name: str) -> None:
        timeline = self._timeline
        with tempfile.TemporaryDirectory() as folder, elche.Timeline(f"{folder}/a") as timeline.to:
            self._run(self._recorded, turns, name)

    def _run(self, train: elche.TrainStep, turns: Turns, name: str) -> None:
        turns.begin(name)
        turn, control = Turn(turns, name), Control()
        state = train.init(self._params)
        for window in train.windows(self._data, BATCH, self._epochs):
            state, metrics = train(state, window)
            turn.on_window(CallbackContext(train, state, window, metrics, (), control))

    def _fit(self, turns: Turns, name: str) -> None:
        turns.begin(name)
        with tempfile.TemporaryDirectory() as folder:
            self._trainer.fit(
                self._params, self._data, BATCH, self._epochs, run_dir=folder, progress=False,
                callbacks=[Turn(turns, name)],
                checkpoints=elche.Checkpoints(every_epochs=self._epochs),
            )  # fmt: skip


def measure(repeats: int) -> list[Result]:
    """Run all cases."""
    devices = jax.devices()
    small, large = mlp_params(width=32, depth=1), mlp_params(width=512, depth=3)
    fixed = elche.FixedTotal(16)
    cases = {
        "5:5:10:20 ms emulated": Work(
            small, 300, 3, 4, FLEET, devices=devices[:4], cadence=elche.ElChe(anchor=4)
        ),
        "two real devices": Work(large, 600, 2, 8, devices=devices[:2], cadence=fixed),
        "one real device": Work(large, 600, 2, 60, devices=devices[:1]),
    }
    results = []
    for name, work in cases.items():
        work.rates(0)  # compiles
        found = [work.rates(repeat) for repeat in range(repeats)]
        rates = {key: tuple(rate[key] for rate in found) for key in found[0]}
        loops = tuple(map(mean, zip(rates["loop"], rates["again"], strict=True)))
        for what, other in (("the loop", loops), ("the recorded loop", rates["recorded"])):
            values = ratios(rates["fit"], other)
            results.append(result("fit", f"{name}: over {what}", values, least=0.98))
        values = ratios(rates["again"], rates["loop"])
        results.append(result("loop", f"{name}: over itself", values))
    work = cases["5:5:10:20 ms emulated"]
    results.append(
        result("time", "recording a window, share of its own time",
               tuple(100 * recording(work) for _ in range(repeats)), "%", most=1.0)
    )  # fmt: skip
    return results


def recording(work: Work, windows: int = 2000) -> float:
    """Return the cost of recording a window and its loss, as a share of the window."""
    records = work.train.records
    with tempfile.TemporaryDirectory() as folder, elche.Timeline(f"{folder}/run.jsonl") as timeline:
        begun = time.perf_counter()
        for at in range(windows):
            timeline.measured(records[at % len(records)])
            timeline.add(LossEvent, window=at, epoch=0, loss=1.0)
        taken = 1e3 * (time.perf_counter() - begun) / windows
        timeline.flush()
    return taken / median(record.wall_ms for record in records)


def main() -> None:
    parser = options_of(__doc__, "benchmarks/out/trainer.json", 21)
    args = parser.parse_args()
    show(measure(args.repeats), args.out)


if __name__ == "__main__":
    main()
