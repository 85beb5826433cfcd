"""A process of a job that saves, stops and resumes, and says what it saw."""

import json
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
import numpy as np
import optax
from reference import data, loss_fn, params
from scenes import Noted, collect_seldom, raised

from elche_jax import _progress
from elche_jax.checkpoint.store import Store

BATCH, EXAMPLES, STOP, LAST = 4, 240, 3, 6
ROWS = {name: rows[:EXAMPLES] for name, rows in data(80).items()}
COUNTS = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (0, 0, 3), (3, 1, 1)]
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
RULES = {
    "mean": {},
    "local": {"averaging": elche.ParameterAveraging(optimizer_state="keep")},
    "diloco": {"averaging": elche.DiLoCo(OUTER)},
    "late": {
        "averaging": elche.ParameterAveraging(optimizer_state="keep", delay=2),
        "exchange": elche.HostExchange(),
    },
}
FIRST = jax.process_index() == 0
OTHER = jax.process_index() == 1


def build(rule="mean", **options):
    cadence = options.pop("cadence", None) or elche.Replay(COUNTS)
    return elche.build_train_step(
        loss_fn, optax.adam(1e-2), cadence=cadence, **RULES[rule] | options
    )


@cache
def shared():
    """That of scenes which look at other things than how it trains."""
    return build(cadence=elche.FixedTotal(3))


@cache
def another(rule):
    """A step that goes on with what others have saved."""
    return build(rule)


def run(train, folder, last, resume="auto", rows=ROWS, **when):
    """Trains to a window, from a checkpoint if there is one, and saves there."""
    state = train.init(params())
    with elche.Checkpointer(train, elche.Checkpoints(folder, **when)) as saver:
        state, cursor = saver.restore(state, resume)
        with train.windows(rows, BATCH, epochs=None, cursor=cursor, seed=3) as windows:
            for window in windows:
                state, _ = train(state, window)
                if window.index + 1 == last:
                    saver.save(state, window, force=True)
                    break
                saver.save(state, window)
    return state, cursor


def said_of(train, state):
    """The bits of the state of this process's devices, its values, and what the run knows."""
    ranks = train.fleet.job.ranks
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return {
        "ranks": list(ranks),
        "bits": [b"".join(leaf[at].tobytes() for leaf in leaves).hex() for at in range(len(ranks))],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in state.params.items()},
        "counts": train.counts_history,
        "skipped": train.skipped,
    }


def straight(folder, rules):
    """Some rules without a stop; with one after half of the windows, which stays in the folder."""
    said = {}
    for rule in rules:
        train = build(rule)
        state, _ = run(train, folder / f"once-{rule}", LAST)
        once = said_of(train, state)
        run(train, folder / rule, STOP)
        resumed = another(rule)
        # a copy, as what resumes it later shall find the half
        if FIRST:
            shutil.copytree(folder / rule, folder / f"{rule}-2")
        resumed_state, cursor = run(resumed, folder / f"{rule}-2", LAST, "must")
        said[rule] = {
            "once": once,
            "stopped": said_of(resumed, resumed_state),
            "cursor": cursor.window,
        }
    return said


def resumed(folder, rules):
    """What these rules' halves of runs become in this job."""
    said = {}
    for rule in rules:
        train = another(rule)
        state, _ = run(train, folder / rule, LAST, "must")
        said[rule] = said_of(train, state)
    return said


def coverage(folder):
    """Which examples the windows of an epoch use that is stopped and resumed in the middle."""
    used, train = [], shared()
    for last in (STOP, None):
        noted, state = Noted(ROWS), train.init(params())
        where = folder / "coverage"
        ends = []
        with elche.Checkpointer(train, elche.Checkpoints(where)) as saver:
            state, cursor = saver.restore(state)
            with train.windows(noted, BATCH, cursor=cursor, seed=3) as windows:
                for window in windows:
                    state, _ = train(state, window)
                    ends.append([window.counts, window.index])
                    if window.index + 1 == last:
                        saver.save(state, window, force=True)
                        break
        # read ahead, and not trained before the stop
        mine = sum(counts[rank] for counts, _ in ends for rank in train.fleet.job.ranks)
        used += noted.read[: mine * BATCH]
    return used


