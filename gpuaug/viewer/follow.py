"""Search for the images and targets (boxes, masks, keypoints, labels) in a batch, before and after each stage.

A *data key* is Kornia's name for a type of input, such as ``mask``. *Target dicts* are torchvision's form of targets: a list
with one dict per image. A *view* is one of several random augmentations of an image. A *member* of a batch is the value of a
key of a dict, an item of a tuple, or a field; its path leads to it. A ``StageTrace`` is a stage with its *selection*: the
members that the stage reads (``on``) and writes (``into``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import TARGET_KEYS
from gpuaug.stages.encoders import is_dense
from gpuaug.stages.selection import Selection
from gpuaug.viewer.trace import StageTrace, Trace

MemberPath = tuple[Any, ...]
"""Path to a member of a batch: a tuple of indices, keys and field names."""

Images = Tensor | Ragged | Sequence[Tensor]
"""A tensor (B, C, H, W), clips (B, T, C, H, W), or B images (C, h, w) of different sizes."""

_IMAGE_NAMES = ("image", "images", "img", "imgs", "input", "inputs", "pixel_values", "x")
"""Usual names of members that hold images."""

_NON_IMAGE_DTYPES = (torch.bool, torch.int64, torch.complex64, torch.complex128)
"""dtypes that images do not have, but masks, labels and spectra."""


@dataclass(frozen=True)
class Row:
    """Images in one member of a batch, with their targets."""

    path: MemberPath
    """Path of the images."""
    batch: Batch
    """The batch before or after a stage, in which ``path`` and the paths of targets lead to members."""
    data_keys: Mapping[MemberPath, str] = field(default_factory=dict)
    """Path of a target → Kornia's data key."""
    stage_inputs: tuple[tuple[StageTrace, Images], ...] = ()
    """(stage, input images of the stage) for each stage that has transformed the images."""

    @property
    def images(self) -> list[Images]:
        """Batches of images in the member: one, or one per view."""
        return images_of(get(self.batch, self.path))

    def targets_with(self, key: str) -> list[Any]:
        """Return the targets with the data key ``key``, without those that are ``None``."""
        values = (get(self.batch, path) for path, data_key in self.data_keys.items() if data_key == key)
        return [value for value in values if value is not None]


@dataclass(frozen=True)
class FollowedImages:
    """Result of ``follow``: images of a batch, before and after the stages."""

    before: tuple[Row, ...]
    """The images before the stages: one row per member that stages read, such as one per camera."""
    after: tuple[Row, ...]
    """One row per member to which stages wrote images."""
    stages_without_images: tuple[str, ...]
    """Names of stages that have replaced the images by other values."""


def follow(trace: Trace) -> FollowedImages:
    """Find the images of a batch and follow them through the stages.

    Raises:
        ArgumentError: If the batch has no images.
    """
    before: dict[MemberPath, Row] = {}
    after: dict[MemberPath, Row] = {}
    stages_without_images: list[str] = []
    for index, stage in enumerate(trace.stages):
        inputs, outputs = trace.states[index : index + 2]  # batch before and after the stage
        members = list(_members_read(stage.selection, inputs, outputs))
        target_members = [(source, result, key) for source, result, key in members if key not in (None, "input")]
        for source, result in _image_members(members, inputs):
            if source not in after and source not in before:
                # Not always the batch as loaded: an earlier stage may have created the member.
                first_state = next(state for state in trace.states if images_of(get(state, source)))
                before[source] = Row(source, first_state)
            if not images_of(get(outputs, result)):  # the result is something else, such as features
                stages_without_images.append(stage.name)
                break
            row = after.get(source) or before[source]
            if source in before:  # the stage may name targets that no earlier stage has named
                row_before = before[source]
                keys_before = {path: key for path, _, key in target_members if get(row_before.batch, path) is not None}
                before[source] = replace(row_before, data_keys={**row_before.data_keys, **keys_before})
            keys_after = {**row.data_keys, **{path: key for _, path, key in target_members}}
            images = images_of(get(inputs, source))[0]
            after[result] = Row(result, outputs, keys_after, (*row.stage_inputs, (stage, images)))
    if not before:  # no stage reads images: they are shown as loaded
        path = _search(trace.states[0])
        if path is None:
            raise ArgumentError(
                "loader must yield images to be shown, (B, C, H, W) of uint8 or floating, got none in a "
                f"{type(trace.states[0]).__name__}. Pass on= with the member of the images to the first stage."
            )
        before = {member: Row(member, trace.states[0]) for member in _members_like(trace.states[0], path)}
    # Targets are read from the batch after the last stage.
    last = trace.states[-1]
    rows_after = (replace(row, batch=last) if images_of(get(last, row.path)) else row for row in after.values())
    shown_before, shown_after = (tuple(map(_with_target_dicts, rows)) for rows in (before.values(), rows_after))
    return FollowedImages(shown_before, shown_after, tuple(stages_without_images))


def _image_members(
    members: Sequence[tuple[MemberPath, MemberPath, str | None]], inputs: Batch
) -> Iterator[tuple[MemberPath, MemberPath]]:
    """Yield (input path, output path) of each member with images. ``members``: as ``_members_read`` yields them.

    Without data keys, members whose number of channels differs from the first member's are omitted: they may be masks.
    """
    channels = None
    results = set[MemberPath]()
    for source, result, key in members:
        images = images_of(get(inputs, source)) if key in (None, "input") else []
        if not images or result in results or (key is None and channels not in (None, _channels_of(images[0]))):
            continue
        channels = _channels_of(images[0])
        results.add(result)
        yield source, result


