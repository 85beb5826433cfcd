"""The initial training state, its shapes, and checks of the arguments it is made from."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from elche_jax import _check as check
from elche_jax.averaging.fragments import assign_fragments
from elche_jax.data.convert import check_plain
from elche_jax.engine.bits import check_bits, check_integers, is_float, is_key, wide_dtype
from elche_jax.engine.devices import names_of
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.lane import Fleet, Lane
from elche_jax.engine.laned import LanedArray, LeadArray, StackedArray, devices_of
from elche_jax.engine.local import LocalRule
from elche_jax.engine.loss import describe, is_real
from elche_jax.engine.merge import MergeRules, resolve_merge
from elche_jax.engine.replicas import check_not_given_up, hold_over, is_stacked, replicate_over
from elche_jax.engine.returned import named_leaves
from elche_jax.engine.shapes import difference, named, one_of, shapes_of
from elche_jax.engine.state import AveragingState, PendingUpdate, TrainState
from elche_jax.engine.trainable import Selection, select_trainable
from elche_jax.train.across import check_same_optimizer, check_same_start
from elche_jax.train.options import Options

PyTree = Any


@dataclass(frozen=True)
class StateSpec:
    """Specification of the state made by `TrainStep.init`.

    Attributes:
        shapes: Shapes of the stacked state.
        key_impl: Name of the PRNG implementation of the state's key.
        selection: Which parameters are trained.
        merge: How model state is merged.
    """

    shapes: TrainState
    key_impl: str
    selection: Selection
    merge: MergeRules

    @property
    def one(self) -> TrainState:
        """Shapes of one device's state."""
        return one_of(self.shapes)


def check_init(
    options: Options, params: PyTree, model_state: PyTree
) -> tuple[Selection, MergeRules]:
    """Check the arguments of `TrainStep.init`.

    Returns:
        Which parameters are trained, and how model state is merged.
    """
    check_one_copy("TrainStep.init", params=params, model_state=model_state)
    check_bits("TrainStep.init", params=params, model_state=model_state)
    check_model_state(model_state)
    if options.merge is not None and model_state is None:
        raise ValueError(
            "TrainStep.init: model_state must be given where build_train_step got merge, "
            f"got None and merge={options.merge!r}. Pass model_state, or leave merge out."
        )
    selection = select_trainable(options.trainable, params)
    shapes = jax.eval_shape(lambda: model_state)
    merge = resolve_merge(options.merge, shapes, may_keep=options.averaging is not None)
    return selection, merge


def initial_state(
    optimizer: optax.GradientTransformation,
    options: Options,
    fleet: Fleet,
    params: PyTree,
    model_state: PyTree,
    rng: Any,
) -> tuple[TrainState, StateSpec]:
    """Return the replicated state before the first window, and its specification.

    Checks the arguments, and that they are the same in all processes; see `TrainStep.init`.
    """
    selection, merge = check_init(options, params, model_state)
    key = as_key(rng)
    check_same_start(fleet.job, params, model_state, key, selection, merge)
    if options.late and "first" in merge.rules:
        rule = "be 'mean', 'pooled', 'max' or 'keep' where exchanges are late"
        todo = "The first device's values cannot be corrected later; 'keep' leaves each its own."
        raise ValueError(check.message("TrainStep.init", "merge", rule, "'first'", todo))
    trained, frozen = selection.split(params)
    check_params(trained, frozen)
    zero: Any = np.int32(0)  # a transfer guard allows explicit transfers only
    state = TrainState(
        params=params,
        opt_state=optimizer_state(optimizer, trained),
        model_state=model_state,
        key=jax.random.key_data(key),
        microbatches=zero,
        examples=zero,
        step=zero,
        loss_scale=options.loss_scale,
        averaging=initial_averaging(options, trained, merge, model_state),
    )
    # copies, as windows donate the state and the caller's arrays must survive
    rule = GradientRule if options.averaging is None else LocalRule
    rest, held = rule.split_lead(state)
    state = rule.join_lead(replicate_over(fleet, rest), hold_over(fleet, held))
    check_same_optimizer(fleet.job, state)
    return state, StateSpec(shapes_of(state), str(jax.random.key_impl(key)), selection, merge)


