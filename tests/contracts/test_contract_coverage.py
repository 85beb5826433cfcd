"""C4: in an epoch every example is used exactly once, whatever the counts."""

import json
from itertools import islice

import jax
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from models import Script, host

import elche_jax as elche

SIZE = 53

count_rows = st.lists(st.tuples(*[st.integers(0, 9)] * 3).filter(any), min_size=1, max_size=12)


class Dataset:
    """A map-style dataset of example numbers."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return {"id": np.int32(i)}


class Batches:
    """An iterable of microbatches that can be iterated again."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        for at in range(0, SIZE, self.batch_size):
            yield {"id": np.arange(at, min(at + self.batch_size, SIZE), dtype=np.int32)}


class Shuffled(Batches):
    """Batches in a different order in every pass, from one generator."""

    def __init__(self, batch_size):
        super().__init__(batch_size)
        self.generator = np.random.default_rng(1)

    def __iter__(self):
        whole = list(super().__iter__())
        return iter([whole[at] for at in self.generator.permutation(SIZE // self.batch_size)])


class ShuffledByEpoch(Shuffled):
    def set_epoch(self, epoch):
        self.generator = np.random.default_rng(epoch)


@pytest.fixture(scope="module")
def counting():
    """A training step whose gradient counts how often each example was used.

    The loss of example i is w[i]; the gradient of a window is its usage over its number
    of examples, and a step of SGD with rate 1 subtracts just that.
    """
    script = Script([(9, 9, 9)])

    def loss_fn(params, batch, rng):
        return params["w"][batch["id"]]

    train = elche.build_train_step(
        loss_fn, optax.sgd(1.0), devices=jax.devices()[:3], cadence=script
    )
    return script, train


def usage(train, data, batch_size, windows=None, cursors=None, **options):
    """How often each example was used in each epoch, in all windows or in the first few."""
    state = train.init({"w": np.zeros(SIZE, "float32")})
    epochs: dict[int, np.ndarray] = {}
    before = np.zeros(SIZE, "float32")
    for window in islice(train.windows(data, batch_size, **options), windows):
        state, _ = train(state, window)
        if cursors is not None:
            cursors.append(window.cursor)
        after = host(state.params)["w"]
        used = (before - after) * window.examples
        before = after
        epochs[window.epoch] = epochs.get(window.epoch, 0) + used
    return [np.rint(epochs[epoch]).astype(int) for epoch in sorted(epochs)]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=count_rows,
    seed=st.integers(0, 2**64 - 1),
    form=st.sampled_from(["pytree", "map", "iterable", "resident"]),
)
def test_every_example_once_per_epoch(counting, rows, seed, form):
    script, train = counting
    script.script[:] = rows
    data = {"map": Dataset(), "iterable": Batches(4)}.get(
        form, {"id": np.arange(SIZE, dtype=np.int32)}
    )
    placement = "resident" if form == "resident" else "stream"
    used = usage(train, data, 4, epochs=2, seed=seed, drop_last=False, placement=placement)
    assert len(used) == 2
    for epoch in used:
        np.testing.assert_array_equal(epoch, np.ones(SIZE, int))


@pytest.mark.parametrize("stop", [2, 4, 6, 7])
def test_a_resumed_iterable_that_shuffles_by_epoch_gives_every_example_once(counting, stop, caplog):
    """Four windows per epoch."""
    script, train = counting
    script.script[:] = [(2, 1, 1)]
    cursors = []
    begun = usage(train, ShuffledByEpoch(4), None, epochs=3, windows=stop, cursors=cursors)
    saved = elche.Cursor.from_dict(json.loads(json.dumps(cursors[-1].to_dict())))
    whole = usage(train, ShuffledByEpoch(4), None, epochs=3)
    rest = usage(train, ShuffledByEpoch(4), None, epochs=3, cursor=saved)
    sums = np.zeros((3, SIZE), int)
    sums[: len(begun)] += begun
    sums[3 - len(rest) :] += rest
    np.testing.assert_array_equal(sums, whole)
    assert set(sums[:, : SIZE // 4 * 4].ravel()) == {1}
    assert caplog.messages == []


@pytest.mark.parametrize(("stop", "differs"), [(3, False), (6, True), (8, False)])
def test_a_resumed_iterable_with_a_different_order_is_said(counting, stop, differs, caplog):
    """In the first epoch it is the same, and at the end of one nothing of it is left."""
    script, train = counting
    script.script[:] = [(2, 1, 1)]
    cursors = []
    usage(train, Shuffled(4), None, epochs=3, windows=stop, cursors=cursors)
    usage(train, Shuffled(4), None, epochs=3, cursor=cursors[-1])
    assert caplog.messages == differs * [
        "elche: epoch 1 of data begins with a different microbatch than before the stop, so "
        "microbatches may be used twice or not at all. An iterable must give the same order "
        "again. Unless epochs=1, its set_epoch(epoch) is called before each epoch."
    ]


@pytest.mark.parametrize("form", ["pytree", "iterable"])
def test_dropping_drops_exactly_the_remainder(counting, form):
    script, train = counting
    script.script[:] = [(1, 3, 0), (2, 2, 2)]
    data = Batches(4) if form == "iterable" else {"id": np.arange(SIZE, dtype=np.int32)}
    for epoch in usage(train, data, 4, epochs=3, drop_last=True, shuffle=form == "pytree"):
        assert epoch.max() == 1 and epoch.sum() == SIZE - SIZE % 4


def test_the_order_does_not_depend_on_the_counts(counting):
    """Windows of one microbatch show the order; larger windows are unions of it."""
    script, train = counting
    data = {"id": np.arange(SIZE, dtype=np.int32)}

    def windows(rows, seed, epochs):
        script.script[:] = rows
        state, before, sets = train.init({"w": np.zeros(SIZE, "float32")}), 0, []
        for window in train.windows(data, 4, seed=seed, epochs=epochs):
            state, _ = train(state, window)
            after = host(state.params)["w"]
            sets.append((window.epoch, set(np.flatnonzero(before - after).tolist())))
            before = after
        return sets

    single = windows([(1, 0, 0)], seed=5, epochs=2)
    for epoch in (0, 1):
        order = [ids for e, ids in single if e == epoch]
        large = [ids for e, ids in windows([(3, 2, 1)], seed=5, epochs=2) if e == epoch]
        assert large == [set().union(*order[at : at + 6]) for at in range(0, 13, 6)]
    assert [ids for e, ids in single if e == 0] != [ids for e, ids in single if e == 1]
    assert single != windows([(1, 0, 0)], seed=6, epochs=2)
