"""Learning rates for windows: schedules over the work done, and rules for larger batches.

An optax schedule counts updates. Here an update covers a window, whose size depends on the
speed of the devices, so the same schedule would end at a different point on every machine.
A schedule that counts microbatches or examples does not have this problem.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from elche_jax import _check as check
from elche_jax._log import logger

Unit = Literal["microbatches", "examples"]
Rule = Literal["none", "linear", "sqrt"]


def schedule_by_work(
    factory: Callable[..., optax.GradientTransformation],
    unit: Unit = "microbatches",
    static_args: str | Iterable[str] = (),
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Make the schedules of an optimizer count the work done instead of its updates.

    Built on `optax.inject_hyperparams(factory)`, except that a schedule `f` among the
    hyperparameters is evaluated as

        value(window) = f(microbatches, or examples, of all windows before this one)

    summed over all devices. The first update uses `f(0)`, as in optax. The schedule's lengths
    and boundaries are thus in `unit`: `optax.cosine_decay_schedule(1e-3, 500_000)` ends after
    500 000 microbatches (or examples), however they are split into windows. Windows whose
    update was dropped count too.

    The values of the last update are in `opt_state.hyperparams`; inside a chain or another
    wrapper use `optax.tree.get(opt_state, "hyperparams")`. Constants are there as well, and
    can be set. All are float32, or int32 if an integer was given. (optax rounds constants to
    the dtype of the parameters; in bfloat16, Adam's 0.999 becomes 1. With 16-bit parameters,
    name the constants in `static_args`.)

    The training step passes the work to the optimizer's update as `microbatches=` and
    `examples=`, int32 scalars, which stay at 2**31 - 1 (microbatches up to 2**32). A wrapper
    around the optimizer must pass them on. `optax.chain`, `masked`, `partition`,
    `apply_if_finite` and `contrib.schedule_free` do, and so does an `optax.MultiSteps` that is
    the optimizer of a training step. `MultiSteps.gradient_transformation()`, `lookahead` and
    `contrib.split_real_and_imaginary` do not; put them inside:

        schedule_by_work(
            lambda learning_rate: optax.MultiSteps(
                optax.sgd(learning_rate), 4
            ).gradient_transformation()
        )(learning_rate=schedule)

    The outer optimizer of `DiLoCo` does not get the work, so its schedules count exchanges.

    Args:
        factory: Makes the optimizer, for instance `optax.adamw`.
        unit: What the schedules count: `"microbatches"` or `"examples"`.
        static_args: Names of arguments of `factory` that are not hyperparameters:
            functions such as `mask` of `optax.adamw`, and integers that determine shapes
            such as `min_dim_size_to_factor` of `optax.adafactor`.

    Returns:
        A function that takes the arguments of `factory`, each of which may be a
        schedule, and returns the optimizer. The optimizer's `update` raises `TypeError`
        if it has a schedule but is not given the work; its `init` does if a schedule does
        not return one number.

    Raises:
        TypeError: `factory` is not callable, takes `*args` or `**kwargs`, or has no signature;
            `static_args` are not names.
        ValueError: `unit` is unknown; `factory` has no argument named in `static_args`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from elche_jax.train.learning_rate import schedule_by_work
        >>> sgd = schedule_by_work(optax.sgd, unit="examples")(
        ...     learning_rate=optax.linear_schedule(1.0, 0.0, 1000)
        ... )
        >>> params = jnp.zeros(2)
        >>> opt_state = sgd.init(params)
        >>> for examples in (0, 640, 720):  # the training step does this
        ...     updates, opt_state = sgd.update(
        ...         jnp.ones(2), opt_state, params, examples=jnp.int32(examples)
        ...     )
        ...     print(f"{opt_state.hyperparams['learning_rate']:.2f}")
        1.00
        0.36
        0.28
    """
    where = "schedule_by_work"
    rule = "be a function that makes an optimizer"
    todo = "Pass optax.adamw, say, and its arguments to the function that is returned."
    check.instance(where, "factory", factory, Callable, rule, todo, brief=True)
    check.one_of(where, "unit", unit, get_args(Unit))
    names = (static_args,) if isinstance(static_args, str) else static_args
    rule = "be the name of an argument of factory, or several"
    check.instance(where, "static_args", names, Iterable, rule)
    static = set[str]()
    for name in names:
        check.instance(where, "static_args", name, str, rule)
        static.add(name)
    signature = _signature(factory)
    if unknown := static - signature.parameters.keys():
        rule = f"name arguments of factory ({', '.join(signature.parameters)})"
        raise ValueError(check.message(where, "static_args", rule, repr(min(unknown))))
    inject = optax.inject_hyperparams(factory, static, jnp.float32)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in bound.arguments.keys() - static:
            bound.arguments[name] = _hyperparameter(name, bound.arguments[name], unit)
        if not any(isinstance(value, _ByWork) for value in bound.arguments.values()):
            logger.warning(
                "elche: schedule_by_work was given no schedule among the arguments of %s, so "
                "that none counts work; one inside it still counts updates.",
                getattr(factory, "__name__", repr(factory)),
            )
        return inject(*bound.args, **bound.kwargs)

    return make


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of an optimizer's factory, whose arguments must all have names."""
    unnamed = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a C function may have no signature
        got = check.describe(factory)
    else:
        if not unnamed & {parameter.kind for parameter in signature.parameters.values()}:
            return signature
        got = f"one that takes {signature}"
    todo = "Wrap it: lambda learning_rate: factory(learning_rate=learning_rate)."
    raise TypeError(
        check.message("schedule_by_work", "factory", "name all its arguments", got, todo)
    )


