"""A picture of the lanes: a timeline for each loop, over the same milliseconds."""

from pathlib import Path
from typing import Any

from bench.figures.pictures import IMAGES
from bench.harness.lane_spans import FIRST_STEP, LANES, LAST_STEP

IMAGE = IMAGES / "lanes.png"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a result of the suite ``lanes``: a colour for each batch."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in result["rows"]))
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.subplots(len(cases), 1, sharex=True, squeeze=False)[:, 0]
    end = max(row["end_ms"] for row in result["rows"])
    for axis, case in zip(axes, cases, strict=True):
        for row in result["rows"]:
            if row["case"] != case:
                continue
            width = row["end_ms"] - row["start_ms"]
            height = LANES.index(row["lane"])
            colour = colormaps["tab10"](row["batch"] % 10)
            # On the host, waiting for a batch is paler than launching the step.
            pale = row["lane"] == "host" and row["name"] == "next"
            axis.barh(height, width, left=row["start_ms"], height=0.8, color=colour, alpha=0.45 if pale else 0.9)
            if width > end / 60:
                middle = row["start_ms"] + width / 2
                axis.text(middle, height, str(row["batch"]), ha="center", va="center", fontsize=7, color="white")
        axis.set_yticks(range(len(LANES)), LANES)
        axis.invert_yaxis()
        axis.set_title(case, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"ms; {LAST_STEP - FIRST_STEP + 1} steps of each loop, a colour and a number for each batch")
    gpu = result["environment"]["gpu"]
    batch_size = result["settings"]["batch"][0]
    figure.suptitle(f"A training loop and its lanes, B={batch_size}, {gpu['name'] if gpu else 'CPU'}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
