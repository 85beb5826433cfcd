"""Checksums of replicas: every changed bit shows, and is named."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import elche_jax as elche
from elche_jax.engine.checksum import _mix, checksums, differing
from elche_jax.engine.lane import lanes_of

DTYPES = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int8",
    "int32",
    "uint32",
    "bool",
    "complex64",
)


def stacked(rows, devices):
    shards = [jax.device_put(row[None], d) for row, d in zip(rows, devices, strict=True)]
    return lanes_of(devices).stack(shards)


def random(dtype, shape=(3, 5)):
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(-100, 100, shape).astype(dtype)


def test_64_bits_are_compared_where_there_are_none_by_default():
    with jax.enable_x64(True):
        copies = elche.replicate({"w": np.float64([1, 2])}, jax.devices()[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elche.check_replicas(copies)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(data=st.data())
def test_one_flipped_bit_is_found_and_named(dtype, data):
    devices = jax.devices()[:3]
    with jax.enable_x64(dtype == "float64"):
        rows = [random(dtype) for _ in devices]
        rank = data.draw(st.integers(1, 2))
        raw = rows[rank].reshape(-1).view(np.uint8)
        at = data.draw(st.integers(0, raw.size - 1))
        raw[at] ^= 1 << (0 if dtype == "bool" else data.draw(st.integers(0, 7)))
        tree = {"a": elche.replicate(np.ones(4), devices), "b": [stacked(rows, devices)]}
        assert differing(checksums(tree, lanes_of(devices))) == [(1, rank)]
        name = rf"leaf \['b'\]\[0\] on {devices[rank]} differs from {devices[0]} in 1 of 15 "
        with pytest.raises(elche.ReplicaMismatch, match=name):
            elche.check_replicas(tree)


def test_equal_copies_have_equal_sums():
    devices = jax.devices()[:3]
    tree = [elche.replicate(random(dtype), devices) for dtype in DTYPES if dtype != "float64"]
    tree += [
        elche.replicate(jax.random.key(3), devices),
        elche.replicate(np.zeros((0, 2)), devices),
    ]
    sums = checksums(tree, lanes_of(devices))
    assert sums.shape == (3, len(tree), 2) and sums.dtype == jnp.uint32
    assert differing(sums) == []
    elche.check_replicas(tree)


@settings(max_examples=50)
@given(data=st.data())
def test_swapped_elements_show(data):
    """A sum alone would not see that two elements have changed places."""
    row = random("float32", (40,))
    i, j = data.draw(st.lists(st.integers(0, 39), min_size=2, max_size=2, unique=True))
    other = row.copy()
    other[[i, j]] = other[[j, i]]
    found = differing(
        checksums([stacked([row, other], jax.devices()[:2])], lanes_of(jax.devices()[:2]))
    )
    assert found == ([(0, 1)] if row[i] != row[j] else [])


@given(word=st.integers(0, 2**32 - 1))
@example(word=0)
@example(word=2**32 - 1)
def test_words_can_be_had_back(word):
    """So no two words are mixed alike: each step is undone by itself or an odd inverse."""
    mixed = int(_mix(jnp.uint32(word)))
    mixed ^= mixed >> 16
    mixed = mixed * pow(0x846CA68B, -1, 2**32) % 2**32
    mixed ^= mixed >> 15 ^ mixed >> 30
    mixed = mixed * pow(0x7FEB352D, -1, 2**32) % 2**32
    assert mixed ^ mixed >> 16 == word


def test_changes_that_cancel_in_plain_sums_show():
    """Three words changed so that both sums of the words themselves would stay."""
    place = jnp.arange(3, dtype=jnp.uint32)
    first = np.asarray(2 * place + 1, np.int64)
    second = np.asarray(_mix(place ^ jnp.uint32(0x9E3779B9)) | 1, np.int64)
    change = [int(first[(i + 1) % 3]) * int(second[(i + 2) % 3])
              - int(first[(i + 2) % 3]) * int(second[(i + 1) % 3]) for i in range(3)]  # fmt: skip
    change = np.array([each % 2**32 for each in change], np.uint64)
    for factors in (first, second):
        assert sum(int(f) * int(c) for f, c in zip(factors, change, strict=True)) % 2**32 == 0
    row = np.array([7, 8, 9], np.uint32)
    other = (row + change).astype(np.uint32)
    assert (other != row).any()
    devices = jax.devices()[:2]
    assert differing(checksums([stacked([row, other], devices)], lanes_of(devices))) == [(0, 1)]


def test_the_first_leaf_and_device_that_differ_are_named():
    devices = jax.devices()[:3]
    one, two = np.zeros(2, np.float32), np.ones(2, np.float32)
    tree = {"a": stacked([one, one, two], devices), "b": stacked([one, two, one], devices)}
    assert differing(checksums(tree, lanes_of(devices))) == [(0, 2), (1, 1)]
    with pytest.raises(elche.ReplicaMismatch, match=rf"\['a'\] on {devices[2]} .* in 2 of 2"):
        elche.check_replicas(tree)


def test_trees_on_several_sets_of_devices():
    first, second = jax.devices()[:2], jax.devices()[2:4]
    one, two = np.zeros(2, np.float32), np.ones(2, np.float32)
    elche.check_replicas([elche.replicate(one, first), elche.replicate(one, second)])
    tree = [elche.replicate(one, first), stacked([one, two], second)]
    with pytest.raises(elche.ReplicaMismatch, match=rf"leaf \[1\] on {second[1]}"):
        elche.check_replicas(tree)
