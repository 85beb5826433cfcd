"""A process that trains by rules, and says what became of its devices' parameters."""

import json
import sys

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
from averaged import train_on
from reference import LEAVES
from test_averaging_lanes import COUNTS
from test_averaging_table import TABLE

WAYS = {
    "device": {},
    "host": {"exchange": elche.HostExchange()},
    "ahead": {"config": elche.DDPConfig(policy="async", exchange="host")},
    "ahead by 5": {"exchange": elche.HostExchange(run_ahead=True, max_overshoot=5)},
    "ahead by 4": {"exchange": elche.HostExchange(run_ahead=True, max_batch_diff=4)},
    "device, float64": {"wide": True},
    "host, float64": {"wide": True, "exchange": elche.HostExchange()},
}


def trained(name, exchange):
    """The parameters of this process's devices after every window, and what was measured."""
    rule, _ = TABLE[name]
    devices = jax.devices()
    with jax.enable_x64(WAYS[exchange].get("wide", False)):
        got, metrics, state, train = train_on(
            rule, COUNTS[len(devices)], devices=devices, **WAYS[exchange]
        )
    elche.check_replicas(train.common(state))
    return {
        "params": [{leaf: stacked[leaf].tolist() for leaf in LEAVES} for stacked in got],
        "finite": all(bool(said["finite"]) for said in metrics) and train.skipped == 0,
        "loss": [float(said["loss"]) for said in metrics],
        "records": [repr(record) for record in train.records],
    }


if __name__ == "__main__":
    ranks = [at for at, d in enumerate(jax.devices()) if d.process_index == jax.process_index()]
    found = {exchange: {} for exchange in WAYS}
    for name, exchange in json.loads(sys.argv[1]):
        found[exchange][name] = trained(name, exchange)
    print(json.dumps({"ranks": ranks, "hash": hash("name"), **found}))
