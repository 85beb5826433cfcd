"""DDPConfig: which cadence its knobs mean, and which of them contradict each other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient, ParameterAveraging
from elche_jax.cadence import Balanced, ElChe, EveryBatch
from elche_jax.config import DDPConfig
from elche_jax.observe.timeline import Timeline

laws = settings(deadline=None, database=None, derandomize=True)


# without a ceiling, or with one


def test_no_ceiling_is_elches_own():
    assert DDPConfig().max_anchor is None
    assert DDPConfig(policy="cadence").cadence_for(2, kinds=1) == ElChe()


def test_no_ceiling_does_not_lower_the_anchor():
    assert DDPConfig(policy="cadence", anchor=300).cadence_for(2, 1).max_anchor == 300
    assert DDPConfig(policy="cadence", anchor=200).cadence_for(2, 1).max_anchor == 200


@pytest.mark.parametrize("most", [1, 5, 10, 1000])
def test_a_ceiling_is_passed_on(most):
    """Also one below the anchor: it binds from the first report on, as ElChe has it."""
    cadence = DDPConfig(policy="cadence", anchor=10, max_anchor=most).cadence_for(2, 1)
    assert cadence == ElChe(anchor=10, max_anchor=most)
    assert cadence.min_anchor == min(10, most)


# the balancer


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("zero", [0, np.int64(0)])
def test_no_cadence_is_the_balancer_whatever_the_kinds(kinds, zero):
    assert DDPConfig(max_anchor=zero).cadence_for(4, kinds) == Balanced(40)
    assert DDPConfig(max_anchor=zero, anchor=3).cadence_for(4, kinds) == Balanced(12)
    assert DDPConfig(max_anchor=zero, total=64).cadence_for(4, kinds) == Balanced(64)


def test_an_anchor_of_one_is_one_microbatch_each():
    cadence = DDPConfig(max_anchor=0, anchor=1).cadence_for(3, kinds=1)
    assert cadence.init(3).counts == (1, 1, 1)


def test_one_device_has_no_cadence():
    config = DDPConfig(max_anchor=0, total=64, speed_hint=(5, 2.0))
    assert config.cadence_for(1, kinds=1) == EveryBatch()


@pytest.mark.parametrize("hint", [(1, 2.3), [1, 2.3], (1.0, 2.3), np.array([1.0, 2.3])])
def test_the_hint_reaches_the_cadence(hint):
    balanced = DDPConfig(max_anchor=0, total=12, speed_hint=hint).cadence_for(2, 1)
    assert balanced == Balanced(12, speed_hint=hint)
    elche = DDPConfig(policy="cadence", speed_hint=hint).cadence_for(2, 1)
    assert elche == ElChe(speed_hint=hint)


@pytest.mark.parametrize("hint", [(1, 2.3), [1, 2.3], np.array([1, 2.3])])
def test_a_copy_means_the_same_and_is_hashable(hint):
    config = DDPConfig(max_anchor=0, total=12, speed_hint=hint)
    assert replace(config) == config
    assert hash(replace(config)) == hash(config)


@laws
@given(st.integers(2, 200), st.integers(1, 50))
def test_the_balancer_works_on_any_number_of_devices(world_size, anchor):
    cadence = DDPConfig(max_anchor=0, anchor=anchor).cadence_for(world_size, kinds=1)
    assert cadence.init(world_size).counts == (anchor,) * world_size
    # the default floor, where that leaves room: half an equal share else
    assert cadence.min_ratio * world_size <= 0.5 or cadence.min_ratio == Balanced.min_ratio
    assert cadence.min_ratio == min(0.05, 0.5 / world_size)


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        (DDPConfig(), []),
        (DDPConfig(max_grad_norm=1.0, timeline=Timeline()), []),
        (DDPConfig(max_anchor=0), ["max_anchor=0"]),
        (DDPConfig(max_anchor=0, total=9), ["max_anchor=0", "total=9"]),
        (DDPConfig(max_anchor=5, anchor=2), ["anchor=2", "max_anchor=5"]),
        (DDPConfig(speed_hint=np.array([1, 2])), ["speed_hint=(1.0, 2.0)"]),
    ],
)
def test_the_knobs_of_the_cadence_are_told(config, knobs):
    assert sorted(config.cadence_knobs()) == knobs


# what contradicts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"policy": "cadence"},
            r"policy must be 'auto' with max_anchor=0, which chooses the balancer, got "
            r"'cadence'\. Leave out one of the two\.",
        ),
        (
            {"policy": "sync"},
            r"policy must be 'auto' with max_anchor=0, which chooses the balancer, got 'sync'\.",
        ),
        (
            {"overhead_target": 0.2},
            r"overhead_target must be left at 0\.1 with max_anchor=0, got 0\.2\. It has no "
            r"effect there; leave it out\.$",
        ),
        (
            {"max_batch_diff": 3},
            r"max_batch_diff must be left at None with max_anchor=0, got 3\. It has no effect",
        ),
        (
            {"anchor": 4, "total": 64},
            r"anchor must be left at 10 with total=64, got 4\. It has no effect there",
        ),
        (
            {"anchor": 1, "speed_hint": (1, 2.0)},
            r"speed_hint must be left at None with max_anchor=0 and anchor=1, one microbatch "
            r"each, got \(1, 2\.0\)\. It has no effect there",
        ),
    ],
)
def test_knobs_beside_no_cadence(options, text):
    with pytest.raises(ValueError, match=f"^DDPConfig: {text}"):
        DDPConfig(max_anchor=0, **options)
    del options[next(iter(options))]
    DDPConfig(max_anchor=0, **options)


@pytest.mark.parametrize("most", [None, 1, 200])
def test_total_needs_the_balancer(most):
    with pytest.raises(
        ValueError,
        match=r"^DDPConfig: total must be None unless max_anchor is 0, got 64\. Pass max_anchor=0 ",
    ):
        DDPConfig(total=64, max_anchor=most)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_anchor": -1}, ValueError, r"DDPConfig: max_anchor must be at least 0, got -1"),
        ({"max_anchor": 2.0}, TypeError, r"DDPConfig: max_anchor must be an integer, got 2\.0"),
        ({"max_anchor": False}, TypeError, r"DDPConfig: max_anchor must be an integer, got Fa"),
        ({"max_anchor": 0, "total": 0}, ValueError, r"DDPConfig: total must be at least 1, got 0"),
        ({"max_anchor": 0, "total": 2**54}, ValueError, r"DDPConfig: total must be at most 90071"),
        ({"max_anchor": 0, "total": "8"}, TypeError, r"DDPConfig: total must be an integer, got"),
        ({"anchor": 0}, ValueError, r"DDPConfig: anchor must be at least 1, got 0"),
        ({"anchor": "9"}, TypeError, r"DDPConfig: anchor must be an integer, got '9'"),
        ({"speed_hint": 2}, TypeError, r"DDPConfig: speed_hint must be a sequence of numbers"),
        ({"speed_hint": (1, 0)}, ValueError, r"DDPConfig: speed_hint ratio must be at least 1"),
        ({"max_batch_diff": 0}, ValueError, r"ElChe: max_batch_diff must be at least 1, got 0"),
        ({"overhead_target": 1}, ValueError, r"ElChe: overhead_target must be at most 0\.5"),
    ],
)
def test_knobs_out_of_range(options, kind, text):
    with pytest.raises(kind, match="^" + text):
        DDPConfig(**options)


@pytest.mark.parametrize("policy", ["auto", "sync", "cadence"])
def test_a_hint_for_other_devices(policy):
    config = DDPConfig(policy=policy, speed_hint=(5, 2.0))
    with pytest.raises(ValueError, match=r"^ElChe\.init: speed_hint slow_rank must be below"):
        config.cadence_for(2, kinds=1)


def test_a_hint_for_other_devices_of_the_balancer():
    config = DDPConfig(max_anchor=0, speed_hint=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"^Balanced\.init: speed_hint must have one entry per device \(2\), got 3"
    ):
        config.cadence_for(2, kinds=1)


# the exchange


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        ({}, MeanGradient()),
        ({"exchange_dtype": "bfloat16"}, MeanGradient("bfloat16")),
        ({"policy": "async"}, MeanGradient(delay=1)),
        ({"policy": "async", "exchange": "host"}, MeanGradient()),
    ],
)
def test_the_rule_that_knobs_mean(knobs, rule):
    assert DDPConfig(**knobs).rule() == rule


def test_what_a_rule_says_already_stays():
    rule = ParameterAveraging(optimizer_state="keep", delay=3, compression="bfloat16")
    assert DDPConfig(policy="async", exchange_dtype="bfloat16").rule(rule) == rule
    late = ParameterAveraging(optimizer_state="keep")
    assert DDPConfig(policy="async").rule(late) == replace(late, delay=1)
    assert late.delay == 0


class Own(AveragingRule):
    """A rule that is no dataclass."""

    optimizer_state = "keep"


def test_a_rule_of_another_class_stays_of_it():
    rule = DDPConfig(policy="async", exchange_dtype="bfloat16").rule(Own())
    assert isinstance(rule, Own)
    assert (rule.delay, rule.compression) == (1, "bfloat16")


@pytest.mark.parametrize(
    ("knobs", "exchange"),
    [
        ({}, None),
        ({"policy": "async"}, None),
        ({"exchange": "host"}, HostExchange()),
        ({"exchange": "host", "exchange_timeout": 2.0}, HostExchange(2.0)),
        ({"exchange": "host", "max_batch_diff": 3}, HostExchange()),
        (
            {"exchange": "host", "policy": "async", "max_overshoot": 2, "max_batch_diff": 3},
            HostExchange(run_ahead=True, max_overshoot=2, max_batch_diff=3),
        ),
    ],
)
def test_the_exchange_that_knobs_mean(knobs, exchange):
    assert DDPConfig(**knobs).host_exchange() == exchange


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: HostExchange(0), ValueError, r"HostExchange: timeout must be above 0, got 0"),
        (lambda: HostExchange("9"), TypeError, r"HostExchange: timeout must be a number, got '9'"),
        (
            lambda: HostExchange(run_ahead=1),
            TypeError,
            "HostExchange: run_ahead must be a bool, got 1",
        ),
        (
            lambda: HostExchange(run_ahead=True, max_overshoot=-1),
            ValueError,
            "HostExchange: max_overshoot must be at least 0, got -1",
        ),
        (
            lambda: HostExchange(run_ahead=True, max_batch_diff=0),
            ValueError,
            "HostExchange: max_batch_diff must be at least 1, got 0",
        ),
        (
            lambda: HostExchange(max_overshoot=1),
            ValueError,
            r"HostExchange: max_overshoot must be None unless run_ahead=True, got 1\. Otherwise n",
        ),
        (
            lambda: DDPConfig(exchange="host", exchange_timeout=-1),
            ValueError,
            "DDPConfig: exchange_timeout must be above 0, got -1",
        ),
        (
            lambda: DDPConfig(exchange_timeout="9"),
            TypeError,
            "DDPConfig: exchange_timeout must be a number, got '9'",
        ),
        (
            lambda: DDPConfig(exchange_timeout=np.array([1, 2])),
            TypeError,
            "DDPConfig: exchange_timeout must be a number, got array",
        ),
        (
            lambda: DDPConfig(max_overshoot="a"),
            TypeError,
            "DDPConfig: max_overshoot must be an integer, got 'a'",
        ),
        (
            lambda: DDPConfig(exchange_timeout=5.0),
            ValueError,
            r"DDPConfig: exchange_timeout must be left at 60\.0 unless exchange='host', got 5\.0",
        ),
        (
            lambda: DDPConfig(exchange="host", max_overshoot=1),
            ValueError,
            "DDPConfig: max_overshoot must be None unless exchange='host' and policy='async', got",
        ),
        (
            lambda: DDPConfig(exchange=HostExchange()),
            TypeError,
            r"DDPConfig: exchange must be 'device' or 'host', got HostExchange\(.*\)\. Pass the ",
        ),
        (
            lambda: DDPConfig(exchange="cpu"),
            ValueError,
            "DDPConfig: exchange must be one of 'device', 'host', got 'cpu'",
        ),
    ],
)
def test_exchanges_that_are_none(make, kind, text):
    with pytest.raises(kind, match="^" + text):
        make()


# arguments that are knobs, too


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_grad_norm", 2.0), ("compute_dtype", "bfloat16"), ("verify_every", 3)],
)
def test_an_argument_is_given_in_one_place(name, value):
    assert DDPConfig().or_given(**{name: value}) == {name: value}
    assert DDPConfig(**{name: value}).or_given(**{name: None}) == {name: value}
    with pytest.raises(
        ValueError,
        match=rf"^build_train_step: {name} must be left out where config sets it \({value!r}\), g",
    ):
        DDPConfig(**{name: value}).or_given(**{name: value})


# the timeline


def test_a_timeline():
    timeline = Timeline()
    assert DDPConfig(timeline=timeline).timeline is timeline
    assert DDPConfig().timeline is None


@pytest.mark.parametrize("timeline", ["run.jsonl", Timeline, [], print])
def test_what_is_no_timeline(timeline):
    with pytest.raises(
        TypeError,
        match=r"^DDPConfig: timeline must be a Timeline, got .*\. Pass elche_jax\.Timel",
    ):
        DDPConfig(timeline=timeline)


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass
from elche_jax.config import DDPConfig

@dataclass(frozen=True)
class Mine(DDPConfig):
    anchor: int = 20
    overhead_target: float = 0.2
    total: int | None = None
"""


def test_a_subclass_has_its_own_defaults_in_a_file_that_postpones_annotations():
    names = {"__name__": __name__}
    exec(POSTPONED, names)
    mine = names["Mine"](policy="cadence")
    assert type(mine.anchor) is int and mine.cadence_for(2, kinds=1).anchor == 20
    assert names["Mine"](max_anchor=0).cadence_for(2, kinds=1).total == 40
