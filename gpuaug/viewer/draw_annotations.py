"""Draws boxes, masks and keypoints over a picture, visible on any background."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuaug.core.plotting import INK, shortened, text_width_in
from gpuaug.viewer.annotations import Annotations, Box, Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, for all kinds of colour vision, in an order in which neighbours differ most.
COLOURS = ("#e69f00", "#56b4e9", "#d55e00", "#009e73", "#f0e442", "#cc79a7", "#0072b2")
_IGNORED = "#9aa0a6"

_LINE_PT, _HALO_PT, _POINT_PT, _TEXT_PT = 1.3, 2.6, 4.0, 6.0
_ALPHA = 0.35
_LONGEST = 18  # characters of a class


def colour(number: int) -> str:
    """Colour of the box, mask or keypoints with this number."""
    return COLOURS[number % len(COLOURS)] if number >= 0 else _IGNORED


def draw_annotations(axes: "Axes", over: Annotations, shape: tuple[int, int], width_in: float) -> None:
    """Draw the annotations of a picture.

    Args:
        axes: The picture's axes, in pixels; the first pixel is [0, 1].
        over: The annotations.
        shape: Height and width of the picture in pixels.
        width_in: Width of the axes in inches.
    """
    from matplotlib.patches import Polygon, Rectangle
    from matplotlib.patheffects import Normal, withStroke

    halo = [withStroke(linewidth=_HALO_PT, foreground=INK), Normal()]
    _fill(axes, over.masks, shape)
    for mask in over.masks:
        _outline(axes, mask)
    for box in over.boxes:
        look: dict[str, Any] = {"fill": False, "edgecolor": colour(box.number), "linewidth": _LINE_PT, "path_effects": halo}
        first, last = box.corners.min(0), box.corners.max(0)
        upright = bool((box.corners == [first, (last[0], first[1]), last, (first[0], last[1])]).all())
        axes.add_patch(Rectangle(tuple(first), *(last - first), **look) if upright else Polygon(box.corners, **look))
    for points in over.points:
        axes.plot(*points.places.T, "o", markersize=_POINT_PT, color=colour(points.number), markeredgecolor="white",
                  markeredgewidth=0.7, path_effects=[withStroke(linewidth=1.8, foreground=INK), Normal()])  # fmt: skip
    _name(axes, over.boxes, shape, width_in)


def _fill(axes: "Axes", masks: list[Mask], shape: tuple[int, int]) -> None:
    from matplotlib.colors import to_rgb

    if not masks:
        return
    layer = np.zeros((*shape, 4))
    for mask in masks:
        layer[mask.covers] = (*to_rgb(colour(mask.number)), _ALPHA)
    axes.imshow(layer, extent=(0, shape[1], shape[0], 0), aspect="auto", interpolation="nearest")


def _outline(axes: "Axes", mask: Mask) -> None:
    """The outline of a mask, closed along the picture's edge."""
    from matplotlib.patheffects import Normal, withStroke

    if not mask.covers.any():
        return
    padded = np.pad(mask.covers, 1).astype(np.float32)
    x, y = (np.arange(length) - 0.5 for length in padded.shape[::-1])
    drawn = axes.contour(x, y, padded, levels=[0.5], colors=[colour(mask.number)], linewidths=_LINE_PT)
    drawn.set_path_effects([withStroke(linewidth=_HALO_PT, foreground=INK), Normal()])


def _name(axes: "Axes", boxes: list[Box], shape: tuple[int, int], width_in: float) -> None:
    """Write each box's label next to its visible part, within the picture and, where there is room, over no other label."""
    from matplotlib.colors import to_rgb

    height, width = shape
    inch = width / width_in  # in pixels
    tall = 1.5 * _TEXT_PT / 72 * inch
    taken: list[tuple[float, float, float, float]] = []
    for box in boxes:
        left, top = np.maximum(box.corners.min(0), 0)
        right, bottom = np.minimum(box.corners.max(0), (width, height))
        if not box.text or right <= left or bottom <= top:
            continue
        text = shortened(box.text, _LONGEST)
        wide = (text_width_in(text, _TEXT_PT) + 0.6 * _TEXT_PT / 72) * inch
        x = min(left, max(width - wide, 0))
        places = [(x, y) for y in (top - tall, top, bottom, bottom - tall) if 0 <= y <= height - tall] or [(x, top)]
        x, y = next((place for place in places if not any(_meet((*place, wide, tall), other) for other in taken)), places[0])
        taken.append((x, y, wide, tall))
        red, green, blue = to_rgb(colour(box.number))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        axes.text(x + wide / 2, y + tall / 2, text, ha="center", va="center_baseline", fontsize=_TEXT_PT, parse_math=False,
                  color=INK if dark else "white", clip_on=True,
                  bbox={"facecolor": colour(box.number), "linewidth": 0, "boxstyle": "square,pad=0.2"})  # fmt: skip


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(one[k] < other[k] + other[k + 2] and other[k] < one[k] + one[k + 2] for k in (0, 1))
