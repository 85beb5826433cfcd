"""Metrics that something depends on: early stopping, and which checkpoints are best."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elche_jax.trainer.evaluation import Patience, monitored
from elche_jax.trainer.plan import FitPlan


class Watching:
    """Takes the metrics of evaluations and epochs, and knows what follows of them.

    A metric of an evaluation goes before one of the training that has the same name.

    Attributes:
        score: The newest value of what says which checkpoints are best, until it is used.

    Args:
        plan: What was asked for.
    """

    def __init__(self, plan: FitPlan):
        self._plan = plan
        self._patience = Patience()
        self._evaluated: list[str] | None = None
        self.score: float | None = None

    def evaluation(self, results: Mapping[str, float]) -> bool:
        """Takes an evaluation's metrics; says whether the run is to end."""
        self._evaluated = list(results)
        return self._see(results)

    def epoch(self, means: Mapping[str, float]) -> bool:
        """Takes an epoch's metrics; says whether the run is to end.

        Raises:
            ValueError: No metric has the name that is watched.
        """
        if self._plan.evaluation is not None and self._evaluated is None:
            return False  # its names are not known yet
        evaluated = self._evaluated or []
        known = dict(means) | dict.fromkeys(evaluated, 0.0)
        for where, monitor in self._monitors():
            monitored(where, monitor, known)
        return self._see({name: value for name, value in means.items() if name not in evaluated})

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"patience": asdict(self._patience), "evaluated": self._evaluated}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on with what `to_dict` gave."""
        self._patience, self._evaluated = Patience(**saved["patience"]), saved["evaluated"]

    def _see(self, values: Mapping[str, float]) -> bool:
        rule, saving = self._plan.early_stopping, self._plan.saving
        if saving is not None and saving.monitor in values:
            self.score = values[saving.monitor]
        if rule is None or rule.monitor not in values:
            return False
        self._patience = self._patience.see(rule, values[rule.monitor])
        return self._patience.over(rule)

    def _monitors(self) -> list[tuple[str, str]]:
        rule, saving = self._plan.early_stopping, self._plan.saving
        found = [] if rule is None else [("EarlyStopping", rule.monitor)]
        if saving is not None and saving.keep_best:
            found.append(("Checkpoints", saving.monitor))
        return found
