"""Results of benchmark suites: functions that create, write and show them. The results of all suites have one schema."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpuaug.benchkit.environment import environment as read_environment
from gpuaug.core.devices import plain_torch_reason

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
"""Version of the schema of results."""

_RATIO_KEYS = ("ratio", "ratio_low", "ratio_high")
"""Keys of a row with the median, the smallest and the largest ratio of the rounds.

A ratio is the rate of the row's variant divided by the rate of the baseline in the same round (``windows.Row``).
"""

_HEADINGS = {"steps_per_s": "steps/s", "images_per_s": "images/s", "host_ms": "host ms"}
"""Key of a row → heading of its column in the table."""


def result(
    suite: str,
    *,
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    device: torch.device,
    environment: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of a suite: rows, settings, hardware, versions and commit.

    Args:
        suite: Name of the suite.
        rows: Results of ``gpuaug.benchkit.windows.Row.record``, or dicts with a ``name`` and numbers whose keys end with a
            unit, such as ``host_ms``.
        settings: Settings of the suite: sizes, workers, whether batches were page-locked.
        device: Device of the measurement.
        environment: Result of ``gpuaug.benchkit.environment.environment`` before the measurement. Default: read now.

    Returns:
        The result. Its environment has a further entry ``plain_torch``: the reason why ``gpuaug.fuse`` ran in
        plain torch on a GPU, or ``None``.
    """
    environment = read_environment(device) if environment is None else environment
    return {
        "schema": SCHEMA,
        "suite": suite,
        "environment": environment | {"plain_torch": plain_torch_reason(device)},
        "settings": settings,
        "rows": rows,
    }


def write(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Write a result as strict JSON with sorted keys. NaN and infinities, which JSON does not have, become null."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(result), sort_keys=True, indent=2, allow_nan=False) + "\n"
    # Written to another file, which then replaces the old result, so that an interruption does not destroy the old result.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def table(rows: list[dict[str, Any]], title: str) -> "Table":
    """Return a table for rich, with a line per row of the result. The table fits into a terminal of 80 columns.

    Args:
        rows: Rows of a result. ``name`` is the name of a variant, which is one of the compared loops. ``case`` is the title of
            the comparison that the variant belongs to: where it changes, a new section begins.
        title: Title above the table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result_table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    result_table.add_column("variant")
    batch_sizes = {row.get("batch_size") for row in rows}
    keys = [key for key in _HEADINGS if any(key in row for row in rows)]
    headings = ["batch"] * (len(batch_sizes) > 1) + [_HEADINGS[key] for key in keys] + ["ratio", "spread"]
    for heading in headings:
        result_table.add_column(heading, justify="right", no_wrap=True)
    case = None
    for row in rows:
        if row.get("case") != case:
            case = row.get("case")
            result_table.add_section()
            result_table.add_row(Text(str(case), style="bold"))
        ratio, low, high = (row.get(key) for key in _RATIO_KEYS)
        result_table.add_row(
            Text(row["name"]),
            *[str(row.get("batch_size", ""))] * (len(batch_sizes) > 1),
            *(_formatted_number(row.get(key)) for key in keys),
            "" if ratio is None else f"{ratio:.2f}",
            "" if low is None or high is None else f"{low:.2f}-{high:.2f}",
        )
    return result_table


def _finite(value: Any) -> Any:
    """Return nested dicts and lists with ``None`` in place of NaN and infinities, and lists in place of tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _formatted_number(value: float | None) -> str:
    """Return a number with three significant digits, without decimals from 100 on; an empty string for ``None``."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
