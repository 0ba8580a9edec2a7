"""Cells of the picture of ``show``. A *line* has one *cell* per sample. A *view* is one of several augmentations of a sample.

A *member* of a batch is one value in it, such as the value under the key ``image``. A ``Row`` is the images in one member,
before or after the stages. There is one line per row and view.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.fusion.draws import Draws
from gpuaug.fusion.fuse import Fused
from gpuaug.fusion.normalization import lam_weighs_sample, normalized_by
from gpuaug.fusion.pixels import LARGEST
from gpuaug.viewer import captions
from gpuaug.viewer.annotations import Annotations, joined_horizontally, overlay
from gpuaug.viewer.follow import FollowedImages, Images, MemberPath, Row, count_of, get, sample_of, walk
from gpuaug.viewer.pixels import shown_frames, to_pixels
from gpuaug.viewer.trace import StageTrace, Trace

_LABEL_NAMES = re.compile(r"label|class|categor|^targets?$|^y$", re.IGNORECASE)
"""Pattern in the usual names of members that hold classes."""

_MAX_CLASSES = 100_000
"""Maximum number of classes of labels without a name. Larger numbers may be identifiers or times."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One image with its texts."""

    pixels: NDArray[np.float32]
    overlay: Annotations
    number: int
    """Index of the sample in the batch; -1 for cells below the first line, which show no index."""
    label: captions.Label
    """Label of the sample; empty below the first line if it equals the label in the first line."""
    note: str
    """Size of the image, and changes of values or channels for drawing."""
    draws: tuple[str, ...]
    """Lines of text about the draws (random parameters) of the sample."""


@dataclass(frozen=True, slots=True)
class Line:
    """Cells of all samples for one member of the batch, or for one view of it."""

    name: str
    cells: tuple[Cell, ...]


def lines_of(trace: Trace, followed: FollowedImages, count: int, classes: Any) -> list[Line]:
    """Return the lines of the picture, from top to bottom.

    Args:
        trace: Copies of the batch, before and after each stage.
        followed: Members of the batch that are images.
        count: Number of samples to show.
        classes: Names of the classes, or ``None``.

    Raises:
        ArgumentError: If the batch has no samples, or the number of images after a stage is no multiple of the batch size.
    """
    before = followed.before[0]
    batch_size = count_of(before.images[0])
    if not batch_size:
        raise ArgumentError("The batch must have samples to be shown, got none. Check the first batch of the loader.")
    line_maker = _LineMaker(trace, before, batch_size, min(count, batch_size), classes)
    first_name = "before" if followed.after else "as loaded"
    lines = []
    for row in followed.before:
        name = first_name if len(followed.before) == 1 else f"{row.path[-1]}, {first_name}"
        for number, images in enumerate(row.images, 1):
            lines.append(line_maker.line(row, images, 0, name if len(row.images) == 1 else f"{name} {number}"))
    names = [_row_name(row) for row in followed.after]  # may be equal; the name of the member is then added
    for row, row_name in zip(followed.after, names, strict=True):
        views = [(images, view) for images in row.images for view in range(_count_views(images, batch_size))]
        name = row_name if names.count(row_name) == 1 else f"{row.path[-1]}, {row_name}"
        name = "after" if len(names) == 1 else name
        view_name = "view" if name == "after" else f"{name}, view"
        for number, (images, view) in enumerate(views, 1):
            lines.append(line_maker.line(row, images, view, name if len(views) == 1 else f"{view_name} {number}"))
    return lines


