"""`docs/flax.md`: its scripts run as they stand, and what they print is as good as it looks."""

import re
from pathlib import Path

import pytest
from marks import slow

PAGE = (Path(__file__).parents[2] / "docs" / "flax.md").read_text(encoding="utf-8")
SCRIPTS = {
    title: script
    for title, script in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.S | re.M
    )
}
# What the last line printed must have for its last number: at least, at most.
GOOD = {
    "Linen": (0.9, 1),
    "NNX": (0.9, 1),
    "Heads": (0, 0.1),
    "Flax's train state": (0, 0.1),
}


def test_every_script_is_found():
    assert list(SCRIPTS) == list(GOOD)
    assert PAGE.count("```python") == len(GOOD)


@pytest.mark.parametrize("title", [slow(x) if x in ("Linen", "NNX", "Heads") else x for x in GOOD])
def test_a_script_runs(title, capsys):
    exec(compile(SCRIPTS[title], title, "exec"), {"__name__": "__main__"})
    number = float(re.findall(r"[\d.]+(?:e-\d+)?", capsys.readouterr().out)[-1])
    low, high = GOOD[title]
    assert low <= number <= high
