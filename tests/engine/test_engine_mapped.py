"""One function over the devices of a group, and arrays with one entry per device."""

import gc
import weakref
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from elche_jax.engine import mapped
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.mapped import AXIS, Mapped, stacked_sharding

X = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def place(array, devices):
    return jax.device_put(array, stacked_sharding(devices))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_device_computes_on_its_entry(world_size, backwards):
    devices = jax.devices()[:world_size][:: -1 if backwards else 1]
    mapped = Mapped(lambda t, y: ({"s": t["x"] * y}, None), devices, donate=())
    x, y = X[:world_size], np.arange(world_size, dtype=np.float32)
    tree = {"x": place(x, devices)}
    out, shared = mapped.compile(tree, place(y, devices))(tree, place(y, devices))
    assert shared is None
    np.testing.assert_array_equal(out["s"], x * y[:, None])
    on = {shard.device: np.asarray(shard.data)[0] for shard in out["s"].addressable_shards}
    for rank, device in enumerate(devices):
        np.testing.assert_array_equal(on[device], x[rank] * y[rank])


def test_collectives_know_the_axis_and_shared_results_have_no_device_axis():
    devices = jax.devices()[:3]

    def fn(x):
        rank = jax.lax.axis_index(AXIS)
        return rank[None], jax.lax.psum(x, AXIS)

    x = place(np.arange(6, dtype=np.int32).reshape(3, 2), devices)
    ranks, total = Mapped(fn, devices, donate=()).compile(x)(x)
    np.testing.assert_array_equal(ranks, [[0], [1], [2]])
    np.testing.assert_array_equal(total, [6, 9])


def test_one_device_gives_shared_results_without_a_device_axis_too():
    devices = jax.devices()[1:2]
    x = place(X[:1], devices)
    out, total = Mapped(lambda x: (x + 1, x.sum()), devices, donate=()).compile(x)(x)
    assert (out.shape, total.shape) == ((1, 5), ())
    assert out.devices() == total.devices() == set(devices)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shapes_suffice_to_compile(world_size):
    devices = jax.devices()[:world_size]
    mapped = Mapped(lambda x: (2 * x, None), devices, donate=())
    program = mapped.compile(jax.ShapeDtypeStruct((world_size, 5), jnp.float32))
    out, _ = program(place(X[:world_size], devices))
    np.testing.assert_array_equal(out, 2 * X[:world_size])


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_donated_arguments_are_given_up(world_size):
    devices = jax.devices()[:world_size]
    x, y = place(X[:world_size], devices) + 0, place(X[:world_size], devices) + 0
    mapped = Mapped(lambda x, y: ((x + y, y), None), devices, donate=(0,))
    mapped.compile(x, y)(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()


@pytest.mark.parametrize("world_size", [1, 3])
def test_stacking_takes_the_arrays_as_they_lie(world_size):
    devices = jax.devices()[:world_size][::-1]
    shards = [jax.device_put(X[r : r + 1], device) for r, device in enumerate(devices)]
    array = lanes_of(devices).stack(shards)
    np.testing.assert_array_equal(array, X[:world_size])
    again = [array.addressable_data(rank) for rank in range(world_size)]
    for shard, original, device in zip(again, shards, devices, strict=True):
        assert shard.devices() == {device}
        assert shard.unsafe_buffer_pointer() == original.unsafe_buffer_pointer()


@pytest.mark.parametrize("world_size", [1, 3])
def test_shards_come_in_rank_order(world_size):
    devices = jax.devices()[:world_size][::-1]
    x = place(np.arange(world_size) + 10, devices)
    out, _ = Mapped(lambda x: (x * 2, None), devices, donate=()).compile(x)(x)
    for array, factor in ((x, 1), (out, 2)):
        shards = [array.addressable_data(rank) for rank in range(world_size)]
        assert [int(shard[0]) for shard in shards] == [factor * (10 + r) for r in range(world_size)]
        assert [shard.devices() for shard in shards] == [{device} for device in devices]


@pytest.mark.parametrize("use", [Mapped.compile, Mapped.__call__], ids=["compiled", "called"])
@pytest.mark.parametrize("world_size", [slow(1), 3])
def test_what_was_compiled_goes_with_its_owner(use, world_size):
    devices = jax.devices()[:world_size]
    x = place(X[:world_size], devices)

    def compile_and_drop(number):
        def fn(x):
            return jnp.sort(x * number), None

        use(Mapped(fn, devices, donate=()), x)
        return weakref.ref(fn)

    compile_and_drop(0)
    gc.collect()
    kept = executables()
    dropped = [compile_and_drop(number) for number in (1, 2)]
    gc.collect()
    assert [fn() for fn in dropped] == [None] * 2
    assert executables() == kept


def executables():
    """How many programs the runtime holds."""
    return len(jax.devices()[0].client.live_executables())


def test_options_that_this_jax_does_not_know_are_left_out_and_named(monkeypatch, caplog):
    monkeypatch.setattr(mapped, "OPTIONS", {"cpu": {"xla_no_such_option": 1}})
    devices = jax.devices()[:1]
    x = place(X[:1], devices)
    out, _ = Mapped(lambda x: (x + 1, None), devices, donate=()).compile(x)(x)
    np.testing.assert_array_equal(out, X[:1] + 1)
    assert (
        "elche: loops on a GPU wait for the host, as JAX rejects compiler options: " in caplog.text
    )
    assert "xla_no_such_option" in caplog.text


def test_another_error_of_the_compiler_is_raised(monkeypatch):
    class Broken:
        def compile(self, options=None):
            raise jax.errors.JaxRuntimeError("INTERNAL: out of memory")

    monkeypatch.setattr(mapped, "OPTIONS", {"cpu": {"xla_no_such_option": 1}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        Mapped(lambda x: (x, None), jax.devices()[:1], donate=()).finish(Broken())


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_launch_that_fails_is_no_error_of_who_waits_for_it(monkeypatch, kind):
    """JAX raises both for an exchange that fails in gloo."""
    last = Mock(**{"is_deleted.return_value": False})
    last.block_until_ready.side_effect = kind("Gloo: connection closed by peer")
    monkeypatch.setattr(mapped.MappedAcross, "_last", last)
    mapped.MappedAcross.settle()
    last.block_until_ready.assert_called_once_with()
