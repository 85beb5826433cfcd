"""C4: in an epoch every example is used exactly once, whatever the counts."""

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


def usage(train, data, batch_size, **options):
    """How often each example was used in each epoch, and the order of use."""
    state = train.init({"w": np.zeros(SIZE, "float32")})
    epochs: dict[int, np.ndarray] = {}
    before = np.zeros(SIZE, "float32")
    for window in train.windows(data, batch_size, **options):
        state, _ = train(state, window)
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
