"""A process of a job that trains in several ways, and says what it saw."""

import json
import sys
import threading
from functools import cache

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
import numpy as np
import optax
from averaged import TX
from flax.training.dynamic_scale import DynamicScale
from held import Held
from reference import data, loss_fn, params
from scenes import Noted, collect_seldom, raised

from elche_jax._processes import Processes
from elche_jax.engine.job import Job
from elche_jax.lab import EmulatedSpeeds

ROWS, BATCH = data(150), 4
OTHER = jax.process_index() == 1
FAR = 12
"""A window that is far beyond one of a device that is late."""


def build(tx=None, loss_fn=loss_fn, **options):
    return elche.build_train_step(loss_fn, tx or optax.adam(1e-2), **options)


def run(train, rows=ROWS, state=None, stop=None, **options):
    """Trains; returns the state, the metrics and the last cursor."""
    state = train.init(params()) if state is None else state
    said, cursor = [], None
    with train.windows(rows, BATCH, **options) as windows:
        for window in windows:
            state, metrics = train(state, window)
            said.append(jax.tree.map(lambda x: np.asarray(x).tolist(), metrics))
            cursor = window.cursor
            if len(said) == stop:
                break
    return state, said, cursor


def bits(state):
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return b"".join(np.asarray(leaf).tobytes() for leaf in leaves).hex()


def values(state):
    return {name: np.asarray(leaf).tolist() for name, leaf in state.params.items()}


def common_of(state):
    """The parameters that all devices have where each has its own, too."""
    return {str(at): np.asarray(leaf).tolist() for at, leaf in enumerate(state.averaging.base)}


def unequal_devices(**options):
    noted = Noted(ROWS)
    speeds = EmulatedSpeeds([2.0, 2.0, 16.0])
    options = {"cadence": elche.ElChe(anchor=2)} | options
    train = build(emulate=speeds, device_loss=True, **options)
    state = train.init(params())
    misses = []
    with train.windows(noted, BATCH, epochs=2, seed=5) as windows:
        for window in windows:
            state, _ = train(state, window)
            misses.append(train._cache.misses)
    elche.check_replicas(train.common(state))
    return {
        "counts": train.counts_history,
        "records": [repr(record) for record in train.records],
        "busy": [record.busy_ms for record in train.records],
        "read": noted.read,
        "params": values(state),
        "misses": [misses[0], misses[-1]],
        "report": str(train.report()).count("\n"),
    }


def replayed():
    counts = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (0, 0, 3), (3, 1, 1)]
    options = {"seed": 3, "epochs": None}
    one = build(cadence=elche.Replay(counts), device_loss=True)
    state, said, _ = run(one, stop=6, **options)
    once, whole = bits(state), values(state)
    state, _, cursor = run(one, stop=3, **options)
    state, *_ = run(one, state=state, stop=3, cursor=cursor, **options)
    stopped = bits(state)
    known, Job.alike = Job.alike, False  # as where processors differ: one lead's bits count
    # the other process would move further by itself
    rate = 1.5e-2 if OTHER else 1e-2
    apart = build(tx=optax.adam(rate), cadence=elche.Replay(counts), device_loss=True)
    other, again, _ = run(apart, stop=6, **options)
    Job.alike = known
    return {
        "once": once, "stopped": stopped, "metrics": said, "params": whole,
        "unlike": values(other), "unlike metrics": again,
    }  # fmt: skip


def poisoned(at=5, windows=3, **options):
    """Microbatch 5 of windows of 2, 2 and 2 is the second one of rank 2."""
    rows = ROWS | {"x": ROWS["x"].copy()}
    rows["x"][at * BATCH] = np.nan
    train = build(cadence=elche.Replay([(2, 2, 2)] * windows), **options)
    said = raised(lambda: run(train, rows, shuffle=False, stop=windows, epochs=None))
    return [said, train.skipped, train.left_out]


class Moody(elche.Replay):
    """A recording that one process may read differently from window 3 on."""

    moody = False

    def counts_at(self, window):
        return (1, 2, 1) if Moody.moody and window >= 3 else super().counts_at(window)


