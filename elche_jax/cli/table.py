"""Tables: plain text, with lines and colours on a terminal."""

import os
import sys
from collections.abc import Sequence

NO_WRAP = 10_000
"""Width in columns that no plain table reaches."""


def show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose other columns are numbers.

    Examples:
        >>> show(["device", "speed"], [["a", "1.5"], ["bb", "10"]])
        device  speed
        a         1.5
        bb         10
    """
    from rich.console import Console
    from rich.table import Table

    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        table, console = Table(), Console(markup=False, emoji=False)
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        console = Console(color_system=None, width=NO_WRAP, markup=False, emoji=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    # Not printed by rich, whose console ends the process with its own exit code on a broken pipe.
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")
