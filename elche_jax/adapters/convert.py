"""Conversion between `flax.training`'s train state and `TrainState`."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields as fields_of
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from elche_jax import _check as check
from elche_jax.adapters.model import differing
from elche_jax.engine.loss import describe
from elche_jax.engine.replicas import replicate, unreplicate
from elche_jax.engine.shapes import one_of
from elche_jax.engine.state import TrainState, averaging_of
from elche_jax.train.initial import as_key, check_one_copy
from elche_jax.train.step import TrainStep

if TYPE_CHECKING:
    from flax.training import train_state

PyTree = Any

STATS = "batch_stats"
"""Conventional name of the model state field in subclasses of Flax's train state."""


def to_flax(
    state: TrainState,
    apply_fn: Any,
    tx: optax.GradientTransformation,
    *,
    kind: "type[train_state.TrainState] | None" = None,
    **fields: Any,
) -> "train_state.TrainState":
    """Convert one device's copy of a state to Flax's train state.

    Flax's `step` is the number of windows. The random key, the numbers of microbatches and
    examples, the loss scale, and the state of `averaging` with its pending updates are not
    converted.

    Args:
        state: The state, or one copy of it (`unreplicate`) on a device or on the host.
        apply_fn: Value of `apply_fn`.
        tx: Value of `tx`: the optimizer of the training step.
        kind: The class to create; None for `flax.training.train_state.TrainState`. It must have
            a field for each collection of the model state, such as `batch_stats`.
        fields: Values of additional fields; required for those without a default.

    Returns:
        The train state, whose leaves have the shapes of one device's copy.

    Raises:
        TypeError: `state` is not a `TrainState`, `kind` is not a train state class, or `fields`
            are not its additional fields.
        ValueError: `averaging` lets the devices' parameters differ, see `TrainStep.average`;
            `tx` is not the state's optimizer; the state was made with `trainable`, so some
            parameters have no optimizer state; or `kind` lacks a field for the model state.

    Examples:
        >>> import jax, numpy as np, optax
        >>> import elche_jax as elche
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - 1) ** 2).mean()
        >>> tx = optax.adam(0.1)
        >>> train = elche.build_train_step(loss_fn, tx, devices=jax.devices()[:2])
        >>> state = train.init({"w": np.zeros((), "float32")})
        >>> flax_state = elche.to_flax(state, apply_fn=None, tx=tx)
        >>> flax_state.step, flax_state.params["w"].shape
        (0, ())
        >>> elche.from_flax(train, flax_state).params["w"].shape
        (2,)
    """
    from flax.training import train_state

    if not isinstance(state, TrainState):
        rule = "be a TrainState of elche_jax"
        raise TypeError(check.message("to_flax", "state", rule, describe(state)))
    kind = train_state.TrainState if kind is None else kind
    if not isinstance(kind, type) or not issubclass(kind, train_state.TrainState):
        rule = "be a subclass of flax.training.train_state.TrainState"
        raise TypeError(check.message("to_flax", "kind", rule, check.describe(kind)))
    # kept by the rules under which parameters differ between windows; one device has one copy
    if averaging_of(state).base and jnp.shape(state.step) != (1,):
        rule, got = "have equal parameters on all devices", "one whose devices may differ"
        todo = (
            "Convert elche_jax.unreplicate(state).replace(params=train.average(state), "
            "averaging=None)."
        )
        raise ValueError(check.message("to_flax", "state", rule, got, todo))
    # these two are not converted, nor stacked over devices like the rest
    one = state.replace(averaging=None, loss_scale=None)
    one = unreplicate(one) if jnp.ndim(state.step) else one
    # compares shapes only, which avoids computing a second optimizer state
    differs = difference(jax.eval_shape(tx.init, one.params), one.opt_state)
    if differs:
        rule = "be the optimizer that the state was made with"
        got = f"another: its state has {differs}"
        todo = "A state made with trainable= cannot be converted."
        raise ValueError(check.message("to_flax", "tx", rule, got, todo))
    carried = {} if one.model_state is None else one.model_state
    homes: Mapping[str, Field[Any]] = vars(kind).get("__dataclass_fields__", {})
    for name in carried:
        if name not in homes:
            todo = "Pass a subclass with that field, or state.replace(model_state=None)."
            got = f"{kind.__name__} for {name!r}"
            rule = "have a field for every collection of model_state"
            raise ValueError(check.message("to_flax", "kind", rule, got, todo))
    filled = {
        "step": int(one.step), "apply_fn": apply_fn, "params": one.params, "tx": tx,
        "opt_state": one.opt_state, **carried,
    }  # fmt: skip
    _check_fields(kind.__name__, homes, filled, fields)
    return kind(**filled, **fields)


