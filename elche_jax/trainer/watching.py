"""Metrics that decide: on early stopping, and on which checkpoints are best."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from elche_jax import _check as check
from elche_jax.trainer.evaluation import Patience
from elche_jax.trainer.plan import FitPlan

logger = logging.getLogger("elche_jax")


class Watching:
    """Takes the metrics of evaluations and epochs, and knows what follows from them.

    A metric of an evaluation takes precedence over one of the training with the same name.

    Args:
        plan: What was asked for.
    """

    def __init__(self, plan: FitPlan):
        self._plan, self._rule = plan, plan.early_stopping
        self._patience = Patience()
        self._evaluated: list[str] | None = None if plan.evaluation is not None else []
        self._training: Collection[str] | None = None
        self._score: tuple[int, float] | None = None

    @property
    def over(self) -> bool:
        """Whether the run is to end, because the metric has stopped getting better."""
        return self._rule is not None and self._patience.over(self._rule)

    def score(self, step: int) -> float | None:
        """How good the state after so many windows is, if it was evaluated."""
        return self._score[1] if self._score is not None and self._score[0] == step else None

    def training(self, names: Collection[str]) -> None:
        """The training has metrics of these names.

        Raises:
            ValueError: No metric has a name that is watched, as far as that is known.
        """
        self._training = names
        self._check()

    def evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """Takes the metrics of an evaluation after so many windows.

        Raises:
            ValueError: No metric has a name that is watched, as far as that is known.
        """
        if self._evaluated is None and self._rule is not None and self._rule.monitor in results:
            self._patience = Patience()  # so far it was the training's of the same name
        self._evaluated = list(results)
        self._check()
        self._see(step, results)

    def epoch(self, step: int, means: Mapping[str, float]) -> None:
        """Takes the training's metrics of an epoch that ended after so many windows."""
        evaluated = self._evaluated or ()
        self._see(step, {name: value for name, value in means.items() if name not in evaluated})

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        rule = None if self._rule is None else asdict(self._rule)
        return {"patience": asdict(self._patience), "rule": rule, "evaluated": self._evaluated}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on with what `to_dict` gave; starts afresh if something else is watched now."""
        if self._plan.evaluation is not None:
            self._evaluated = saved["evaluated"] or None
        if self._rule is None or saved["rule"] is None:
            return
        now = asdict(self._rule)
        if all(saved["rule"][name] == now[name] for name in ("monitor", "mode", "min_delta")):
            self._patience = Patience(**saved["patience"])
            return
        logger.warning(
            "elche: early stopping looked at %s (%s) before, and looks at %s (%s) now: it begins "
            "anew.",
            saved["rule"]["monitor"],
            saved["rule"]["mode"],
            now["monitor"],
            now["mode"],
        )

    def _see(self, step: int, values: Mapping[str, float]) -> None:
        saving = self._plan.saving
        if saving is not None and saving.monitor in values:
            self._score = step, values[saving.monitor]
        if self._rule is not None and self._rule.monitor in values:
            self._patience = self._patience.see(self._rule, values[self._rule.monitor])

    def _check(self) -> None:
        if self._training is None or self._evaluated is None:
            return  # what an evaluation gives is known after the first one
        names, saving = sorted({*self._training, *self._evaluated}), self._plan.saving
        best = saving if saving is not None and saving.keep_best else None
        for where, watches in (("EarlyStopping", self._rule), ("Checkpoints", best)):
            if watches is not None and watches.monitor not in names:
                rule = f"be one of {', '.join(map(repr, names))}"
                todo = "Those are the metrics that are one number each."
                got = repr(watches.monitor)
                raise ValueError(check.message(where, "monitor", rule, got, todo))
