"""How long the others wait for a sign of life of a process that has ended."""

from elche_jax._neighbours import Place

HEARTBEAT = 600 if Place.here() else 4
"""Seconds: longer than a test may take, so that none waits for it where ends are seen."""
