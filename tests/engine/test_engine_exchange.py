"""Sums over devices: packed ones against plain ones, rounded ones against their bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from elche_jax.engine.exchange import PACK_BELOW, packed_psum
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.wire import encode, sum_bfloat16

SIZES = (0, 1, 7, PACK_BELOW // 4 - 1, PACK_BELOW // 4, PACK_BELOW // 4 + 3)


def psum_bfloat16(tree, axis_name):
    """A sum over devices with two bytes per number on the wire."""
    assert axis_name == AXIS
    leaves, structure = jax.tree.flatten(tree)
    sent, _ = encode(leaves, [], True, "bfloat16")
    return structure.unflatten(sum_bfloat16(sent, None))


def mapped(fn, world):
    return jax.pmap(fn, axis_name=AXIS, devices=jax.devices()[:world])


def test_small_arrays_are_packed_and_no_bit_changes():
    rng = np.random.default_rng(0)
    tree = {f"f{n}": rng.normal(size=(3, n)).astype("float32") for n in SIZES}
    tree |= {f"i{n}": rng.integers(-9, 9, size=(3, 2, n)).astype("int32") for n in SIZES[:3]}
    tree["scalar"] = rng.normal(size=3).astype("float32")
    tree["half"] = rng.normal(size=(3, 5)).astype(jnp.bfloat16)
    got = mapped(lambda t: packed_psum(t, AXIS), 3)(tree)
    want = mapped(lambda t: jax.lax.psum(t, AXIS), 3)(tree)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_hundreds_of_arrays_find_their_places_again():
    """Places are numbers of two digits here: 17 of one shape, 300 of another."""
    rng = np.random.default_rng(1)
    shapes = [(2, 3)] * 17 + [(2,)] * 300 + [(2, 5)]
    tree = [rng.normal(size=(2, *shapes[i])).astype("float32") for i in rng.permutation(318)]
    got = mapped(lambda t: packed_psum(t, AXIS), 2)(tree)
    for out, values in zip(got, tree, strict=True):
        np.testing.assert_array_equal(np.asarray(out)[1], values[0] + values[1])


def test_one_collective_per_dtype_and_large_array():
    """What packing is for: 40 small arrays and 2 large ones are 3 operands, not 42."""
    tree = [jnp.ones((2, 8))] * 40 + [jnp.ones((2, PACK_BELOW // 4))] * 2

    program = mapped(lambda t: packed_psum(t, AXIS), 2).lower(tree).as_text()
    plain = mapped(lambda t: jax.lax.psum(t, AXIS), 2).lower(tree).as_text()
    assert (program.count("all_reduce"), plain.count("all_reduce")) == (3, 42)


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=30)
@given(data=st.data())
def test_two_bytes_on_the_wire_err_by_two_roundings(world, data):
    """|sum - exact| <= (2 + 2**-8) * 2**-8 * sum of sizes; alike on all."""
    size = data.draw(st.sampled_from([1, 2, 9]))  # few, as each one is compiled
    values = data.draw(
        arrays(
            np.float32,
            (world, size),
            elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
        )
    )
    tree = {"a": values, "b": values[:, :1, None]}
    got = PROGRAMS[world](tree)
    for name, x in tree.items():
        out, exact = np.asarray(got[name]), x.astype(np.float64).sum(axis=0)
        assert out.shape == x.shape and (out == out[:1]).all()
        bound = (2 + 2.0**-8) * 2.0**-8 * np.abs(x.astype(np.float64)).sum(axis=0) + 2.0**-120
        assert (np.abs(out[0] - exact) <= bound).all()


def test_two_bytes_on_the_wire_of_no_numbers():
    tree = {"none": np.zeros((2, 0, 3), "float32")}
    got = mapped(lambda t: psum_bfloat16(t, AXIS), 2)(tree)
    assert (got["none"].shape, got["none"].dtype) == ((2, 0, 3), "float32")


def _rounded(world):
    fn = mapped(lambda t: psum_bfloat16(t, AXIS), world)
    return lambda tree: fn(tree)


PROGRAMS = {world: _rounded(world) for world in (2, 3)}


def test_sums_are_made_in_float32():
    """In bfloat16 sums 256 + 1 would stay 256 for ever: three devices' ones are not lost."""
    values = np.array([[256.0], [1.0], [1.0]], np.float32)
    got = mapped(lambda t: psum_bfloat16(t, AXIS), 3)(values)
    assert np.asarray(got).tolist() == [[258.0]] * 3


def test_only_two_bytes_per_number_travel():
    text = mapped(lambda t: psum_bfloat16(t, AXIS), 2).lower(np.ones((2, 64), "f")).as_text()
    moves = [line for line in text.splitlines() if "all_to_all" in line or "all_gather" in line]
    kinds = [line.rsplit(":", 1)[1] for line in moves if ":" in line]
    assert len(kinds) >= 2
    assert all("bf16" in kind and "f32" not in kind.replace("bf16", "") for kind in kinds)


def test_what_is_not_finite_stays_so():
    values = np.array([[np.nan, np.inf, 1], [1, 1, 1]], np.float32)
    got = np.asarray(mapped(lambda t: psum_bfloat16(t, AXIS), 2)(values))
    assert np.isnan(got[:, 0]).all() and np.isposinf(got[:, 1]).all() and (got[:, 2] == 2).all()


def test_nothing_to_exchange():
    assert mapped(lambda t: (psum_bfloat16([], AXIS), t), 2)(np.ones(2))[0] == []
