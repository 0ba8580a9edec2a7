"""Boxes or keypoints of the target dicts of a batch, as one tensor of *rows*: one row per box or keypoint."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpuaug.core.columns import Column, TensorColumn, as_plain_tensors, split
from gpuaug.core.packed_targets import FlatColumn, PackedColumn, PackedTargets
from gpuaug.core.torchvision_types import type_name
from gpuaug.fusion.ops.boxes import floating_dtype
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.targets.masks import with_class_of


class Annotations(NamedTuple):
    """Boxes or keypoints of a batch, in the order of the images that have any."""

    samples: Sequence[int]
    """Indices of the images."""
    keys: Sequence[str]
    """Key of each value in its dict."""
    tensors: TensorColumn
    """The values as a column. Unless all values are tensors, only its attribute ``types`` can be read."""

    def items(self) -> "zip[tuple[int, str, Any]]":
        """Return an iterator of (sample index, key, value)."""
        return zip(self.samples, self.keys, self.tensors.tensors, strict=True)


class Rows:
    """Boxes or keypoints of a batch as one tensor of rows.

    Args:
        annotations: Boxes or keypoints. All of them must be tensors.
    """

    def __init__(self, annotations: Annotations) -> None:
        self.samples, self.keys, self._tensors = annotations
        column = self._tensors
        self.counts: list[int]
        """Number of rows of each image in ``samples``."""
        if isinstance(column, FlatColumn):
            self.counts = [length * column.rows_per_entry for length in column.packed.lengths]
        else:
            self.counts = [shape[0] if len(shape) == 2 else shape[:-1].numel() for shape in column.shapes]

    def joined(self) -> Tensor:
        """Return the rows of all images, (n, 4), or (n, 2 or 3) for keypoints."""
        dtypes = self._tensors.dtypes
        if len(dtypes) > 1:
            # torch.cat would convert int64 beside float16 to float16, in which large coordinates are rounded.
            dtype = torch.float64 if torch.float64 in dtypes else torch.float32
            with as_plain_tensors():
                return torch.cat([value.to(dtype).flatten(0, -2) for value in self._tensors.tensors])
        if self._tensors.entry is not None:
            return self._tensors.joined.flatten(0, -2)
        with as_plain_tensors():
            return torch.cat([value.flatten(0, -2) for value in self._tensors.tensors])

    def split(
        self, joined_rows: Tensor, frame: tuple[int, int], conversions: TargetConversions, format_name: str | None = None
    ) -> Sequence[Tensor]:
        """Split rows by image, and restore the shape, dtype and class of the inputs. Integers become floating-point.

        Args:
            joined_rows: Rows of all images.
            frame: Height and width of the output images, in pixels.
            conversions: Conversions of the output. torchvision's tensors become plain tensors if ``conversions.is_pure``.
            format_name: Name of the output format of boxes; ``None`` for the format of the inputs.
        """
        shapes, entry = self._tensors.shapes, self._tensors.entry
        if entry is not None:
            lengths = [shape[0] for shape in shapes]
            parts = split(joined_rows.view(sum(lengths), *entry), lengths)
        else:
            rows_per_image = split(joined_rows, self.counts)
            parts = [rows.view(shape) for rows, shape in zip(rows_per_image, shapes, strict=True)]
        values = self._tensors.tensors
        if len(self._tensors.dtypes) > 1:
            parts = [part.to(floating_dtype(value.dtype)) for part, value in zip(parts, values, strict=True)]
        if self._tensors.types <= {Tensor} or (conversions.is_pure and all(map(type_name, values))):
            return parts
        return [
            with_class_of(part, value, canvas_size=frame, **format_attribute(vars(value), format_name))
            for part, value in zip(parts, values, strict=True)
        ]

    def packed(
        self, rows: Tensor, frame: tuple[int, int], conversions: TargetConversions, format_name: str | None = None
    ) -> tuple[PackedColumn, Tensor]:
        """Return (packed column that describes the rows, rows in one tensor). Arguments as of ``split``."""
        column = self._tensors
        assert isinstance(column, FlatColumn)
        flat = rows.view(column.joined.shape)
        if column.packed.tensor_type is Tensor or conversions.is_pure:
            return column.packed.plain(), flat
        attributes = [{**values, "canvas_size": frame, **format_attribute(values, format_name)} for values in column.attributes]
        return column.packed._replace(attributes=attributes), flat


def annotations_of(columns_by_key: Mapping[str, Column], *keys: str) -> Annotations:
    """Return the values of all dicts under ``keys``: the keys of boxes, or the key of keypoints."""
    key_columns = [(key, columns_by_key[key]) for key in keys if key in columns_by_key]
    if len(key_columns) == 1:
        ((key, column),) = key_columns
        return Annotations(list(column.samples), [key] * len(column.values), TensorColumn(column.values))
    # Sorted by sample alone: the sort is stable, so the keys of a sample keep their order.
    rows = sorted(
        ((sample, key, value) for key, column in key_columns for sample, value in zip(*column, strict=True)),
        key=lambda row: row[0],
    )
    return Annotations([row[0] for row in rows], [row[1] for row in rows], TensorColumn([row[2] for row in rows]))


def packed_annotations_of(packed: PackedTargets | None, *keys: str) -> Annotations | None:
    """Return the values under the first of ``keys`` that packed target dicts have; ``None`` without such a key."""
    for key in keys:
        column = None if packed is None else packed.column(key)
        if column:
            return Annotations(column.packed.samples, [key] * len(column.packed.lengths), column)
    return None


def format_attribute(attributes: Mapping[str, Any], format_name: str | None) -> dict[str, Any]:
    """Return ``{"format": …}`` for ``format_name``; empty if ``format_name`` is ``None``, or the tensor is not boxes.

    ``attributes``: attributes of the input tensor.
    """
    box_format = attributes.get("format")
    return {} if format_name is None or box_format is None else {"format": type(box_format)[format_name.upper()]}
