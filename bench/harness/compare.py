"""Compare two results of one suite, row by row.

    python -m bench compare before.json after.json --json comparison.json

Rows are matched by case, batch size and name. A line of the comparison has the rates in both results (or the times, if the row
has no rate), the ratio of the second to the first and, if both have rounds, whether the ranges of the rounds overlap. If they
do, the difference is within the spread, and only more rounds can show whether there is one.
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from bench.harness.console import console
from bench.harness.result_check import check_result
from bench.harness.result_rows import FIGURES, hardware
from gpuaug.benchkit import results

Key = tuple[str, str, str]
"""(case, batch size, name) of a row; empty strings for labels that the row lacks."""


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Compare the results ``a`` and ``b``.

    Raises:
        ValueError: If the results are not of one suite, or two rows of a result have the same labels.
    """
    if a["suite"] != b["suite"]:
        raise ValueError(f"results must be of one suite, got {a['suite']!r} and {b['suite']!r}. Compare two runs of the same.")
    rows_a, rows_b = _by_key(a), _by_key(b)
    rows = [_labels(key) | _row(rows_a[key], rows_b[key]) for key in rows_a if key in rows_b]
    return {
        "suite": a["suite"],
        "a": _origin(a),
        "b": _origin(b),
        "warnings": _warnings(a, b),
        "rows": rows,
        "only_a": [_labels(key) for key in rows_a if key not in rows_b],
        "only_b": [_labels(key) for key in rows_b if key not in rows_a],
    }


def table(comparison: dict[str, Any]) -> Table:
    """Return the matched rows of a comparison as a rich table."""
    rows = comparison["rows"]
    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    labels = [key for key in ("case", "batch_size", "name") if any(key in row for row in rows)]
    for key in labels:
        rich_table.add_column(key.replace("_", " "), justify="right" if key == "batch_size" else "left")
    for heading in ("", "A", "B", "B/A"):
        rich_table.add_column(heading, justify="right", no_wrap=True)
    rich_table.add_column("spread")
    spread_text = {None: "", True: "within", False: "outside"}
    for row in rows:
        unit = FIGURES.get(row["figure"], row["figure"].replace("_", " "))
        cells = [Text(str(row.get(key, ""))) for key in labels]
        rich_table.add_row(
            *cells, unit, _number(row["a"]), _number(row["b"]), f"{row['ratio']:.3f}", spread_text[row["within_spread"]]
        )
    return rich_table


def _by_key(result: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    rows_by_key: dict[Key, dict[str, Any]] = {}
    for row in result["rows"]:
        key = (str(row.get("case", "")), str(row.get("batch_size", "")), row["name"])
        if key in rows_by_key:
            raise ValueError(
                f"rows of {result['suite']} must differ in case, batch size or name, got two of {_label_text(_labels(key))}. "
                "A suite of moments rather than rates cannot be compared row by row."
            )
        rows_by_key[key] = row
    return rows_by_key


def _labels(key: Key) -> dict[str, Any]:
    case, batch_size, name = key
    return ({"case": case} if case else {}) | ({"batch_size": int(batch_size)} if batch_size else {}) | {"name": name}


def _row(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    figure = _common_figure(a, b)
    # A row has rounds of its rate only, not of times.
    rounds = (a.get("rounds"), b.get("rounds")) if figure.endswith("_per_s") else (None, None)
    within = max(map(min, rounds)) <= min(map(max, rounds)) if all(rounds) else None
    return {"figure": figure, "a": a[figure], "b": b[figure], "ratio": b[figure] / a[figure], "within_spread": within}


def _common_figure(a: dict[str, Any], b: dict[str, Any]) -> str:
    shared_keys = [key for key in a if isinstance(a[key], (int, float)) and a[key] and b.get(key)]
    shared_keys = [key for key in shared_keys if key.endswith(("_per_s", "_us", "_ms", "_s", "_bytes"))]
    # Figures that are plotted come first, rates before times.
    candidates = [*(key for key in FIGURES if key in shared_keys), *shared_keys]
    candidates.sort(key=lambda key: not key.endswith("_per_s"))
    if not candidates:
        raise ValueError(
            f"rows of {a['name']!r} must share a rate or a time, got {sorted(a)} and {sorted(b)}. Measure one again."
        )
    return candidates[0]


def _origin(result: dict[str, Any]) -> dict[str, Any]:
    environment = result["environment"]
    return {
        "hardware": hardware(result),
        "cores": environment["cpu"]["cores_allowed"],
        "torch": environment["versions"]["torch"],
        "commit": environment["commit"],
        "dirty": environment["dirty"],
        "time_utc": environment["time_utc"],
    }


def _warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    origin_a, origin_b = _origin(a), _origin(b)
    differences = {
        "hardware": "the GPUs differ",
        "cores": "the numbers of cores differ",
        "torch": "the versions of torch differ",
    }
    return [
        f"{text}: {origin_a[key]} and {origin_b[key]}. A ratio may say more about that than about the code."
        for key, text in differences.items()
        if origin_a[key] != origin_b[key]
    ]


def _heading(letter: str, path: Path, origin: dict[str, Any]) -> str:
    commit = (origin["commit"] or "unknown")[:9] + (" with changes" if origin["dirty"] else "")
    machine = f"{origin['hardware']}, {origin['cores']} cores, torch {origin['torch']}"
    return f"{letter}: {path}: {machine}, commit {commit}, measured {origin['time_utc'][:10]}"


def _label_text(labels: dict[str, Any]) -> str:
    return ", ".join(f"B={value}" if key == "batch_size" else str(value) for key, value in labels.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m bench compare", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A.json", help="the result to which ratios are relative")
    parser.add_argument("b", type=Path, metavar="B.json", help="the other result")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the comparison there")
    options = parser.parse_args(argv)
    loaded_results = []
    for path in (options.a, options.b):
        try:
            loaded_results.append(json.loads(path.read_text(encoding="utf-8")))
            check_result(loaded_results[-1])
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    try:
        comparison = compare(*loaded_results)
    except ValueError as error:
        parser.error(str(error))
    lines = [comparison["suite"], _heading("A", options.a, comparison["a"]), _heading("B", options.b, comparison["b"])]
    lines += [f"warning: {text}" for text in comparison["warnings"]]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if comparison["rows"]:
        console.print(table(comparison))
    for letter in "ab":
        for labels in comparison[f"only_{letter}"]:
            console.print(f"only in {letter.upper()}: {_label_text(labels)}", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        results.write(options.json, comparison)
    return comparison
