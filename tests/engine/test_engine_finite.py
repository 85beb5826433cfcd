"""Whether arrays are finite, against NumPy, and without copies of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from elche_jax.engine import finite
from elche_jax.engine.finite import all_finite, floats

SHAPES = [(), (0,), (7,), (2, 3, 4), (4, 1)]
DTYPES = ["float32", "bfloat16", "float16"]
BAD = [np.inf, -np.inf, np.nan]


@st.composite
def trees(draw):
    """Arrays, and whether all are finite; half of the time one element is not."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = []
    for shape in shapes:
        dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
        largest = float(jnp.finfo(dtype).max)
        numbers = rng.choice([0.0, -0.0, 1.5, largest, -largest, 1e-38], shape)
        arrays.append(np.asarray(numbers).astype(dtype))
    victim = arrays[draw(st.integers(0, len(arrays) - 1))]
    if victim.size and draw(st.booleans()):
        victim.reshape(-1)[draw(st.integers(0, victim.size - 1))] = draw(st.sampled_from(BAD))
    return arrays, all(np.isfinite(x.astype("float64")).all() for x in arrays)


@given(trees())
def test_small_arrays(found):
    arrays, expected = found
    assert bool(all_finite(arrays)) is expected


def large(shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("shape", [(2**18,), (512, 512), (3, 3, 128, 256), (2**18, 1)])
@pytest.mark.parametrize("bad", [*BAD, np.finfo("float32").max])
def test_large_arrays(shape, bad):
    arrays = [large(shape), large(shape)]
    assert arrays[0].nbytes >= finite.ALONE
    check = jax.jit(all_finite)
    assert bool(check(arrays))
    for at in (0, -1):
        arrays[1].reshape(-1)[at] = bad
        assert bool(check(arrays)) is bool(np.isfinite(bad))


def products(array):
    """How a large array is multiplied by zeros, if it is."""
    text = jax.jit(lambda x: all_finite(x)).lower(array).as_text()
    return [line for line in text.splitlines() if "dot_general" in line]


def test_a_precision_of_products_changes_nothing():
    # rounded to bfloat16 it would be infinite, where a device multiplies with less precision
    array = np.full((512, 512), np.finfo("float32").max)
    with jax.default_matmul_precision("bfloat16"):
        assert bool(jax.jit(lambda x: all_finite(x))(array))
        (product,) = products(array)
    assert "precision = [HIGHEST, HIGHEST]" in product


def test_smaller_floats_are_not_multiplied():
    assert products(large((1024, 1024), "bfloat16")) == []


def test_large_arrays_are_not_copied():
    arrays = [large((1024, 1024)) for _ in range(3)]
    compiled = jax.jit(lambda arrays: all_finite([2 * x for x in arrays])).lower(arrays).compile()
    size = arrays[0].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < 3.1 * size  # what is checked
    compiled = jax.jit(all_finite).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * size


def test_floats():
    kept = [np.float32(1), jnp.ones(2, "bfloat16")]
    assert floats({"a": kept[0], "b": np.int32(1), "c": kept[1], "d": np.bool_(True)}) == kept
