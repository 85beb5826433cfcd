"""Examples and microbatches of other libraries, and of plain Python."""

from collections import UserDict
from types import MappingProxyType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.sparse import csr_array

import elche_jax as elche
from elche_jax.data.convert import as_arrays
from elche_jax.data.source import as_source


class Dtype:
    """The type of a tensor, which NumPy does not know."""

    def __repr__(self):
        return "other.float32"


class Tensor:
    """As those of torch: a `dtype` of its own, and NumPy may ask for its numbers."""

    dtype = Dtype()

    def __init__(self, array, error=None):
        self.array, self.error = np.asarray(array), error
        self.shape, self.nbytes = self.array.shape, self.array.nbytes

    def __array__(self, dtype=None, copy=None):
        if self.error is not None:
            raise self.error
        return self.array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, i):
        return Tensor(self.array[i])


class Narrow(Tensor):
    """One of a type that NumPy has not, which only DLPack hands over."""

    def __init__(self, array):
        super().__init__(np.zeros(np.shape(array)), TypeError("Got unsupported ScalarType"))
        self.on_device = jnp.asarray(array, "bfloat16")

    def __dlpack__(self, **options):
        return self.on_device.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.on_device.__dlpack_device__()


class Table:
    """As a data frame: a type for each column, so none of the whole."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, column):
        raise KeyError(column)


class Plain:
    """A tensor without `shape` and length: what `as_arrays` makes of it, its `dtype` says."""

    dtype = Dtype()


X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("item", "want"),
    [
        (Tensor(X), X),
        (Table(X), X),
        ([Tensor(X), (Tensor(X[0]), 3)], [X, (X[0], 3)]),  # as a loader collates pairs
        ({"x": [1.0, 2.5], "y": True}, {"x": np.array([1.0, 2.5]), "y": True}),
        (([[1, 2], [3, 4]],), (np.array([[1, 2], [3, 4]]),)),
        ({"x": [np.float32(1), np.float32(2)]}, {"x": np.array([1, 2], "float32")}),
        ((1.0, 2), (1.0, 2)),
        ({"x": 1, "none": None, "of": ({}, ())}, {"x": 1, "none": None, "of": ({}, ())}),
        ({"x": [X, [1, 2]]}, {"x": [X, np.array([1, 2])]}),
    ],
)
def test_leaves_become_arrays(item, want):
    assert_same(as_arrays(item), want)


def test_what_is_an_array_stays_as_it_is():
    item = {"x": X, "y": jnp.ones(3), "n": 3, "z": np.float32(1)}
    assert all(a is item[name] for name, a in as_arrays(item).items())


def test_types_that_numpy_has_not_come_by_dlpack():
    (got,) = jax.tree.leaves(as_arrays({"x": Narrow([1.5, 2.5])}))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, "float32"), [1.5, 2.5])


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (
            {"x": Tensor(X, RuntimeError("Can't call numpy() on it"))},
            TypeError,
            r"^data: every leaf must convert to a NumPy array, but leaf \['x'\] is a \S*Tensor "
            r"that does not \(RuntimeError: Can't call numpy\(\) on it\)\. Convert it in the data",
        ),
        (
            {"x": Table(np.array([[1, "a"]], object))},
            TypeError,
            r"^data: every leaf must convert to a NumPy array, but leaf \['x'\] is a \S*Table that "
            r"does not \(TypeError: NumPy makes objects of it\)\. Convert it in the dataset\.$",
        ),
        (Plain(), TypeError, r"leaf data is a \S*Plain that does not \(TypeError: NumPy makes obj"),
        (
            {"x": [[1, 2], [3]]},
            ValueError,
            r"^data: lists of numbers must have one length on every level, but leaf \['x'\] has ",
        ),
        (
            {"x": X, "y": []},
            ValueError,
            r"^data: a list of numbers must not be empty, but leaf \['y'\] is\. Pad it, or leav",
        ),
        (([[], []],), ValueError, r"a list of numbers must not be empty, but leaf \[0\] is\."),
        (
            [1.0, 2.0],
            ValueError,
            r"^data: an example or a microbatch must be an array, or a dict or tuple of them, got "
            r"a list of numbers\. Return numpy\.asarray\(it\) for one array, a tuple for",
        ),
        (
            UserDict(x=X),
            TypeError,
            r"^data: an example or a microbatch must be an array, or a dict or tuple of them, but "
            r"leaf data is a UserDict\. Pass dict\(it\)\.$",
        ),
        ({"x": MappingProxyType({"a": X})}, TypeError, r"leaf \['x'\] is a mappingproxy\. Pass di"),
        (
            {"x": X, "k": jax.random.key(0)},
            TypeError,
            r"^data: every leaf must be an array of numbers, but leaf \['k'\] is of dtype key<fry>"
            r"\. Encode it first\.$",
        ),
        (
            {"x": np.ma.masked_array(X, mask=X > 0)},
            TypeError,
            r"^data: every leaf must be a plain array, but leaf \['x'\] is a masked one, whose m",
        ),
    ],
)
def test_what_cannot_be_an_array(item, error, message):
    with pytest.raises(error, match=message):
        as_arrays(item)


@pytest.mark.parametrize("leaf", [csr_array(X), jax.ShapeDtypeStruct((24, 3), "float32")])
@pytest.mark.parametrize("read", [as_source, as_arrays])
def test_what_numpy_makes_an_object_of(leaf, read):
    """It has a shape and a dtype of numbers, but no such numbers in memory."""
    message = (
        r"^data: every leaf must convert to a NumPy array, but leaf \['x'\] is a \S*"
        rf"{type(leaf).__name__} that does not \(TypeError: NumPy makes objects of it\)\. Convert"
    )
    with pytest.raises(TypeError, match=message):
        read({"x": leaf})


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"] - 1) ** 2).mean()


def trained(train, data, batch_size=4):
    state = train.init({"w": np.zeros(3, "float32")})
    for window in train.windows(data, batch_size, shuffle=False):
        state, _ = train(state, window)
    return elche.unreplicate(state.params)["w"]


class Rows:
    """A map-style dataset of rows of a form of their own."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i]}


