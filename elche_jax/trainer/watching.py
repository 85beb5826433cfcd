"""Monitored metrics: early stopping and the scores of checkpoints."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.trainer.evaluation import Patience
from elche_jax.trainer.plan import FitPlan


class Watching:
    """Watch evaluation and training metrics for early stopping and checkpoint scores.

    An evaluation metric takes precedence over a training metric of the same name. So with an
    evaluation, a training metric gives no score and stops no run before the names of the evaluation
    metrics are known.

    Args:
        plan: Arguments of `Trainer.fit`.
    """

    def __init__(self, plan: FitPlan):
        self._plan, self._rule = plan, plan.early_stopping
        self._patience = Patience()
        self._evaluated: list[str] | None = None if plan.evaluation is not None else []
        self._before: list[str] | None = None  # the same of the run that is resumed
        self._training: Collection[str] | None = None
        self._score: tuple[int, float] | None = None

    @property
    def over(self) -> bool:
        """Whether the run should stop because the metric has stopped improving."""
        if self._rule is None or self._known is None:
            return False
        return self._patience.over(self._rule)

    @property
    def _known(self) -> list[str] | None:
        """Names of the evaluation metrics; None until an evaluation has told them."""
        return self._before if self._evaluated is None else self._evaluated

    def score(self, step: int) -> float | None:
        """Return the score of the state after `step` windows; None if it has none."""
        return self._score[1] if self._score is not None and self._score[0] == step else None

    def training(self, names: Collection[str]) -> None:
        """Set the names of the training metrics.

        Raises:
            ValueError: A monitored metric is known not to exist, or a metric has a name that is
                taken in metrics.csv.
        """
        self._training = names
        self._check()
        taken = {"step": "the first column of metrics.csv"} if self._plan.folder else {}
        if self._plan.log_every is not None:
            taken |= {f"window_{name}": f"the mean of {name!r} with log_every" for name in names}
        for name in names:
            if name in taken:
                raise ValueError(
                    f"loss_fn: metrics must not use the name {name!r}, which is {taken[name]}. "
                    "Choose another name."
                )

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation after `step` windows.

        Raises:
            ValueError: A monitored metric is known not to exist, or a training metric has the name
                under which an evaluation metric is reported.
        """
        rule = self._rule
        if rule is not None and rule.monitor in results and rule.monitor not in (self._known or ()):
            self._patience = Patience()  # until now it tracked the training metric of that name
        self._evaluated = list(results)
        self._check()
        self._see(step, results)

    def epoch(self, step: int, means: Mapping[str, float]) -> None:
        """Take the training metrics of an epoch that ended after `step` windows."""
        known = self._known or ()
        self._see(step, {name: value for name, value in means.items() if name not in known})

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        rule = None if self._rule is None else asdict(self._rule)
        return {"patience": asdict(self._patience), "rule": rule, "evaluated": self._known}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the output of `to_dict`; reset if another metric is monitored now."""
        if self._plan.evaluation is not None:
            # an empty list comes from a run without an evaluation: the names are still unknown
            self._before = saved["evaluated"] or None
        if self._rule is None or saved["rule"] is None:
            return
        now = asdict(self._rule)
        if all(saved["rule"][name] == now[name] for name in ("monitor", "mode", "min_delta")):
            self._patience = Patience(**saved["patience"])
            return
        logger.warning(
            "elche: early stopping monitored %s (%s) before and monitors %s (%s) now: its patience "
            "was reset.",
            saved["rule"]["monitor"],
            saved["rule"]["mode"],
            now["monitor"],
            now["mode"],
        )

    def _see(self, step: int, values: Mapping[str, float]) -> None:
        saving = self._plan.saving
        if saving is not None and saving.monitor in values and self._known is not None:
            self._score = step, values[saving.monitor]
        if self._rule is not None and self._rule.monitor in values:
            self._patience = self._patience.update(self._rule, values[self._rule.monitor])

    def _check(self) -> None:
        if self._training is None or self._evaluated is None:
            return  # unknown until the first evaluation: that of a resumed run may differ
        for name in self._evaluated:
            if f"eval_{name}" in self._training:
                raise ValueError(
                    f"metric_fn: metrics must not use the name {name!r}, as the loss reports "
                    f"'eval_{name}' already. Choose another name for one of them."
                )
        names, saving = sorted({*self._training, *self._evaluated}), self._plan.saving
        best = saving if saving is not None and saving.keep_best else None
        for where, watches in (("EarlyStopping", self._rule), ("Checkpoints", best)):
            if watches is not None and watches.monitor not in names:
                rule = f"be one of {', '.join(map(repr, names))}"
                todo = "These are the scalar metrics."
                got = repr(watches.monitor)
                raise ValueError(check.message(where, "monitor", rule, got, todo))
