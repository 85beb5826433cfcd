"""A process of a job that evaluates, predicts and reduces by hand, and says what it saw."""

import json
import sys

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
import jax.numpy as jnp
import numpy as np
import optax
from advising import asked
from reference import data, loss_fn, params
from scenes import Noted, raised

from elche_jax.engine.job import Job
from elche_jax.lab import EmulatedSpeeds

SIZE, BATCH = 1003, 4  # the last microbatch has 3 examples
OTHER = jax.process_index() == 1
AT = jax.process_index()
ROWS = {
    "x": np.random.default_rng(0).uniform(0.5, 2.0, (SIZE, 3)).astype("float32"),
    "index": np.arange(SIZE, dtype="int32"),
}
W = {"w": np.array([0.3, -0.2, 0.5], "float32")}
STATE = {"scale": np.float32(3)}


def metric_fn(params, batch):
    error = batch["x"] @ params["w"]
    return {
        "error": error, "wide": batch["x"] * 2, "index": batch["index"],
        "some": elche.Weighted(error**2, (batch["index"] % 3).astype("float32")),
    }  # fmt: skip


def masked_fn(params, model_state, batch):
    mask = batch["mask"].astype("float32")
    mean = (batch["x"] @ params["w"] * mask).sum() / mask.sum()
    return {"error": elche.Weighted(mean * model_state["scale"], mask.sum())}


def apply_fn(params, batch):
    out = batch["x"] @ params["w"]
    return {"out": out, "half": out.astype(jnp.bfloat16), "index": batch["index"]}


