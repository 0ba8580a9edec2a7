"""Drawing of boxes, masks and keypoints over a picture, with dark outlines that are visible on any background."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuaug.core.plotting import INK, shortened, text_width_in
from gpuaug.viewer.annotations import Annotations, Box, Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, distinguishable with colour blindness, in an order in which neighbours differ most.
COLOURS = ("#e69f00", "#56b4e9", "#d55e00", "#009e73", "#f0e442", "#cc79a7", "#0072b2")
_IGNORED = "#9aa0a6"

_LINE_PT, _HALO_PT, _POINT_PT, _TEXT_PT = 1.3, 2.6, 4.0, 6.0
_ALPHA = 0.35  # opacity of the fill of masks
_MAX_LABEL = 18  # maximum number of characters of a class name


def colour(number: int) -> str:
    """Return the colour of the box, mask or keypoints with index ``number``; grey for a negative index."""
    return COLOURS[number % len(COLOURS)] if number >= 0 else _IGNORED


def draw_annotations(axes: "Axes", annotations: Annotations, shape: tuple[int, int], width_in: float) -> None:
    """Draw the annotations of a picture.

    Args:
        axes: Axes of the picture, in pixels; the first pixel covers [0, 1].
        annotations: The annotations.
        shape: Height and width of the picture in pixels.
        width_in: Width of the axes in inches.
    """
    from matplotlib.patches import Polygon
    from matplotlib.patheffects import Normal, withStroke

    halo = [withStroke(linewidth=_HALO_PT, foreground=INK), Normal()]
    _fill(axes, annotations.masks, shape)
    for mask in annotations.masks:
        _outline(axes, mask)
    for box in annotations.boxes:
        style: dict[str, Any] = {"fill": False, "edgecolor": colour(box.number), "linewidth": _LINE_PT, "path_effects": halo}
        axes.add_patch(Polygon(box.corners, **style))
    for points in annotations.points:
        axes.plot(*points.xy.T, "o", markersize=_POINT_PT, color=colour(points.number), markeredgecolor="white",
                  markeredgewidth=0.7, path_effects=[withStroke(linewidth=1.8, foreground=INK), Normal()])  # fmt: skip
    _draw_labels(axes, annotations.boxes, shape, width_in)


def _fill(axes: "Axes", masks: list[Mask], shape: tuple[int, int]) -> None:
    """Fill the area of each mask with its colour, half transparent. Later masks cover earlier masks."""
    from matplotlib.colors import to_rgb

    if not masks:
        return
    layer = np.zeros((*shape, 4))
    for mask in masks:
        layer[mask.covers] = (*to_rgb(colour(mask.number)), _ALPHA)
    axes.imshow(layer, extent=(0, shape[1], shape[0], 0), aspect="auto", interpolation="nearest")


def _outline(axes: "Axes", mask: Mask) -> None:
    """Draw the outline of a mask, closed along the edge of the picture."""
    from matplotlib.patheffects import Normal, withStroke

    if not mask.covers.any():
        return
    padded = np.pad(mask.covers, 1).astype(np.float32)
    x, y = (np.arange(length) - 0.5 for length in padded.shape[::-1])
    contours = axes.contour(x, y, padded, levels=[0.5], colors=[colour(mask.number)], linewidths=_LINE_PT)
    contours.set_path_effects([withStroke(linewidth=_HALO_PT, foreground=INK), Normal()])


def _draw_labels(axes: "Axes", boxes: list[Box], shape: tuple[int, int], width_in: float) -> None:
    """Write the label of each box next to the visible part of the box, within the picture, if possible beside other labels."""
    from matplotlib.colors import to_rgb

    height, width = shape
    pixels_per_inch = width / width_in
    label_height = 1.5 * _TEXT_PT / 72 * pixels_per_inch
    drawn_labels: list[tuple[float, float, float, float]] = []
    for box in boxes:
        left, top = np.maximum(box.corners.min(0), 0)
        right, bottom = np.minimum(box.corners.max(0), (width, height))
        if not box.text or right <= left or bottom <= top:
            continue
        text = shortened(box.text, _MAX_LABEL)
        label_width = (text_width_in(text, _TEXT_PT) + 0.6 * _TEXT_PT / 72) * pixels_per_inch
        x = min(left, max(width - label_width, 0))
        # Above the box, inside at its top, below the box, inside at its bottom.
        tops = (top - label_height, top, bottom, bottom - label_height)
        areas = [(x, y, label_width, label_height) for y in tops if 0 <= y <= height - label_height]
        areas = areas or [(x, top, label_width, label_height)]
        label = next((area for area in areas if not any(_overlap(area, other) for other in drawn_labels)), areas[0])
        x, y, *_ = label
        drawn_labels.append(label)
        red, green, blue = to_rgb(colour(box.number))
        is_bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        axes.text(x + label_width / 2, y + label_height / 2, text, ha="center", va="center_baseline", fontsize=_TEXT_PT,
                  parse_math=False, color=INK if is_bright else "white", clip_on=True,
                  bbox={"facecolor": colour(box.number), "linewidth": 0, "boxstyle": "square,pad=0.2"})  # fmt: skip


def _overlap(label: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return whether two rectangles (x, y, width, height) overlap."""
    return all(label[axis] < other[axis] + other[axis + 2] and other[axis] < label[axis] + label[axis + 2] for axis in (0, 1))
