"""Copies on every device: made, taken back, compared bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elche_jax.engine.lane import lanes_of
from elche_jax.engine.replicas import (
    ReplicaMismatch,
    check_replicas,
    replicate,
    unreplicate,
)

TREE = {
    "w": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
    "half": jnp.arange(4, dtype=jnp.bfloat16),
    "step": np.int32(7),
    "flags": (np.array([True, False]), np.zeros((0, 2), np.float32)),
    "nothing": None,
}


def stacked(rows, devices):
    """A stacked array whose row `d` is `rows[d]`: replicas that need not be alike."""
    shards = [
        jax.device_put(np.asarray(row)[None], device)
        for row, device in zip(rows, devices, strict=True)
    ]
    return lanes_of(devices).stack(shards)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_replicate_and_back(world_size, backwards):
    devices = jax.devices()[:world_size][:: -1 if backwards else 1]
    copies = replicate(TREE, devices)
    assert jax.tree.structure(copies) == jax.tree.structure(TREE)
    for leaf, original in zip(jax.tree.leaves(copies), jax.tree.leaves(TREE), strict=True):
        assert leaf.shape == (world_size, *np.shape(original))
        assert leaf.dtype == original.dtype
        assert {shard.device for shard in leaf.addressable_shards} == set(devices)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data)[0], np.asarray(original))
    check_replicas(copies)

    one = unreplicate(copies)
    for leaf, original in zip(jax.tree.leaves(one), jax.tree.leaves(TREE), strict=True):
        assert leaf.shape == np.shape(original)
        assert leaf.devices() == {devices[0]}
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(original))


class Tensor:
    """One of another library, whose `dtype` NumPy does not know."""

    dtype, shape = "other.float32", (2,)

    def __array__(self, dtype=None, copy=None):
        return np.float32([1, 2])


def test_tensors_of_other_libraries():
    copies = replicate({"w": Tensor()}, jax.devices()[:2])
    np.testing.assert_array_equal(copies["w"], [[1, 2], [1, 2]])


def test_a_copy_does_not_share_memory_with_the_argument():
    raw = np.zeros(64 * 17, np.float32)
    w = raw[-raw.ctypes.data % 64 // 4 :][: 64 * 16]  # aligned: could be read in place
    copies = replicate({"w": w}, jax.devices()[:2])
    w[:] = 1
    assert not np.asarray(copies["w"]).any()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_difference_names_leaf_device_and_extent(rank):
    devices = jax.devices()[:3]
    rows = [np.arange(6, dtype=np.float32).reshape(2, 3) for _ in devices]
    rows[rank][1, :2] = 9
    tree = {"a": replicate(np.ones(2), devices), "b": stacked(rows, devices)}
    with pytest.raises(
        ReplicaMismatch,
        match=r"^check_replicas: all replicas must be bitwise equal, but leaf \['b'\] on "
        rf"{devices[rank]} differs from {devices[0]} in 2 of 6 elements\.$",
    ):
        check_replicas(tree)


def test_a_difference_in_a_bare_array_is_named_tree():
    devices = jax.devices()[:2]
    with pytest.raises(ReplicaMismatch, match=r"but leaf tree on .* in 1 of 1 elements"):
        check_replicas(stacked([np.int32(1), np.int32(2)], devices))


def test_bits_are_compared_and_not_values():
    devices = jax.devices()[:2]
    nan = np.float32("nan")
    check_replicas(stacked([nan, nan], devices))
    with pytest.raises(ReplicaMismatch, match="in 1 of 1 elements"):
        check_replicas(stacked([np.float32(0.0), np.float32(-0.0)], devices))
    # one unit in the last place of a narrow type
    low, high = jnp.bfloat16(1), jnp.bfloat16(1) + jnp.finfo(jnp.bfloat16).eps
    with pytest.raises(ReplicaMismatch, match="in 1 of 1 elements"):
        check_replicas(stacked([low, high], devices))


@pytest.mark.parametrize("function", [unreplicate, check_replicas])
@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (np.ones((2, 3)), r"ndarray of shape \(2, 3\)"),
        (jnp.ones((2, 3)), r"ArrayImpl of shape \(2, 3\)"),
        (jnp.float32(1), r"ArrayImpl of shape \(\)"),
        (1.5, r"float of shape \(\)"),
    ],
)
def test_what_is_not_stacked_is_an_error(function, leaf, got):
    with pytest.raises(
        ValueError,
        match=rf"^{function.__name__}: every leaf must be a stacked array with one entry per "
        rf"device, but leaf \['w'\] is {got}\. Pass what replicate or a training step returned\.$",
    ):
        function({"w": leaf})


@pytest.mark.parametrize("function", [unreplicate, check_replicas])
@pytest.mark.parametrize("axes", [(), (None, "x")])
def test_as_many_rows_as_devices_are_no_copies(function, axes):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    with pytest.raises(ValueError, match=r"must be a stacked array .* ArrayImpl of shape \(2, 4\)"):
        function(jax.device_put(np.ones((2, 4)), layout))


def test_unreplicating_twice_is_an_error():
    copies = replicate({"w": np.ones((2, 3))}, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"^unreplicate: every leaf must be a stacked"):
        unreplicate(unreplicate(copies))


@pytest.mark.parametrize("world_size", [1, 3])
def test_typed_keys_are_copied_and_compared(world_size):
    devices = jax.devices()[:world_size]
    tree = {"one": jax.random.key(3), "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    copies = replicate(tree, devices)
    check_replicas(copies)
    assert copies["rbg"].shape == (world_size, 2)
    one = unreplicate(copies)
    for name, keys in tree.items():
        assert one[name].dtype == keys.dtype
        np.testing.assert_array_equal(*map(jax.random.key_data, (one[name], keys)))
        assert one[name].devices() == {devices[0]}


@pytest.mark.parametrize(
    ("tree", "devices", "error", "message"),
    [
        ({"a": 1.0}, 3, TypeError, r"^replicate: devices must be a sequence of jax\.Device"),
        ({"a": 1.0}, [], ValueError, r"^replicate: devices must "),
        (
            {"a": "s"},
            None,
            TypeError,
            r"^replicate: every leaf .* \['a'\] is of dtype <U1",
        ),
        (
            {"a": {1}},
            None,
            TypeError,
            r"^replicate: every leaf .* \['a'\] is of dtype obj",
        ),
        (
            {"a": 2**40 + 7},
            None,
            ValueError,
            r"^replicate: integers must fit int32, to .* int64, got 1099511627783 in leaf \['a'",
        ),
    ],
)
def test_what_cannot_be_replicated(tree, devices, error, message):
    with pytest.raises(error, match=message):
        replicate(tree, jax.devices()[:2] if devices is None else devices)
