"""Data in every form, and uneven shares of them, for evaluation and inference."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

WORLDS = range(1, 5)
SIZES = (1, 2, 5, 11, 24, 48)
FORMS = ("arrays", "arrays on a device", "map", "iterable", "iterator")


def examples(size):
    """Examples that know their number; `x` is above 0, so that nothing cancels."""
    x = np.random.default_rng(size).uniform(0.5, 2.0, size)
    return {"index": np.arange(size, dtype="int32"), "x": x.astype("float32")}


class MapStyle:
    """A data set of one example at a time."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, i):
        return jax.tree.map(lambda leaf: leaf[i], self.data)


class Batches:
    """Microbatches, the last one smaller; begins anew whenever it is iterated."""

    def __init__(self, data, batch_size):
        self.data, self.batch_size = data, batch_size

    def __iter__(self):
        for at in range(0, len(self.data["x"]), self.batch_size):
            yield jax.tree.map(lambda leaf, at=at: leaf[at : at + self.batch_size], self.data)


def in_form(form, data, batch_size):
    """The data in a form, and the batch size to pass with it."""
    if form in ("iterable", "iterator"):
        batches = Batches(data, batch_size)
        return (iter(batches) if form == "iterator" else batches), None
    return {
        "arrays": lambda: data,
        "arrays on a device": lambda: jax.tree.map(jnp.asarray, data),
        "map": lambda: MapStyle(data),
    }[form](), batch_size


@st.composite
def cases(draw):
    """Devices, counts, and how the data come: what must make no difference."""
    world = draw(st.sampled_from(WORLDS))
    batch_size = draw(st.sampled_from((1, 4)))
    counts = st.tuples(*[st.integers(0, 5)] * world).filter(any)
    form = draw(st.sampled_from(FORMS))
    placements = ("stream", "resident", "auto") if "arrays" in form else ("stream", "auto")
    return {
        "world": world,
        "size": draw(st.sampled_from(SIZES)),
        "batch_size": batch_size,
        "script": draw(st.lists(counts, min_size=1, max_size=3)),
        "form": form,
        "placement": draw(st.sampled_from(placements)),
        # a call takes one microbatch, three, or all
        "window_bytes": draw(st.sampled_from((8 * batch_size, 24 * batch_size, 2**28))),
        "mask_key": draw(st.sampled_from((None, "mask"))),
    }
