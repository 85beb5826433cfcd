"""The argument checks: what passes, and how each error reads."""

import math

import jax
import numpy as np
import pytest

from elche_jax import _check as check


def test_message_has_the_four_parts():
    assert check.message("A", "b", "be c", "d") == "A: b must be c, got d."
    assert check.message("A", "b", "be c", "d", "Do e.") == ("A: b must be c, got d. Do e.")


@pytest.mark.parametrize("value", [3, np.int32(3), np.array(3), np.uint8(3)])
def test_integer_returns_a_plain_int(value):
    result = check.integer("A", "b", value, low=3, high=3)
    assert result == 3
    assert type(result) is int


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, r"True \(bool\)"),
        (np.bool_(True), r"\(bool\)"),
        (3.0, r"3\.0 \(float\)"),
        ("3", r"'3' \(str\)"),
        (None, r"None \(NoneType\)"),
        (np.array([3]), r"\(ndarray\)"),
    ],
)
def test_integer_rejects_other_types(value, shown):
    with pytest.raises(TypeError, match=rf"^A: b must be an integer, got .*{shown}\.$"):
        check.integer("A", "b", value)


@pytest.mark.parametrize(
    ("checked", "kind"), [(check.integer, "an integer"), (check.real, "a number")]
)
def test_a_random_key_is_no_number(checked, kind):
    """`train.windows(..., seed=jax.random.key(0))`; JAX's own error names an abstract method."""
    with pytest.raises(TypeError, match=rf"(?s)^A: b must be {kind}, got .*\(PRNGKeyArray\)\."):
        checked("A", "b", jax.random.key(0))


def test_integer_bounds():
    with pytest.raises(ValueError, match=r"^A: b must be at least 1, got 0\.$"):
        check.integer("A", "b", 0, low=1)
    with pytest.raises(ValueError, match=r"^A: b must be at most 4, got 5\. Less!$"):
        check.integer("A", "b", 5, high=4, todo="Less!")


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0)])
def test_real_returns_a_plain_float(value):
    result = check.real("A", "b", value, low=2, high=2)
    assert result == 2.0
    assert type(result) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_real_rejects_what_is_not_finite(value):
    with pytest.raises(ValueError, match=r"^A: b must be finite, got -?(nan|inf)\.$"):
        check.real("A", "b", value)


@pytest.mark.parametrize("value", [True, "1", None, 1j, np.array([1.0])])
def test_real_rejects_other_types(value):
    with pytest.raises(TypeError, match=r"^A: b must be a number, got "):
        check.real("A", "b", value)


def test_real_bounds():
    with pytest.raises(ValueError, match=r"^A: b must be at least 0, got -1\.$"):
        check.real("A", "b", -1, low=0)
    with pytest.raises(ValueError, match=r"^A: b must be above 0, got 0\.$"):
        check.real("A", "b", 0, above=0)
    with pytest.raises(ValueError, match=r"^A: b must be at most 1, got 1\.5\.$"):
        check.real("A", "b", 1.5, high=1)


@pytest.mark.parametrize(
    "values", [(1, 2), [1, 2], range(1, 3), np.array([1, 2]), list(np.array([1, 2]))]
)
def test_integers_accept_any_sequence(values):
    result = check.integers("A", "b", values, low=1)
    assert result == (1, 2)
    assert {type(entry) for entry in result} == {int}


@pytest.mark.parametrize("values", [(1.5, 2.0), [1.5, 2], np.array([1.5, 2]), [np.float64(1.5), 2]])
def test_reals_accept_any_sequence(values):
    result = check.reals("A", "b", values, above=0)
    assert result == (1.5, 2.0)
    assert {type(entry) for entry in result} == {float}


def test_sequences_name_the_entry_at_fault():
    with pytest.raises(ValueError, match=r"^A: b\[1\] must be at least 0, got -1\.$"):
        check.integers("A", "b", (0, -1), low=0)
    with pytest.raises(ValueError, match=r"^A: b\[1\] must be at most 2, got 3\.$"):
        check.integers("A", "b", (2, 3), high=2)
    with pytest.raises(TypeError, match=r"^A: b\[0\] must be an integer, got 1\.0 "):
        check.integers("A", "b", np.array([1.0, 2.0]))
    with pytest.raises(TypeError, match=r"^A: b\[1\] must be an integer, got True "):
        check.integers("A", "b", [1, True])
    with pytest.raises(ValueError, match=r"^A: b\[1\] must be finite, got nan\.$"):
        check.reals("A", "b", (0.0, math.nan))
    with pytest.raises(ValueError, match=r"^A: b\[0\] must be above 0, got 0\.0\.$"):
        check.reals("A", "b", (0.0, 1.0), above=0)
    with pytest.raises(TypeError, match=r"^A: b\[0\] must be a number, got False "):
        check.reals("A", "b", [False])


@pytest.mark.parametrize("values", ["12", b"12", 12, None, {1: 2}, np.array(3)])
def test_what_is_no_sequence_is_rejected(values):
    with pytest.raises(TypeError, match=r"^A: b must be a sequence of integers, got "):
        check.integers("A", "b", values)


def test_per_device():
    check.per_device("A", "b", 2, 2)
    with pytest.raises(ValueError, match=r"^A: b must have one entry per device \(2\), got 3\.$"):
        check.per_device("A", "b", 3, 2)


def test_instance():
    check.instance("A", "b", 1, int)
    with pytest.raises(TypeError, match=r"^A: b must be of type str, got 1 \(int\)\.$"):
        check.instance("A", "b", 1, str)