@cache
def verifying():
    """A step that compares the replicas after each window."""
    return build(cadence=Moody([(2, 1, 1)] * 8), verify_every=1)


def changed(part, change, stop=None):
    """What is raised if a part of the state is changed after the second window, and when."""
    train = verifying()
    state, trained = train.init(params()), []

    def loop(state):
        with train.windows(ROWS, BATCH, epochs=None) as windows:
            for window in windows:
                state, _ = train(state, window)
                trained.append(window.index)
                if window.index == 1:
                    rows = jax.tree.map(lambda x: change(np.array(x)), getattr(state, part))
                    state = state.replace(**{part: jax.tree.map(train.fleet.put, rows)})
                if len(trained) == stop:
                    break

    return [raised(lambda: loop(state)), trained[-1]]


def apart():
    """The parameters of process 1."""
    return changed("params", lambda rows: rows + np.float32(OTHER))


def other_optimizer():
    """Process 1 has another learning rate."""
    train = build(tx=optax.adam(2e-2 if OTHER else 1e-2), cadence=elche.FixedTotal(6))
    return raised(lambda: run(train, stop=5, epochs=None))


def torn():
    """The key of the second device of process 0; parameters would be the lead's again."""

    def change(rows):
        if not OTHER:
            rows[1] += 1
        return rows

    return changed("key", change)


def apart_at_last():
    """Those that are changed before the last window of a loop."""
    said, last = changed("params", lambda rows: rows + np.float32(OTHER), stop=3)
    assert last == 2
    return said


def ended_early(**options):
    """Loops that are left at once, without `with`, and that leave out windows."""
    speeds = EmulatedSpeeds([1.0, 2.0, 3.0])
    train = build(cadence=elche.ElChe(anchor=2), emulate=speeds, **options)
    state = train.init(params())
    for number in range(4):
        for window in train.windows(ROWS, BATCH, seed=number):
            if window.index % 5 == 2:
                continue
            state, _ = train(state, window)
            if window.index % 4 == 3:
                break
    train.settle()
    return {
        "counts": train.counts_history,
        "records": [repr(record) for record in train.records],
        "windows": int(np.asarray(state.step)[0]),
    }


def late():
    """The second device of process 0 takes longer than the others wait."""
    train = build(
        cadence=elche.FixedTotal(6), emulate=EmulatedSpeeds([2.0, 400.0, 2.0]),
        exchange=elche.HostExchange(timeout=0.2), verify_every=1,
    )  # fmt: skip
    state, said, _ = run(train, stop=12, epochs=None)
    return {
        "counts": train.counts_history,
        "records": [repr(record) for record in train.records],
        "left_out": train.left_out,
        "params": values(state),
        "loss": repr([one["loss"] for one in said]),
    }


def late_ahead(averaging=None):
    """The second device of process 0 has no end of window 2 until the others are far beyond."""
    held = Held({(2, 1)})
    train = build(
        tx=TX, cadence=elche.EveryBatch(), emulate=held, verify_every=1, averaging=averaging,
        exchange=elche.HostExchange(timeout=1.0, run_ahead=True),
    )  # fmt: skip
    state, said = train.init(params()), []
    with train.windows(ROWS, BATCH, shuffle=False) as windows:
        for window in windows:
            state, metrics = train(state, window)
            said.append(float(metrics["loss"]))
            if window.index == FAR:
                held.let_go(2, 1)
            if window.index > FAR and window.counts[1]:  # it is back
                break
    elche.check_replicas(train.common(state))
    return {
        "counts": train.counts_history,
        "records": [repr(record) for record in train.records],
        "left_out": train.left_out,
        "params": values(state) if averaging is None else common_of(state),
        "loss": repr(said),
    }


