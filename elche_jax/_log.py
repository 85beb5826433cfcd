"""The logger of the library."""

import logging

logger = logging.getLogger("elche_jax")
"""One for all modules, so that a program sets level and handlers of the library once."""
