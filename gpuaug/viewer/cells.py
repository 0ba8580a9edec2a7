"""The cells of the picture: a line of cells for each batch of images, with a cell for each sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.draws import Draws
from gpuaug.fusion.fuse import Fused
from gpuaug.fusion.normalization import lam_is_own, normalized_by
from gpuaug.viewer import captions
from gpuaug.viewer.annotations import Annotations, beside, overlay
from gpuaug.viewer.follow import Followed, Images, Place, Row, count_of, get, sample_of, walk
from gpuaug.viewer.pixels import frames_shown, shown, strip
from gpuaug.viewer.trace import StageTrace, Trace

_LABELS = ("label", "labels", "class", "classes", "target", "targets", "y")


@dataclass(frozen=True, slots=True)
class Cell:
    """One image and the texts around it."""

    pixels: NDArray[np.float32]
    overlay: Annotations
    number: int
    """Index of the sample in the batch; less than 0 where a cell above shows it."""
    label: captions.Label
    """The sample's label; empty where it equals the label of the cell above."""
    note: str
    """Size of the image, and changes that were made to show it."""
    draws: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """The images of all samples in one member of the batch, or one view of them."""

    name: str
    cells: tuple[Cell, ...]


def lines_of(taken: Trace, followed: Followed, count: int, classes: Any) -> list[Line]:
    """The lines from top to bottom.

    Args:
        taken: The batch.
        followed: The members that are its images.
        count: Number of samples to show.
        classes: Names of the classes, or ``None``.

    Raises:
        ArgumentError: If there are no samples, or images after a stage are not of these samples.
    """
    before = followed.before
    size = count_of(before.images[0])
    if not size:
        raise ArgumentError("The batch must hold samples to be shown, got none. See what the loader yields first.")
    making = _Making(taken, before, size, min(count, size), classes)
    first = "before" if followed.after else "as loaded"
    lines = [
        making.line(before, images, 0, first if len(before.images) == 1 else f"{first} {number}")
        for number, images in enumerate(before.images, 1)
    ]
    for row in followed.after:
        views = [(images, view) for images in row.images for view in range(_views(images, size))]
        place = "after" if len(followed.after) == 1 else _name_of(row)
        for number, (images, view) in enumerate(views, 1):
            lines.append(making.line(row, images, view, place if len(views) == 1 else _of_view(place, number)))
    return lines


class _Making:
    """Makes the lines of one picture."""

    def __init__(self, taken: Trace, before: Row, size: int, count: int, classes: Any) -> None:
        self._before, self._size, self._count, self._classes = before, size, count, classes
        self._name = captions.namer(classes)
        self._labels = _place_of_labels(before, size)
        self._draws: dict[int, Draws] = {}
        keyed = (ran.transform for ran in taken.ran if "targets" in (ran.selection.data_keys or ()))
        self._channels_first = any(isinstance(ran.transform, Fused) and ran.transform.clips.channels_first for ran in taken.ran)
        self._form = next((fused.options.boxes for fused in keyed if isinstance(fused, Fused)), "xyxy")

    def line(self, row: Row, images: Images, view: int, name: str) -> Line:
        normalized = normalized_by([ran.transform for ran, _ in row.through])
        cells = []
        for sample in range(self._count):
            index = view * self._size + sample
            image = sample_of(images, index)
            height, width = image.shape[-2:]
            of_frames = ""
            if image.ndim == 4:
                clip = image.transpose(0, 1) if self._channels_first else image
                chosen = frames_shown(len(clip))
                parts = [overlay(row, index, (height, width), self._form, self._name, frame) for frame in chosen]
                over = beside(parts, width)
                of_frames = f"{len(chosen)} of {len(clip)} frames"
                image = strip(clip)
            else:
                over = overlay(row, index, (height, width), self._form, self._name)
            pixels, note = shown(image, normalized)
            note = ", ".join(filter(None, (of_frames, note)))
            draws = tuple(said for ran, given in row.through for said in self._drawn(ran, given, index))
            label = self._label(row, index)
            first = row is self._before
            label = label if first or label != self._label(self._before, sample) else ()
            size = f"{width}x{height}"
            cells.append(Cell(pixels, over, sample if first else -1, label, f"{size}, {note}" if note else size, draws))
        return Line(name, tuple(cells))

    def _drawn(self, ran: StageTrace, given: Images, index: int) -> list[str]:
        """Lines on the draws of a fused pipeline for a sample; none where they are unknown, or differ from frame to frame."""
        if not isinstance(ran.transform, Fused) or ran.transform.clips.draws_per_frame:
            return []
        if id(ran) not in self._draws:
            self._draws[id(ran)] = _draws(ran.transform, given, ran.seed)
        draws = self._draws[id(ran)]
        # A stage before the one that makes views draws once for all views of a sample.
        return captions.drawn(draws.of(index % len(draws)))

    def _label(self, row: Row, index: int) -> captions.Label:
        named = row.under("class")
        value = next((each for each in named if isinstance(each, Tensor) or captions.is_words(each, self._size)), None)
        if value is None and self._labels is not None:
            found = get(row.batch, self._labels)
            count = len(found) if isinstance(found, Tensor) and found.ndim else 0
            value = found if count and count % self._size == 0 and captions.is_labels(found, count) else None
        if value is None:
            return ()
        if not isinstance(value, Tensor):
            return ((value[index % len(value)], ""),)
        if value.ndim == 3:
            value = value[0]  # (mixes, B, 3) of Kornia's several mixes: there is only one
        if value.ndim == 2 and not value.is_floating_point():
            return ()  # classes of boxes
        keyed = [ran.transform for ran, _ in row.through if "class" in _keys(ran)]
        fused = bool(keyed) and isinstance(keyed[-1], Fused) and keyed[-1].options.num_classes is not None
        mixed = bool(keyed) and not fused and value.ndim == 2 and value.shape[1] == 3
        name = captions.namer(self._classes, "class {}")
        return captions.label(value[index % len(value)], name, mixed=mixed, rest=lam_is_own(keyed))


def _draws(fused: Fused, images: Images, seed: int) -> Draws:
    """The draws of a fused pipeline in a call with ``seed``."""
    shape: Any = images if isinstance(images, Ragged) else getattr(images, "shape", None)
    return fused.draw(shape, seed)


def _views(images: Images, size: int) -> int:
    count = count_of(images)
    if count % size or not count:
        raise ArgumentError(
            f"Stages must give as many images for each of the {size} samples, got {count}. "
            "Views of a batch have to lie behind one another: (views · B, C, H, W)."
        )
    return count // size


def _name_of(row: Row) -> str:
    """Name of a line, where stages wrote images to several members."""
    last = row.place[-1] if row.place else 0
    return last if isinstance(last, str) else f"after {row.through[-1][0].name}"


def _of_view(place: str, number: int) -> str:
    return f"view {number}" if place == "after" else f"{place}, view {number}"


def _keys(ran: StageTrace) -> Sequence[str]:
    return ["class" if key.lower() == "label" else key.lower() for key in ran.selection.data_keys or ()]


def _place_of_labels(before: Row, size: int) -> Place | None:
    members = list(walk(before.batch))
    # A mapping for each sample, such as its target dict, may by chance have as many entries as there are samples.
    ways = [way for way, value in members if _are_mappings(value) and before.place[: len(way)] != way]
    labels = [place for place, value in members if captions.is_labels(value, size) and place != before.place]
    found = [place for place in labels if not any(place[: len(way)] == way for way in ways)]
    named = [place for place in found if place and str(place[-1]).lower() in _LABELS]
    return next(iter(named or found), None)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)