def asked(**options):
    """A loop that exchanges after each of its windows, which are averaged at the same time."""
    train = build(cadence=elche.FixedTotal(6), emulate=EmulatedSpeeds([1.0, 2.0, 6.0]), **options)
    state, averages = train.init(params()), []
    with train.windows(ROWS, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            averages.append(train.average(state))  # read at the end
            if window.index % 2:
                elche.check_replicas(train.common(state))
            if window.index == 10:
                break
    return jax.tree.map(lambda x: np.asarray(x).tolist(), averages)


def kept_for_later(**options):
    """Windows that are trained once their loop was closed; the first one is not finite."""
    rows = ROWS | {"x": ROWS["x"].copy()}
    rows["x"][5 * BATCH] = np.nan
    train = build(cadence=elche.Replay([(2, 2, 2)] * 6), nonfinite="skip", **options)
    state = train.init(params())
    windows = train.windows(rows, BATCH, shuffle=False, epochs=None)
    kept = [next(windows) for _ in range(2)]
    windows.close()
    for window in kept:
        state, _ = train(state, window)
    train.settle()
    return [train.skipped, values(state)]


def planned_apart():
    Moody.moody = OTHER
    try:
        return raised(lambda: run(verifying(), epochs=None))
    finally:
        Moody.moody = False


def unlike(call):
    """Where processors differ."""
    known, Job.alike = Job.alike, False
    try:
        return call()
    finally:
        Job.alike = known


def with_metrics(name):
    """Begins to train with a loss that reports something of this name."""
    train = build(tx=TX, has_aux=True, loss_fn=lambda p, b, rng: (loss_fn(p, b, rng), {name: 1.0}))
    train.init(params())
    train.windows(ROWS, BATCH)


def errors():
    """What each of these raises, here and in the other process."""
    train = build(cadence=elche.FixedTotal(6))
    other = {name: leaf + OTHER for name, leaf in params().items()}
    rows = ROWS | {"y": ROWS["y"] + OTHER}
    found = {
        "devices": lambda: build(devices=jax.local_devices()),
        "order": lambda: build(devices=jax.devices()[:: -1 if OTHER else 1]),
        # another device of process 0 would exchange with the others
        "fewer, DDP": lambda: elche.DDP(jax.devices()[int(OTHER) :]),
        "cadence": lambda: build(cadence=elche.FixedTotal(6 + OTHER)),
        "params": lambda: train.init(other),
        "rng": lambda: train.init(params(), rng=int(OTHER)),
        "verify_every": lambda: build(verify_every=1 + OTHER),
        "nonfinite": lambda: build(nonfinite="skip" if OTHER else "raise"),
        "exchange": lambda: build(exchange=elche.HostExchange(timeout=5.0 + OTHER)),
        "bits": lambda: unlike(lambda: build(exchange=elche.HostExchange())),
        "again": elche.distributed.initialize,
        "loss_scale": lambda: build(loss_scale=DynamicScale(scale=2.0 ** (9 + OTHER))),
        "trainable": lambda: build(trainable=lambda path, _: "w" in path or not OTHER).init(
            params()),
        "merge": lambda: build(merge="max" if OTHER else "mean").init(
            params(), model_state={"seen": np.float32(0)}),
        "optimizer": lambda: build(optax.sgd(0.1) if OTHER else None).init(params()),
        "metrics": lambda: with_metrics("other" if OTHER else "own"),
    }  # fmt: skip
    said = {name: raised(call) for name, call in found.items()}
    train.init(params())
    said["data"] = raised(lambda: train.windows(rows, BATCH))
    fewer = {name: leaf[: len(leaf) - 4 * OTHER] for name, leaf in ROWS.items()}
    said["size"] = raised(lambda: train.windows(fewer, BATCH))
    said["batch_size"] = raised(lambda: train.windows(ROWS, BATCH + OTHER))
    said["seed"] = raised(lambda: train.windows(ROWS, BATCH, seed=int(OTHER)))
    return said


def replayed_pending(rule, **options):
    """With windows pending; once stopped, and resumed from the state and the cursor."""
    counts = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (0, 0, 3), (3, 1, 1), (2, 0, 2)]
    train = build(cadence=elche.Replay(counts), averaging=rule, **options)
    how = {"seed": 3, "epochs": None}
    state, said, _ = run(train, stop=7, **how)
    once, plans = bits(state), [[list(one.counts) for one in train.records]]
    part, early, cursor = run(train, stop=4, **how)
    part, late, _ = run(train, state=part, stop=3, cursor=cursor, **how)
    plans.append([list(one.counts) for one in train.records])
    return [once, bits(part), repr(said), repr(early + late), *plans]


