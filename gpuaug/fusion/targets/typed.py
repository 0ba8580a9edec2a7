"""Targets recognized by class: torchvision's ``Mask``, ``BoundingBoxes`` and ``KeyPoints`` in any container.

A *target dict* holds the annotations of one image under fixed keys, such as ``{"boxes": …, "masks": …}``. ``TargetDicts``
transforms them. Targets in other containers are put into new target dicts, and the results into a copy of the container.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.columns import Column, columns
from gpuaug.core.errors import ArgumentError
from gpuaug.core.torchvision_types import HOLDS_NOTHING, TARGET_TYPES, holds_targets, type_name
from gpuaug.fusion.targets.masks import with_class_of

_Path = tuple[Any, ...]
"""Path of a tensor in a container: keys, field names and indices. The index of the image is left out."""

_FRAMES = object()
"""Entry of a path: the indices of clips and frames are left out there."""

_Visit = Callable[[Tensor, _Path, int | None, Any], tuple[Tensor, Tensor | None]]
"""Function that is called for each tensor, with (tensor, path, index of its image or ``None``, container of the tensor).

It returns (tensor to put in place, mask to put under the key ``valid`` of the container or ``None``).
"""

_TARGET_DICT_KEYS = frozenset({*TARGET_TYPES.values(), "bbox"})
"""Keys of target dicts whose values are transformed whatever their class."""


@dataclass
class _Column:
    """Tensors of all images at one path."""

    key: str
    """Key of the tensors in a target dict."""
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """Tensors by index of the image."""
    valid: dict[int, Tensor] = field(default_factory=dict)
    """Masks of the input boxes that are valid, (n,), by index of the image."""
    is_batched: bool = False
    """True if the container holds one tensor for all images, which is split in ``tensors``."""
    is_per_frame: bool = False
    """True if an index counts the frames of all clips; False if it counts images."""


class TypedTargets:
    """Masks, boxes and keypoints in one input, which are converted to inputs with data keys, ``inputs``.

    In a sequence of B elements, element ``i`` belongs to image ``i``. A tensor outside such a sequence holds one entry per
    image, (B, …). Of clips, a list may hold one list with one element per frame for each clip, and keypoints may be
    (B, T, n, 2).

    Args:
        container: Tensor of one of torchvision's types, or a container of such tensors, nested to any depth.
        batch: Number of images.
        in_dicts: Whether ``container`` is a list of target dicts. Values under the keys ``boxes``, ``bbox``, ``masks`` and
            ``keypoints`` are then left to ``TargetDicts``.
        frames: Number of frames per clip; 0 for images.
        images: Number of frames of all clips.

    Raises:
        ArgumentError: If a sequence or a tensor does not hold one entry per image.
    """

    def __init__(self, container: Any, batch: int, *, in_dicts: bool = False, frames: int = 0, images: int = 0) -> None:
        self._batch = batch
        self._frames, self._images = frames, images
        self._frame_indices: Sequence[int] = range(frames)
        """Index of the input frame per output frame."""
        self._skipped = _TARGET_DICT_KEYS if in_dicts else frozenset()
        """Keys whose values are left to ``TargetDicts``."""
        self._columns: dict[_Path, _Column] = {}
        """Boxes, keypoints and instance masks that are put into target dicts."""
        self._maps: dict[_Path, Tensor] = {}
        """Segmentation maps of all images, (B, …), that become inputs with the data key ``mask``."""
        self._container = container
        self._flat_columns = _flat_columns(container, batch, self._skipped)
        """Tensors of all images by key, if the container is a list of dicts of tensors; ``None`` for other containers.

        Such lists are common, and read faster than by ``_mapped``.
        """
        if self._flat_columns is None:
            self._mapped(container, self._collect)
        else:
            self._collect_flat(self._flat_columns)
        self.inputs = [*(("mask", values) for values in self._maps.values()), *(("targets", dicts) for dicts in self._dicts())]
        """(data key, value) of each input."""

    @property
    def box_names(self) -> list[str]:
        """Names of the boxes that are put into target dicts, for errors."""
        boxes = [path for path, column in self._columns.items() if column.key == "boxes"]
        return [".".join(str(name) for name in path if name is not _FRAMES) or "boxes" for path in boxes]

    def results(self, results: Sequence[Any], dicts: Sequence[Any] | None, frame_indices: Sequence[int]) -> Any:
        """Return a copy of the container with transformed masks, boxes and keypoints.

        Args:
            results: Results of ``inputs``, in the same order.
            dicts: Copy of the container in which ``TargetDicts`` has transformed its values; ``None`` if there is none.
            frame_indices: Index of the input frame per output frame of a clip. Elements of other frames are left out.
        """
        self._frame_indices = frame_indices
        maps = dict(zip(self._maps, results, strict=False))
        records = results[len(maps) :]
        list_indices = self._list_indices()
        if self._flat_columns is not None:
            return self._put_flat(self._flat_columns, records, self._container if dicts is None else dicts)

        def put(_: Tensor, path: _Path, sample: int | None, container: Any) -> tuple[Tensor, Tensor | None]:
            """Return the result for a tensor."""
            if path in maps:
                return maps[path], None
            column, list_index = self._columns[path], list_indices[path]
            if not column.is_batched:
                record = records[list_index][sample]
                return record[column.key], record.get("valid") if self._has_valid(path, container) else None
            parts = [record[column.key] for record in records[list_index]]
            if column.is_per_frame:
                parts = [parts[first + frame] for first in range(0, self._images, self._frames) for frame in frame_indices]
            result = (torch.cat if column.key == "boxes" else torch.stack)([part.as_subclass(Tensor) for part in parts])
            if column.is_per_frame:
                result = result.unflatten(0, (-1, len(frame_indices)))
            has_valid = column.key == "boxes" and self._has_valid(path, container)
            valid = (
                torch.cat([record["valid"] for record in records[list_index]]) if has_valid and records[list_index] else None
            )
            return with_class_of(result, parts[0]), valid

        result = self._mapped(self._container, put)
        if dicts is None:
            return result
        changes = [
            {name: value for name, value in new_record.items() if value is not old_record.get(name)}
            for new_record, old_record in zip(result, self._container, strict=True)
        ]
        return (tuple if isinstance(dicts, tuple) else list)(
            batches.replace(record, values) if values else record for record, values in zip(dicts, changes, strict=True)
        )

    def _collect_flat(self, columns_by_key: Mapping[str, Column]) -> None:
        """Fill ``_columns`` from a list of dicts of tensors."""
        for name, (samples, values) in columns_by_key.items():
            column = self._columns[name,] = _Column(TARGET_TYPES[type_name(values[0])])
            column.tensors.update(zip(samples, values, strict=True))
        for name, (samples, _) in columns_by_key.items():
            for sample in self._with_valid(name, samples):
                if "valid" in self._container[sample]:
                    self._columns[name,].valid[sample] = self._container[sample]["valid"]

    def _put_flat(self, columns_by_key: Mapping[str, Column], records: Sequence[Any], dicts: Sequence[Any]) -> Any:
        """Return copies of ``dicts`` with transformed tensors in place of those in ``columns_by_key``.

        Args:
            columns_by_key: Tensors of all images by key.
            records: Transformed target dicts, one list for each of ``inputs``.
            dicts: The container, or a copy of it.
        """
        list_indices = self._list_indices()
        changes: list[dict[str, Any]] = [{} for _ in dicts]
        for name, (samples, _) in columns_by_key.items():
            column = self._columns[name,]
            results = records[list_indices[name,]]
            for sample in samples:
                changes[sample][name] = results[sample][column.key]
            for sample in self._with_valid(name, samples):
                changes[sample]["valid"] = results[sample]["valid"]
        return (tuple if isinstance(dicts, tuple) else list)(
            record if not change else {**record, **change} if type(record) is dict else batches.replace(record, change)
            for record, change in zip(dicts, changes, strict=True)
        )

    def _with_valid(self, name: str, samples: Sequence[int]) -> Sequence[int]:
        """Return the indices of the dicts in which ``valid`` refers to the boxes under ``name``. Reads all ``_columns``."""
        if self._columns[name,].key != "boxes":
            return ()
        if not self._skipped and sum(column.key == "boxes" for column in self._columns.values()) == 1:
            return samples
        return [sample for sample in samples if self._has_valid((name,), self._container[sample])]

    def _list_indices(self) -> dict[_Path, int]:
        """Return the index of the list of target dicts of each column.

        A target dict holds one value per key, so columns with the same key are in different lists. So are columns of images and
        of frames.
        """
        counts: Counter[tuple[bool, str]] = Counter()
        lists: dict[tuple[bool, int], int] = {}
        list_indices = {}
        for path, column in self._columns.items():
            kind = column.is_per_frame, column.key
            list_indices[path] = lists.setdefault((column.is_per_frame, counts[kind]), len(lists))
            counts[kind] += 1
        return list_indices

    def _dicts(self) -> list[list[dict[str, Tensor]]]:
        """Return lists of target dicts that hold all columns."""
        list_indices = self._list_indices()
        lengths = {
            list_indices[path]: self._images if column.is_per_frame else self._batch for path, column in self._columns.items()
        }
        dict_lists: list[list[dict[str, Tensor]]] = [[{} for _ in range(length)] for length in lengths.values()]
        for path, column in self._columns.items():
            for sample, tensor in column.tensors.items():
                dict_lists[list_indices[path]][sample][column.key] = tensor
            for sample, valid in column.valid.items():
                dict_lists[list_indices[path]][sample]["valid"] = valid
        return dict_lists

    def _mapped(self, value: Any, visit: _Visit, path: _Path = (), sample: int | None = None) -> Any:
        """Return ``value`` with each target replaced by the result of ``visit``; ``value`` itself if nothing changes.

        Args:
            value: Container, or a part of it.
            visit: Function that is called for each tensor of torchvision's classes.
            path: Path of ``value`` in the container.
            sample: Index of the image or frame that ``value`` belongs to; ``None`` if it belongs to all images.
        """
        if isinstance(value, Tensor):
            return self._visited(value, visit, path, sample, None)[0]
        if not batches.is_container(value):
            return value
        if sample is None and self._is_per_frame(value):
            return self._mapped_frames(value, visit, path)
        per_image = sample is None and _is_sequence(value)
        if per_image and len(value) != self._batch:
            if not holds_targets(value):
                return value
            raise ArgumentError(
                f"A list of masks, boxes or keypoints must hold one element for each of the {self._batch} images, got "
                f"{len(value)}. Put tensors that hold all images into a dict, not into a list."
            )
        if per_image:
            self._check_elements(value)
        changes: dict[Any, Any] = {}
        for name in batches.member_names(value):
            member = batches.member(value, name)
            member_path, member_sample = ((*path, name), sample) if not per_image else (path, name)
            if isinstance(member, Tensor):
                if name in self._skipped and not path:
                    continue
                result, valid = self._visited(member, visit, member_path, member_sample, value)
                if valid is not None:
                    changes["valid"] = valid
            else:
                result = self._mapped(member, visit, member_path, member_sample)
            if result is not member:
                changes[name] = result
        return batches.replace(value, changes) if changes else value

    def _check_elements(self, elements: Sequence[Any]) -> None:
        """Raise an error if the elements of a sequence may be annotations of all images, although there is one per image."""
        kinds = sorted(set(map(_kind, elements)) - {""})
        got = " and ".join(kinds)
        if kinds == ["Mask"] and isinstance(elements, tuple) and self._batch > 1 and not self._frames:
            shapes = {tuple(element.shape) if isinstance(element, Tensor) else () for element in elements}
            shape = shapes.pop()
            # Masks of all images, (B, H, W), or B masks of each image. Collate functions return lists for one mask per image.
            is_ambiguous = not shapes and len(shape) == 3 and shape[0] == self._batch
            got = f"{self._batch} masks {shape}"
        else:
            is_ambiguous = len(kinds) > 1 and holds_targets(elements)
        if is_ambiguous:
            raise ArgumentError(
                f"A list of {self._batch} elements must hold annotations of one image in each, got {got}, which may hold "
                "annotations of all images. Put tensors that hold all images into a dict, and tensors of one image into a dict "
                "for each image."
            )

    def _is_per_frame(self, value: Any) -> bool:
        """Return whether a value is a list with, for each clip, one list of one element per frame, of one type or ``None``."""
        if not self._frames or type(value) not in (list, tuple) or len(value) * self._frames != self._images:
            return False
        if any(type(clip) not in (list, tuple) or len(clip) != self._frames for clip in value):
            return False
        return len({type(element) for clip in value for element in clip} - {type(None)}) == 1 and holds_targets(value)

    def _mapped_frames(self, value: Any, visit: _Visit, path: _Path) -> Any:
        """Return ``_mapped`` for a value for which ``_is_per_frame`` is true, with the elements of the output frames only."""
        path = (*path, _FRAMES)
        return type(value)(
            type(clip)(self._mapped(clip[frame], visit, path, index * self._frames + frame) for frame in self._frame_indices)
            for index, clip in enumerate(value)
        )

    def _visited(
        self, tensor: Tensor, visit: _Visit, path: _Path, sample: int | None, container: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of ``visit`` for a target, and other tensors unchanged."""
        name = type_name(tensor)
        if name not in TARGET_TYPES:
            return tensor, None
        # In a batch of one image, every tensor belongs to that image, unless it has a batch axis.
        sample = 0 if sample is None and self._batch == 1 and tensor.ndim < 4 else sample
        return visit(tensor, path, sample, container)

    def _collect(self, tensor: Tensor, path: _Path, sample: int | None, container: Any) -> tuple[Tensor, None]:
        """Add a tensor to ``_maps`` or ``_columns``. A ``visit`` function for ``_mapped``, which keeps the tensor unchanged."""
        key = TARGET_TYPES[type_name(tensor)]
        if sample is None and key == "masks":
            self._maps[path] = tensor
            return tensor, None
        column = self._columns.setdefault(path, _Column(key, is_per_frame=_FRAMES in path))
        if sample is not None:
            column.tensors[sample] = tensor
            if self._has_valid(path, container) and "valid" in container:
                column.valid[sample] = container["valid"]
            return tensor, None
        shape, source = tensor.shape, tensor
        if key == "keypoints" and self._frames and len(shape) == 4 and shape[1] == self._frames:
            tensor, column.is_per_frame = tensor.flatten(0, 1), True
        if not tensor.ndim or len(tensor) != (self._images if column.is_per_frame else self._batch):
            raise ArgumentError(
                f"{type_name(source)} must hold one entry for each of the {self._batch} images, got {tuple(shape)}. "
                "Pass a list of one tensor per image."
            )
        column.is_batched = True
        if self._has_valid(path, container) and "valid" in container:
            valid = container["valid"]
            fits = isinstance(valid, Tensor) and valid.shape == (self._batch,)
            column.valid.update(enumerate(valid.split(1) if fits else [valid] * self._batch))  # TargetDicts refuses others
        parts = tensor.split(1) if key == "boxes" else tensor.unbind()
        column.tensors.update((index, with_class_of(part, source)) for index, part in enumerate(parts))
        return tensor, None

    def _has_valid(self, path: _Path, container: Any) -> bool:
        """Return whether ``valid`` in ``container`` refers to the boxes at ``path``: only to the first boxes in a mapping."""
        if not isinstance(container, Mapping):
            return False
        names = [name for name, value in container.items() if type_name(value) == "BoundingBoxes"]
        is_of_target_dict = len(path) == 1 and any(name in self._skipped for name in ("boxes", "bbox") if name in container)
        return names[:1] == [path[-1]] and not is_of_target_dict


