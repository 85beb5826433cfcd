"""`python -m elche_jax`: the command line."""

import sys

from elche_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
