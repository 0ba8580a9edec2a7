"""Write the tables of the documentation from stored results, so that no figure is typed by hand.

    python -m bench tables           rewrite README.md and docs/**/*.md
    python -m bench tables --check   fail if a table differs from its result

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is one of

    SUITE               rates of all cases; SUITE is the name of a file in bench/results
    SUITE.CASE          all figures of one case
    SUITE.FIGURE        one figure of all cases, by its key
    SUITE.BATCH_SIZE    rates of all cases at this batch size

After the name, ``rows: A; B`` selects rows, and then ``cases: C; D`` selects cases, in this order. With ``by case`` before
both, the table has a line per case and a column per row, in the order of ``rows``. A table whose file or part is missing is not
changed.
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

# Figures of the whole loop that the table of a profile shows.
_PROFILE_FIGURES = ("bound_ms", "full_ms", "serial_ms", "exposed_ms", "headspace", "copy_gb_per_s", "link_gb_per_s")

# Rates: tables show the first of these that the rows have.
_RATES = ("gb_per_s", "steps_per_s", "images_per_s")

# Keys of a row that tables leave out, because they are for programs, or are shown elsewhere.
_HIDDEN_KEYS = ("rounds", "ratio_low", "ratio_high", "batch_size", "gpu", "cores_allowed")


def rewrite(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Return ``text`` with every table between markers written again from ``results``, which are keyed by suite."""

    def replace(match: re.Match[str]) -> str:
        result = results.get(match["suite"])
        if result is None or (match["part"] and not _has_part(result, match["part"])):
            return match[0]
        names, cases = ([name.strip() for name in (match[key] or "").split(";") if name] for key in ("rows", "cases"))
        table = markdown(result, match["part"] or "", names, cases=cases, by_case=bool(match["by_case"]))
        return f"{match['begin']}{table}{match['end']}"

    return _TABLE.sub(replace, text)


def _has_part(result: dict[str, Any], part: str) -> bool:
    return any(part in (row.get("case"), str(row.get("batch_size"))) or part in row for row in result["rows"])


def markdown(
    result: dict[str, Any], part: str = "", names: Sequence[str] = (), *, cases: Sequence[str] = (), by_case: bool = False
) -> str:
    """Return a result, or a part of it, as a Markdown table, followed by a line about the machine and date of the measurement.

    If the settings have ``columns``, rows have many figures: the table shows the rates at the batch size with most rows. Cases
    with a single row are left out if other cases have several rows, unless ``part`` is that case.

    Args:
        result: Content of a file in bench/results.
        part: Case, key of a figure, or batch size. Empty: rates of all cases.
        names: Names of the rows to show. Empty: all.
        cases: Names of the cases to show. Empty: all.
        by_case: Whether a table of rates or of one figure has a line per case and a column per row.

    Returns:
        The table, between empty lines.

    Raises:
        ValueError: If one of ``names`` is not a row of this part, or one of ``cases`` is not a case.
    """
    columns = result["settings"].get("columns")
    case = part if any(row.get("case") == part for row in result["rows"]) else ""
    size = int(part) if part.isdigit() else None
    figure = "" if case or size else part
    # Before rows are selected, because the batch size with most rows depends on all rows.
    rows = [row for row in result["rows"] if row.get("case") == case] if case else shown_rows(result, size)
    if unknown := set(names) - {row["name"] for row in rows}:
        raise ValueError(f"A row must be one that {result['suite']!r} has here, got {sorted(unknown)}. Correct the page.")
    if unknown := set(cases) - {row.get("case") for row in rows}:
        raise ValueError(f"A case must be one that {result['suite']!r} has here, got {sorted(unknown)}. Correct the page.")
    rows = [row for row in rows if (not names or row["name"] in names) and (not figure or figure in row)]
    if cases:
        rows = sorted((row for row in rows if row["case"] in cases), key=lambda row: cases.index(row["case"]))
    is_accuracy = "top1_percent" in rows[0]
    rate = next((key for key in _RATES if key in rows[0]), "")
    heading = _heading(figure or rate)
    if heading == "images/s":
        heading = f"{result['settings'].get('sample', 'image')}s/s"
    if "verdicts" in result["settings"]:
        lines = _profile_table(result)
    elif case or is_accuracy or not (figure or rate):
        lines = _flat_table(rows, [key for key in columns or () if not case or key != "case"])
    else:
        size_suffix = f", B={rows[0]['batch_size']}" if columns else ""
        lines = _matrix(rows, result, figure or rate, heading + size_suffix, transposed=by_case, order=names)
    ratios = not is_accuracy and not case and (not figure or figure in _RATES)
    return "\n".join(["", *lines, "", _caption(result, rows, ratios=ratios), ""]) + "\n"


