"""Rows of a result for plots, tables and comparisons: selection, figure and grouping."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results")
"""The folder of JSON files, from the root of the repository."""

# Figure: label of the axis. A row is plotted by its first figure in this order.
FIGURES = {
    "top1_percent": "top-1, %",
    "gb_per_s": "GB/s",
    "steps_per_s": "steps/s",
    "images_per_s": "images/s",
    "median_us": "µs",
    "step_ms": "ms a step",
}


def compared_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, without rows that are alone in their case where other cases have several."""
    rows: list[dict[str, Any]] = result["rows"]
    counts = Counter(row.get("case") for row in rows)
    return [row for row in rows if counts[row.get("case")] > 1] or rows


def shown_rows(result: dict[str, Any], batch_size: int | None = None) -> list[dict[str, Any]]:
    """The rows that a plot or table shows.

    These are the rows of ``batch_size``. Without one, and where rows have many figures: those of the batch size with most rows.
    """
    rows = compared_rows(result)
    if batch_size is None and "columns" in result["settings"]:
        counts = Counter(row["batch_size"] for row in rows)
        batch_size = max(counts, key=lambda size: (counts[size], size))
    return [row for row in rows if batch_size in (None, row.get("batch_size"))]


def panel(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Title of a row's group: its case, if any, and its batch size where rows differ in it."""
    parts = [str(row["case"])] if row.get("case") else []
    if "batch_size" in row and (not parts or len({other.get("batch_size") for other in rows}) > 1):
        parts.append(f"B={row['batch_size']}")
    return ", ".join(parts)


def hardware(result: dict[str, Any]) -> str:
    """Name of the GPU that a result was measured on, or ``CPU``."""
    gpu = result["environment"]["gpu"]
    return gpu["name"] if gpu else "CPU"
