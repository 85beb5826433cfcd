"""The three forms of data, and what is none of them."""

from collections import UserDict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from elche_jax.data.convert import as_arrays
from elche_jax.data.reader import microbatch_size
from elche_jax.data.source import (
    ArraySource,
    IterableSource,
    MapSource,
    as_source,
    stack,
)

FORMS = (
    r"^data must be a pytree of arrays, a map-style dataset \(__len__ and "
    r"__getitem__\) or an iterable of microbatches, got "
)


class Squares:
    """A map-style dataset of Python numbers and arrays."""

    def __init__(self, size):
        self.size = size
        self.asked = []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.asked.append(i)
        return {"n": i, "x": np.full(2, i * i, np.float32)}


def test_arrays_are_recognised_and_read_by_row():
    x = np.arange(12, dtype=np.int16).reshape(6, 2)
    source = as_source({"x": x, "pair": (jnp.arange(6), np.arange(6.0)), "none": (None, {}, ())})
    assert isinstance(source, ArraySource)
    assert source.size == 6
    assert source.nbytes == 12 * 2 + 6 * 4 + 6 * 8
    rows = source.rows(np.array([5, 0, 0]))
    np.testing.assert_array_equal(rows["x"], [[10, 11], [0, 1], [0, 1]])
    np.testing.assert_array_equal(rows["pair"][0], [5, 0, 0])
    assert rows["x"].dtype == np.int16
    assert isinstance(rows["pair"][0], np.ndarray)
    assert not np.shares_memory(rows["x"], x)


class Items:
    """An array of shape, dtype and items."""

    def __init__(self, array):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self._array = array

    def __len__(self):
        return len(self._array)

    def __getitem__(self, i):
        return self._array[i]


class InFile(Items):
    """An array as those of netCDF4."""

    def __array__(self, dtype=None, copy=None):
        return self._array


@pytest.mark.parametrize("kind", [Items, InFile])
def test_arrays_that_do_not_know_their_bytes(kind):
    source = as_source({"x": kind(np.arange(12, dtype=np.int16).reshape(6, 2))})
    assert source.nbytes == 12 * 2
    np.testing.assert_array_equal(source.rows(np.array([5, 0]))["x"], [[10, 11], [0, 1]])


def test_a_single_array_is_data():
    source = as_source(np.arange(3))
    assert source.size == 3
    np.testing.assert_array_equal(source.rows(np.array([2])), [2])


def test_map_style_is_recognised_and_asked_with_plain_ints():
    dataset = Squares(5)
    source = as_source(dataset)
    assert isinstance(source, MapSource)
    assert source.size == 5
    rows = source.rows(np.array([3, 1]))
    np.testing.assert_array_equal(rows["n"], [3, 1])
    np.testing.assert_array_equal(rows["x"], [[9, 9], [1, 1]])
    assert dataset.asked == [3, 1]
    assert {type(i) for i in dataset.asked} == {int}


def test_iterables_are_recognised():
    source = as_source(range(3).__iter__())
    assert isinstance(source, IterableSource)
    assert source.once
    again = as_source({1: 2}.values())
    assert isinstance(again, IterableSource)
    assert not again.once


def test_an_iterable_starts_anew_in_every_epoch():
    source = IterableSource([1, 2, 3])
    assert list(source.epoch(0)) == [1, 2, 3]
    assert source.peek() == 1
    assert source.peek() == 1
    assert list(source.epoch(0)) == [1, 2, 3]
    assert list(source.epoch(1)) == [1, 2, 3]


def test_an_iterable_is_told_its_epoch_if_it_is_read_for_several():
    """What was read to know the shapes is of epoch 0, and used in it only."""

    class ByEpoch:
        epoch, begun = None, []

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            self.begun.append(self.epoch)
            return iter([self.epoch, 7])

    data = ByEpoch()
    source = IterableSource(data)
    assert [source.peek(), *source.epoch(0), *source.epoch(1)] == [None, None, 7, None, 7]
    source.several = True
    assert [source.peek(), *source.epoch(0), *source.epoch(1)] == [0, 0, 7, 1, 7]
    assert [source.peek(), *source.epoch(2)] == [0, 2, 7]
    assert data.begun == [None, None, 0, 1, 0, 2]