def initial_averaging(
    options: Options, trained: PyTree, merge: MergeRules, model_state: PyTree
) -> AveragingState | None:
    """Return one device's initial `AveragingState`; None if there is nothing to keep.

    Args:
        options: The options of the training step.
        trained: The trained parameters.
        merge: How model state is merged.
        model_state: The model state.

    Raises:
        ValueError: There are more fragments than arrays.
    """
    rule, leaves = options.averaging, jax.tree.leaves(trained)
    sizes = [leaf.size for leaf in leaves]
    parts = assign_fragments(sizes, 1 if rule is None else rule.fragments)
    zeros = [np.zeros(leaf.shape, wide_dtype(leaf)) for leaf in leaves]
    state = AveragingState()
    if rule is not None and rule.outer is not None:
        sums = [jnp.asarray(leaf, wide_dtype(leaf)) for leaf in leaves]
        outer = (optimizer_state(rule.outer, [sums[i] for i in part], OUTER) for part in parts)
        state = state.replace(outer=tuple(outer))
    # kept on any number of devices and with a host exchange, so that checkpoints can move there
    if rule is not None and (len(parts) > 1 or options.may_be_late):
        state = state.replace(base=leaves, steps=np.zeros((len(parts),), np.float32))
    if options.rule.compression == "int8":
        state = state.replace(error=[np.zeros(leaf.shape, np.float32) for leaf in leaves])
    if options.may_be_late:
        state = state.replace(merged=merge.of_sent(model_state))
    unchanged = merge.sent.unchanged(state.merged)
    none = PendingUpdate(zeros, np.float32(0), np.bool_(True), unchanged)
    state = state.replace(pending=(none,) * options.rule.delay)
    # an outer optimizer's state is needed even if it has no leaves, like that of plain SGD
    return state if state.outer or jax.tree.leaves(state) else None


def check_params(trained: PyTree, frozen: PyTree) -> None:
    """Raise if a trained parameter is not a float array, or a frozen one is not an array."""
    for name, leaf in named(frozen, "params"):
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                "TrainStep.init: every leaf of params must be an array, but frozen leaf "
                f"{name} is {describe(leaf)}."
            )
        check_integers("TrainStep.init", "integers of params", name, leaf)
    if not jax.tree.leaves(trained):
        raise ValueError("TrainStep.init: params must hold at least one array, got none.")
    for name, leaf in named(trained, "params"):
        if not hasattr(leaf, "dtype") or not is_float(leaf):
            raise TypeError(
                f"TrainStep.init: every leaf of params must be a float array, but leaf "
                f"{name} is {describe(leaf)}. Convert numbers "
                "with jnp.asarray; name what is not trained with trainable."
            )


def check_one_copy(where: str, **trees: PyTree) -> None:
    """Raise if arrays in arguments are masked, or stacked over devices like those of a state."""
    for argument, tree in trees.items():
        for path, leaf in named_leaves(where, argument, tree):
            check_plain(path, leaf, f"{where}: {argument}")
            # on one device, a stacked array cannot be told from one with an axis of length 1
            if is_stacked(leaf) and not leaf.is_fully_replicated:
                name = jax.tree_util.keystr(path) or argument
                check_not_given_up(where, name, leaf)
                got = f"leaf {name} with the copies of {leaf.shape[0]} devices"
                todo = "Take one with elche_jax.unreplicate."
                raise ValueError(check.message(where, argument, "be one copy", got, todo))


MOVED = "elche_jax.replicate(jax.tree.map(lambda leaf: leaf[0], state), train.devices)"
"""How to move a stacked state, on the host or any devices, onto those of a training step."""

REPLACED = "Put what you replace in it on every device: elche_jax.replicate(value, train.devices)."
"""How to set a learning rate in the state, for example."""


def other_shapes(where: str, state: TrainState, like: TrainState) -> str:
    """Return an error's message if a state has other shapes than it must; else an empty string."""
    if not (differs := difference(shapes_of(state), like)):
        return ""
    rule = "have the shapes of the one that TrainStep.init made last"
    todo = f"Was it made for another model or optimizer? {REPLACED}"
    return check.message(where, "state", rule, f"another: {differs}", todo)


