"""Reading an epoch: every example once, whatever the counts, from any kind of source."""

import weakref

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.data.order import Cursor, Reading, epoch_order
from elche_jax.data.reader import (
    IndexedReader,
    IterableReader,
    Partial,
    microbatch_size,
    open_epoch,
)
from elche_jax.data.source import ArraySource, IterableSource, MapSource

PROFILE = settings(deadline=None, max_examples=60)
WANTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


class Numbers:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"n": np.int32(i)}


def microbatches(size, batch):
    """The numbers `0 .. size - 1` in order, cut; the last one may be shorter."""
    return [np.arange(at, min(at + batch, size)) for at in range(0, size, batch)]


def source_of(kind, size, batch):
    if kind == "arrays":
        return ArraySource({"n": np.arange(size, dtype=np.int32)})
    if kind == "map":
        return MapSource(Numbers(size))
    return IterableSource([{"n": part} for part in microbatches(size, batch)])


def read_epoch(reader, batch, wants, start=0):
    """Valid example numbers, in order, read in windows of the sizes `wants`, repeated."""
    numbers, at = [], start
    while there := reader.available(at, wants[at % len(wants)]):
        assert at < 1000, "the epoch never ends"
        (block,) = reader.blocks([at], there)["n"]
        assert block.shape == (there, batch)
        for place, row in enumerate(block):
            partial = reader.partial
            short = partial is not None and partial.microbatch == at + place
            valid = partial.valid if short else batch
            numbers += row[:valid].tolist()
            assert set(row[valid:].tolist()) <= {row[0]}  # the filler is real data
        at += there
    return numbers