def timed(folder):
    """Windows after which the first process saved, as only its clock said so."""
    train = shared()
    state, saved, written = train.init(params()), [], []
    when = elche.Checkpoints(folder / "timed", every_seconds=1e-3 if FIRST else 1e6)
    with elche.Checkpointer(train, when) as saver, train.windows(ROWS, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            if saver.save(state, window):
                saved.append(window.index)
            written.append(saver.written)
            if window.index == 11:
                break
    return [saved, written]


def full(folder):
    """What is raised, and after which window, if the disk of the first process is full."""

    def save(*_, **__):
        raise OSError(28, "No space left on device")

    said, known = {}, Store.save
    Store.save = save
    for when in ("now", "end"):
        train, trained = shared(), []

        def loop(train=train, trained=trained, when=when):
            state = train.init(params())
            asked = elche.Checkpoints(folder / when, every_windows=5, on_error=when)
            with elche.Checkpointer(train, asked) as saver, train.windows(ROWS, BATCH) as windows:
                for window in windows:
                    state, _ = train(state, window)
                    trained.append(window.index)
                    saver.save(state, window)

        said[when] = [raised(loop), trained[-1]]
    Store.save = known
    return said


def failing(folder):
    """What is taken for the last checkpoint after each window, if all after the first one fail."""
    train, written = shared(), []
    state, known = train.init(params()), Store.save

    def save(store, saved):
        if saved.step > 3:
            raise OSError(28, "No space left on device")
        return known(store, saved)

    asked = elche.Checkpoints(folder / "failing", every_windows=3, on_error="end")
    Store.save = save
    with suppress(elche.CheckpointError), elche.Checkpointer(train, asked) as saver:
        for window in train.windows(ROWS, BATCH):
            state, _ = train(state, window)
            if FIRST and window.index == 4:  # told from the next window on, in which all save again
                saver._thread.wait()
            saver.save(state, window)
            written.append(saver.written)
            if window.index == 9:
                break
    Store.save = known
    return written


def errors(folder):
    """What each of these raises."""
    train = shared()
    state = train.init(params())
    nowhere = folder / ("file/folder" if FIRST else "fine")
    if FIRST:
        (folder / "file").touch()

    def in_other_calls():
        """The first process makes one by itself, which exchanges arrays of another shape."""
        if FIRST:
            elche.Checkpointer(train, elche.Checkpoints(folder / "other"))
        else:
            train.init(params())

    def in_calls_alike():
        with elche.Checkpointer(train, elche.Checkpoints(folder / "other")) as saver:
            said = raised(saver.wait if FIRST else lambda: elche.check_replicas(state))
        raise RuntimeError(said)

    def restore(resume, name):
        with elche.Checkpointer(train, elche.Checkpoints(folder / name)) as saver:
            saver.restore(state, resume)

    return {
        "must": raised(lambda: restore("must", "none")),
        "never": raised(lambda: restore("never", "local")),
        "later": raised(lambda: later(train, folder)),
        "folder": raised(lambda: elche.Checkpointer(train, elche.Checkpoints(nowhere))),
        "calls": raised(in_other_calls),
        "calls of one shape": raised(in_calls_alike),
        "intervals": raised(lambda: elche.Checkpointer(
            train, elche.Checkpoints(folder / "other", every_windows=2 + OTHER))),
        "best": raised(lambda: elche.Checkpointer(
            train, elche.Checkpoints(folder / "best")).best(state)),
    }  # fmt: skip


def later(train, folder):
    """Saves over a checkpoint of a later window."""
    state = train.init(params())
    where = elche.Checkpoints(folder / "once-local")
    with elche.Checkpointer(train, where) as saver, train.windows(ROWS, BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            saver.save(state, window, force=True)


def again(folder):
    """After which window all end if one is asked to start again, and what it has saved."""
    train, trained = shared(), []
    state = train.init(params())
    try:
        with elche.Checkpointer(train, elche.Checkpoints(folder / "again")) as saver:
            for window in train.windows(ROWS, BATCH):
                state, _ = train(state, window)
                trained.append(window.index)
                if OTHER and window.index == 2:
                    elche.distributed.request_restart()
                saver.save(state, window)
    except elche.RestartRequested as ended:
        _progress._asked = False  # what follows is not asked
        return [trained[-1], ended.windows, ended.code, saver.written]


def ahead(folder):
    """The states of a run that runs ahead, and of one that stops and resumes.

    And what each process says if it restores what it has saved by itself.
    """
    exchange, states = elche.HostExchange(run_ahead=True), []
    for stops in ([LAST], [STOP, LAST]):
        train, place = build("local", exchange=exchange), folder / f"ahead-{len(stops)}"
        for last in stops:
            state, _ = run(train, place, last)
        elche.check_replicas(train.common(state))
        states.append(said_of(train, state))
    return *states, raised(lambda: train.restore_run(train.run_to_dict(state), state))


def unreported(folder):
    """Loss and weight of each window, of parameters that stay, in a run that stops and resumes."""
    said, train = [], elche.build_train_step(
        loss_fn, optax.sgd(0.0), averaging=elche.MeanGradient(delay=1),
        cadence=elche.Replay(COUNTS),
    )  # fmt: skip
    for last in (STOP, LAST):
        state = train.init(params())
        with elche.Checkpointer(train, elche.Checkpoints(folder / "unreported")) as saver:
            state, cursor = saver.restore(state)
            with train.windows(ROWS, BATCH, shuffle=False, cursor=cursor) as windows:
                for window in windows:
                    state, metrics = train(state, window)
                    said.append([float(metrics["loss"]), float(metrics["weight"])])
                    if window.index + 1 == last:
                        saver.save(state, window, force=True)
                        break
    return said


SCENES = (coverage, timed, full, failing, errors, again, unreported)

if __name__ == "__main__":
    collect_seldom()
    phase, place, *asked = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    rules = [name for name in asked if name in RULES]
    if phase == "half":
        for rule in rules:
            run(build(rule), place / rule, STOP)
        print("{}")
    elif phase == "endless":
        run(build(cadence=elche.FixedTotal(3)), place, None, every_windows=1)
    elif phase == "straight":
        halves = [rule for rule in RULES if (place / "alone" / rule).exists()]
        said = {
            "straight": straight(place, rules),
            "resumed": resumed(place / "alone", halves),
        }
        scenes = [*SCENES, *[ahead] * ("ahead" in asked)]
        print(json.dumps(said | {scene.__name__: scene(place) for scene in scenes}))
    else:
        print(json.dumps({"resumed": resumed(place, rules)}))
