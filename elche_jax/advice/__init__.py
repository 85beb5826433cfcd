"""Predictions of the throughput of a machine's devices in a run, from measurements."""

from elche_jax.advice.advice import Advice as Advice, DeviceAdvice as DeviceAdvice
from elche_jax.advice.measure import advise as advise
from elche_jax.advice.predict import Plan as Plan, Speeds as Speeds
