"""Tables: plain text, and in a terminal with lines and colours."""

import os
import sys
from collections.abc import Sequence


def show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is text, the others are numbers.

    Examples:
        >>> show(["device", "speed"], [["a", "1.5"], ["bb", "10"]])
        device  speed
        a         1.5
        bb         10
    """
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        _show_rich(headers, rows)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in [headers, *rows]:
        first, *others = row
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def _show_rich(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, header in enumerate(headers):
        table.add_column(header, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
