"""Write the tables in the documentation from the results, so that no figure is typed by hand.

    python -m bench tables           rewrite README.md and docs/**/*.md
    python -m bench tables --check   fail if one of them is not what the results say

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is one of

    SUITE               all cases by their rate; SUITE is the name of a file in bench/results
    SUITE.CASE          all figures of one case
    SUITE.FIGURE        one figure of all cases, by its key
    SUITE.BATCH_SIZE    all cases by their rate, at this batch size

``rows: A; B`` after the name shows these rows alone, ``cases: C; D`` after that these cases alone, in this order. ``by case``
before both makes a line of each case and a column of each row, in the order of ``rows``. Text whose file or part is missing is
left alone.
"""

import json
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.result_rows import RESULTS, hardware, panel_title, shown_rows

_TABLE = re.compile(
    r"(?P<begin><!-- table: (?P<suite>\w+)(?:\.(?P<part>[\w.-]+))?(?P<by_case> by case)?(?: rows: (?P<rows>[^\n]+?))?"
    r"(?: cases: (?P<cases>[^\n]+?))? -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)

# What a profile's table shows of the figures of the whole.
_PROFILED = ("bound_ms", "full_ms", "serial_ms", "exposed_ms", "headspace", "copy_gb_per_s", "link_gb_per_s")

# What a table of the whole shows, the first that its rows have.
_RATES = ("gb_per_s", "steps_per_s", "images_per_s")

# Keys of a row that are for machines or that its other columns say already.
_HIDDEN = ("rounds", "ratio_low", "ratio_high", "batch_size", "gpu")


def rewrite(text: str, results: dict[str, dict[str, Any]]) -> str:
    """``text`` with every table between markers made anew from ``results``, by suite."""

    def replace(match: re.Match[str]) -> str:
        result = results.get(match["suite"])
        if result is None or (match["part"] and not _has(result, match["part"])):
            return match[0]
        names, cases = ([each.strip() for each in (match[key] or "").split(";") if each] for key in ("rows", "cases"))
        table = markdown(result, match["part"] or "", names, cases=cases, by_case=bool(match["by_case"]))
        return f"{match['begin']}{table}{match['end']}"

    return _TABLE.sub(replace, text)


def _has(result: dict[str, Any], part: str) -> bool:
    return any(part in (row.get("case"), str(row.get("batch_size"))) or part in row for row in result["rows"])


def markdown(
    result: dict[str, Any], part: str = "", names: Sequence[str] = (), *, cases: Sequence[str] = (), by_case: bool = False
) -> str:
    """A result, or a part of it, as a Markdown table with a line that says where it was measured.

    A result that names ``columns`` has many figures a row: it is shown at the batch size of most rows, by its rates.
    A row that is the only one of its case is shown where that case is asked for, and otherwise where no case has several.

    Args:
        result: What a file in bench/results holds.
        part: A case, the key of a figure, or a batch size. Empty: all cases by their rate.
        names: The rows to show. Empty: all.
        cases: The cases to show. Empty: all.
        by_case: Whether a table of rates or of one figure has a line for each case, and a column for each row.

    Returns:
        The table, between empty lines.

    Raises:
        ValueError: One of ``names`` is no row of this part, or one of ``cases`` no case.
    """
    columns = result["settings"].get("columns")
    case = part if any(row.get("case") == part for row in result["rows"]) else ""
    size = int(part) if part.isdigit() else None
    figure = "" if case or size else part
    # Before rows are left out: which batch size most rows have is a matter of all of them.
    rows = [row for row in result["rows"] if row.get("case") == case] if case else shown_rows(result, size)
    if missing := set(names) - {row["name"] for row in rows}:
        raise ValueError(f"A row must be one that {result['suite']!r} has here, got {sorted(missing)}. Correct the page.")
    if missing := set(cases) - {row.get("case") for row in rows}:
        raise ValueError(f"A case must be one that {result['suite']!r} has here, got {sorted(missing)}. Correct the page.")
    rows = [row for row in rows if (not names or row["name"] in names) and (not figure or figure in row)]
    if cases:
        rows = sorted((row for row in rows if row["case"] in cases), key=lambda row: cases.index(row["case"]))
    trained = "top1_percent" in rows[0]
    rate = next((key for key in _RATES if key in rows[0]), "")
    if "verdicts" in result["settings"]:
        lines = _profiles(result)
    elif case or trained or not (figure or rate):
        lines = _flat(rows, [key for key in columns or () if not case or key != "case"])
    else:
        at = f", B={rows[0]['batch_size']}" if columns else ""
        lines = _by_case(rows, result, figure or rate, _heading(figure or rate) + at, turned=by_case, order=names)
    ratios = not trained and not case and (not figure or figure in _RATES)
    return "\n".join(["", *lines, "", _caption(result, rows, ratios=ratios), ""]) + "\n"


def _by_case(
    rows: list[dict[str, Any]], result: dict[str, Any], key: str, heading: str, *, turned: bool, order: Sequence[str]
) -> list[str]:
    columns = list(dict.fromkeys(panel_title(row, rows) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    if turned and order:
        names.sort(key=order.index)
    cells = {(row["name"], panel_title(row, rows)): _rate(row, result, key) for row in rows}
    ceilings = result["settings"].get("ceilings", ())
    titles = [f"*{name}* (ceiling)" if name in ceilings else name for name in names]
    if turned:
        return _lines([heading, *titles], [[column, *(cells.get((name, column), "") for name in names)] for column in columns])
    body = [[title, *(cells.get((name, column), "") for column in columns)] for name, title in zip(names, titles, strict=True)]
    return _lines([heading, *columns], body)


def _profiles(result: dict[str, Any]) -> list[str]:
    """Profiles, a column for each case: the parts and loops, the bounds, and below the table what they were found to mean."""
    rows = result["rows"]
    verdicts = result["settings"]["verdicts"]
    columns = list(dict.fromkeys(panel_title(row, rows) for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        shown = {row["name"]: row["wall_ms"]} if "wall_ms" in row else {key: row[key] for key in _PROFILED if key in row}
        for name, value in shown.items():
            cells.setdefault(name, {})[panel_title(row, rows)] = _figure(value)
    # Cases differ in their stages, which stand between the copy and the step.
    names = sorted(
        cells, key=lambda name: ("load", "copy").index(name) - 3 if name in ("load", "copy") else -name.startswith("stage/")
    )
    titles = {name: f"*{_heading(name)}*" for name in _PROFILED}
    body = [[titles.get(name, name), *(cells[name].get(column, "") for column in columns)] for name in names]
    cases = dict.fromkeys(f"{row['case']}, B={row['batch_size']}" for row in rows)
    return [*_lines(["ms a batch", *columns], body), "", *(f"- *{case}*: {' '.join(verdicts[case])}" for case in cases)]


def _rate(row: dict[str, Any], result: dict[str, Any], key: str) -> str:
    # A ratio is one of rates.
    ratio = row.get("ratio") if key in _RATES else None
    shown = _figure(row[key])
    return shown if ratio is None or row["name"] == result["settings"].get("baseline") else f"{shown} ({ratio:.2f}x)"


def _flat(rows: list[dict[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in _HIDDEN]
    # A file's keys are in alphabetical order: what a row is called, then times, then the rest.
    keys.sort(key=lambda key: (key != "case", key != "name", not key.endswith(("_us", "_ms")), key))
    if columns:
        keys = [key for key in columns if any(key in row for row in rows)]
    headings = [key.removesuffix("_bytes") + ", MB" if key.endswith("_bytes") else key for key in keys]
    body = [[_cell(key, row.get(key)) for key in keys] for row in rows]
    return _lines([_heading(heading) for heading in headings], body)


def _heading(key: str) -> str:
    if key.endswith("_per_s"):
        return f"{key.removesuffix('_per_s').replace('gb', 'GB').replace('_', ' ')}/s"
    if key.endswith("_percent"):
        return f"{key.removesuffix('_percent').replace('top1', 'top-1').replace('_', ' ')}, %"
    for unit in ("us", "ms", "s"):
        if key.endswith(f"_{unit}"):
            return f"{key.removesuffix(f'_{unit}').replace('_', ' ')}, {unit.replace('us', 'µs')}"
    return key.replace("_", " ")


def _cell(key: str, value: Any) -> str:
    if key.endswith("_bytes") and value is not None:
        return _figure(value / 1e6)
    return "" if value is None else _figure(value) if isinstance(value, (int, float)) else str(value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _lines(heading: list[str], body: list[list[str]]) -> list[str]:
    rule = ["---" if index == 0 or title == "name" else "---:" for index, title in enumerate(heading)]
    return [f"| {' | '.join(cells)} |" for cells in (heading, rule, *body)]


def _caption(result: dict[str, Any], rows: Sequence[dict[str, Any]], *, ratios: bool = True) -> str:
    versions, cpu = result["environment"]["versions"], result["environment"]["cpu"]
    # Rows of several calls may come from several GPUs.
    gpus = dict.fromkeys(row["gpu"] for row in rows if "gpu" in row)
    parts = [
        " and ".join(gpus) or hardware(result),
        # Where there are several numbers of them, they are a column.
        "" if "cores" in result["rows"][0] else f"{cpu['cores_allowed']} cores",
        f"torch {versions['torch']}",
        f"{workers} workers" if isinstance(workers := result["settings"].get("workers"), int) else "",
        f"a copy alone: {link:.3g} GB/s" if (link := result["settings"].get("link_gb_per_s")) else "",
        f"measured {result['environment']['time_utc'][:10]}",
    ]
    text = ", ".join(filter(None, parts))
    baseline = result["settings"].get("baseline")
    to = "the row at 1.00" if baseline is None else f"*{baseline}*"
    ratios = ratios and any(row.get("ratio") for row in result["rows"])
    paired = f" In brackets: the ratio to {to}, paired within rounds." if ratios else ""
    return f"<sub>{text}.{paired}</sub>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench tables", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="Markdown files (default: README.md and docs/**/*.md)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table is out of date")
    options = parser.parse_args(argv)
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.results.rglob("*.json"))}
    stale = []
    for path in options.files or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]:
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        written = rewrite(text, results)
        if written != text:
            stale.append(path)
            if not options.check:
                path.write_text(written, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date' if options.check else 'rewritten'}")
    return 1 if options.check and stale else 0
