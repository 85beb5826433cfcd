"""What `make docs`, which builds the documentation, would not notice."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "elche_jax"


def test_examples_are_a_section():
    """The reference shows what is under `Examples:` as code; what is under `Example:`, as prose."""
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"^\s*Example:$", path.read_text(encoding="utf-8"), re.M), path