def test_peeking_into_an_iterator_loses_nothing():
    source = IterableSource(iter([1, 2, 3]))
    assert source.peek() == 1
    assert list(source.epoch(0)) == [1, 2, 3]
    assert list(source.epoch(1)) == []


def test_an_exhausted_iterator_in_a_dataset_shows():
    class Wrapping:
        items = iter([np.zeros(2)])

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return next(self.items)

    with pytest.raises(RuntimeError, match="StopIteration"):
        as_source(Wrapping()).rows(np.arange(3))


def test_stack_joins_leaves_of_any_structure():
    stacked = stack([(1, {"a": [1.0, 2.0]}), (3, {"a": [4.0, 5.0]})], range(2))
    np.testing.assert_array_equal(stacked[0], [1, 3])
    np.testing.assert_array_equal(stacked[1]["a"][1], [2.0, 5.0])


def test_stack_copies_even_one_example():
    # The producer may reuse its buffer, and a device may read the block in place.
    one = np.zeros(64)
    assert not np.shares_memory(stack([one], [0]), one)


def test_examples_of_another_structure_are_an_error():
    with pytest.raises(
        ValueError,
        match=r"^data: every example must have the same structure "
        r"\(PyTreeDef\({'x': \*}\)\), but example 7 has "
        r"PyTreeDef\({'y': \*}\)\.$",
    ):
        stack([{"x": 1}, {"x": 1}, {"y": 1}], [5, 3, 7])


def test_examples_of_another_shape_or_dtype_are_an_error():
    with pytest.raises(
        ValueError,
        match=r"^data: every example must have the same shape and dtype "
        r"\(\(2,\), float64\), but \['x'\] of example 1 has \(3,\), float64\. Pad them, or convert "
        r"them\.$",
    ):
        stack([{"n": 1, "x": np.zeros(2)}, {"n": 1, "x": np.zeros(3)}], range(2))
    with pytest.raises(
        ValueError, match=r"\(\(\), int64\), but the array of example 1 has \(\), fl"
    ):
        stack([1, 1.5], range(2))


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_examples_of_dtypes_that_are_the_same_in_jax(wide):
    """They are stacked whichever comes first, and no number is cut off on the way."""
    reals, integers = [np.float32(0.1)] * 3, [np.int32(7)] * 3
    reals[wide], integers[wide] = np.float64(0.1), np.int64(2**40)
    stacked = stack([{"x": x, "n": n} for x, n in zip(reals, integers, strict=True)], range(3))
    assert [stacked["x"].dtype, stacked["n"].dtype] == [np.float64, np.int64]
    assert stacked["n"][wide] == 2**40
    np.testing.assert_array_equal(stacked["x"].astype(np.float32), np.full(3, 0.1, np.float32))
    with jax.enable_x64(True), pytest.raises(ValueError, match="same shape and dtype"):
        stack([{"x": x} for x in reals], range(3))


def test_rows_that_are_not_filled_yet_are_not_cast(monkeypatch):
    """Memory may hold anything, also what NumPy warns of in a cast."""
    signalling, empty = np.array(0x7FA00001, np.uint32).view(np.float32), np.empty

    def used_before(shape, dtype):
        rows = empty(shape, dtype)
        rows[...] = signalling if dtype == np.float32 else 0
        return rows

    monkeypatch.setattr(np, "empty", used_before)
    stacked = stack([np.float32(1), np.float64(2), np.float32(3)], range(3))
    np.testing.assert_array_equal(stacked, np.array([1.0, 2.0, 3.0]), strict=True)


def test_a_scalar_leaf_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"^data: every leaf must have a leading axis of examples, but leaf "
        r"\['y'\] is a scalar\.$",
    ):
        as_source({"x": np.zeros(3), "y": np.float32(1)})
    with pytest.raises(ValueError, match=r"leaf data is a scalar\.$"):
        as_source(np.float32(1))