def explain(state: TrainState, like: TrainState, fleet: Fleet, cause: BaseException) -> None:
    """Raise an error that explains why a window failed, if its state is to blame.

    Args:
        state: The state.
        like: The shapes of the state that `init` made.
        fleet: The devices of the training step.
        cause: The error.
    """
    if text := other_shapes("train", state, like):
        raise ValueError(text) from cause
    if isinstance(cause, Exception):
        _check_place(state, fleet, cause)


def _check_place(state: TrainState, fleet: Fleet, cause: BaseException) -> None:
    """Raise if a state is not on the devices of a training step, in the same order.

    A fleet of several lanes accepts a state of other lanes; a single lane does not.
    """
    for path, leaf in named_leaves("train", "state", state):
        if isinstance(leaf, LeadArray):
            continue
        devices = devices_of(leaf)
        other_lanes = isinstance(fleet, Lane) and isinstance(leaf, LanedArray)
        if devices == list(fleet.devices) and not other_lanes:
            continue
        rule = f"be on the devices of this training step ({', '.join(names_of(fleet.devices))})"
        rule += ", in this order" + (" and one lane" if devices == list(fleet.devices) else "")
        got = f"leaf {jax.tree_util.keystr(path)} on {', '.join(names_of(devices))}"
        todo = f"Move it: {MOVED}."
        raise ValueError(check.message("train", "state", rule, got, todo)) from cause


def check_digits(like: TrainState) -> None:
    """Raise if a state has a dtype that JAX does not have enabled at present."""
    for name, leaf in named(like):
        if jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True) != leaf.dtype:
            rule, got = "have a dtype that JAX has enabled", f"{leaf.dtype} in leaf {name}"
            todo = "Train with jax_enable_x64 as it was at TrainStep.init."
            raise ValueError(check.message("TrainStep.windows", "state", rule, got, todo))


def check_model_state(model_state: PyTree) -> None:
    """Raise if the dtype of a model state leaf cannot be merged, or its integers would overflow."""
    for name, leaf in named(model_state, "model_state"):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        if is_real(array):
            check_integers("TrainStep.init", "integers of model_state", name, array)
            continue
        raise TypeError(
            f"TrainStep.init: every leaf of model_state must be an array of floats, integers or "
            f"bools, but leaf {name} is {describe(leaf)}. For random numbers, use the key that "
            "loss_fn gets for every microbatch."
        )


INNER = "optimizer"
OUTER = "outer optimizer of averaging"
CALLS = {
    INNER: "grads, state, params, value=loss, grad=grads, microbatches=m, examples=e",
    OUTER: "difference, state, params",
}
"""Arguments of an optimizer's update, for messages."""


def optimizer_state(
    optimizer: optax.GradientTransformation, params: PyTree, name: str = INNER
) -> PyTree:
    """Return the state of an optimizer for these parameters.

    Raises:
        TypeError: `init` or `update` fails on them, or `update` changes the structure, shapes or
            dtypes of the state, or returns updates of another structure or other shapes than the
            parameters. Any exception of the optimizer becomes an error that explains how the
            optimizer is called.
    """

    def update(params: PyTree, opt_state: PyTree) -> PyTree:
        tx = optax.with_extra_args_support(optimizer)
        grads = jax.tree.map(jnp.asarray, params)
        if name == OUTER:
            return tx.update(grads, opt_state, params)
        work = {"microbatches": jnp.int32(0), "examples": jnp.int32(0)}
        return tx.update(grads, opt_state, params, value=jnp.float32(0), grad=grads, **work)

    try:
        opt_state = optimizer.init(params)
        updates, new = jax.eval_shape(update, params, opt_state)
    except Exception as error:  # for example, it requires value_fn
        raise TypeError(
            f"TrainStep.init: the {name} must work with update({CALLS[name]}), got "
            f"{type(error).__name__}: {str(error).rstrip('.')}.{_instead(error)}"
        ) from error
    differs = difference(new, jax.eval_shape(lambda: opt_state))
    if differs:
        raise TypeError(
            f"TrainStep.init: an update of the {name} must keep the structure, shapes and "
            f"dtypes of its state, got another: {differs}."
        )
    if jax.tree.structure(updates) == jax.tree.structure(params):  # they may differ in dtype
        updates = jax.tree.map(lambda u, p: jax.ShapeDtypeStruct(u.shape, p.dtype), updates, params)
    if differs := difference(updates, params):
        raise TypeError(
            f"TrainStep.init: updates of the {name} must have the structure and shapes of the "
            f"parameters, got others: {differs}."
        )
    return opt_state