def _channels_of(images: Images) -> int:
    """Return the number of channels of each image."""
    if isinstance(images, Ragged):
        return images.shapes.channels
    return int((images if isinstance(images, Tensor) else images[0]).shape[-3])


def _members_like(batch: Batch, path: MemberPath) -> list[MemberPath]:
    """Return the paths, in the container of ``path``, to members with as many images with as many channels, in order."""

    def counts_of(value: Any) -> list[tuple[int, int]]:
        """Return [(number of images, number of channels)]; empty without images. Of several views, the first counts."""
        return [(count_of(images), _channels_of(images)) for images in images_of(value)[:1]]

    expected = counts_of(get(batch, path))
    return [
        other
        for other, value in walk(batch)
        if other[:-1] == path[:-1] and len(other) == len(path) and counts_of(value) == expected
    ]


def count_of(images: Images) -> int:
    """Return the number of images, or of clips."""
    return images.shapes.samples if isinstance(images, Ragged) else len(images)


def sample_of(images: Images, index: int) -> Tensor:
    """Return the image (C, h, w) or clip (T, C, h, w) at ``index``."""
    frames = images.shapes.frames if isinstance(images, Ragged) else 0
    if not frames:
        return images[index]
    return torch.stack([images[frame] for frame in range(index * frames, (index + 1) * frames)])


def get(batch: Batch, path: MemberPath) -> Any:
    """Return the member of a batch at ``path``, or ``None`` if the batch has no such member."""
    for name in path:
        try:
            batch = batches.member(batch, name)
        except (AttributeError, LookupError, TypeError):
            return None
    return batch


def walk(value: Any, path: MemberPath = ()) -> Iterator[tuple[MemberPath, Any]]:
    """Yield (path, member) of every member of a batch, a container before its members."""
    yield path, value
    if batches.is_container(value) and not isinstance(value, Ragged):
        for name in batches.member_names(value):
            yield from walk(batches.member(value, name), (*path, name))


def images_of(value: Any) -> list[Images]:
    """Return the batches of images in a member: one, or one per view; empty if the member does not hold images."""
    if isinstance(value, Tensor):
        if not is_dense(value) or value.dtype in _NON_IMAGE_DTYPES or 0 in value.shape[-3:]:
            return []
        if value.ndim == 3 and value.shape[0] in (1, 3):  # one image, (C, H, W)
            return [value[None]]
        return [value] if value.ndim in (4, 5) else []
    if isinstance(value, Ragged):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, Tensor) for item in value):
        return []
    if value and all(item.ndim == 3 and images_of(item) for item in value):
        return [value]
    # A list of tensors (B, C, H, W) with equal C holds views. With different C it may hold images and masks.
    if any(item.ndim != 4 for item in value) or len({item.shape[1] for item in value}) != 1:
        return []
    views = [images_of(item) for item in value]
    return [view[0] for view in views] if all(views) else []


def _with_target_dicts(row: Row) -> Row:
    """Return the row with the target dicts of its batch as targets, unless a stage has target dicts in ``on``."""
    if "targets" in row.data_keys.values():
        return row
    target_dicts = {path: "targets" for path, value in walk(row.batch) if _are_target_dicts(value)}
    return replace(row, data_keys={**row.data_keys, **target_dicts})


def _are_target_dicts(value: Any) -> bool:
    """Return whether ``value`` is a list of target dicts, or has one such list per clip."""
    if not isinstance(value, list | tuple) or not value:
        return False
    if all(isinstance(item, list | tuple) for item in value):
        return all(map(_are_target_dicts, value))
    return all(isinstance(item, Mapping) for item in value) and any(key in item for item in value for key in TARGET_KEYS)


def _search(batch: Batch) -> MemberPath | None:
    """Return the path of the first member with images and a usual name such as ``image``, or else of the first with images."""
    paths = [path for path, value in walk(batch) if images_of(value)]
    usual = [path for path in paths if path and str(path[-1]).lower() in _IMAGE_NAMES]
    return next(iter(usual or paths), None)


def _members_read(selection: Selection, inputs: Batch, outputs: Batch) -> Iterator[tuple[MemberPath, MemberPath, str | None]]:
    """Yield (path in ``inputs``, path of its result in ``outputs``, data key or ``None``) of each member that a stage reads.

    Args:
        selection: Selection of the stage.
        inputs: Batch before the stage.
        outputs: Batch after the stage.
    """
    if selection.on is None:
        source = _search(inputs)
        if source is not None:
            keeps_path = bool(images_of(get(outputs, source)))
            yield source, (source if keeps_path else _search(outputs) or source), None
        return
    sources: list[MemberPath] = [(name,) for name in selection.names(inputs)] or [()]  # (): the batch itself
    results = sources
    if selection.into is not ...:  # ``...``: results replace the members that were read
        results = [(name,) for name in selection.image_names(outputs)]
        results *= 1 if isinstance(selection.into, tuple) else len(sources)  # not a tuple: one member holds all results
    keys: Sequence[str | None] = selection.normalized_keys or [None] * len(sources)
    yield from zip(sources, results, keys, strict=False)
