"""One table of all cadences, one suite that each of them passes."""

import ast
import copy
import json
import sys
from dataclasses import FrozenInstanceError, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import elche_jax.cadence as package
from elche_jax.cadence import (
    HOLD_GROWTH,
    QSR,
    STABLE,
    AdaComm,
    Balanced,
    ElChe,
    EveryBatch,
    FixedTotal,
    PostLocal,
    Replay,
    WindowReport,
    WindowTime,
    nudge_down,
)

laws = settings(deadline=None, database=None, derandomize=True, max_examples=40)

CADENCES = {
    "elche": ElChe(),
    "elche_tight": ElChe(anchor=3, max_anchor=5, max_batch_diff=1),
    "elche_hinted": ElChe(speed_hint=(1, 2.3)),
    "elche_speeds": ElChe(speed_hint=[1.0, 2.0, 4.0]),
    "balanced": Balanced(total=12, calibration_windows=1, rebalance_every=2),
    "balanced_hinted": Balanced(total=12, calibration_windows=3, speed_hint=(1, 2.3)),
    "fixed_total": FixedTotal(total=12),
    "fixed_total_scarce": FixedTotal(total=2),
    "every_batch": EveryBatch(),
    "replay": Replay([(1, 2, 3)] * 20),
    "window_time": WindowTime(),
    "window_time_short": WindowTime(window_ms=0.5, least=1),
    "qsr": QSR(alpha=0.1, base=4, learning_rate=lambda step: 0.05 / (1 + step)),
    "post_local": PostLocal(switch=3, anchor=4),
    "adacomm": AdaComm(anchor=8),
}
CONSTANT_TOTAL = {
    "balanced": 12,
    "balanced_hinted": 12,
    "fixed_total": 12,
    "fixed_total_scarce": 2,
}
every_cadence = pytest.mark.parametrize("name", CADENCES)
windows = st.lists(
    st.tuples(
        st.lists(st.floats(0.0, 1e3), min_size=3, max_size=3),
        st.lists(st.integers(0, 50), min_size=3, max_size=3),
        st.floats(0.0, 1e3),
        st.sampled_from([STABLE, HOLD_GROWTH, nudge_down(0.5)]),
    ),
    min_size=1,
    max_size=10,
)


@every_cadence
@laws
@given(windows=windows)
def test_any_report_leads_to_a_sound_plan(name, windows):
    cadence = CADENCES[name]
    state = cadence.init(3)
    for wall_ms, counts, sync_ms, verdict in windows:
        report = WindowReport(wall_ms, counts, sync_ms, 1.0)
        before = copy.deepcopy(state)
        after = cadence.update(state, report, verdict)
        # pure: neither the state nor the report is touched, and no hidden memory
        assert state == before
        assert report == WindowReport(wall_ms, counts, sync_ms, 1.0)
        assert cadence.update(state, report, verdict) == after
        state = after
        assert len(state.counts) == 3
        assert {type(count) for count in state.counts} == {int}
        assert min(state.counts) >= 0
        assert sum(state.counts) == CONSTANT_TOTAL.get(name, sum(state.counts)) > 0
        # the state's way through JSON ends in an equal state of plain numbers
        through = type(state).from_dict(json.loads(json.dumps(state.to_dict())))
        assert through == state
        assert cadence.update(through, report) == cadence.update(state, report)


@every_cadence
@laws
@given(windows=windows, lost=st.sets(st.integers(0, 2), min_size=1, max_size=2))
def test_the_devices_that_are_left_have_a_sound_plan(name, windows, lost):
    cadence = CADENCES[name]
    if cadence.scripted:
        return  # a recording needs its devices, see `Controller.without`
    state = cadence.init(3)
    for wall_ms, counts, sync_ms, verdict in windows:
        state = cadence.update(state, WindowReport(wall_ms, counts, sync_ms, 1.0), verdict)
    before, left = copy.deepcopy(state), 3 - len(lost)
    state = cadence.without(state, lost)
    for wall_ms, counts, sync_ms, verdict in [(None, None, None, None), *windows]:
        if counts is not None:
            report = WindowReport(wall_ms[:left], counts[:left], sync_ms, 1.0)
            state = cadence.update(state, report, verdict)
        assert len(state.counts) == left and min(state.counts) >= 0
        assert sum(state.counts) == CONSTANT_TOTAL.get(name, sum(state.counts)) > 0
        assert type(state).from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert cadence.without(before, lost) == cadence.without(copy.deepcopy(before), lost)


@every_cadence
def test_config_and_state_are_frozen_and_comparable(name):
    cadence = CADENCES[name]
    state = cadence.init(3)
    assert is_dataclass(cadence)
    assert type(state) is cadence.state_type
    assert state == copy.deepcopy(cadence).init(3)
    assert hash(cadence) == hash(copy.deepcopy(cadence))
    for frozen in (cadence, state):
        with pytest.raises(FrozenInstanceError):
            frozen.counts = (1, 1, 1)


@every_cadence
def test_update_checks_its_arguments(name):
    cadence = CADENCES[name]
    where = rf"^{type(cadence).__name__}\.update: "
    state = cadence.init(3)
    good = WindowReport((1.0,) * 3, (1,) * 3, 0.0)
    with pytest.raises(
        ValueError, match=where + r"report must have one entry per device \(3\), got 2"
    ):
        cadence.update(state, WindowReport((1.0, 1.0), (1, 1), 0.0))
    with pytest.raises(TypeError, match=where + "report must be of type WindowReport"):
        cadence.update(state, None)
    with pytest.raises(TypeError, match=where + "verdict must be of type Verdict"):
        cadence.update(state, good, "hold_growth")


@every_cadence
@pytest.mark.parametrize("world_size", [True, 3.0, "3", None])
def test_world_size_must_be_an_integer(name, world_size):
    cadence = CADENCES[name]
    where = rf"^{type(cadence).__name__}\.init: world_size must be an integer, got "
    with pytest.raises(TypeError, match=where):
        cadence.init(world_size)


@pytest.mark.parametrize("name", ["balanced", "fixed_total", "every_batch"])
def test_one_device_is_allowed(name):
    cadence = CADENCES[name]
    state = cadence.init(1)
    report = WindowReport((5.0,), state.counts, 0.0)
    assert cadence.update(state, report).counts == state.counts
    with pytest.raises(ValueError, match=r"world_size must be at least 1, got 0\.$"):
        cadence.init(0)


def test_every_batch_is_one_each_whatever_happens():
    cadence = EveryBatch()
    state = cadence.init(3)
    report = WindowReport((900.0, 1.0, 1.0), (1, 1, 1), 500.0)
    for verdict in (STABLE, HOLD_GROWTH, nudge_down()):
        assert cadence.update(state, report, verdict).counts == (1, 1, 1)


def test_all_exported_names_exist_and_are_documented():
    named = [
        alias.asname
        for node in ast.parse(Path(package.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert "ElChe" in named and None not in named  # `as` marks a name as exported
    for name in named:
        if name not in ("STABLE", "HOLD_GROWTH"):
            assert getattr(package, name).__doc__


def test_nothing_but_python_and_numpy_is_imported():
    sources = sorted(Path(package.__file__).parent.glob("*.py"))
    assert len(sources) > 10
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                modules = [node.module or ""]
                if modules == ["elche_jax"]:
                    assert [alias.name for alias in node.names] == ["_check"]
                    continue
            for module in modules:
                top = module.split(".")[0]
                assert (
                    top == "numpy"
                    or top in sys.stdlib_module_names
                    or module.startswith("elche_jax.cadence")
                ), (source.name, module)
