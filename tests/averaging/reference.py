"""Averaging by hand: a linear model, SGD with momentum, all in NumPy float64."""

import numpy as np

LEARNING_RATE = 0.05
MOMENTUM = 0.9
LEAVES = ("b", "v", "w")  # as jax.tree sorts them
BATCH = 4


def data(microbatches=400, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(microbatches * BATCH, 3)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.3 + 0.1 * rng.normal(size=len(x))
    return {"x": x, "y": y.astype("float32")}


def params():
    return {"b": np.zeros((), "f"), "v": np.full(2, 0.5, "f"), "w": np.ones(3, "f")}


def loss_fn(p, batch, rng):
    """The model as the library gets it: prediction x.w + b + sum(v)."""
    error = batch["x"] @ p["w"] + p["b"] + p["v"].sum() - batch["y"]
    return 0.5 * (error**2).mean()


def gradient(p, x, y):
    error = x @ p["w"] + p["b"] + p["v"].sum() - y
    mean = error.mean()
    return {"w": (error[:, None] * x).mean(axis=0), "b": mean, "v": np.full(2, mean)}


class Outer:
    """SGD, plain or with Nesterov's momentum, as Sutskever et al. write it."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.trace = {}

    def update(self, name, grad):
        trace = grad + self.momentum * self.trace.get(name, 0.0)
        self.trace[name] = trace
        return -self.rate * (grad + self.momentum * trace if self.nesterov else trace)


def run(
    counts,
    *,
    outer=None,
    exponent=1.0,
    optimizer_state="average",
    parts=(LEAVES,),
    int8=False,
    delay=0,
    lost=(),
    before=False,
    momentum=MOMENTUM,
):
    """Trains windows of these counts; gives each device's parameters after every window.

    `parts` are the fragments, by names of leaves; `lost` holds pairs (window, device) of
    devices that are left out of a window's average; `before` gives what is before a late
    correction instead of after it.
    """
    world, rows = len(counts[0]), data()
    wide = {name: np.asarray(leaf, np.float64) for name, leaf in params().items()}
    own = [{n: leaf.copy() for n, leaf in wide.items()} for _ in range(world)]
    base = {n: leaf.copy() for n, leaf in wide.items()}
    trace = [{n: np.zeros_like(leaf) for n, leaf in wide.items()} for _ in range(world)]
    rest = [{n: np.zeros_like(leaf) for n, leaf in wide.items()} for _ in range(world)]
    steps = np.zeros((len(parts), world))
    pending = None
    at, history = 0, []
    for window, each in enumerate(counts):
        begun = [{n: leaf.copy() for n, leaf in p.items()} for p in own]
        for device, count in enumerate(each):
            for _ in range(count):
                piece = slice(at * BATCH, (at + 1) * BATCH)
                grads = gradient(own[device], rows["x"][piece], rows["y"][piece])
                for name, grad in grads.items():
                    trace[device][name] = grad + momentum * trace[device][name]
                    own[device][name] = own[device][name] - LEARNING_RATE * trace[device][name]
                at += 1
        good = [d for d in range(world) if (window, d) not in lost]
        steps += np.array(each)[None]
        if delay:
            if before:
                history.append([{n: leaf.copy() for n, leaf in p.items()} for p in own])
            pending = _delayed(own, begun, base, pending, each, exponent, outer)
            if not before:
                history.append([{n: leaf.copy() for n, leaf in p.items()} for p in own])
            continue
        for device in range(world):
            if device not in good:
                own[device] = {n: leaf.copy() for n, leaf in base.items()}
                trace[device] = {n: np.zeros_like(leaf) for n, leaf in wide.items()}
                steps[:, device] = 0
        number = window % len(parts)
        share = _shares(steps[number], good, exponent)
        for name in parts[number]:
            sent = {}
            for device in range(world):
                if share[device] == 0:
                    continue
                sent[device] = base[name] - own[device][name]
                if int8:
                    wanted = sent[device] + rest[device][name]
                    scale = np.abs(wanted).max() / 127
                    sent[device] = np.round(wanted / scale) * scale
                    rest[device][name] = wanted - sent[device]
            delta = sum(share[d] * difference for d, difference in sent.items())
            update = -delta if outer is None else outer.update(name, delta)
            base[name] = base[name] + update
            for device in range(world):
                own[device][name] = base[name].copy()
        steps[number] = 0
        if optimizer_state == "reset":
            trace = [{n: np.zeros_like(leaf) for n, leaf in wide.items()} for _ in own]
        if optimizer_state == "average":
            weights = _shares(np.array(each, float), good, exponent)
            mean = {
                n: sum(weights[d] * trace[d][n] for d in range(world) if weights[d]) for n in LEAVES
            }
            trace = [{n: leaf.copy() for n, leaf in mean.items()} for _ in own]
        history.append([{n: leaf.copy() for n, leaf in p.items()} for p in own])
    return history


def _shares(steps, good, exponent):
    raw = np.array([s**exponent if s > 0 and d in good else 0.0 for d, s in enumerate(steps)])
    return raw / raw.sum()


def _delayed(own, before, base, pending, counts, exponent, outer):
    """The exchange of the window before, of the parameters this window began with."""
    if pending is not None:
        share = _shares(pending, range(len(own)), exponent)
        for name in LEAVES:
            delta = sum(s * (base[name] - b[name]) for s, b in zip(share, before, strict=True))
            update = -delta if outer is None else outer.update(name, delta)
            base[name] = base[name] + update
            for mine, start in zip(own, before, strict=True):
                mine[name] = mine[name] + (base[name] - start[name])
    return np.array(counts, float)
