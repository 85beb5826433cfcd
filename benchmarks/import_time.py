"""The time that loading all of `elche_jax` adds to `import jax, flax, optax`.

    python benchmarks/import_time.py [--repeats 7]

Every repeat is a separate process; the first one, which writes bytecode, is ignored.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

MOST_MS = 100

CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
begun = time.perf_counter()
import flax, jax, optax
before = time.perf_counter()
from elche_jax import *
print(1e3 * (before - begun), 1e3 * (time.perf_counter() - before))
"""


def measure() -> tuple[float, float]:
    """Return the milliseconds of these three imports, and of ours after them."""
    root = str(Path(__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", CODE, root], check=True, capture_output=True, text=True
    ).stdout
    theirs, ours = map(float, out.split())
    return theirs, ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    theirs, ours = zip(*[measure() for _ in range(repeats + 1)][1:], strict=True)
    print(f"import jax, flax, optax: {median(theirs):6.0f} ms")
    print(
        f"import elche_jax after:  {median(ours):6.0f} ms "
        f"({min(ours):.0f} to {max(ours):.0f}), asked <= {MOST_MS}"
    )
    return int(median(ours) > MOST_MS)


if __name__ == "__main__":
    sys.exit(main())