def test_leaves_of_different_length_are_an_error():
    with pytest.raises(
        ValueError,
        match=r"^data: all leaves must have the same number of examples, got "
        r"{\"\['x'\]\": 3, \"\['y'\]\": 4}\.$",
    ):
        as_source({"x": np.zeros(3), "y": np.zeros(4)})


@pytest.mark.parametrize("data", [np.zeros((0, 3)), {"x": np.zeros(0)}, Squares(0)])
def test_empty_data_is_an_error(data):
    with pytest.raises(ValueError, match=r"^data must hold at least one example, got 0\.$"):
        as_source(data)


@pytest.mark.parametrize("empty", [iter(()), {}.values()])
def test_an_empty_iterator_is_an_error(empty):
    with pytest.raises(
        ValueError,
        match=r"^data must hold at least one microbatch, but the iterator is empty\.$",
    ):
        as_source(empty).peek()


@pytest.mark.parametrize(
    ("data", "got"),
    [
        ({"x": [1, 2.0]}, r"a dict with leaves of type float, int\. Convert the leaves with num"),
        ([1, 2], r"a list with leaves of type int\. Convert the leaves with numpy\.asarray\.$"),
        (
            {"x": np.zeros(2), "y": []},
            r"a dict with leaves of type list\. The list is empty: fill it, or leave it out\.$",
        ),
        (FrozenDict(x=np.zeros(2), y=[]), r"a FrozenDict with leaves of type list\. The list is"),
        ({}, r"a dict without any array\.$"),
        ({"x": []}, r"a dict without any array\.$"),
        ([{"x": None}], r"a list without any array\.$"),
        (
            {"x": np.zeros(2), "name": ["a", "b"]},
            r"a dict with leaves of type str\. Leave text out, or encode it\.$",
        ),
        ((np.zeros(2), b"label"), r"a tuple with leaves of type bytes\. Leave text out, or enc"),
    ],
)
def test_containers_of_other_things_are_an_error(data, got):
    with pytest.raises(TypeError, match=FORMS + got):
        as_source(data)


MIXED = {"x": np.zeros(4), 1: np.zeros(4)}


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("it", lambda: as_source(MIXED)),
        ("an example", lambda: stack([MIXED], [0])),
        ("microbatch 2", lambda: microbatch_size(MIXED, 2)),
        ("an example or a microbatch", lambda: as_arrays({"x": [1.0], 1: [2.0]})),
    ],
)
def test_keys_that_cannot_be_sorted(what, call):
    message = (
        rf"^data: dicts in {what} must have keys of one type, as JAX sorts them, got several "
        r"\('<' not .* 'int' and 'str'\)\. Use strings\.$"
    )
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("kind", [UserDict, type("Batch", (dict,), {})])
def test_a_mapping_that_jax_does_not_know_is_an_error(kind):
    """It has items and a length, which is that of its names."""
    with pytest.raises(TypeError, match=FORMS + f"a {kind.__name__}" + r"\. Pass dict\(data\)\.$"):
        as_source(kind({"x": np.zeros(8), "y": np.zeros(8)}))


def test_a_mapping_of_numbers_is_a_map_style_dataset():
    source = as_source(UserDict(enumerate("abc")))
    assert isinstance(source, MapSource)
    assert source.size == 3


@pytest.mark.parametrize("path", ["digits.npz", b"digits.npz"])
def test_a_path_is_an_error(path):
    with pytest.raises(TypeError, match=FORMS + type(path).__name__ + r"\. Load the file first\.$"):
        as_source(path)


@pytest.mark.parametrize("kind", [Squares, InFile])
def test_a_class_is_an_error(kind):
    """It has the methods of a dataset, or the shape of an array, but no examples."""
    message = FORMS + f"the class {kind.__name__}" + r"\. Pass an object of this class\.$"
    with pytest.raises(TypeError, match=message):
        as_source(kind)


@pytest.mark.parametrize(
    ("data", "name"),
    [(None, "NoneType"), (3, "int"), (SimpleNamespace(), "SimpleNamespace")],
)
def test_other_objects_are_an_error(data, name):
    with pytest.raises(TypeError, match=FORMS + name + r"\.$"):
        as_source(data)
