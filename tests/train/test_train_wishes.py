"""What one process asks of all counts once all know it, at the same window."""

import pytest

from elche_jax.train.wishes import NAMES, Wishes


def test_one_process_asks_nobody():
    wishes = Wishes(one_process=True, in_flight=2)
    assert wishes.agreed == frozenset()
    wishes.add("save")
    assert wishes.agreed == {"save"}
    wishes.clear("save")
    assert wishes.agreed == frozenset()


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_a_wish_counts_once_no_process_can_have_missed_it(in_flight):
    """A process may have seen every dispatch, or all but those in flight: both agree."""
    told = {3: 1 << NAMES.index("stop"), 5: 1 << NAMES.index("interrupt")}
    history = []
    for unseen in (0, in_flight):
        wishes, agreed = Wishes(False, in_flight), []
        for number in range(1, 12):
            wishes.dispatches = number
            seen = number - unseen
            if seen in told:
                wishes.found(seen, [0.0, float(told[seen]), 0.0])
            agreed.append(wishes.agreed)
        history.append(agreed)
    early, late = history
    assert early == late
    assert next(at for at, now in enumerate(early, 1) if "stop" in now) == 3 + in_flight
    assert early[-1] == {"stop", "interrupt"}


@pytest.mark.parametrize("unseen", [0, 2])
def test_what_was_told_before_a_wish_was_met_is_forgotten(unseen):
    wishes = Wishes(False, in_flight=2)
    for number in range(1, 9):  # told up to dispatch 4, met after it
        wishes.dispatches = number
        seen = number - unseen
        if 1 <= seen <= 4:
            wishes.found(seen, [1.0])
        if number == 4:
            assert wishes.agreed == {"save"}
            wishes.clear("save")
        if number > 4:
            assert wishes.agreed == frozenset()
    wishes.found(8, [1.0])
    wishes.dispatches = 10
    assert wishes.agreed == {"save"}