def _flat_columns(container: Any, batch: int, skipped: Collection[str]) -> dict[str, Column] | None:
    """Return the masks, boxes and keypoints of a list of dicts of tensors, by key.

    ``skipped``: keys to leave out.

    Returns:
        Tensors of all images by key. ``None`` if ``container`` is not a list of one dict per image, if values are containers of
        targets, or if tensors under one key differ in their class.
    """
    if type(container) not in (list, tuple) or len(container) != batch or set(map(type, container)) != {dict}:
        return None
    result = {}
    for name, column in columns(container).items():
        types = set(map(type, column.values))
        if name in skipped or types <= HOLDS_NOTHING:
            continue
        if len(types) > 1 or type_name(column.values[0]) not in TARGET_TYPES:
            if any(map(holds_targets, column.values)):
                return None
            continue
        result[name] = column
    return result


def has_targets_under_other_keys(dicts: Any) -> bool:
    """Return whether target dicts hold torchvision's tensors under keys other than ``boxes``, ``masks`` and so on."""
    if not isinstance(dicts, list | tuple):
        return False
    records = dicts if set(map(type, dicts)) == {dict} else [record for record in dicts if isinstance(record, Mapping)]
    return any(
        key not in _TARGET_DICT_KEYS and not HOLDS_NOTHING.issuperset(map(type, values)) and any(map(holds_targets, values))
        for key, (_, values) in columns(records).items()
    )


