"""Every rule by hand in NumPy float64: what `reference` does, and what is pending."""

import numpy as np
from reference import BATCH, LEARNING_RATE, LEAVES, MOMENTUM, data, gradient, params


def rounded(value, kind, error):
    """What travels of a value, and what is lost of it."""
    if kind is None:
        return value, error
    if kind == "int8":
        wanted = value + error
        scale = np.abs(wanted).max() / 127
        sent = np.round(wanted / scale) * scale if scale > 0 else np.zeros_like(wanted)
        return sent, wanted - sent
    bits = np.asarray(value, np.float32).view(np.uint32)  # bfloat16, ties to even
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64), error


class Device:
    """One device's copies, by names of leaves."""

    def __init__(self, wide):
        self.own = {n: leaf.copy() for n, leaf in wide.items()}
        self.trace = {n: np.zeros_like(leaf) for n, leaf in wide.items()}
        self.error = {n: np.zeros_like(leaf) for n, leaf in wide.items()}
        # of windows that are not averaged: (progress, amount, loss, what travels of the progress)
        self.pending = []

    def sent(self, progress, kind):
        """What travels of the progress of a window."""
        both = {name: rounded(value, kind, self.error[name]) for name, value in progress.items()}
        self.error |= {name: error for name, (_, error) in both.items()}
        return {name: value for name, (value, _) in both.items()}

    def step(self, grads):
        for name, grad in grads.items():
            self.trace[name] = grad + MOMENTUM * self.trace[name]
            self.own[name] = self.own[name] - LEARNING_RATE * self.trace[name]


def begun_by(devices):
    """The counts of the windows that are pending, oldest first."""
    return list(zip(*([one[1] for one in d.pending] for d in devices), strict=True))


def train(
    counts, *, local=False, outer=None, parts=(LEAVES,), kind=None, delay=0, optimizer_state="keep",
    weigh=None, rows=None, lost=None, ahead=None, ran=None,
):  # fmt: skip
    """Every device's parameters after every window.

    `local` are local steps, else the mean gradient; `weigh(steps, losses)` weighs devices. `rows`
    are read again and again. `lost` says by window whose devices ended in it: the counts in which
    the pending windows before it run again, from the last mean. Where devices run ahead,
    `ahead(pending, counts)` says of the counts of windows, oldest first, whether the mean of the
    first one must be applied before a window of these counts. `ran` says which windows ran in what
    order, with which counts: one that ran before runs again from the mean of the one before it.
    """
    rows, world = rows or data(), len(counts[0])
    size, again, lost = len(rows["x"]) // BATCH, [], dict(lost or {})
    wide = {n: np.asarray(leaf, np.float64) for n, leaf in params().items()}
    base = {n: leaf.copy() for n, leaf in wide.items()}
    devices = [Device(wide) for _ in range(world)]
    since = np.zeros((len(parts), world))
    at, history, window, delivers, ran = 0, [], 0, ran is not None, list(ran or ())

    def apply(window):
        names = parts[window % len(parts)]
        done = [device.pending.pop(0) for device in devices]
        amount = np.array([one[1] for one in done], float)
        losses = np.array([one[2] for one in done])
        if len(parts) > 1:
            amount = since[window % len(parts)].copy()
            since[window % len(parts)] = 0
            done = [({n: base[n] - d.own[n] for n in names}, 0, 0, None) for d in devices]
        _exchange(devices, base, done, amount, names, local, outer, kind, weigh, losses)
        if local and optimizer_state == "average":
            raw = amount if weigh is None else np.where(amount > 0, weigh(amount, losses), 0)
            for name in LEAVES:
                mean = sum(a * d.trace[name] for a, d in zip(raw, devices, strict=True))
                for device in devices:
                    device.trace[name] = mean / raw.sum()

    def roll_back():
        for device in devices:
            device.pending.clear()
            if local:
                device.own = {n: leaf.copy() for n, leaf in base.items()}

    while window < len(counts) or ran:
        if window in lost:
            again = lost.pop(window)
            window -= len(again)
            at -= sum(map(sum, again))
            roll_back()
        if ran:
            begun, (to, each) = window - len(devices[0].pending), ran.pop(0)
            while begun < to < window:
                apply(begun)
                begun += 1
            if to < window:
                at -= sum(map(sum, begun_by(devices)))
                roll_back()
            window = to
        else:
            each = again.pop(0) if again else counts[window]
        while ahead and ahead(begun_by(devices), each):
            apply(window)
        losses = np.zeros(world)
        for rank, (device, count) in enumerate(zip(devices, each, strict=True)):
            begun = {n: leaf.copy() for n, leaf in device.own.items()}
            sums = {n: np.zeros_like(leaf) for n, leaf in wide.items()}
            for _ in range(count):
                piece = slice(at % size * BATCH, (at % size + 1) * BATCH)
                x, y = rows["x"][piece].astype(np.float64), rows["y"][piece].astype(np.float64)
                mine = device.own
                error = x @ mine["w"] + mine["b"] + mine["v"].sum() - y
                losses[rank] += 0.5 * (error**2).mean() / count
                grads = gradient(mine, x, y)
                sums = {n: total + grads[n] for n, total in sums.items()}
                if local:
                    device.step(grads)
                at += 1
            if local:
                progress = {n: begun[n] - device.own[n] for n in LEAVES}
            else:
                progress = {n: total / max(count, 1) for n, total in sums.items()}
            sent = device.sent(progress, kind) if delivers and count else None
            device.pending.append((progress, count, losses[rank], sent))
        since += np.array(each, float)[None]
        oldest = window + 1 - len(devices[0].pending)
        if not ahead and len(devices[0].pending) > delay and not (ran and ran[0][0] <= oldest):
            apply(oldest)
        del history[window:]
        history.append([{n: leaf.copy() for n, leaf in d.own.items()} for d in devices])
        window += 1
    return history


def _exchange(devices, base, done, amount, names, local, outer, kind, weigh, losses):
    raw = amount if weigh is None else np.where(amount > 0, weigh(amount, losses), 0)
    total = {n: np.zeros_like(base[n]) for n in names}
    for rank, device in enumerate(devices):
        if not amount[rank]:
            continue
        for name in names:
            if done[rank][3] is not None:  # rounded when it was delivered
                sent = done[rank][3][name]
            else:
                sent, device.error[name] = rounded(done[rank][0][name], kind, device.error[name])
            total[name] += sent * raw[rank] / raw.sum()
    for name in names:
        if not local:  # all devices take the same step
            for device in devices:
                device.trace[name] = total[name] + MOMENTUM * device.trace[name]
                device.own[name] = device.own[name] - LEARNING_RATE * device.trace[name]
            continue
        update = -total[name] if outer is None else outer.update(name, total[name])
        base[name] = base[name] + update
        for device in devices:
            later = sum((progress[name] for progress, *_ in device.pending), 0 * base[name])
            device.own[name] = base[name] - later