def _hyperparameter(name: str, value: Any, unit: str) -> Any:
    """Return the value to pass to `optax.inject_hyperparams` for an argument."""
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        value = value.item()  # optax takes NumPy's numbers for other arguments
    if isinstance(value, int) and not isinstance(value, bool):
        todo = "If it is not a hyperparameter, name it in static_args."
        check.integer("schedule_by_work", name, value, low=-(2**31), high=2**31 - 1, todo=todo)
        return np.asarray(value, np.int32)  # optax's own conversion is weakly typed
    if not callable(value) or isinstance(value, optax.schedules.StatefulSchedule):
        return value
    if hasattr(value, "dtype"):  # scalar types such as jnp.bfloat16 are callable, too
        return np.dtype(cast(Any, value))
    return _ByWork(name, value, unit)


@dataclass(frozen=True)
class _ByWork:
    """A schedule over the work done: an optax `StatefulSchedule` with an empty state."""

    name: str
    schedule: Callable[[Any], Any]
    unit: str

    # these methods make it a StatefulSchedule: optax passes a plain schedule the number of
    # updates and no extra arguments
    def init(self) -> tuple[()]:
        return ()

    def update(self, state: tuple[()], **extra_args: Any) -> tuple[()]:
        if self.unit not in extra_args:
            raise TypeError(
                f"schedule_by_work: the optimizer's update must be given {self.unit}=, the work "
                f"done so far, got {', '.join(sorted(extra_args)) or 'no extra argument'}. "
                "elche_jax's training step gives it, but not to the outer optimizer of DiLoCo; a "
                "wrapper around the optimizer must pass it on."
            )
        return state

    def __call__(self, state: tuple[()], **extra_args: Any) -> jax.Array:
        work = extra_args.get(self.unit, 0)  # `init` calls it without extra arguments
        value = self.schedule(jnp.asarray(work, jnp.int32))
        kind = _kind(value)
        if kind is None:
            raise TypeError(
                f"schedule_by_work: the schedule {self.name} must return one number, "
                f"got {value!r}. If it is not a schedule, name it in static_args."
            )
        return jnp.asarray(value, kind)


def _kind(value: Any) -> Any:
    """Return the dtype in which to keep a schedule's value; None if it is not a number."""
    if isinstance(value, int | float | np.generic | np.ndarray | jax.Array) and not np.shape(value):
        dtype = jnp.result_type(value)
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.float32
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.int32
    return None