class _LineMaker:
    """Creates the lines of one picture.

    ``before``: the first row before the stages. Its cells show the index of the sample and the label; cells of other lines show
    a label only if it differs.
    """

    def __init__(self, trace: Trace, before: Row, batch_size: int, count: int, classes: Any) -> None:
        self._before = before
        self._batch_size = batch_size
        self._count = count
        self._classes = classes
        self._name_of = captions.class_namer(classes)
        self._labels_path = _path_of_labels(before, batch_size)
        self._draws: dict[int, Draws] = {}
        target_stages = (stage.transform for stage in trace.stages if "targets" in stage.selection.normalized_keys)
        fused_stages = (stage.transform for stage in trace.stages if isinstance(stage.transform, Fused))
        self._channels_first = any(fused.clip_layout.channels_first for fused in fused_stages)
        self._box_format = next((fused.options.boxes for fused in target_stages if isinstance(fused, Fused)), "xyxy")

    def line(self, row: Row, images: Images, view: int, name: str) -> Line:
        """Return the line of one view of a batch of images.

        Args:
            row: Member of the batch that holds the images.
            images: Batch of images, of one or several views.
            view: Index of the view in ``images``.
            name: Name of the line.
        """
        # Value that stands for 1 in the images before the stages, such as 255.
        largest = LARGEST.get(sample_of(row.stage_inputs[0][1], 0).dtype, 1) if row.stage_inputs else 1
        normalized = normalized_by([stage.transform for stage, _ in row.stage_inputs], largest)
        cells = []
        for sample in range(self._count):
            index = view * self._batch_size + sample
            image = sample_of(images, index)
            height, width = image.shape[-2:]
            frames: Sequence[Any] = (None,)
            frames_note = ""
            if image.ndim == 4:
                clip = image.transpose(0, 1) if self._channels_first else image
                frames = shown_frames(len(clip))
                frames_note = f"{len(frames)} of {len(clip)} frames"
                image = torch.cat([clip[frame] for frame in frames], -1)  # (C, H, n · W): n frames side by side
            parts = [overlay(row, index, (height, width), self._box_format, self._name_of, frame) for frame in frames]
            pixels, values_note = to_pixels(image, normalized)
            note = ", ".join(filter(None, (f"{width}x{height}", frames_note, values_note)))
            draws = tuple(text for stage, inputs in row.stage_inputs for text in self._draw_lines(stage, inputs, index))
            label = self._label(row, index)
            is_first = row is self._before
            label = label if is_first or label != self._label(self._before, sample) else ()
            cells.append(Cell(pixels, joined_horizontally(parts, width), sample if is_first else -1, label, note, draws))
        return Line(name, tuple(cells))

    def _draw_lines(self, stage: StageTrace, inputs: Images, index: int) -> list[str]:
        """Return lines of text about a sample's draws in a fused pipeline. Empty for other stages, or draws per frame."""
        if not isinstance(stage.transform, Fused) or stage.transform.clip_layout.draws_per_frame:
            return []
        if id(stage) not in self._draws:
            shape: Any = inputs if isinstance(inputs, Ragged) else getattr(inputs, "shape", None)
            self._draws[id(stage)] = stage.transform.draw(shape, stage.seed)
        draws = self._draws[id(stage)]
        # A stage before the stage that creates views draws once per sample, for all views of the sample.
        return captions.draw_lines(draws.of(index % len(draws)))

    def _label(self, row: Row, index: int) -> captions.Label:
        """Return the label of one image of a row, from data with the key ``class`` or from the labels of the batch.

        ``index``: index of the image. Views share the labels of their samples if there is one label per sample.
        """
        candidates = row.targets_with("class")
        labels = (item for item in candidates if isinstance(item, Tensor) or captions.are_class_names(item, self._batch_size))
        value = next(labels, None)
        if value is None and self._labels_path is not None:
            member = get(row.batch, self._labels_path)
            count = len(member) if isinstance(member, Tensor) and member.ndim else 0
            value = member if count and count % self._batch_size == 0 and captions.is_labels(member, count) else None
        if value is None:
            return ()
        if not isinstance(value, Tensor):
            return ((value[index % len(value)], ""),)
        if value.ndim == 3:
            value = value[0]  # (mixes, B, 3) of Kornia, with one mix
        if value.ndim == 2 and not value.is_floating_point():
            return ()  # (B, N) integers: classes of boxes
        # Transforms that get the labels, and may mix the labels of two samples. ``mixed``: rows of Kornia's (label, label of
        # the partner, weight).
        mixers = [stage.transform for stage, _ in row.stage_inputs if "class" in stage.selection.normalized_keys]
        has_probabilities = bool(mixers) and isinstance(mixers[-1], Fused) and mixers[-1].options.num_classes is not None
        mixed = bool(mixers) and not has_probabilities and value.ndim == 2 and value.shape[1] == 3
        name_of = captions.class_namer(self._classes, "class {}")
        return captions.label(value[index % len(value)], name_of, mixed=mixed, lam_is_sample=lam_weighs_sample(mixers))


def _count_views(images: Images, batch_size: int) -> int:
    """Return the number of views per sample."""
    count = count_of(images)
    if count % batch_size or not count:
        raise ArgumentError(
            f"Stages must return equally many images for each of the {batch_size} samples, got {count} images. "
            "Concatenate views along the batch axis: (views · B, C, H, W)."
        )
    return count // batch_size


def _row_name(row: Row) -> str:
    """Return the name of a row's line if stages have written images to several members."""
    last = row.path[-1] if row.path else 0
    return last if isinstance(last, str) else f"after {row.stage_inputs[-1][0].name}"


def _path_of_labels(before: Row, batch_size: int) -> MemberPath | None:
    """Return the path of the member that seems to hold labels; ``None`` if there is none.

    This is a member with a usual name such as ``label``, or else the first possible member of a tuple or list. Whole numbers
    under another name are taken as identifiers, times or indices.
    """
    members = list(walk(before.batch))
    # Not in lists of mappings, such as target dicts: the length of a tensor there may equal the batch size by chance.
    excluded = [path for path, value in members if _are_mappings(value) and before.path[: len(path)] != path]
    labels = [path for path, value in members if captions.is_labels(value, batch_size) and path != before.path]
    candidates = [path for path in labels if not any(path[: len(prefix)] == prefix for prefix in excluded)]
    usual = [path for path in candidates if path and _LABEL_NAMES.search(str(path[-1]))]
    unnamed = [path for path in candidates if path and isinstance(path[-1], int) and _may_be_classes(get(before.batch, path))]
    return next(iter(usual or unnamed), None)


def _may_be_classes(labels: Tensor) -> bool:
    """Return whether labels may be class indices, by their range, or are probabilities."""
    return labels.ndim > 1 or bool(((labels >= -1) & (labels < _MAX_CLASSES)).all())


def _are_mappings(value: Any) -> bool:
    """Return whether ``value`` is a list or tuple of mappings only."""
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)
