"""What runs the windows of a training step: one runner per kind of loss and model."""

import logging
from dataclasses import dataclass
from typing import Any

import jax
import optax

from elche_jax.data.source import IterableSource
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.host.program import HostProgram
from elche_jax.engine.host.runner import HostRunner
from elche_jax.engine.lane import Lane
from elche_jax.engine.local import LocalRule
from elche_jax.engine.loss import LossFn, inspect_loss
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import Microbatches
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.rule import Ended, Rule
from elche_jax.engine.runner import Runner
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection
from elche_jax.train.options import Options

PyTree = Any
logger = logging.getLogger("elche_jax")

TrainRunner = Runner | HostRunner
"""What runs the windows of a training step."""


@dataclass(frozen=True)
class StateSpec:
    """What `TrainStep.init` has learned: shapes of the state, and what follows of them."""

    shapes: TrainState
    key_impl: str
    selection: Selection
    merge: MergeRules

    @property
    def one(self) -> TrainState:
        """Shapes of one device's state."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.shapes)


@dataclass(frozen=True)
class BatchSpec:
    """How the data come.

    Attributes:
        microbatch: Shapes of one microbatch.
        mask_key: Name under which a microbatch has the mask of its valid examples.
        ragged: Whether a microbatch may have fewer valid examples, where they are used.
    """

    microbatch: PyTree
    mask_key: str | None
    ragged: bool


def reads_ragged(source: Any, size: int, drop_last: bool) -> bool:
    """Whether a microbatch may have fewer valid examples than the others."""
    return not drop_last and (isinstance(source, IterableSource) or bool(source.size % size))


class Runners:
    """Makes runners, and keeps them.

    Args:
        loss_fn: The user's loss.
        optimizer: The optax optimizer.
        lane: The devices.
        options: What was asked for.
        cache: Compiled programs.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        lane: Lane,
        options: Options,
        cache: CompileCache,
    ):
        self._loss_fn, self._optimizer, self._lane = loss_fn, optimizer, lane
        self._options, self._cache = options, cache
        self._runners: dict[Any, TrainRunner] = {}
        self._used: TrainRunner | None = None
        self._unreported: PyTree = None

    def __contains__(self, runner: object) -> bool:
        return runner in self._runners.values()

    def release(self) -> None:
        """Gives back what runners keep on the devices."""
        self._unreported = None
        for runner in self._runners.values():
            runner.release()

    @property
    def unreported(self) -> PyTree:
        """What the next window will report of the last one, see `Runner.unreported`."""
        return self._used.unreported if isinstance(self._used, Runner) else self._unreported

    @unreported.setter
    def unreported(self, rows: PyTree) -> None:
        self._used, self._unreported = None, rows

    def get(self, initial: StateSpec, reads: BatchSpec) -> TrainRunner:
        """The runner for a state and data of these shapes.

        Raises:
            TypeError: `loss_fn` returns none of its forms.
            ValueError: The loss cannot leave out the examples that a microbatch lacks.
        """
        options, shapes, impl = self._options, initial.shapes, initial.key_impl
        loss_fn = LossFn(
            self._loss_fn.fn, self._loss_fn.has_aux, shapes.model_state is not None, reads.mask_key
        )
        one = initial.one
        key = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), one.key)
        cast = options.precision.cast
        params, batch = jax.eval_shape(cast, (one.params, reads.microbatch))
        form = inspect_loss(loss_fn, params, one.model_state, batch, key)
        if form.form != "vector" and reads.mask_key is None and reads.ragged:
            raise ValueError(
                "windows: with drop_last=False the loss must be a vector of per-example "
                f"losses or take a mask (mask_key), got a {form.form} loss. Return one "
                "loss per example, pass mask_key='mask', or drop_last=True."
            )
        if options.loss_scale is not None and "loss_scale" in form.aux:
            raise TypeError(
                "loss_fn: aux must not use the name 'loss_scale', every window reports it "
                "already where the scale is dynamic. Choose another name."
            )
        names = tuple(sorted(form.aux))
        leaves, structure = jax.tree.flatten(shapes)
        known = (  # without the function itself, the same in all calls, which may have no hash
            reads.mask_key, loss_fn.has_model_state, impl, form.form, names, structure,
            initial.selection, initial.merge,
            tuple((x.shape, x.dtype) for x in leaves),
        )  # fmt: skip
        if known not in self._runners:
            work = Microbatches(
                loss_fn, form.form, names, impl, initial.selection, options.precision
            )
            self._runners[known] = self._make(work, initial)
        runner = self._runners[known]
        if runner is not self._used:
            self._hand_on(runner)
        self._used = runner
        return runner

    def _hand_on(self, runner: Runner | HostRunner) -> None:
        """Gives a runner what the one before has not reported yet, where it can report it."""
        rows, taken = self.unreported, None
        self._unreported = None
        if isinstance(runner, Runner):
            runner.unreported = rows
            taken = runner.unreported
        if rows is not None and jax.tree.structure(taken) != jax.tree.structure(rows):
            logger.warning(
                "train: loss and metrics of the window before the stop are not reported, as this "
                "run has one device, other metrics or an exchange on the host."
            )

    def exchanged_bytes(self, initial: StateSpec) -> tuple[int, int]:
        """Bytes that each device exchanges in a window, with fragments on average, and bytes of
        float32 that frozen parameters save."""
        if self._lane.world_size == 1:
            return 0, 0
        rule, one = self.rule(initial), initial.one

        def brought(state: TrainState) -> list[Contribution]:
            carry = rule.zeros(state)
            after, done = rule.finish(state, carry)
            sums = rule.sums_of(carry)
            parts = [Ended(state, after, done, part) for part in range(rule.parts)]
            return [rule.contribute(ended, sums)[0] for ended in parts]

        sent = sum(map(rule.reduction(one).bytes_of, jax.eval_shape(brought, one)))
        frozen = jax.tree.leaves(initial.selection.split(one.params)[1])
        return sent // rule.parts, 4 * sum(leaf.size for leaf in frozen)

    def rule(self, initial: StateSpec, work: Microbatches | None = None) -> Rule:
        """What a window does to states of these shapes.

        Args:
            initial: The shapes.
            work: The gradient of a microbatch; None where nobody is to compute one.
        """
        options, size = self._options, self._lane.world_size
        if work is None:
            work = Microbatches(self._loss_fn, "scalar", (), "", initial.selection)
        common: Any = {
            "work": work, "tx": self._optimizer, "size": size, "merge": initial.merge,
            "compression": options.rule.compression if size > 1 else None, "late": options.late,
            "pending": options.pending, "max_grad_norm": options.max_grad_norm,
        }  # fmt: skip
        averaging = options.averaging
        if averaging is not None:
            return LocalRule(**common, parts=averaging.fragments, averaging=averaging)
        alone = options.late or options.host is not None or options.rule.compression == "int8"
        return GradientRule(
            **common, drop_nonfinite=options.finite.drops, packs=size > 1 and not alone
        )

    def _make(self, work: Microbatches, initial: StateSpec) -> TrainRunner:
        options, emulate = self._options, self._options.emulate
        rule, where = self.rule(initial, work), (self._lane, self._cache, initial.shapes)
        if options.host is None:
            return Runner(CollectiveProgram(rule, emulate), *where)
        seconds = None if emulate is None else emulate.on_host()
        program = HostProgram(rule, emulate if seconds is None else None)
        return HostRunner(program, *where, options.host, seconds)
