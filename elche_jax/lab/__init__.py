"""Experiments with artificially slowed devices. No other part of the package imports this one."""

from elche_jax.lab.emulate import (
    EmulatedSpeeds as EmulatedSpeeds,
    ExtraWork as ExtraWork,
    Schedule as Schedule,
    constant as constant,
    drift as drift,
    jitter as jitter,
    throttle as throttle,
)
