"""Console of the suites, and tables of rows."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 140)


def print_rows(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print rows as a table with a column for each key."""
    table = Table(title=title, title_justify="left")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key.replace("_", " "), justify="left" if key in {"name", "case"} else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in map(row.get, keys)))
    console.print(table)
