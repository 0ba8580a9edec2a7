"""Results of benchmark suites, of one schema: functions that create, check, write and show results."""

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpuaug import ArgumentError
from gpuaug.benchkit.environment import environment as read_environment
from gpuaug.core.devices import plain_torch_reason

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1

_ENVIRONMENT_KEYS = ("time_utc", "commit", "dirty", "versions", "device", "gpu", "cpu")
_RATIO_KEYS = ("ratio", "ratio_low", "ratio_high")
_HEADINGS = {"steps_per_s": "steps/s", "images_per_s": "images/s", "host_ms": "host ms"}


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
        rows: Results of ``Row.record``, or dicts with a ``name`` and numbers whose keys end with a unit, such as ``host_ms``.
        settings: Settings of the suite: sizes, workers, whether batches were page-locked.
        device: Device of the measurement.
        environment: Result of ``gpuaug.benchkit.environment.environment`` before the measurement. Default: read now.

    Returns:
        The result. ``plain_torch`` in its environment is the reason why ``gpuaug.fuse`` ran without Triton, or ``None``.
    """
    before = read_environment(device) if environment is None else environment
    return {
        "schema": SCHEMA,
        "suite": suite,
        "environment": before | {"plain_torch": plain_torch_reason(device)},
        "settings": settings,
        "rows": rows,
    }


def write(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Write a result as strict JSON with sorted keys. NaN and infinities, which JSON does not have, become null."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(result), sort_keys=True, indent=2, allow_nan=False) + "\n"
    # Written to another file, which then replaces the old result, so that an interruption does not destroy the old result.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check(result: dict[str, Any]) -> None:
    """Check that a result has the schema that the function ``result`` creates.

    Raises:
        ArgumentError: If ``result`` has another schema. The message names the first key that differs.
    """
    keys = {"schema", "suite", "environment", "settings", "rows"}
    for key in sorted(keys ^ set(result)):
        raise ArgumentError(f"keys of a result must be {sorted(keys)}, got {sorted(result)}. The difference is {key!r}.")
    _require(result["schema"] == SCHEMA, "schema", f"{SCHEMA}", result["schema"])
    _require(isinstance(result["suite"], str) and result["suite"], "suite", "a name", result["suite"])
    _require(isinstance(result["settings"], dict), "settings", "a dict", result["settings"])
    _require(isinstance(result["environment"], dict), "environment", "a dict", result["environment"])
    for key in _ENVIRONMENT_KEYS:
        _require(key in result["environment"], f"environment.{key}", "present", "nothing")
    _require(isinstance(result["rows"], list) and result["rows"], "rows", "a list that is not empty", result["rows"])
    for index, row in enumerate(result["rows"]):
        _check_row(row, f"rows[{index}]")


def table(rows: list[dict[str, Any]], title: str) -> "Table":
    """Return a table for rich, with a section per value of ``case``. It fits into a terminal of 80 columns."""
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
            *(_figure(row.get(key)) for key in keys),
            "" if ratio is None else f"{ratio:.2f}",
            "" if low is None or high is None else f"{low:.2f}-{high:.2f}",
        )
    return result_table


def _check_row(row: Any, where: str) -> None:
    _require(isinstance(row, dict), where, "a dict", row)
    _require(isinstance(row.get("name"), str) and row["name"], f"{where}.name", "a name", row.get("name"))
    for key, value in row.items():
        if isinstance(value, (int, float)) or (value is None and _is_figure(key)):
            _require(value is not None and math.isfinite(value), f"{where}.{key}", "a finite number", value)
        if key.endswith("_per_s") or (key in _RATIO_KEYS and value is not None):
            _require(value > 0, f"{where}.{key}", "positive", value)
        if key == "rounds":
            _require(value and all(rate and rate > 0 for rate in value), f"{where}.rounds", "positive numbers", value)
    _require(any(map(_is_figure, row)), where, "a row with a figure, its unit in the key (steps_per_s)", sorted(row))


def _is_figure(key: str) -> bool:
    return key.endswith(("_per_s", "_ms", "_s", "_us", "_bytes"))


def _require(holds: Any, key: str, rule: str, value: Any) -> None:
    if not holds:
        raise ArgumentError(f"{key} must be {rule}, got {value!r}. Make results with gpuaug.benchkit.results.result.")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
