"""Merge of the target dicts of several images into one dict.

An op, such as a mosaic, combines each *group* of consecutive images into one image, the group's *canvas*. A *target dict* holds
the annotations of one image, such as ``{"boxes": …}``. The N target dicts are in the order of the images, so the dicts of a
group are consecutive, and the M merged dicts are in the order of the canvases.

Target dicts are *packed*: a *column* is the concatenation of the values of one key. ``PackedColumn.samples`` are the images
that have the key, and ``lengths`` the number of *rows* of each value: of its entries along the first axis, such as boxes.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.core.targets import (
    BOXES,
    HOLDS_NOTHING,
    KEYPOINTS,
    LABELS,
    MASKS,
    PER_BOX,
    TARGET_KEYS,
    TARGET_TYPES,
    Column,
    FlatColumn,
    Kind,
    PackedColumn,
    PackedTargets,
    TargetsLayout,
    as_plain_tensors,
    indices_of,
    owners_of,
    type_name_of,
)
from gpuaug.fusion.backends.readers import send
from gpuaug.fusion.combine_ops import Placement
from gpuaug.fusion.forms.views import concatenated
from gpuaug.fusion.ops.torchvision.per_box import label_key

_SEQUENCES = (Tensor, np.ndarray, list, tuple)
"""Types of values that may have one entry per box."""

_LEAST_IMAGES = 8
"""Number of images from which on it is hardly a coincidence if all have as many entries under a key as boxes."""

_SINGLE = -1
"""In place of a number of entries: the value is a number or another value without axes."""


def kind_of(name: Any, cls: type) -> Kind | None:
    """Return the kind of values under key ``name``, or of class ``cls``; ``None`` if passes do not change such values."""
    return TARGET_KEYS.get(name, TARGET_TYPES.get(type_name_of(cls)))


_Parts = list[tuple[Sequence[int], list[int]]]
"""Images, and number of entries per image, in parts."""


def keys_per_box(targets: PackedTargets, count: int) -> set[Any]:
    """Return the keys with one entry per box, which ``Merge`` concatenates.

    An image with another number of entries than boxes is an error: in the merged dict, its entries would belong to boxes of
    another image. As in ``sanitize``, the first key that contains ``label`` has one entry per box if its numbers of entries are
    the numbers of boxes. Otherwise it belongs to the image. Another key whose numbers of entries are the numbers of boxes in
    ``_LEAST_IMAGES`` or more images is an error; in fewer images, it belongs to the image.

    Args:
        targets: Target dicts of all images, in the order of the samples.
        count: Number of images per sample.

    Raises:
        ArgumentError: If the numbers differ in an image; if a key that is not in ``PER_BOX`` has as many entries as boxes in
            all images, which have different numbers of boxes.
    """
    labels = label_key(targets.layout.keys)
    parts_by_key = _parts_by_key(targets)
    box_parts = next((parts for (_, kind), parts in parts_by_key.items() if kind is BOXES), [])
    keys = set(PER_BOX)
    for (name, kind), parts in parts_by_key.items() if box_parts else ():
        is_known = kind is not None or name in PER_BOX  # to have one entry per box
        if parts != box_parts:
            # Image → number of entries, of this key and of boxes.
            counts, box_counts = (dict(chain.from_iterable(starmap(zip, each))) for each in (parts, box_parts))
            different = [image for image in sorted({*counts, *box_counts}) if counts.get(image, 0) != box_counts.get(image, 0)]
            if different and not is_known:  # the values belong to the image
                continue
            for image in different:
                sample, position = divmod(image, count)
                expected, got = box_counts.get(image, 0), counts.get(image, 0)
                raise ArgumentError(
                    f"{name} of image {position} of sample {sample} must have one entry per box, {expected}, got "
                    f"{'a single value' if got == _SINGLE else got}. Return boxes and {name} of all objects from the data set."
                )
        if is_known or name == labels:
            keys.add(name)
            continue
        numbers = sorted(set(chain.from_iterable(lengths for _, lengths in box_parts)))
        if len(numbers) > 1 and len(targets.layout.records) >= _LEAST_IMAGES:
            raise ArgumentError(
                f"{name!r} must be a key that is known to have one entry per box, got as many entries as boxes in images with "
                f"{' and '.join(map(str, numbers))} boxes. Rename it to such a key, for instance to 'ids'."
            )
    return keys


def _parts_by_key(targets: PackedTargets) -> dict[tuple[Any, Kind | None], _Parts]:
    """Return (key, kind) → numbers of entries per image.

    Left out are keypoints (n, 2) and segmentation maps (H, W), which belong to the image, and single values under keys that are
    not in ``PER_BOX``.
    """
    parts_by_key: dict[tuple[Any, Kind | None], _Parts] = {}
    for name, cls, axes, images, lengths in chain.from_iterable(map(_entries, targets.all_columns().values())):
        kind = kind_of(name, cls)
        if axes != 2 if kind in (KEYPOINTS, MASKS) else axes or kind is not None or name in PER_BOX:
            parts_by_key.setdefault((name, kind), []).append((images, lengths))
    return parts_by_key


def _entries(column: Column) -> Iterator[tuple[Any, type, int, Sequence[int], list[int]]]:
    """Yield (key, class, number of axes, images, number of entries per image) for a packed column, or for each value."""
    if isinstance(column, FlatColumn):
        yield column.name, column.packed.tensor_type, column.joined.ndim, column.samples, column.lengths
        return
    for image, value in zip(column.samples, column.values, strict=True):
        # Without a key of ``PER_BOX``, plain numbers and text are not counted.
        if value is not None and (column.name in PER_BOX or type(value) not in HOLDS_NOTHING - {Tensor}):
            axes = value.ndim if isinstance(value, Tensor | np.ndarray) else int(isinstance(value, list | tuple))
            yield column.name, type(value), axes, [image], [len(value) if axes else _SINGLE]


class PlacedMasks(NamedTuple):
    """n masks of objects, moved to where their images are on the canvases."""

    owners: NDArray[np.int64]
    """(n,) index of the image of each mask, ascending."""
    flat: Tensor
    """Pixels of the masks in one flat tensor. Each mask is (H, W) of its canvas."""


_Groups = tuple[Tensor | None, list[int], list[int], list[int]]
"""Values of a column that the merged dicts get, in the order of the canvases:

