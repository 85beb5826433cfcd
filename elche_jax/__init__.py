"""Data-parallel training of Flax models at the sum of the devices' speeds.

import elche_jax as elche
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elche_jax import distributed as distributed
    from elche_jax._processes import (
        ProcessLostError as ProcessLostError,
        RestartRequested as RestartRequested,
    )
    from elche_jax.adapters.convert import from_flax as from_flax, to_flax as to_flax
    from elche_jax.adapters.head import Head as Head, from_head as from_head
    from elche_jax.adapters.linen import from_linen as from_linen
    from elche_jax.adapters.model import Model as Model
    from elche_jax.adapters.nnx import from_nnx as from_nnx
    from elche_jax.advice import (
        Advice as Advice,
        DeviceAdvice as DeviceAdvice,
        Plan as Plan,
        advise as advise,
    )
    from elche_jax.averaging.exchange import HostExchange as HostExchange
    from elche_jax.averaging.rules import (
        AveragingRule as AveragingRule,
        DeviceWork as DeviceWork,
        DiLoCo as DiLoCo,
        MeanGradient as MeanGradient,
        ParameterAveraging as ParameterAveraging,
    )
    from elche_jax.cadence import (
        HOLD_GROWTH as HOLD_GROWTH,
        QSR as QSR,
        STABLE as STABLE,
        AdaComm as AdaComm,
        Balanced as Balanced,
        Cadence as Cadence,
        Divergence as Divergence,
        ElChe as ElChe,
        EveryBatch as EveryBatch,
        FixedTotal as FixedTotal,
        Guard as Guard,
        LevelGuard as LevelGuard,
        NoGuard as NoGuard,
        PostLocal as PostLocal,
        Replay as Replay,
        TrendGuard as TrendGuard,
        Verdict as Verdict,
        WindowReport as WindowReport,
        apportion as apportion,
        clamp_counts as clamp_counts,
        nudge_down as nudge_down,
        shard_sizes as shard_sizes,
    )
    from elche_jax.checkpoint.checkpointer import Checkpointer as Checkpointer
    from elche_jax.checkpoint.errors import CheckpointError as CheckpointError
    from elche_jax.checkpoint.options import Checkpoints as Checkpoints
    from elche_jax.config import DDPConfig as DDPConfig
    from elche_jax.data.order import Cursor as Cursor
    from elche_jax.engine.collectives import (
        broadcast_from as broadcast_from,
        weighted_mean as weighted_mean,
        weighted_psum as weighted_psum,
    )
    from elche_jax.engine.ddp import DDP as DDP
    from elche_jax.engine.devices import device_summary as device_summary
    from elche_jax.engine.loss import Weighted as Weighted
    from elche_jax.engine.replicas import (
        ReplicaMismatch as ReplicaMismatch,
        check_replicas as check_replicas,
        replicate as replicate,
        unreplicate as unreplicate,
    )
    from elche_jax.engine.state import TrainState as TrainState
    from elche_jax.observe.timeline import Timeline as Timeline
    from elche_jax.train.build import build_train_step as build_train_step
    from elche_jax.train.evaluate import (
        EvalStep as EvalStep,
        build_eval_step as build_eval_step,
        predict as predict,
    )
    from elche_jax.train.finite import NonFiniteError as NonFiniteError
    from elche_jax.train.in_flight import Window as Window
    from elche_jax.train.learning_rate import (
        learning_rate_factor as learning_rate_factor,
        scale_learning_rate as scale_learning_rate,
        schedule_by_work as schedule_by_work,
    )
    from elche_jax.train.step import TrainStep as TrainStep
    from elche_jax.train.windows import Windows as Windows
    from elche_jax.trainer.callback import Callback as Callback, CallbackContext as CallbackContext
    from elche_jax.trainer.epochs import EpochMetrics as EpochMetrics
    from elche_jax.trainer.evaluation import (
        EarlyStopping as EarlyStopping,
        Evaluation as Evaluation,
    )
    from elche_jax.trainer.handle import Handle as Handle
    from elche_jax.trainer.result import FitResult as FitResult
    from elche_jax.trainer.trainer import Trainer as Trainer
else:
    from elche_jax._lazy import lazily

    __getattr__, __dir__, __all__ = lazily(__spec__, globals())

__version__ = "0.1.0"