@pytest.mark.parametrize("kind", ["arrays", "map", "iterable"])
@PROFILE
@given(size=st.integers(1, 60), batch=st.integers(1, 9), drop=st.booleans(), wants=WANTS)
def test_every_example_exactly_once(kind, size, batch, drop, wants):
    if drop and size < batch:
        size += batch
    reading = Reading(batch, shuffle=True, seed=3, drop_last=drop)
    reader = open_epoch(source_of(kind, size, batch), reading, Cursor(epoch=2))
    order = list(range(size)) if kind == "iterable" else epoch_order(size, 3, 2).tolist()
    used = size // batch * batch if drop else size
    assert read_epoch(reader, batch, wants) == order[:used]
    short = size % batch
    assert reader.partial == (Partial(size // batch, short) if short and not drop else None)


@pytest.mark.parametrize("kind", ["arrays", "map", "iterable"])
@PROFILE
@given(data=st.data(), size=st.integers(1, 60), batch=st.integers(1, 9), wants=WANTS)
def test_resuming_reads_what_is_left(kind, data, size, batch, wants):
    start = data.draw(st.integers(0, -(-size // batch)))
    reading = Reading(batch, drop_last=False)
    reader = open_epoch(source_of(kind, size, batch), reading, Cursor(2, start))
    left = list(range(start * batch, size))
    assert read_epoch(reader, batch, wants, start) == left


def test_without_shuffling_the_order_is_that_of_the_source():
    reader = open_epoch(source_of("arrays", 7, 2), Reading(2), Cursor(epoch=1))
    np.testing.assert_array_equal(reader.index(0, 3), [[0, 1], [2, 3], [4, 5]])


def test_index_of_no_microbatch_has_the_width_of_one():
    reader = IndexedReader(source_of("arrays", 6, 2), Reading(2), epoch=0)
    assert reader.index(3, 0).shape == (0, 2)
    assert reader.available(3, 5) == 0


@PROFILE
@given(size=st.integers(1, 40), batch=st.integers(1, 8))
def test_index_fills_the_last_microbatch_with_its_first_example(size, batch):
    order = epoch_order(size, 0, 0)
    reading = Reading(batch, shuffle=True, seed=0, drop_last=False)
    reader = IndexedReader(source_of("arrays", size, batch), reading, epoch=0)
    parts = [order[at : at + batch].tolist() for at in range(0, size, batch)]
    parts[-1] += [parts[-1][0]] * (batch - len(parts[-1]))
    np.testing.assert_array_equal(reader.index(0, reader.microbatches), parts)


@pytest.mark.parametrize("kind", ["arrays", "map", "iterable"])
def test_a_cursor_beyond_the_epoch_is_an_error(kind):
    reading = Reading(2, shuffle=True, seed=0, drop_last=False)
    with pytest.raises(
        ValueError,
        match=r"^data: cursor.microbatch must lie within the epoch \(4 microbatches\), "
        r"got 5\. Resume with the data and batch_size it came from\.$",
    ):
        open_epoch(source_of(kind, 7, 2), reading, Cursor(0, 5))


@PROFILE
@given(
    length=st.integers(0, 30),
    batch=st.integers(1, 5),
    wants=st.lists(st.integers(1, 9), min_size=30, max_size=30),
)
def test_an_iterable_reads_like_slices_of_its_list(length, batch, wants):
    items = [{"n": np.arange(batch) + batch * i, "m": np.full(batch, i)} for i in range(length)]
    reader = IterableReader(IterableSource(iter(items)), Reading(batch, drop_last=False))
    at = 0
    for want in wants:
        there = reader.available(at, want)
        expected = items[at : at + want]
        assert there == len(expected)
        if there:
            half = there // 2  # shares of two devices, or parts of them
            for starts, count in (
                ([at], there),
                ([at + half], there - half),
                ([at, at + half], half),
            ):
                if not count:
                    continue
                blocks = reader.blocks(starts, count)
                for name in ("n", "m"):
                    want_rows = [[item[name] for item in items[s : s + count]] for s in starts]
                    np.testing.assert_array_equal(blocks[name], np.array(want_rows))
        at += there


def test_microbatches_of_an_iterable_are_read_as_they_come():
    reader = IterableReader(IterableSource([np.zeros(3)] * 2), Reading(3, drop_last=False))
    assert reader.available(0, 9) == 2
    assert reader.blocks([0], 2).shape == (1, 2, 3)


def test_a_short_microbatch_is_filled_or_left_out():
    items = [np.arange(3.0), np.arange(3.0, 5.0)]
    reader = IterableReader(IterableSource(items), Reading(3, drop_last=False))
    assert reader.available(0, 9) == 2
    assert reader.partial == Partial(microbatch=1, valid=2)
    np.testing.assert_array_equal(reader.blocks([0], 2), [[[0, 1, 2], [3, 4, 3]]])

    reader = IterableReader(IterableSource(items), Reading(3))
    assert reader.available(0, 9) == 1
    assert reader.partial is None


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_short_microbatch_in_the_middle_is_an_error(drop_last):
    items = [np.zeros(3), np.zeros(2), np.zeros(3)]
    reader = IterableReader(IterableSource(items), Reading(3, drop_last=drop_last))
    with pytest.raises(
        ValueError,
        match=r"^data: only the last microbatch of an iterator may be smaller, but "
        r"microbatch 1 had 2 examples of 3 and was not the last\.$",
    ):
        reader.available(0, 9)


def test_a_larger_microbatch_is_an_error():
    reader = IterableReader(IterableSource([np.zeros(3), np.zeros(4)]), Reading(3))
    with pytest.raises(
        ValueError,
        match=r"^data: every microbatch must have 3 examples, but microbatch 1 has 4\.$",
    ):
        reader.available(0, 2)


def test_none_is_a_bad_microbatch_and_not_the_end():
    reader = IterableReader(IterableSource([np.zeros(3), None]), Reading(3))
    with pytest.raises(ValueError, match=r"microbatch 1 has shapes \{\}\.$"):
        reader.available(0, 2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"y": np.zeros(3)}, r"the same structure \(.*'x'.*\), but microbatch 1 has .*'y'.*"),
        ({"x": np.zeros((3, 2))}, r"the same shape and dtype .*, but \['x'\] of microbatch 1 has "),
    ],
)
def test_a_microbatch_unlike_the_one_before_is_an_error(other, message):
    reader = IterableReader(IterableSource([{"x": np.zeros(3)}, other]), Reading(3))
    assert reader.available(0, 2) == 2
    with pytest.raises(ValueError, match=r"^data: every microbatch must have " + message):
        reader.blocks([0], 2)


def test_skipping_holds_one_microbatch_at_a_time():
    alive = weakref.WeakValueDictionary()
    held = []

    def items():
        for i in range(20):
            held.append(len(alive))
            item = np.full(4, i)
            alive[i] = item
            yield item
            del item

    reader = open_epoch(IterableSource(items()), Reading(4), Cursor(0, 18))
    assert max(held) <= 1
    assert reader.available(18, 9) == 2
    np.testing.assert_array_equal(reader.blocks([18], 2)[0, :, 0], [18, 19])


@pytest.mark.parametrize(
    ("item", "shapes"),
    [
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"""{"\['x'\]": \(3,\), "\['y'\]": \(2,\)}"""),
        (np.zeros((0, 2)), r"{'microbatch': \(0, 2\)}"),
        ([1, 2], r"{'\[0\]': \(\), '\[1\]': \(\)}"),
        ({}, r"{}"),
    ],
)
def test_a_microbatch_without_a_common_axis_is_an_error(item, shapes):
    with pytest.raises(
        ValueError,
        match=r"^data: the leaves of a microbatch must have one common, non-empty "
        rf"leading axis, but microbatch 4 has shapes {shapes}\.$",
    ):
        microbatch_size(item, 4)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({"name": ["a"] * 3, "x": np.zeros(3)}, r"\['name'\]\[0\]"),
        ((np.zeros(3), ("a", "b", "c")), r"\[1\]\[0\]"),
        ({"name": b"train", "x": np.zeros(3)}, r"\['name'\]"),
        ("train", "microbatch"),
    ],
)
def test_text_in_a_microbatch_is_named(item, name):
    with pytest.raises(
        TypeError,
        match=rf"^data: every leaf of a microbatch must be an array of numbers, but leaf {name} "
        r"of microbatch 4 is text\. Leave it out, or encode it\.$",
    ):
        microbatch_size(item, 4)


def test_microbatch_size_is_the_common_axis():
    assert microbatch_size({"x": np.zeros((5, 2)), "y": jax.numpy.zeros(5)}, 0) == 5


def test_an_error_in_the_source_keeps_its_traceback():
    def failing_source():
        yield np.zeros(2)
        raise OSError("disk gone")

    reader = IterableReader(IterableSource(failing_source()), Reading(2))
    assert reader.available(0, 1) == 1
    with pytest.raises(OSError, match="disk gone") as caught:
        reader.available(1, 1)
    assert caught.traceback[-1].name == "failing_source"
