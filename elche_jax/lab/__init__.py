"""Experiments: devices made slower on purpose. Nothing else imports this folder."""

from elche_jax.lab.emulate import (
    EmulatedSpeeds as EmulatedSpeeds,
    ExtraWork as ExtraWork,
    Schedule as Schedule,
    constant as constant,
    drift as drift,
    jitter as jitter,
    throttle as throttle,
)