def plain(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


def evaluated():
    noted = Noted(ROWS)
    slow = EmulatedSpeeds([1.0, 1.0, 8.0])
    evaluate = elche.build_eval_step(metric_fn, emulate=slow if len(jax.devices()) == 3 else None)
    first = evaluate(W, noted, BATCH)
    counts = [record.counts for record in evaluate.records]
    records = [repr(record) for record in evaluate.records]
    again = evaluate(W, ROWS, BATCH, placement="resident")
    masked = elche.build_eval_step(masked_fn)
    train = elche.build_train_step(
        lambda p, b, rng: ((b["x"] @ p["w"]) ** 2).mean(), optax.sgd(0.1)
    )
    state = train.init(W)
    few = {name: row[:BATCH] for name, row in ROWS.items()}  # one microbatch: one device has work
    return {
        "first": plain(first), "again": plain(again), "counts": counts, "records": records,
        "read": sorted(noted.read), "planned": list(evaluate.counts),
        "masked": plain(masked(W, ROWS, BATCH, model_state=STATE, mask_key="mask")),
        "state": plain(evaluate(state, ROWS, BATCH)), "few": plain(evaluate(W, few, BATCH)),
        "batches": plain(evaluate(W, iter([few, few]))),
        "report": str(evaluate.report()).count("\n"),
    }  # fmt: skip


def predicted():
    noted = Noted(ROWS)
    out = elche.predict(apply_fn, W, noted, BATCH)
    few = elche.predict(apply_fn, W, {name: row[:2] for name, row in ROWS.items()}, BATCH)
    small = elche.predict(apply_fn, W, ROWS, BATCH, window_bytes=3 * 4 * 4 * BATCH)
    return {
        "out": plain(out), "few": plain(few), "read": sorted(noted.read),
        "small": plain(small), "dtype": str(out["half"].dtype),
    }  # fmt: skip


def big():
    """What is larger than a piece."""
    job = Job(tuple(jax.devices()))
    value = np.arange(400_000 + 50_000 * AT)
    told = job.exchange(value)
    return [[len(one), int(one.sum())] for one in told]


class Faulty(Noted):
    """A dataset that one process cannot read to its end."""

    def __getitem__(self, number):
        if OTHER and len(self.read) == 2 * BATCH:  # not in the first window
            raise OSError("the disk is gone")
        return super().__getitem__(number)


def failing():
    def faulty_fn(params, batch):
        if OTHER:
            raise KeyError("no such name")
        return metric_fn(params, batch)

    evaluate = elche.build_eval_step(metric_fn)
    other = {"w": W["w"] + OTHER}
    found = {
        "metric_fn": lambda: elche.build_eval_step(faulty_fn)(W, ROWS, BATCH),
        "data": lambda: evaluate(W, Faulty(ROWS), BATCH),
        "predict": lambda: elche.predict(apply_fn, W, Faulty(ROWS), BATCH),
        "params": lambda: evaluate(other, ROWS, BATCH),
        "batch_size": lambda: evaluate(W, ROWS, BATCH + OTHER),
        "rows": lambda: evaluate(W, {name: row[AT:] for name, row in ROWS.items()}, BATCH),
        "empty": lambda: evaluate(W, {name: row[:0] for name, row in ROWS.items()}, BATCH),
        "devices": lambda: elche.build_eval_step(metric_fn, devices=jax.local_devices()),
        "DDP": lambda: elche.DDP(jax.local_devices()),
        "good": lambda: evaluate(W, ROWS, BATCH),
    }
    return {name: raised(call) for name, call in found.items()}


def by_hand():
    ddp = elche.DDP()
    world, own = ddp.world_size, list(ddp.ranks)
    rng = np.random.default_rng(1)
    every = {"a": rng.normal(size=(world, 5)), "b": rng.normal(size=(world, 2, 3))}
    every = {name: x.astype("float32") for name, x in every.items()}
    mine = {name: x[own] for name, x in every.items()}
    counts = [0, 3, 1, 2][:world]
    holes = {name: np.where(np.reshape(counts, (-1,) + (1,) * (x.ndim - 1)), x, np.nan)
             for name, x in every.items()}  # fmt: skip
    holed = {name: x.astype("float32")[own] for name, x in holes.items()}
    known, Job.alike = Job.alike, False  # as where processors differ: one lead's bits count
    unlike = elche.DDP().weighted_all_reduce_gradients(holed, counts)
    Job.alike = known
    key = jax.random.key(AT)
    synced = ddp.sync_buffers(ddp.replicate({"n": np.int32(AT), "z": np.float32(-0.0)}))
    square = ddp.map(lambda x, n: x**2 + n)
    _, wrapped = elche.DDP.wrap([{"w": np.full(2, rank, "float32")} for rank in own])
    params, cadence = ddp.replicate(jnp.float32(0)), elche.ElChe(anchor=2)
    state, reports = cadence.init(world), []
    step = ddp.map(lambda p, n: p + n.astype(jnp.float32))
    for _ in range(4):
        with ddp.timed(state.counts) as clock:
            work = clock.worked(step(params, np.array(state.counts)[own]))
            params = clock.synced(ddp.weighted_all_reduce_gradients(work, state.counts))
        reports.append([repr(clock.report), clock.compiled])
        state = cadence.update(state, clock.report)
    elche.check_replicas(params)
    torn = ddp.replicate({"v": np.zeros(3), "w": np.full(2, float(OTHER))})
    own_torn = {"w": ddp.fleet.put(np.arange(len(own), dtype="float32"))}
    return {
        "ranks": own, "every": plain(every), "counts": counts,
        "mean": plain(ddp.all_reduce_gradients(mine)),
        "weighted": plain(ddp.weighted_all_reduce_gradients(holed, counts)),
        "unlike": plain(unlike), "synced": plain(synced),
        "sign": bool(np.signbit(np.asarray(synced["z"])).all()),
        "params": plain(ddp.sync_params(mine)),
        "key": np.asarray(jax.random.key_data(
            elche.unreplicate(ddp.sync_params(ddp.replicate(key))))).tolist(),
        "map": plain(square(mine["a"], np.array(own))),
        "wrapped": plain(wrapped), "reports": reports, "plan": state.counts,
        "torn": raised(lambda: elche.check_replicas(torn)),
        "own torn": raised(lambda: elche.check_replicas(own_torn)),
        "leaves": raised(lambda: elche.check_replicas(
            ddp.replicate({f"at {AT}": np.zeros(1)}))),
        "not stacked": raised(lambda: elche.check_replicas(
            np.zeros(3) if OTHER else ddp.replicate(np.zeros(3)))),
        "axis": raised(lambda: ddp.map(lambda x: jax.lax.psum(x, ddp.axis_name))(mine["a"])),
        "batch_counts": raised(lambda: ddp.weighted_all_reduce_gradients(mine, [1])),
        "stacked": raised(lambda: ddp.all_reduce_gradients(
            {"a": np.zeros((world + 1, 2), "float32")})),
        "replicas": raised(lambda: elche.DDP.wrap([{"w": np.zeros(2)}] * (world + 1))),
    }  # fmt: skip


def averaged():
    """Parameters between two exchanges of fragments."""
    rule = elche.DiLoCo(optax.sgd(0.7), fragments=2)
    counts = [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2)]
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.05, momentum=0.9), averaging=rule,
        cadence=elche.Replay(counts), device_loss=True,
    )  # fmt: skip
    state = train.init(params())
    with train.windows(data(150), BATCH, shuffle=False, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 2:
                break
    return plain(train.average(state))


def advised():
    """What is advised if the device of the other process is slow."""
    advice = asked(4, [4.0, 4.0, 12.0])
    return {"advice": advice.to_dict(), "text": str(advice)}


SCENES = evaluated, predicted, big, failing, by_hand

if __name__ == "__main__":
    of_three = [advised, averaged] if len(jax.devices()) == 3 else []
    more = [scene for scene in of_three if scene.__name__ in sys.argv[1:]]
    print(json.dumps({scene.__name__: scene() for scene in (*SCENES, *more)}))
