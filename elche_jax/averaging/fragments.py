"""Assignment of arrays to the windows in which they are exchanged."""

from collections.abc import Sequence

from elche_jax import _check as check


def assign_fragments(sizes: Sequence[int], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Divide arrays into parts of about the same size.

    The largest remaining array goes to the smallest part, or to the first of equal parts.

    Args:
        sizes: Number of elements of each array.
        fragments: Number of parts.

    Returns:
        The indices of the arrays in each part, ascending; no part is empty.

    Raises:
        ValueError: If there are more parts than arrays.

    Examples:
        >>> from elche_jax.averaging.fragments import assign_fragments
        >>> assign_fragments([4, 100, 90, 5], 2)
        ((1,), (0, 2, 3))
    """
    if fragments > len(sizes):
        rule = f"be at most the number of arrays that are trained ({len(sizes)})"
        raise ValueError(check.message("DiLoCo", "fragments", rule, fragments))
    parts: list[list[int]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # by the number of arrays, too, so that arrays without elements leave no part empty
        lightest = min(range(fragments), key=lambda p: (loads[p], len(parts[p])))
        parts[lightest].append(i)
        loads[lightest] += sizes[i]
    return tuple(tuple(sorted(part)) for part in parts)