def learning_rate_factor(world_size: float, rule: Rule = "linear", ratio: float = 1.0) -> float:
    """Return the learning-rate factor for a batch `world_size` times as large.

    | rule | factor |
    |---|---|
    | `"none"` | `1` |
    | `"linear"` | `1 + ratio * (world_size - 1)` |
    | `"sqrt"` | `sqrt(1 + ratio * (world_size - 1))` |

    The linear rule (with `ratio=1`) is that of Goyal et al. 2017, arXiv:1706.02677, for
    SGD; they warm up to it over the first epochs. The square root keeps the variance of an
    update (Krizhevsky 2014, arXiv:1404.5997); for Adam and similar optimizers it follows
    from Malladi et al. 2022, arXiv:2205.10330, whose rule also changes Adam's `b1`, `b2`
    and `eps`, which is left to you. All are rules of thumb that break down beyond some
    batch size.

    A window's batch is `sum(counts)` microbatches, which equals the number of devices only
    with `EveryBatch`. So `world_size` is the factor by which the batch grows in your run:
    with `FixedTotal(64)` it is `64` compared to training on single microbatches; with
    devices of speeds 1 and 2.5 it is `3.5` compared to the first device alone.

    Args:
        world_size: The batch as a multiple of the one for which the learning rate was
            tuned, at least 1, not necessarily whole.
        rule: `"none"`, `"linear"` or `"sqrt"`.
        ratio: How much of the rule to apply, from 0 (none) to 1 (all).

    Returns:
        The factor, at least 1.

    Raises:
        TypeError: `world_size` or `ratio` is not a number.
        ValueError: `world_size` is below 1, `ratio` outside [0, 1], or `rule` unknown.

    Examples:
        >>> from elche_jax.train.learning_rate import learning_rate_factor
        >>> learning_rate_factor(4), learning_rate_factor(4, "sqrt")
        (4.0, 2.0)
        >>> learning_rate_factor(3.5, ratio=0.5)  # devices of speeds 1 and 2.5
        2.25
    """
    return _factor("learning_rate_factor", world_size, rule, ratio)


def scale_learning_rate(
    optimizer: optax.GradientTransformation,
    world_size: float,
    rule: Rule = "linear",
    ratio: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Multiply an optimizer's learning rate by `learning_rate_factor`.

    This is `optax.chain(optimizer, optax.scale(factor))`, which multiplies the update.
    That equals a larger learning rate for optimizers that multiply the update by the
    learning rate last: SGD with and without momentum, Adam, Lion, LAMB, LARS and RMSProp,
    also with a schedule, including `schedule_by_work`. The weight decay of `optax.adamw`,
    which optax also multiplies by the learning rate, grows with it, exactly as with a
    larger `learning_rate`.

    The two differ if something follows the learning rate in the chain, or if the optimizer
    uses the rate in another way. For example, the factor here multiplies the
    `weight_decay_rate` of `optax.adafactor`, whereas a larger rate does not. Clipping at the
    end of a chain, `optax.fromage`, `optax.contrib.schedule_free` and
    `optax.contrib.dadapt_adamw` differ too. Pass the learning rate times
    `learning_rate_factor` to those.

    The state is that of the chain: `opt_state[0]` is the optimizer's, and a learning rate
    read there does not include the factor.

    Args:
        optimizer: An optax optimizer.
        world_size: See `learning_rate_factor`.
        rule: See `learning_rate_factor`.
        ratio: See `learning_rate_factor`.

    Returns:
        The optimizer with the larger learning rate; it passes on extra arguments.

    Raises:
        TypeError: `optimizer` is not an optax optimizer; see `learning_rate_factor`.
        ValueError: See `learning_rate_factor`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from elche_jax.train.learning_rate import scale_learning_rate
        >>> optimizer = scale_learning_rate(optax.sgd(0.5), world_size=3)
        >>> updates, _ = optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))
        >>> updates.tolist()
        [-1.5, -1.5]
    """
    where, kind = "scale_learning_rate", optax.GradientTransformation
    todo = (
        "Pass an object like optax.MultiSteps as "
        "optax.GradientTransformationExtraArgs(it.init, it.update)."
    )
    check.instance(where, "optimizer", optimizer, kind, "be an optax optimizer", todo, brief=True)
    factor = _factor(where, world_size, rule, ratio)
    return optax.chain(optimizer, optax.scale(factor))


def _factor(where: str, world_size: float, rule: str, ratio: float) -> float:
    world_size = check.real(where, "world_size", world_size, low=1)
    ratio = check.real(where, "ratio", ratio, low=0, high=1)
    check.one_of(where, "rule", rule, get_args(Rule))
    linear = 1.0 + ratio * (world_size - 1.0)
    return {"none": 1.0, "linear": linear, "sqrt": math.sqrt(linear)}[rule]
