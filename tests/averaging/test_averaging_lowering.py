"""Every program of every rule can be lowered for a GPU, which this machine need not have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from averaged import TX
from jax import export
from jax.sharding import Mesh, PartitionSpec
from marks import slow
from reference import BATCH, data, loss_fn, params
from test_averaging_lanes import APART
from test_averaging_table import TABLE

import elche_jax as elche
from elche_jax.engine.mapped import AXIS


def runner_of(averaging, lanes):
    """The runner of a training step over two devices, and its calls."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], lanes=lanes, averaging=averaging,
        cadence=elche.Replay([(2, 1)]),
    )  # fmt: skip
    train.init(params())
    with train.windows(data(), BATCH, placement="stream") as windows:
        (call,) = next(windows).calls
        return train._last_pipeline.runner, call


def lower(fn, *args):
    """Lowers a function of one device's values over two devices, as `pmap` would."""
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,))

    def on_each(*stacked):
        own = jax.tree.map(lambda x: x[0], stacked)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], fn(*own))

    mapped = jax.shard_map(
        on_each, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS),
        check_vma=False,
    )  # fmt: skip
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), args)
    return export.export(jax.jit(mapped), platforms=["cuda"])(*shapes)


def one(tree):
    """The shapes of one device."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


LANES = ["mean gradient, int8, three pending", "Local SGD, three pending",
         "DiLoCo, fragments, int8"]  # fmt: skip
OTHER = ["mean gradient, bfloat16", "DiLoCo, int8, one pending"]
"""Rules whose programs with a collective are lowered by `make test`, beside lanes of others."""


@pytest.mark.parametrize("name", [name if name in OTHER else slow(name) for name in TABLE])
def test_programs_with_a_collective(name):
    runner, call = runner_of(TABLE[name][0], None)
    program, state = runner.sums._program, one(runner.state)
    carried = jax.eval_shape(program.zeros, state)
    data, call_args = one(call.payload), one(call.call_args)
    for fn, *args in (
        (program.accumulate, program.rule.reads(state), carried, data, call_args),
        (program.combine, state, carried),
        (program.last_call, state, carried, data, call_args),
    ):
        assert lower(fn, *args).platforms == ("cuda",)


@pytest.mark.parametrize("name", [name if name in LANES else slow(name) for name in APART])
def test_programs_of_lanes(name, monkeypatch):
    """They can use what they donate: JAX warns of a buffer for which there is no result."""
    # on a CPU they donate nothing
    monkeypatch.setattr("elche_jax.engine.lanes.compiled._donated", lambda lane, *at: at)
    runner, call = runner_of(TABLE[name][0], ((0,), (1,)))
    compiled, program = runner._compiled, runner._compiled._program
    data, call_args = one(call.payload), one(call.call_args)
    state, thin, carried = compiled._state, compiled._thin, compiled._carried
    programs = [(program.accumulate, program.rule.reads(state), carried, data, call_args)]
    for part in compiled.parts:
        sent, agreed = compiled._contributed(part)[1], compiled._agreed(part)
        gathered = compiled._gathered(part, [True, True])
        programs += [
            (partial(program.contribute, part, 2), thin, carried),
            (partial(program.agree, part), thin, compiled._held, gathered),
            (partial(program.adopt, part), thin, carried, sent, agreed),
        ]
    for fn, *args in programs:
        assert lower(fn, *args).platforms == ("cuda",)
    made = [compiled.accumulating(0, runner._lanes.part(call.payload, 0))]
    for part in compiled.parts:
        contribute, agree, adopt = compiled._ending(part, 0)
        made += [contribute[0], agree, adopt[0]]
    for each in made:
        each.mapped.lower(*each.shapes())  # a warning is an error
    assert adopt[0].mapped.lower(*adopt[0].shapes()).args_info[0][0].step.donated
