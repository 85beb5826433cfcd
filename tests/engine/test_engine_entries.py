"""Entries of stacked arrays in a program that takes them out and stacks them itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elche_jax.engine.bundles import bundled
from elche_jax.engine.entries import current_entries, traced_entries
from elche_jax.engine.mapped import Mapped


def program(fn, **arrays):
    """The operations of a function mapped over one device, and its results."""
    mapped = Mapped(lambda x: (fn(x), None), jax.devices()[:1])
    lowered = mapped.lower(arrays)
    operations = re.findall(r"= stablehlo\.(\w+)", lowered.as_text())
    return operations, jax.device_get(mapped.finish(lowered)(arrays)[0])


def test_what_is_returned_as_it_came_is_not_taken_out():
    x = np.arange(6, dtype="float32").reshape(1, 2, 3)
    operations, found = program(lambda own: own["x"], x=x)
    assert operations == []
    np.testing.assert_array_equal(found, x, strict=True)
    operations, found = program(lambda own: own["x"] + 1, x=x)
    assert "reshape" in operations
    np.testing.assert_array_equal(found, x + 1, strict=True)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_a_bundle_is_filled_with_stacked_arrays(shape):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(1, *shape)).astype("float32") for name in "abcde"}
    operations, found = program(lambda own: bundled([own[name] for name in "abcde"]), **arrays)
    assert operations == ["concatenate", "broadcast_in_dim"]  # the last stacks the bundle
    np.testing.assert_array_equal(found[0], np.concatenate(list(arrays.values())), strict=True)


def test_a_bundle_is_filled_where_only_some_are_stacked():
    def fn(own):
        return bundled([own["a"], own["b"] + 1])

    a, b = np.ones((1, 3), "float32"), np.zeros((1, 3), "float32")
    _, found = program(fn, a=a, b=b)
    np.testing.assert_array_equal(found[0], np.ones((2, 3)))


def test_only_the_program_that_is_traced_has_entries():
    assert current_entries() is None
    with pytest.raises(ZeroDivisionError), traced_entries() as outer:
        with traced_entries() as inner:
            assert current_entries() is inner
        assert current_entries() is outer
        raise ZeroDivisionError
    assert current_entries() is None


def test_values_that_were_computed_are_told_from_entries():
    """Also if they live where one lived that nobody has any more."""
    with traced_entries() as entries:
        for value in range(100):
            stacked = jnp.full((1, 2), value)
            np.testing.assert_array_equal(entries.stack(entries.take(stacked)[::-1]), stacked)
            assert entries.stacked(jnp.zeros(2)) is None