def two_threads():
    """A second thread begins to train in the middle of a window; nothing is trained after that."""
    together, said = Processes.together, {}

    def trained(name):
        train = build(cadence=elche.FixedTotal(6))
        state = train.init(params())
        with train.windows(ROWS, BATCH) as windows:
            for window in windows:
                if window.index == 2 and name == "first":
                    Processes.together = meanwhile
                state, _ = train(state, window)

    def begins(name):
        said[name] = raised(lambda: trained(name))

    def meanwhile(self, leads, exchange):
        Processes.together = together
        second = threading.Thread(target=begins, args=["second"])
        second.start()
        second.join()
        return together(self, leads, exchange)

    begins("first")
    return said


DILOCO = elche.DiLoCo(optax.sgd(0.7, momentum=0.9))
DILOCO_LATE = elche.DiLoCo(optax.sgd(0.7, momentum=0.9), delay=3)
AHEAD = elche.HostExchange(run_ahead=True)
FARTHER = elche.HostExchange(run_ahead=True, max_overshoot=9)
LATE = {"averaging": elche.MeanGradient(delay=1)}
SCENES = {
    "unequal_devices": unequal_devices,
    "unequal_devices, pending": lambda: unequal_devices(**LATE),
    "unequal_devices, async": lambda: unequal_devices(
        cadence=None, config=elche.DDPConfig(policy="async", anchor=2)
    ),
    "unequal_devices, host": lambda: unequal_devices(exchange=elche.HostExchange()),
    "unequal_devices, ahead": lambda: unequal_devices(
        cadence=None, config=elche.DDPConfig(policy="async", exchange="host", anchor=2)
    ),
    # two lanes in one process and one in the other, as where it has devices of two kinds
    "unequal_devices, lanes": lambda: unequal_devices(lanes=lambda device: device.id),
    "late": late,
    "late, ahead": late_ahead,
    "late, DiLoCo ahead": lambda: late_ahead(DILOCO),
    "asked, ahead": lambda: asked(exchange=AHEAD, averaging=DILOCO),
    "asked, host": lambda: asked(exchange=elche.HostExchange(), averaging=DILOCO_LATE),
    "replayed": replayed,
    "replayed, gradients pending": lambda: replayed_pending(elche.MeanGradient("int8", 3)),
    "replayed, pending": lambda: replayed_pending(DILOCO_LATE),
    "replayed, ahead": lambda: replayed_pending(DILOCO, exchange=AHEAD),
    "replayed, gradients ahead": lambda: replayed_pending(None, exchange=FARTHER),
    "poisoned": poisoned,
    "poisoned, pending": lambda: poisoned(**LATE),
    "poisoned at last": lambda: poisoned(5, 1, **LATE),
    "skipped, pending": lambda: poisoned(5, 6, nonfinite="skip", averaging=DILOCO_LATE),
    "apart": apart,
    "apart at last": apart_at_last,
    "other optimizer": other_optimizer,
    "torn": torn,
    "ended_early": ended_early,
    "ended_early, pending": lambda: ended_early(**LATE),
    "ended_early, ahead": lambda: ended_early(exchange=FARTHER),
    "poisoned, ahead": lambda: poisoned(exchange=AHEAD),
    "poisoned, host": lambda: poisoned(exchange=elche.HostExchange()),
    "kept": kept_for_later,
    "kept, pending": lambda: kept_for_later(**LATE),
    "kept, host": lambda: kept_for_later(exchange=elche.HostExchange()),
    "kept, ahead": lambda: kept_for_later(exchange=AHEAD),
    "planned_apart": planned_apart,
    "errors": errors,
    "two_threads": two_threads,
}

if __name__ == "__main__":
    collect_seldom()
    print(json.dumps({name: SCENES[name]() for name in json.loads(sys.argv[1])}))
