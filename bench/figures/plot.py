"""Draw the results: a picture for each file in bench/results, into docs/images.

    python -m bench plot

The picture of a suite with rates has a panel for each case or batch size, with a bar for each row: grey for what users do
today, green for gpuaug, hatched for ceilings, which leave work out. Whiskers show the slowest and the fastest round, or the
worst and the best seed. ``bench.figures.curves`` draws suites over many batch sizes as lines, ``bench.figures.step_timeline``
training steps as a timeline, and ``bench.figures.readings`` the resources of a process in a long run.
"""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from bench.figures import curves, readings, step_timeline
from bench.figures.pictures import IMAGES
from bench.harness.result_rows import FIGURES, RESULTS, hardware, panel_title, shown_rows


def draw(result: dict[str, Any]) -> Figure | None:
    """Draw a result. Returns ``None`` if its rows have none of the figures that are plotted."""
    rows = result["rows"]
    if "readings" in rows[0]:
        return readings.draw(result)
    key = next((key for key in FIGURES if key in rows[0]), None)
    if key is None:
        return None
    title = f"{result['suite'].replace('_', ' ')}, {hardware(result)}"
    if curves.fits(result):
        return curves.draw(result, title)
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in shown_rows(result):
        panels.setdefault(panel_title(row, rows), []).append(row)
    columns = min(3, len(panels))
    line_count = -(-len(panels) // columns)
    max_rows = max(map(len, panels.values()))
    figure = Figure(figsize=(1.8 + 3.0 * columns, (0.7 + 0.3 * max_rows) * line_count + 0.7), layout="constrained")
    axes = figure.subplots(line_count, columns, squeeze=False).flatten()
    for axis in axes[len(panels) :]:
        axis.remove()
    for index, (heading, panel_rows) in enumerate(panels.items()):
        _bars(axes[index], panel_rows, key, result["settings"])
        axes[index].set_title(heading, loc="left", fontsize=9)
        axes[index].set_xlabel(FIGURES[key], fontsize=8)
        first_in_line = list(panels.values())[index - index % columns]
        if index % columns and [row["name"] for row in panel_rows] == [row["name"] for row in first_in_line]:
            axes[index].set_yticklabels([])
    figure.suptitle(title, fontsize=10)
    return figure


def _bars(axis: Axes, rows: list[dict[str, Any]], key: str, settings: dict[str, Any]) -> None:
    ours, ceilings = settings.get("ours", ()), settings.get("ceilings", ())
    values = [row[key] for row in rows]
    for height, row in enumerate(rows):
        ceiling = row["name"] in ceilings
        green = row["name"] in ours or row["name"].startswith(("StreamedLoader", "gpuaug"))
        colour = "#2a9d5c" if green else "white" if ceiling else "#9aa0a6"
        axis.barh(height, row[key], color=colour, edgecolor="#9aa0a6", hatch="////" if ceiling else None, linewidth=0.6)
        rounds = row.get("top1_seeds") if key == "top1_percent" else row.get("rounds") if key.endswith("_per_s") else None
        if rounds:
            axis.hlines(height, min(rounds), max(rounds), color="black", linewidth=0.8)
        bar_end = max(row[key], max(rounds or [0]))
        axis.annotate(f"{row[key]:.3g}" if row[key] < 1000 else f"{row[key]:,.0f}", (bar_end, height), (3, 0),
                      textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    if not key.endswith("_per_s") and min(values) > 0 and max(values) > 30 * min(values):
        axis.set_xscale("log")
    elif max(values) >= 10_000:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.margins(x=0.18)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = ArgumentParser(prog="python -m bench plot", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files (default: %(default)s)")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder to draw into (default: %(default)s)")
    options = parser.parse_args(argv)
    targets = []
    for path in sorted(options.results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        options.images.mkdir(parents=True, exist_ok=True)
        if result["suite"] == "waits":
            step_timeline.draw(result, options.images / "waits.png")
            targets.append(options.images / "waits.png")
            continue
        figure = draw(result)
        if figure is not None:
            target = options.images / f"{path.stem}.png"
            figure.savefig(target, dpi=150)
            targets.append(target)
    print("\n".join(map(str, targets)) or f"plot: no results in {options.results}")
    return targets
