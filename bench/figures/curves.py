"""Plots over the batch size: the ratio of each row to the baseline, and its rate.

Green lines are gpuaug, grey lines are what users do today; markers differ. Bands show the range from the slowest to the fastest
round. The line of a row that was left out at the largest batch sizes ends before them.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

MIN_SIZES = 4
"""Smallest number of batch sizes for which lines are drawn."""

_GREENS, _GREYS = ("#1b7a45", "#3fbf7f", "#8fd6ae"), ("#3c4043", "#80868b", "#5f6368", "#9aa0a6", "#70757a")
_OUR_MARKERS, _MARKERS = "oP*", "sD^vX<>"
_LOG_SCALE_RANGE = 4.0
"""Largest ratio over smallest ratio above which the axis of the ratios is logarithmic."""
_LABEL_GAP = 0.065
"""Smallest distance between two labels, as a share of the height of the axis."""

Series = dict[str, list[dict[str, Any]]]


def fits(result: dict[str, Any]) -> bool:
    """Return whether a result can be drawn as lines: no cases, ``MIN_SIZES`` batch sizes or more, one row per name and size."""
    rows = result["rows"]
    sizes = {row.get("batch_size") for row in rows}
    points = {(row["name"], row.get("batch_size")) for row in rows}
    has_rates = all("batch_size" in row and "images_per_s" in row and not row.get("case") for row in rows)
    return has_rates and len(sizes) >= MIN_SIZES and len(points) == len(rows)


def draw(result: dict[str, Any], title: str) -> Figure:
    """Draw a result for which ``fits`` is true."""
    series: Series = {}
    for row in sorted(result["rows"], key=lambda row: row["batch_size"]):
        series.setdefault(row["name"], []).append(row)
    series = {name: series[name] for name in dict.fromkeys(row["name"] for row in result["rows"])}
    settings = result["settings"]
    sizes = sorted({row["batch_size"] for row in result["rows"]})
    styles = _styles(list(series), settings.get("ours", ()))
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    ratio_axis, rate_axis = figure.subplots(1, 2)
    baseline = settings.get("baseline")
    _ratios(ratio_axis, {name: rows for name, rows in series.items() if name != baseline}, styles)
    ratio_axis.set_title(f"ratio to {baseline}", loc="left", fontsize=9)
    _rates(rate_axis, series, styles)
    rate_axis.set_title("images/s", loc="left", fontsize=9)
    for axis in (ratio_axis, rate_axis):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(sizes))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_xlabel("batch size", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", color="#e8eaed", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    _label_lines(rate_axis, series, styles)
    figure.suptitle(title, fontsize=10)
    return figure


def _styles(names: Sequence[str], ours: Sequence[str]) -> dict[str, dict[str, Any]]:
    green = [name for name in names if name in ours]
    grey = [name for name in names if name not in ours]
    styles = {}
    for group, colours, markers in ((green, _GREENS, _OUR_MARKERS), (grey, _GREYS, _MARKERS)):
        for index, name in enumerate(group):
            styles[name] = {
                "color": colours[index % len(colours)],
                "marker": markers[index % len(markers)],
                "linewidth": 1.8 if name in ours else 1.1,
                "markersize": 5,
                "markeredgecolor": "white",
                "markeredgewidth": 0.5,
                "zorder": 3 if name in ours else 2,
            }
    return styles


def _ratios(axis: Axes, series: Series, styles: dict[str, dict[str, Any]]) -> None:
    axis.axhline(1, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for name, rows in series.items():
        rows_with_ratio = [row for row in rows if row.get("ratio")]
        sizes = [row["batch_size"] for row in rows_with_ratio]
        low, high = ([row.get(key) or row["ratio"] for row in rows_with_ratio] for key in ("ratio_low", "ratio_high"))
        axis.fill_between(sizes, low, high, color=styles[name]["color"], alpha=0.15, linewidth=0)
        axis.plot(sizes, [row["ratio"] for row in rows_with_ratio], **styles[name])
    ratios = [row["ratio"] for rows in series.values() for row in rows if row.get("ratio")]
    if ratios and max(ratios) > _LOG_SCALE_RANGE * min(ratios):
        axis.set_yscale("log", base=2)
        axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))


def _rates(axis: Axes, series: Series, styles: dict[str, dict[str, Any]]) -> None:
    for name, rows in series.items():
        sizes, rates = ([row[key] for row in rows] for key in ("batch_size", "images_per_s"))
        if all(row.get("rounds") and row.get("steps_per_s") for row in rows):
            # Rounds are in steps per second.
            low, high = ([extreme(row["rounds"]) * row["batch_size"] for row in rows] for extreme in (min, max))
            axis.fill_between(sizes, low, high, color=styles[name]["color"], alpha=0.15, linewidth=0)
        axis.plot(sizes, rates, **styles[name])
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label_lines(axis: Axes, series: Series, styles: dict[str, dict[str, Any]]) -> None:
    """Write names beside the ends of lines, moved apart where ends are close. A thin line connects each name to its end."""
    ends = {name: (rows[-1]["batch_size"], rows[-1]["images_per_s"]) for name, rows in series.items()}
    to_axes = axis.transData + axis.transAxes.inverted()
    line_ends = sorted((to_axes.transform(end)[1], name) for name, end in ends.items())
    heights: list[float] = []
    for height, _ in line_ends:
        heights.append(max(height, heights[-1] + _LABEL_GAP) if heights else height)
    # Move labels above the top down again, and labels below them further down.
    limit = 1.0
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], limit)
        limit = heights[index] - _LABEL_GAP
    for height, (_, name) in zip(heights, line_ends, strict=True):
        axis.annotate(
            name,
            ends[name],
            (1.05, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            color=styles[name]["color"],
            weight="bold" if styles[name]["zorder"] == 3 else "normal",
            arrowprops={"arrowstyle": "-", "color": styles[name]["color"], "linewidth": 0.6, "shrinkB": 4, "relpos": (0, 0.5)},
        )