class Loader:
    """Microbatches of a form of their own."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return (self.make(X[at : at + 4]) for at in range(0, len(X), 4))


def test_every_form_trains_alike():
    """Tensors and lists, as data, as examples and as microbatches."""
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2])
    want = trained(train, {"x": X})
    assert np.abs(want).min() > 0.01
    for make in (Tensor, Table, np.ndarray.tolist):
        forms = [(Rows(list(map(make, X))), 4)]
        forms += [(Loader(lambda rows, make=make: {"x": make(rows)}), None)]
        for data, batch_size in forms:
            np.testing.assert_array_equal(trained(train, data, batch_size), want)
    for make in (Tensor, Table):
        np.testing.assert_array_equal(trained(train, {"x": make(X)}), want)


@pytest.mark.parametrize("data", [Table(X), {"x": Table(X)}])
def test_a_table_is_data(data):
    source = as_source(data)
    assert source.size == len(X) and source.nbytes == X.nbytes
    (rows,) = jax.tree.leaves(source.rows(np.array([5, 0])))
    np.testing.assert_array_equal(rows, X[[5, 0]])


def test_a_table_is_read_once():
    """Its `__array__` may take long."""
    read = []

    class Slow(Table):
        def __array__(self, dtype=None, copy=None):
            read.append(self)
            return self.array

    as_source({"x": Slow(X)}).rows(np.arange(3))
    assert len(read) == 1


def test_what_has_only_a_shape_is_no_data():
    with pytest.raises(TypeError, match=r"got a dict with leaves of type SimpleNamespace\. Conv"):
        as_source({"x": SimpleNamespace(shape=(3,), ndim=1)})


class Columns(Rows):
    """As Hugging Face's `Dataset`: map-style, with the `shape` of its table."""

    def __init__(self, rows):
        super().__init__(rows)
        self.shape, self.column_names = (len(rows), 1), ["x"]
        self.read = []

    def __getitem__(self, i):
        if not 0 <= i < len(self.rows):
            raise IndexError(i)
        self.read.append(i)
        return {"x": self.rows[i].tolist()}


def test_a_dataset_with_a_shape_is_read_example_by_example():
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2])
    dataset = Columns(X)
    np.testing.assert_array_equal(trained(train, dataset), trained(train, {"x": X}))
    # one example tells their shapes, before the loop
    assert dataset.read[0] == 0 and sorted(dataset.read[1:]) == [*range(len(X))]


def test_datasets_are_not_read_to_find_that_they_are_no_arrays():
    dataset = Columns(X)
    with pytest.raises(TypeError, match=r"got a dict with leaves of type Columns\. Convert the le"):
        as_source({"train": dataset})
    assert not dataset.read


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.ma.masked_array(X)},
        Rows([np.ma.masked_array(row) for row in X]),
        Loader(lambda rows: {"x": np.ma.masked_array(rows)}),
    ],
)
def test_masks_are_not_lost(data):
    with pytest.raises(TypeError, match=r"^data: every leaf must be a plain array, but leaf \['x'"):
        source = as_source(data)
        source.peek() if isinstance(data, Loader) else source.rows(np.arange(2))


def test_the_loader_of_torch():
    torch = pytest.importorskip("torch", reason="needs torch, which the project does not install")
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2])
    want = trained(train, {"x": X})
    rows = Rows(torch.from_numpy(X))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    for data, batch_size in ((loader, None), (rows, 4), ({"x": torch.from_numpy(X)}, 4)):
        np.testing.assert_array_equal(trained(train, data, batch_size), want)
    narrow = as_arrays({"x": torch.ones(2, dtype=torch.bfloat16)})["x"]
    assert narrow.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match=r"leaf data is a torch\.Tensor that does not \(RuntimeErr"):
        as_arrays(torch.ones(2, requires_grad=True))
