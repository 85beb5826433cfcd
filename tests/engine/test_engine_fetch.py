"""Microbatch `i` of a call, out of what lies on the device (test_engine_place.py
has the way there)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

from elche_jax.data.split import Range, piece_lengths
from elche_jax.engine import fetch
from elche_jax.engine.fetch import CallArgs, Pieces, Rows

BATCH = 2


def pieces_of(numbers, capacity):
    """Pieces with microbatch `i` holding `numbers[i]`; what is not read holds NaN."""
    real = Range(0, len(numbers)).pieces()
    rows = np.repeat(np.array(numbers, np.float32)[:, None], BATCH, axis=1)
    return Pieces(
        tuple(
            {"x": rows[real[length] : real[length] + length]}
            if length in real
            else {"x": np.full((length, BATCH), np.nan, np.float32)}
            for length in piece_lengths(capacity)
        )
    )


@pytest.mark.parametrize("capacity", [1, 3, slow(7), slow(15), slow(31)])
def test_pieces_give_every_microbatch_of_every_count_and_nothing_else(capacity):
    @jax.jit
    def fetch_all(payload, count):
        return jax.vmap(lambda i: payload.fetch(i, count))(jnp.arange(capacity))

    numbers = np.random.default_rng(0).normal(size=capacity).astype(np.float32)
    for count in range(capacity + 1):
        got = fetch_all(pieces_of(numbers[:count], capacity), jnp.int32(count))
        want = np.repeat(numbers[:count, None], BATCH, axis=1)
        np.testing.assert_array_equal(got["x"][:count], want)


def test_no_microbatch_is_no_error():
    # the loop never asks, but the program is traced with count 0 as with any other
    payload = pieces_of([], 7)
    assert payload.fetch(jnp.int32(0), jnp.int32(0))["x"].shape == (BATCH,)


@pytest.mark.parametrize("capacity", [1, 3, slow(31)])
def test_capacity_of_pieces(capacity):
    shapes = [
        {"x": jax.ShapeDtypeStruct((length, BATCH), jnp.float32)}
        for length in piece_lengths(capacity)
    ]
    stacked = [
        {"x": jax.ShapeDtypeStruct((4, length, BATCH), jnp.float32)}
        for length in piece_lengths(capacity)
    ]
    assert Pieces(tuple(shapes)).capacity(stacked=False) == capacity
    assert Pieces(tuple(stacked)).capacity(stacked=True) == capacity


def test_rows_are_looked_up_by_example_number():
    data = {"x": jnp.arange(20.0).reshape(10, 2), "y": jnp.arange(10)}
    payload = Rows(data, jnp.array([[3, 1, 4], [1, 5, 9]], jnp.int32))
    got = payload.fetch(jnp.int32(1), jnp.int32(2))
    np.testing.assert_array_equal(got["x"], [[2, 3], [10, 11], [18, 19]])
    np.testing.assert_array_equal(got["y"], [1, 5, 9])
    assert payload.capacity(stacked=False) == 2
    assert Rows(data, jnp.zeros((4, 7, 3), jnp.int32)).capacity(stacked=True) == 7


def lowered_for(platform, payload):
    traced = jax.jit(lambda payload: payload.fetch(jnp.int32(1), jnp.int32(2))).trace(payload)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_cpu_reads_one_piece_and_accelerators_select():
    pieces = pieces_of([1.0, 2.0], 7)
    assert "_where" not in lowered_for("cpu", pieces)
    assert "_where" in lowered_for("cuda", pieces)


def test_accelerators_get_the_same_microbatches():
    # their form of it, which the CPU can run as well
    numbers = np.random.default_rng(0).normal(size=7).astype(np.float32)
    pieces, starts = pieces_of(numbers[:5], 7).pieces, [0, 4, 4]
    for i in range(5):
        got = fetch._select_piece(jnp.int32(i), starts, pieces)
        np.testing.assert_array_equal(got["x"], numbers[[i, i]])


def test_payloads_and_orders_are_pytrees():
    payload = pieces_of([1.0], 1)
    doubled = jax.tree.map(lambda x: 2 * x, payload)
    np.testing.assert_array_equal(doubled.pieces[0]["x"], [[2, 2]])
    rows = jax.tree.map(lambda x: x, Rows({"x": jnp.zeros(3)}, jnp.zeros((1, 1), jnp.int32)))
    assert isinstance(rows, Rows)


def test_orders_are_read_by_name():
    call_args = CallArgs(jnp.array([5, 12, 1, 14, 3], jnp.int32))
    assert int(call_args.count) == 5
    assert int(call_args.start) == 12
    assert bool(call_args.fresh)
    valid = [int(call_args.valid(place, 8)) for place in range(12, 17)]
    assert valid == [8, 8, 3, 8, 8]
    later = CallArgs(jnp.array([5, 12, 0, -1, 0], jnp.int32))
    assert not bool(later.fresh)
    assert [int(later.valid(place, 8)) for place in range(3)] == [8, 8, 8]
