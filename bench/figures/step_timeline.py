"""Picture of training loops over time: a bar for each training step, and a gap where the GPU waits for images."""

from pathlib import Path
from typing import Any

from bench.figures.pictures import IMAGES, save

IMAGE = IMAGES / "waits.png"

_TRAINING_COLOUR, _WAITING_COLOUR = "#2a9d5c", "#e8b4b0"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a result of the suite ``waits``, at a width that is legible on a phone."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    loops = result["settings"]["loops"]
    figure = Figure(figsize=(5.6, 3.3), dpi=200, layout="constrained")
    axes = figure.subplots(len(loops), 1, sharex=True, squeeze=False)[:, 0]
    end_s = min(max(row["end_ms"] for row in result["rows"] if row["case"] == name) for name in loops) / 1e3
    for axis, (name, figures) in zip(axes, loops.items(), strict=True):
        axis.axvspan(0, end_s, color=_WAITING_COLOUR, linewidth=0)
        steps = [(row["start_ms"] / 1e3, row["end_ms"] / 1e3) for row in result["rows"] if row["case"] == name]
        axis.broken_barh(
            [(start, end - start) for start, end in steps], (0, 1), color=_TRAINING_COLOUR, edgecolor="white", linewidth=0.4
        )
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_title(f"{figures['images_per_s']:,.0f} images/s", loc="right", fontsize=11, fontweight="bold")
        axis.set_ylim(0, 1)
        axis.set_yticks([])
        axis.tick_params(labelsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlim(0, end_s)
    gpu = result["environment"]["gpu"]
    device = gpu["name"] if gpu else "CPU"
    axes[-1].set_xlabel(
        f"seconds; {result['settings']['model']}, JPEG files, B={result['settings']['batch'][0]}, {device}", fontsize=10
    )
    patches = [Patch(color=_TRAINING_COLOUR, label="GPU trains"), Patch(color=_WAITING_COLOUR, label="GPU waits for images")]
    figure.legend(handles=patches, loc="outside upper center", ncols=2, frameon=False, fontsize=11)
    save(figure, path)
