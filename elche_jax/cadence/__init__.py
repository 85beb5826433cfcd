"""How many microbatches each device gets. Plain Python and NumPy, no JAX.

A cadence is a frozen config object: ``init(world_size)`` makes a state,
``update(state, report, verdict)`` the next one, ``state.counts`` is the plan.

Examples:
    >>> cadence = ElChe(anchor=10)
    >>> state = cadence.init(world_size=2)
    >>> report = WindowReport(wall_ms=(300.0, 100.0), counts=(10, 10), sync_ms=5.0)
    >>> cadence.update(state, report).counts
    (10, 30)
"""

from elche_jax.cadence.adacomm import AdaComm, AdaCommState
from elche_jax.cadence.anchor_rule import AnchorRule, AnchorRuleState
from elche_jax.cadence.apportion import apportion, clamp_counts, shard_sizes
from elche_jax.cadence.balanced import Balanced, BalancedState
from elche_jax.cadence.base import (
    HOLD_GROWTH,
    STABLE,
    Cadence,
    CadenceState,
    State,
    Verdict,
    WindowReport,
    nudge_down,
    stronger,
)
from elche_jax.cadence.controller import Controller, ControllerState
from elche_jax.cadence.elche import ElChe
from elche_jax.cadence.every_batch import EveryBatch, EveryBatchState
from elche_jax.cadence.fixed_total import FixedTotal, FixedTotalState
from elche_jax.cadence.guards import Guard, LevelGuard, NoGuard, TrendGuard
from elche_jax.cadence.post_local import PostLocal
from elche_jax.cadence.proportional import ElCheState
from elche_jax.cadence.qsr import QSR
from elche_jax.cadence.replay import Replay, ReplayState
from elche_jax.cadence.scheduler import Scheduler, SchedulerState
from elche_jax.cadence.shift import Shift, ShiftState
from elche_jax.cadence.window import (
    Divergence,
    WindowMeasurement,
    WindowPlan,
    WindowRecord,
)
from elche_jax.cadence.window_time import WindowTime, WindowTimeState

__all__ = [
    "HOLD_GROWTH",
    "QSR",
    "STABLE",
    "AdaComm",
    "AdaCommState",
    "AnchorRule",
    "AnchorRuleState",
    "Balanced",
    "BalancedState",
    "Cadence",
    "CadenceState",
    "Controller",
    "ControllerState",
    "Divergence",
    "ElChe",
    "ElCheState",
    "EveryBatch",
    "EveryBatchState",
    "FixedTotal",
    "FixedTotalState",
    "Guard",
    "LevelGuard",
    "NoGuard",
    "PostLocal",
    "Replay",
    "ReplayState",
    "Scheduler",
    "SchedulerState",
    "Shift",
    "ShiftState",
    "State",
    "TrendGuard",
    "Verdict",
    "WindowMeasurement",
    "WindowPlan",
    "WindowRecord",
    "WindowReport",
    "WindowTime",
    "WindowTimeState",
    "apportion",
    "clamp_counts",
    "nudge_down",
    "shard_sizes",
    "stronger",
]