def concatenated_typed_views(views: Sequence[Any], batch: int) -> Any:
    """Concatenate the results of one input over all views, that is, random augmentations of the same images.

    Lists of B elements that hold targets, and targets of all images, are concatenated. All other values are returned once.

    Args:
        views: Result of the input per view.
        batch: Number of images per view.
    """
    first = views[0]
    if isinstance(first, Tensor):
        return with_class_of(torch.cat(tuple(views)), first) if type_name(first) in TARGET_TYPES else first
    if not holds_targets(first):
        return first
    if _is_sequence(first) and len(first) == batch:
        return type(first)(element for view in views for element in view)
    names = batches.member_names(first)
    result = {name: concatenated_typed_views([batches.member(view, name) for view in views], batch) for name in names}
    if isinstance(first, Mapping) and "valid" in first and "BoundingBoxes" in map(type_name, first.values()):
        result["valid"] = torch.cat([view["valid"] for view in views])
    return batches.replace(first, result)


def _kind(value: Any) -> str:
    """Return a name of the type of annotations, which is equal for all images; ``""`` for an empty value."""
    if isinstance(value, Tensor):
        return type_name(value) or ("other values" if value.numel() else "")
    if _is_sequence(value):
        inner = _kind(value[0]) if value else ""
        return inner and f"list of {inner}"
    if value is None:
        return ""
    return "dict" if batches.is_container(value) else "other values"


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or a similar sequence, and not a namedtuple or string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not batches.is_namedtuple(value)