(indices of the rows of these values, on the device of the column, or ``None`` for all rows; indices of the canvases that get a
value, ascending; number of rows per such canvas; per such canvas, position of its first value in ``PackedColumn.samples``).
"""


class Merge:
    """Merge of the target dicts of each group into one dict.

    Values with one entry per box are concatenated over the images that the canvas shows, in the order of the images. These are
    the values of ``keys``, and boxes, masks and keypoints of torchvision's classes. Other keys have the value of the
    first image of the group. If the op blends images, boxes get the weight of their image, under the key ``"weight"``.

    Args:
        packed: Target dicts of N images.
        placement: Placement of the images by the op.
        keys: Result of ``keys_per_box``.
        device: Device of the images.
    """

    def __init__(self, packed: PackedTargets, placement: Placement, keys: Set[Any], device: torch.device) -> None:
        self._count, self._placement, self._keys = placement.op.count, placement, keys
        self._is_first = np.arange(len(placement.used)) % self._count == 0
        weights = placement.op.weights(placement.draws)
        self._packed = packed if weights is None else _weighted(packed, np.stack((weights, 1 - weights), 1).ravel(), device)
        self._cached_groups: list[tuple[Any, _Groups]] = []
        """(arguments, result) of the calls of ``_groups_of``. Most columns have the same images and lengths."""

    def result(self, masks: Mapping[Any, PlacedMasks]) -> PackedTargets:
        """Return one packed dict per canvas. ``masks``: key → masks on the canvases, which replace the masks of the dicts."""
        columns = [
            self._mask_column(column.packed, masks[name]) if name in masks else self._merged(column.packed, column.joined)
            for name, column in self._packed.columns().items()
        ]
        # Key → index of the canvas → values of the group that are not packed, in the order of the images.
        others: dict[Any, dict[int, list[Any]]] = {}
        for name, values in self._packed.others.items():
            if name in masks:  # masks that are not packed have several classes: the first class is kept
                columns.append(self._mask_column(Column([*values], [*values.values()], name).packed, masks[name]))
                continue
            is_kept = self._is_kept(name in self._keys)
            groups = others.setdefault(name, {})
            for image, value in values.items():
                if is_kept[image] and value is not None:
                    groups.setdefault(image // self._count, []).append(value)
        new_others = {
            name: {index: _merged_value(parts, name) for index, parts in groups.items()} for name, groups in others.items()
        }
        layout = TargetsLayout(list, self._packed.layout.records[:: self._count], [])
        return PackedTargets((), new_others, layout).with_columns(columns)

    def _is_kept(self, is_per_box: bool) -> NDArray[np.bool_]:
        """Return the (N,) mask of the images whose values the merged dicts get.

        With ``is_per_box``, for values with one row per box, these are all images that are visible in the results. Otherwise it
        is the first image of each group.
        """
        return self._placement.used if is_per_box else self._is_first

    def _merged(self, column: PackedColumn, flat: Tensor) -> FlatColumn:
        """Return a merged column, with one value per canvas, from the description and the data of the column."""
        is_per_box = column.name in self._keys or type_name_of(column.tensor_type) in TARGET_TYPES
        if is_per_box and column.shapes is not None:
            raise ArgumentError(
                f"{column.name} of the images of a sample must have one shape after the first axis, got "
                f"{' and '.join(str(tuple(shape)) for shape in dict.fromkeys(column.shapes))}. Return such tensors from the "
                "data set, also for an image without boxes."
            )
        arguments = is_per_box, column.samples, column.lengths, flat.device
        if all(cached != arguments for cached, _ in self._cached_groups):
            self._cached_groups.append((arguments, self._groups_of(*arguments)))
        rows, canvases, lengths, first_positions = next(groups for cached, groups in self._cached_groups if cached == arguments)
        flat = flat if rows is None else flat.index_select(0, rows)
        # Attributes of torchvision's tensors: one dict per value, or a single dict if all are equal.
        attributes = column.attributes
        if len(attributes) > 1:
            attributes = [attributes[position] for position in first_positions]
        if any("canvas_size" in entries for entries in attributes):
            sizes = map(tuple, self._placement.canvases[canvases].tolist())
            attributes = attributes * len(canvases) if len(attributes) == 1 else attributes
            attributes = [{**entries, "canvas_size": size} for entries, size in zip(attributes, sizes, strict=True)]
        shapes = None if column.shapes is None else [column.shapes[position] for position in first_positions]
        return FlatColumn(column._replace(samples=canvases, lengths=lengths, shapes=shapes, attributes=attributes), flat)

    def _groups_of(self, is_per_box: bool, samples: Sequence[int], lengths: Sequence[int], device: torch.device) -> _Groups:
        """Return the ``_Groups`` of a column with values of ``lengths`` rows for the images ``samples``."""
        images = indices_of(samples)
        row_counts = np.array(lengths, np.int64)
        is_kept = self._is_kept(is_per_box)[images]
        kept_rows = None if is_kept.all() else send([np.flatnonzero(np.repeat(is_kept, row_counts))], device)[0]
        kept_positions = np.flatnonzero(is_kept)
        # Index of the canvas of each value that is kept. The indices ascend.
        canvas_of_value = images[kept_positions] // self._count
        canvases = np.flatnonzero(np.bincount(canvas_of_value))
        new_lengths = np.bincount(canvas_of_value, row_counts[kept_positions])[canvases].astype(np.int64)
        first_positions = kept_positions[np.searchsorted(canvas_of_value, canvases)]
        return kept_rows, canvases.tolist(), new_lengths.tolist(), first_positions.tolist()

    def _mask_column(self, column: PackedColumn, placed_masks: PlacedMasks) -> FlatColumn:
        """Return the merged column of masks, (n, H, W) per canvas."""
        owners, flat = placed_masks
        images = indices_of(column.samples)
        # Canvases that show at least one image whose dict has masks.
        canvases = np.unique(images[self._placement.used[images]] // self._count)
        masks_per_canvas = np.bincount(owners // self._count, minlength=len(self._placement.canvases))[canvases].tolist()
        sizes = self._placement.canvases[canvases].tolist()
        column = column._replace(samples=canvases.tolist(), lengths=masks_per_canvas, shapes=None)
        if all(size == sizes[0] for size in sizes):
            return FlatColumn(column, flat.view(len(owners), *sizes[0]) if sizes else flat.view(0, 1, 1))
        shapes = [torch.Size((count, *size)) for count, size in zip(masks_per_canvas, sizes, strict=True)]
        return FlatColumn(column._replace(lengths=[shape.numel() for shape in shapes], shapes=shapes), flat)


def _weighted(packed: PackedTargets, weights: NDArray[np.float32], device: torch.device) -> PackedTargets:
    """Multiply ``"weight"``, one number per object, by the weight of its image, or add the column if there is none.

    Dicts without boxes, labels and keypoints of objects are returned unchanged.

    Args:
        packed: Target dicts of N images.
        weights: (N,) weight of each image.
        device: Device of a column that is added.

    Raises:
        ArgumentError: If an existing weight is not one number per object.
    """
    kinds = BOXES, LABELS, KEYPOINTS
    entries = _parts_by_key(packed).items()
    parts = next((parts for kind in kinds for (name, own), parts in entries if own is kind or name in kind.keys), [])
    if not parts or any(_SINGLE in lengths for _, lengths in parts):
        return packed
    samples = [*chain.from_iterable(images for images, _ in parts)]
    lengths = [*chain.from_iterable(lengths for _, lengths in parts)]
    column = packed.all_columns().get("weight", Column((), ()))
    old_weights = [(image, value) for image, value in zip(column.samples, column.values, strict=True) if value is not None]
    factors = []
    if old_weights:
        samples = [image for image, _ in old_weights]
        with as_plain_tensors():
            for _, value in old_weights:
                dtype = None if isinstance(value, Tensor | np.ndarray) else torch.float32
                try:
                    factor = torch.as_tensor(value, dtype=dtype, device=device)
                except (TypeError, ValueError):  # not numbers, or rows of different lengths
                    factor = None
                if factor is None or factor.ndim != 1:
                    raise ArgumentError(
                        f"weight must be one number per object, (n,), got {shown(value)}. Return such weights from the data "
                        "set, or leave them out."
                    )
                factors.append(factor)
        lengths = [len(factor) for factor in factors]
    (flat,) = send([weights[owners_of(samples, lengths)]], device)
    flat = flat * torch.cat(factors) if factors else flat
    others = {name: values for name, values in packed.others.items() if name != "weight"}
    packed = PackedTargets(packed.flat, others, packed.layout)
    return packed.with_columns([FlatColumn(PackedColumn("weight", samples, lengths), flat)])


def _merged_value(parts: Sequence[Any], name: Any) -> Any:
    """Return the concatenation of the values of a group that are not packed; the first one if they have no entries.

    Values without entries do not decide on the type, because many data sets return ``torch.tensor([])`` for them.

    Raises:
        ArgumentError: If values with entries have different types.
    """
    if len(parts) == 1 or not all(isinstance(part, _SEQUENCES) and getattr(part, "ndim", 1) for part in parts):
        return parts[0]
    filled = [part for part in parts if len(part)] or parts[:1]
    result = filled[0] if len(filled) == 1 else concatenated(filled)
    # Integers, such as labels, would be converted to floats. Coordinates may be converted.
    are_floating = {np.issubdtype(part.dtype, np.floating) for part in filled if isinstance(part, np.ndarray)}
    are_floating |= {part.is_floating_point() for part in filled if isinstance(part, Tensor)}
    if result is None or (len(are_floating) > 1 and kind_of(name, type(filled[0])) is None):
        types = dict.fromkeys(f"{type(part).__name__} of {getattr(part, 'dtype', 'objects')}" for part in filled)
        raise ArgumentError(
            f"{name} must have the same type in all images of a sample, got {' and '.join(types)}. Convert the values in the "
            "data set."
        )
    return result