def _instead(error: Exception) -> str:
    """Return advice on what to pass instead of an optimizer that cannot be called as usual."""
    # optax.lookahead reads these attributes of its LookaheadParams, which plain params lack
    if getattr(error, "name", None) in ("fast", "slow") or "LookaheadParams" in str(error):
        return (
            " For Lookahead write averaging=DiLoCo(optax.sgd(slow_step_size), "
            "inner_steps=sync_period)."
        )
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        # optax.contrib.sam claims to take extra arguments, but accepts only those it names
        return (
            " If it needs none of the keywords, pass optax.GradientTransformation(it.init, "
            "lambda grads, state, params=None: it.update(grads, state, params))."
        )
    return ""


def check_buffers(state: Any, where: str = "train") -> None:
    """Raise if a state's buffers cannot be donated to a program.

    JAX's own errors about deleted or twice donated buffers are hard to read, and end the process
    if there are several devices.
    """
    arrays = jax.tree.leaves(state)
    kinds = set(map(type, arrays))  # runs in every window: check per type, not per leaf
    if not isinstance(state, TrainState) or not all(
        issubclass(kind, StackedArray) for kind in kinds
    ):
        got, todo = type(state).__name__, ""
        if isinstance(state, TrainState):
            host = {name: leaf for name, leaf in named(state) if not isinstance(leaf, StackedArray)}
            name, leaf = next(iter(host.items()))
            got += f" whose {name} is on the host, {describe(leaf)}"
            got += f" (one of {len(host)})" if len(host) > 1 else ""
            todo = f"{REPLACED} To move a whole state with an axis over devices: {MOVED}."
        rule = "be a TrainState on the devices (TrainStep.init, or replicate(state, train.devices))"
        raise TypeError(check.message(where, "state", rule, got, todo))
    if any(leaf.is_deleted() for leaf in arrays):
        name = next(name for name, leaf in named(state) if leaf.is_deleted())
        raise ValueError(
            f"{where}: state must be the one the last call returned, got leaf {name} whose "
            "buffer was given up. Write `state, metrics = train(state, window)`; what is to "
            "be used again must be copied first (leaf.copy())."
        )
    if len(set(map(id, arrays))) < len(arrays):
        seen: set[int] = set()
        name = next(name for name, leaf in named(state) if id(leaf) in seen or seen.add(id(leaf)))
        raise ValueError(
            f"{where}: every leaf of state must be an array of its own, got leaf {name}, which is "
            "in the state twice. Copy it: leaf.copy()."
        )


def as_key(rng: Any, where: str = "TrainStep.init") -> jax.Array:
    """Return a typed key from a seed, a raw key or a typed key; `where` is for messages."""
    key: jax.Array
    rule = "be a key or an integer seed"
    if isinstance(rng, int | np.integer) and not isinstance(rng, bool):
        # jax.random.key accepts larger seeds, but drops the upper half without 64-bit types
        seed = check.integer(where, "rng", rng, low=0, high=2**32 - 1)
        with jax.transfer_guard_host_to_device("allow"):  # a seed is meant to be placed
            return jax.random.key(seed)
    if isinstance(rng, jax.Array) and not isinstance(rng, Tracer) and rng.is_deleted():
        got = f"{describe(rng)} whose buffer was given up"
        raise ValueError(check.message(where, "rng", rule, got, "Make a new key."))
    if isinstance(rng, jax.Array) and is_key(rng):
        key = rng
    elif isinstance(rng, jax.Array) and rng.dtype == jnp.uint32:
        try:
            key = jax.random.wrap_key_data(rng)
        except (TypeError, ValueError) as error:  # not a key of the default kind
            todo = "Pass a raw key of another kind as jax.random.wrap_key_data(it, impl=...)."
            raise TypeError(check.message(where, "rng", rule, describe(rng), todo)) from error
    else:
        raise TypeError(check.message(where, "rng", rule, describe(rng)))
    if key.shape != ():
        raise TypeError(f"{where}: rng must be one key, got an array of shape {key.shape}.")
    return key