def _check_fields(
    kind: str,
    homes: Mapping[str, Field[Any]],
    filled: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> None:
    """Raise `TypeError` unless values are those of a class's remaining fields.

    Args:
        kind: Name of the class.
        homes: All of its fields.
        filled: The values that the state gives.
        fields: The values that the user gives.
    """
    for name in fields:
        if name in filled or name not in homes or not homes[name].init:
            rule = f"be fields of {kind} that the state does not fill"
            raise TypeError(check.message("to_flax", "fields", rule, repr(name)))
    for name, home in homes.items():
        required = home.init and home.default is MISSING and home.default_factory is MISSING
        if required and name not in filled and name not in fields:
            rule = f"hold every field of {kind} without a default"
            got, todo = f"none for {name!r}", f"Pass {name}=."
            raise TypeError(check.message("to_flax", "fields", rule, got, todo))


def from_flax(
    train: TrainStep, flax_state: Any, model_state: PyTree = None, rng: Any = 0
) -> TrainState:
    """Convert Flax's train state to a state for a training step.

    Like `train.init`, this starts a new run. Each Flax step counts as one window and one
    microbatch, so no random key is used twice; the keys differ from those of the Flax loop.

    Args:
        train: The training step. It must have the optimizer of `flax_state`.
        flax_state: One copy of a `flax.training.train_state.TrainState` or of a subclass. The
            field `batch_stats`, if any, becomes `model_state={"batch_stats": ...}`. Any other field
            of a subclass must be None, outside the pytree, or a collection of `model_state`.
        model_state: The model state, if any; with `batch_stats`, unless that is None.
        rng: A key or an integer seed, as for `train.init`.

    Returns:
        The state, replicated over `train.devices`; parameters, optimizer state and step are
        bitwise those of `flax_state`.

    Raises:
        TypeError: `train` is not a `TrainStep`, or `flax_state` is not a train state of Flax; or
            as raised by `TrainStep.init`.
        ValueError: The optimizer state belongs to a different optimizer or model, or
            `flax_state` is replicated or has another field; or as raised by `TrainStep.init`.
    """
    from flax.training import train_state

    check.instance("from_flax", "train", train, TrainStep)
    if not isinstance(flax_state, train_state.TrainState):
        rule, todo = "be a flax.training.train_state.TrainState", ""
        if isinstance(flax_state, TrainState):
            todo = "For a state of elche_jax, use replicate(state, train.devices)."
        raise TypeError(check.message("from_flax", "flax_state", rule, describe(flax_state), todo))
    parts = {"params": flax_state.params, "opt_state": flax_state.opt_state}
    check_one_copy("from_flax", flax_state=parts)
    if model_state is None and getattr(flax_state, STATS, None):
        model_state = {STATS: getattr(flax_state, STATS)}
    _check_all_is_kept(flax_state, model_state)
    key = as_key(rng, "from_flax")
    state = train.init(flax_state.params, model_state=model_state, rng=key)
    differs = difference(flax_state.opt_state, one_of(state.opt_state))
    if differs:
        rule = "be of the training step's optimizer and of its own parameters"
        got = f"an opt_state with {differs}"
        raise ValueError(check.message("from_flax", "flax_state", rule, got))
    step = jnp.int32(flax_state.step)
    opt_state, windows, microbatches = replicate((flax_state.opt_state, step, step), train.devices)
    return state.replace(opt_state=opt_state, step=windows, microbatches=microbatches)


def _check_all_is_kept(flax_state: Any, model_state: PyTree) -> None:
    """Raise `ValueError` if a subclass has a value that would be dropped."""
    kept = {"step", "params", "opt_state"}
    kept |= set(model_state) if isinstance(model_state, Mapping) else set()
    for field in fields_of(flax_state):
        # others, such as `apply_fn` and `tx`, are not in Flax's pytree
        in_tree = field.metadata.get("pytree_node", True) and field.name not in kept
        if in_tree and jax.tree.leaves(getattr(flax_state, field.name)):
            rule = "be None in fields that a TrainState of elche_jax lacks"
            todo = (
                f"Pass it in model_state={{{field.name!r}: ...}}, or keep it yourself and pass "
                f"flax_state.replace({field.name}=None)."
            )
            got = f"a value in {field.name!r}"
            raise ValueError(check.message("from_flax", "flax_state", rule, got, todo))


def difference(got: PyTree, want: PyTree) -> str:
    """Describe the first difference between two pytrees; empty if there is none."""
    for name, wanted, found in differing(want, got):
        return f"{found or 'none'} for leaf {name} instead of {wanted or 'none'}"
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structure {jax.tree.structure(got)} instead of {jax.tree.structure(want)}"
    return ""
