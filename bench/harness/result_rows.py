"""Rows of a result, for pictures, tables and comparisons: which are shown, by which figure, grouped by what."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results")
"""The folder of JSON files, from the root of the repository."""

# The figures a row may be drawn by, the first that it has, and what the axis says.
FIGURES = {
    "top1_percent": "top-1, %",
    "gb_per_s": "GB/s",
    "steps_per_s": "steps/s",
    "images_per_s": "images/s",
    "median_us": "µs",
    "step_ms": "ms a step",
}


def compared_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result, without those that are the only one of their case where other cases have several."""
    rows: list[dict[str, Any]] = result["rows"]
    counts = Counter(row.get("case") for row in rows)
    return [row for row in rows if counts[row.get("case")] > 1] or rows


def shown_rows(result: dict[str, Any], batch_size: int | None = None) -> list[dict[str, Any]]:
    """The rows that a picture or table of the whole shows.

    These are the rows of ``batch_size``; without one, where a row has many figures, of the batch size that most rows have.
    """
    rows = compared_rows(result)
    if batch_size is None and "columns" in result["settings"]:
        counts = Counter(row["batch_size"] for row in rows)
        batch_size = max(counts, key=lambda size: (counts[size], size))
    return [row for row in rows if batch_size in (None, row.get("batch_size"))]


def panel(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """What groups rows: the case if they have one, and the batch size where it differs."""
    parts = [str(row["case"])] if row.get("case") else []
    if "batch_size" in row and (not parts or len({other.get("batch_size") for other in rows}) > 1):
        parts.append(f"B={row['batch_size']}")
    return ", ".join(parts)


def hardware(result: dict[str, Any]) -> str:
    """The GPU that a result was measured on, or that there was none."""
    gpu = result["environment"]["gpu"]
    return gpu["name"] if gpu else "CPU"
