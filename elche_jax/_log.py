"""The logger of the library."""

import logging

logger = logging.getLogger("elche_jax")
"""Shared by all modules, so that a program sets the library's level and handlers once."""
