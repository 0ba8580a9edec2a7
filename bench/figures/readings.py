"""Picture of the resources of a process during a long run: a panel for each resource."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from bench.harness.result_rows import hardware


def draw(result: dict[str, Any]) -> Figure:
    """Draw a result whose rows have ``readings``, pairs (batches so far, value)."""
    rows = result["rows"]
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.2 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(rows) :]:
        axis.remove()
    for axis, row in zip(axes, rows, strict=False):
        in_bytes = "growth_bytes" in row
        scale = 1e6 if in_bytes else 1
        axis.plot([at for at, _ in row["readings"]], [value / scale for _, value in row["readings"]], color="#2a9d5c")
        axis.set_ylim(0, max(1.0, 1.25 * max(value for _, value in row["readings"]) / scale))
        axis.set_xlim(left=0)
        axis.set_title(f"{row['name']}{', MB' if in_bytes else ''}", loc="left", fontsize=9)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    rate = result["settings"]["batches_per_s"]
    figure.suptitle(f"{result['suite']}, {hardware(result)}: by batches so far, {rate:,.0f} a second", fontsize=10)
    return figure
