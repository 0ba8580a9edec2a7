"""Finds the images and targets in a batch, and follows both from stage to stage."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.stages.selection import Selection
from gpuaug.viewer.trace import StageTrace, Trace

Place = tuple[Any, ...]
"""Path to a member of a batch: indices, keys and fields."""

Images = Tensor | Ragged | Sequence[Tensor]
"""A tensor (B, C, H, W), clips (B, T, C, H, W), or B images (C, h, w)."""

_PARTS = ("boxes", "bbox", "masks", "keypoints")
_NAMES = ("image", "images", "img", "imgs", "input", "inputs", "pixel_values", "x")
_KEYS = {"image": "input", "label": "class"}
_NOT_PIXELS = (torch.bool, torch.int64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Row:
    """The images at one place of a batch, with their targets."""

    place: Place
    batch: Batch
    keys: Mapping[Place, str] = field(default_factory=dict)
    """Kornia's data key of each target, by its place."""
    through: tuple[tuple[StageTrace, Images], ...] = ()
    """(stage, its input images) for each stage that worked on them."""

    @property
    def images(self) -> list[Images]:
        """The batches of images at the place: one, or several views."""
        return images_of(get(self.batch, self.place))

    def under(self, key: str) -> list[Any]:
        """The targets with one of Kornia's data keys."""
        return [value for place, found in self.keys.items() if found == key and (value := get(self.batch, place)) is not None]


@dataclass(frozen=True)
class Followed:
    """The rows of a batch."""

    before: Row
    after: tuple[Row, ...]
    """A row for each member that stages wrote images to."""
    ends: tuple[str, ...]
    """Names of stages that replaced images by something else."""


def follow(taken: Trace) -> Followed:
    """Find the images of a batch and follow them through the stages.

    Raises:
        ArgumentError: If there are none.
    """
    before: Row | None = None
    rows: dict[Place, Row] = {}
    ends: list[str] = []
    for index, ran in enumerate(taken.ran):
        given, gave = taken.states[index : index + 2]
        moves = list(_moves(ran.selection, given, gave))
        start, end = next(((a, b) for a, b, key in moves if key in (None, "input") and images_of(get(given, a))), (None, None))
        if start is None or end is None:
            continue
        if before is None:
            first = next(state for state in taken.states if images_of(get(state, start)))
            before = Row(start, first)
        row = rows.get(start) or (before if start == before.place else Row(start, given))
        if not images_of(get(gave, end)):
            ends.append(ran.name)
            continue
        others = [(a, b, key) for a, b, key in moves if key not in (None, "input")]
        before = replace(before, keys={**before.keys, **{a: key for a, _, key in others if get(before.batch, a) is not None}})
        keys = {**row.keys, **{b: key for _, b, key in others}}
        images = images_of(get(given, start))[0]
        rows[end] = Row(end, gave, keys, (*row.through, (ran, images)))
    if before is None:
        place = _search(taken.states[0])
        if place is None:
            raise ArgumentError(
                "loader must yield images to be shown, (B, C, H, W) of uint8 or floating, got none in a "
                f"{type(taken.states[0]).__name__}. Name them with on= of the first stage, or see what the loader yields."
            )
        before = Row(place, taken.states[0])
    # The rest of the batch is shown as the last stage left it.
    last = taken.states[-1]
    after = [replace(row, batch=last) if images_of(get(last, row.place)) else row for row in rows.values()]
    return Followed(_with_targets(before), tuple(map(_with_targets, after)), tuple(ends))


def count_of(images: Images) -> int:
    """Number of images, or of clips."""
    return len(images) // (images.shapes.frames or 1) if isinstance(images, Ragged) else len(images)


def sample_of(images: Images, index: int) -> Tensor:
    """One image, (C, h, w), or one clip, (T, C, h, w)."""
    frames = images.shapes.frames if isinstance(images, Ragged) else 0
    if not frames:
        return images[index]
    return torch.stack([images[frame] for frame in range(index * frames, (index + 1) * frames)])


def get(batch: Batch, place: Place) -> Any:
    """The member at a place, or ``None`` if there is none."""
    for step in place:
        try:
            batch = batch[step] if isinstance(batch, Mapping) or not isinstance(step, str) else getattr(batch, step)
        except (AttributeError, LookupError, TypeError):
            return None
    return batch


def walk(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """(place, member) of every member of a batch, containers before their own members."""
    yield place, value
    if isinstance(value, Tensor | Ragged):
        return
    if isinstance(value, Mapping):
        items = list(value.items())
    elif batches.is_namedtuple(value):
        items = list(zip(value._fields, value, strict=True))
    elif batches.is_record(value):
        items = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        items = list(enumerate(value)) if isinstance(value, tuple | list) else []
    for step, member in items:
        yield from walk(member, (*place, step))


def images_of(value: Any) -> list[Images]:
    """The batches of images in a member that can be drawn: one, or several views from a list; else an empty list."""
    if isinstance(value, Tensor):
        single = value.ndim == 3 and value.shape[0] in (1, 3)
        fits = value.dtype not in _NOT_PIXELS and (value.ndim in (4, 5) or single) and 0 not in value.shape[-3:]
        return [value[None] if single else value] if fits else []
    if isinstance(value, Ragged):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(each, Tensor) for each in value):
        return []
    if value and all(each.ndim == 3 and images_of(each) for each in value):
        return [value]
    # Views have equal numbers of channels; masks beside images have another.
    views = len({each.shape[1] for each in value if each.ndim == 4}) == 1 and all(each.ndim == 4 for each in value)
    found = [images_of(each) for each in value] if views else []
    return [each[0] for each in found] if all(found) else []


def _with_targets(row: Row) -> Row:
    """The row, with target dicts that no stage names: their keys tell them from other members."""
    if "targets" in row.keys.values():
        return row
    return replace(row, keys={**row.keys, **{place: "targets" for place, value in walk(row.batch) if _is_targets(value)}})


def _is_targets(value: Any) -> bool:
    if isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, list | tuple) for each in value):
        return all(map(_is_targets, value))  # one list for each clip
    dicts = isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, Mapping) for each in value)
    return dicts and any(part in each for each in value for part in _PARTS)


def _search(batch: Batch) -> Place | None:
    """The place of the images: the first with a usual name such as ``image``, else the first of all."""
    found = [place for place, value in walk(batch) if images_of(value)]
    named = [place for place in found if place and str(place[-1]).lower() in _NAMES]
    return next(iter(named or found), None)


def _moves(selection: Selection, given: Batch, gave: Batch) -> Iterator[tuple[Place, Place, str | None]]:
    """(input place, output place, Kornia's data key) of each member that a stage works on."""
    on, into = selection.on, selection.into
    if on is None:
        start = _search(given)
        if start is not None:
            stays = bool(images_of(get(gave, start)))
            yield start, start if stays else _search(gave) or start, None
        return
    keys = [_KEYS.get(key.lower(), key.lower()) for key in selection.data_keys or ()]
    selectors = tuple(on) if isinstance(on, tuple | Mapping) else (on,)
    if into is ...:
        ends = [_place(given, selector) for selector in selectors]
    else:
        ends = [_place(gave, selector) for selector in (into if isinstance(into, tuple) else (into,) * len(selectors))]
    for index, (selector, end) in enumerate(zip(selectors, ends, strict=False)):
        yield _place(given, selector), end, keys[index] if keys else None


def _place(batch: Batch, selector: Any) -> Place:
    sequence = isinstance(batch, tuple | list) and not batches.is_namedtuple(batch)
    if selector is ...:
        return (0,) if sequence else ()
    return (selector % len(batch),) if sequence else (selector,)
