"""Rules for how many microbatches each device computes. Plain Python and NumPy, no JAX.

A cadence is a frozen config object: ``init(world_size)`` returns a state,
``update(state, report, verdict)`` returns the next one, and ``state.counts`` is the plan
for the next window.

Examples:
    >>> cadence = ElChe(anchor=10)
    >>> state = cadence.init(world_size=2)
    >>> report = WindowReport(wall_ms=(300.0, 100.0), counts=(10, 10), sync_ms=5.0)
    >>> cadence.update(state, report).counts
    (10, 30)
"""

from elche_jax.cadence.adacomm import AdaComm as AdaComm, AdaCommState as AdaCommState
from elche_jax.cadence.apportion import (
    apportion as apportion,
    clamp_counts as clamp_counts,
    shard_sizes as shard_sizes,
)
from elche_jax.cadence.balanced import Balanced as Balanced, BalancedState as BalancedState
from elche_jax.cadence.base import (
    HOLD_GROWTH as HOLD_GROWTH,
    STABLE as STABLE,
    Cadence as Cadence,
    CadenceState as CadenceState,
    Verdict as Verdict,
    WindowReport as WindowReport,
    nudge_down as nudge_down,
)
from elche_jax.cadence.controller import (
    Controller as Controller,
    ControllerState as ControllerState,
)
from elche_jax.cadence.elche import ElChe as ElChe
from elche_jax.cadence.every_batch import (
    EveryBatch as EveryBatch,
    EveryBatchState as EveryBatchState,
)
from elche_jax.cadence.fixed_total import (
    FixedTotal as FixedTotal,
    FixedTotalState as FixedTotalState,
)
from elche_jax.cadence.guards import (
    Guard as Guard,
    LevelGuard as LevelGuard,
    NoGuard as NoGuard,
    TrendGuard as TrendGuard,
)
from elche_jax.cadence.post_local import PostLocal as PostLocal
from elche_jax.cadence.proportional import (
    AnchorRule as AnchorRule,
    AnchorRuleState as AnchorRuleState,
    ElCheState as ElCheState,
)
from elche_jax.cadence.qsr import QSR as QSR
from elche_jax.cadence.replay import Replay as Replay, ReplayState as ReplayState
from elche_jax.cadence.rest import Rest as Rest, RestState as RestState
from elche_jax.cadence.scheduler import Scheduler as Scheduler, SchedulerState as SchedulerState
from elche_jax.cadence.shift import Shift as Shift, ShiftState as ShiftState
from elche_jax.cadence.state import State as State
from elche_jax.cadence.window import (
    Divergence as Divergence,
    WindowMeasurement as WindowMeasurement,
    WindowPlan as WindowPlan,
    WindowRecord as WindowRecord,
)
from elche_jax.cadence.window_time import (
    WindowTime as WindowTime,
    WindowTimeState as WindowTimeState,
)
