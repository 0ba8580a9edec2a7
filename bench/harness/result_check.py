"""Check of the schema of results, so that plots, tables and comparisons can rely on it."""

import math
from typing import Any

from gpuaug import ArgumentError
from gpuaug.benchkit import results

_ENVIRONMENT_KEYS = ("time_utc", "commit", "dirty", "versions", "device", "gpu", "cpu")
_RATIO_KEYS = ("ratio", "ratio_low", "ratio_high")


def check_result(result: dict[str, Any]) -> None:
    """Check that a result has the schema that ``gpuaug.benchkit.results.result`` creates.

    Raises:
        ArgumentError: If ``result`` has another schema. The message names the first key that differs.
    """
    keys = {"schema", "suite", "environment", "settings", "rows"}
    for key in sorted(keys ^ set(result)):
        raise ArgumentError(f"keys of a result must be {sorted(keys)}, got {sorted(result)}. The difference is {key!r}.")
    _require(result["schema"] == results.SCHEMA, "schema", f"{results.SCHEMA}", result["schema"])
    _require(isinstance(result["suite"], str) and result["suite"], "suite", "a name", result["suite"])
    _require(isinstance(result["settings"], dict), "settings", "a dict", result["settings"])
    _require(isinstance(result["environment"], dict), "environment", "a dict", result["environment"])
    for key in _ENVIRONMENT_KEYS:
        _require(key in result["environment"], f"environment.{key}", "present", "nothing")
    _require(isinstance(result["rows"], list) and result["rows"], "rows", "a list that is not empty", result["rows"])
    for index, row in enumerate(result["rows"]):
        _check_row(row, f"rows[{index}]")


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
