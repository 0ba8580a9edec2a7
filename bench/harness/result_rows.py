"""Selection and grouping of a result's rows for plots, tables and comparisons."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results")
"""Folder of the stored results, relative to the root of the repository."""

# Key of a figure: label of its axis. Plots show the first of these figures that a row has.
FIGURES = {
    "top1_percent": "top-1, %",
    "gb_per_s": "GB/s",
    "steps_per_s": "steps/s",
    "images_per_s": "images/s",
    "median_us": "µs",
    "step_ms": "ms a step",
}


def compared_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result. If any case has several rows, cases with a single row are left out."""
    rows: list[dict[str, Any]] = result["rows"]
    counts = Counter(row.get("case") for row in rows)
    return [row for row in rows if counts[row.get("case")] > 1] or rows


def shown_rows(result: dict[str, Any], batch_size: int | None = None) -> list[dict[str, Any]]:
    """Return the rows that a plot or table shows.

    Without ``batch_size``, these are all rows, or the rows of the batch size with most rows if rows have many figures.
    """
    rows = compared_rows(result)
    if batch_size is None and "columns" in result["settings"]:
        counts = Counter(row["batch_size"] for row in rows)
        batch_size = max(counts, key=lambda size: (counts[size], size))
    return [row for row in rows if batch_size in (None, row.get("batch_size"))]


def panel_title(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Return the title of the panel or column of ``row``: its case, and its batch size if ``rows`` have several."""
    parts = [str(row["case"])] if row.get("case") else []
    if "batch_size" in row and (not parts or len({other_row.get("batch_size") for other_row in rows}) > 1):
        parts.append(f"B={row['batch_size']}")
    return ", ".join(parts)


def hardware(result: dict[str, Any]) -> str:
    """Return the name of the GPU on which a result was measured, or ``CPU``."""
    gpu = result["environment"]["gpu"]
    return gpu["name"] if gpu else "CPU"