def _matrix(
    rows: list[dict[str, Any]], result: dict[str, Any], key: str, heading: str, *, transposed: bool, order: Sequence[str]
) -> list[str]:
    columns = list(dict.fromkeys(panel_title(row, rows) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    if transposed and order:
        names.sort(key=order.index)
    cells = {(row["name"], panel_title(row, rows)): _rate_cell(row, result, key) for row in rows}
    ceilings = result["settings"].get("ceilings", ())
    limit = "lower limit" if "_ms" in key else "ceiling"  # for a time or a rate
    titles = [f"*{name}* ({limit})" if name in ceilings else name for name in names]
    if transposed:
        return _markdown_lines(
            [heading, *titles], [[column, *(cells.get((name, column), "") for name in names)] for column in columns]
        )
    body = [[title, *(cells.get((name, column), "") for column in columns)] for name, title in zip(names, titles, strict=True)]
    return _markdown_lines([heading, *columns], body)


def _profile_table(result: dict[str, Any]) -> list[str]:
    """Return a table with a column per case: times of parts and loops, bounds; and below the table the verdict of each case."""
    rows = result["rows"]
    verdicts = result["settings"]["verdicts"]
    columns = list(dict.fromkeys(panel_title(row, rows) for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        figures = (
            {row["name"]: row["wall_ms"]} if "wall_ms" in row else {key: row[key] for key in _PROFILE_FIGURES if key in row}
        )
        for name, value in figures.items():
            cells.setdefault(name, {})[panel_title(row, rows)] = _figure(value)
    # Cases differ in their stages, which come between the copy and the step.
    names = sorted(
        cells, key=lambda name: ("load", "copy").index(name) - 3 if name in ("load", "copy") else -name.startswith("stage/")
    )
    titles = {name: f"*{_heading(name)}*" for name in _PROFILE_FIGURES}
    body = [[titles.get(name, name), *(cells[name].get(column, "") for column in columns)] for name in names]
    cases = dict.fromkeys(f"{row['case']}, B={row['batch_size']}" for row in rows)
    return [
        *_markdown_lines(["ms a batch", *columns], body),
        "",
        *(f"- *{case}*: {' '.join(verdicts[case])}" for case in cases),
    ]


def _rate_cell(row: dict[str, Any], result: dict[str, Any], key: str) -> str:
    # Ratios are of rates.
    ratio = row.get("ratio") if key in _RATES else None
    text = _figure(row[key])
    return text if ratio is None or row["name"] == result["settings"].get("baseline") else f"{text} ({ratio:.2f}x)"


def _flat_table(rows: list[dict[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in _HIDDEN_KEYS]
    # Labels first, then times, then other figures, since the keys in a file are in alphabetical order.
    keys.sort(key=lambda key: (key != "case", key != "name", not key.endswith(("_us", "_ms")), key))
    if columns:
        keys = [key for key in columns if any(key in row for row in rows)]
    headings = [key.removesuffix("_bytes") + ", MB" if key.endswith("_bytes") else key for key in keys]
    body = [[_cell(key, row.get(key)) for key in keys] for row in rows]
    return _markdown_lines([_heading(heading) for heading in headings], body)


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


def _markdown_lines(heading: list[str], body: list[list[str]]) -> list[str]:
    rule = ["---" if index == 0 or title == "name" else "---:" for index, title in enumerate(heading)]
    return [f"| {' | '.join(cells)} |" for cells in (heading, rule, *body)]


def _caption(result: dict[str, Any], rows: Sequence[dict[str, Any]], *, ratios: bool = True) -> str:
    versions, cpu = result["environment"]["versions"], result["environment"]["cpu"]
    # Rows of one result may have been measured on different machines.
    gpus = dict.fromkeys(row["gpu"] for row in rows if "gpu" in row)
    cores = dict.fromkeys(str(row.get("cores_allowed", cpu["cores_allowed"])) for row in rows)
    parts = [
        " and ".join(gpus) or hardware(result),
        # If rows have different numbers of cores, the number is a column.
        "" if "cores" in result["rows"][0] else f"{' and '.join(cores)} cores",
        f"torch {versions['torch']}",
        f"{workers} workers" if isinstance(workers := result["settings"].get("workers"), int) else "",
        f"a copy alone: {link:.3g} GB/s" if (link := result["settings"].get("link_gb_per_s")) else "",
        f"measured {result['environment']['time_utc'][:10]}",
    ]
    text = ", ".join(filter(None, parts))
    baseline = result["settings"].get("baseline")
    reference = "the row at 1.00" if baseline is None else f"*{baseline}*"
    ratios = ratios and any(row.get("ratio") for row in rows)
    paired = f" In brackets: the ratio to {reference} in the same round, the median over rounds." if ratios else ""
    return f"<sub>{text}.{paired}</sub>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m bench tables", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="Markdown files (default: README.md and docs/**/*.md)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table is out of date")
    options = parser.parse_args(argv)
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.results.glob("*.json"))}
    stale = []
    for path in options.files or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]:
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        rewritten = rewrite(text, results)
        if rewritten != text:
            stale.append(path)
            if not options.check:
                path.write_text(rewritten, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date' if options.check else 'rewritten'}")
    return 1 if options.check and stale else 0
