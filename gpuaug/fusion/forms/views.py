"""Outputs of several *views*, that is, random augmentations of the same images, and conversion of the outputs of a call.

Not in ``record.py``, because a ``Record`` holds the inputs and outputs of one view.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core import batch as batches
from gpuaug.core.errors import ArgumentError, ArgumentTypeError, shown
from gpuaug.core.targets import BOXES, TARGET_TYPES, VALID, FlatColumn, PackedTargets, holds_targets, type_name, with_class_of


def concatenated_views(views: Sequence[Any], keys: Sequence[str], samples: int, *, is_cutmix: bool) -> Any:
    """Concatenate the outputs of all views, input by input.

    Args:
        views: Result of ``Record.results`` for each view: a list of outputs, or the images alone.
        keys: Data key of each input: what the input holds, such as ``"input"`` for images or ``"class"`` for labels.
        samples: Number of samples per view: of images or clips, or of frames that have parameters of their own.
        is_cutmix: Whether the labels are the result of Kornia's CutMix, (1, B, 3), which is concatenated along axis 1.

    Returns:
        List in the order of the inputs; the images alone if they were the only input.

    Raises:
        ArgumentError: If views differ in size, because different modules were picked for them, or if labels do not have one
            entry per image.
        ArgumentTypeError: If labels are not a tensor, array, list or tuple.
    """
    images = views if len(keys) == 1 else [view[keys.index("input")] for view in views]
    sizes = list(dict.fromkeys("{}x{}".format(*image.shape[-2:]) for image in images))
    if len(sizes) > 1:
        raise ArgumentError(
            f"pipeline must return all views in one size, got {' and '.join(sizes)}. Make all modules that can be picked "
            "return one size, or add a resize after them."
        )
    if len(keys) == 1:
        return concatenated(views)
    results: list[Any] = []
    for key, parts in zip(keys, zip(*views, strict=True), strict=True):
        axis = 1 if is_cutmix and key == "class" else 0
        if key == "tv_tensors":
            results.append(_concatenated_containers(parts, len(images[0])))
            continue
        results.append(concatenated(parts, axis))
        if results[-1] is None:
            raise ArgumentTypeError(
                f"{key} must be a tensor, array, list or tuple with one entry for each image for {len(views)} views, got "
                f"{shown(parts[0])}. Pass such labels, or leave {key!r} out of data_keys."
            )
        entries = parts[0].shape[1] if axis else len(parts[0])
        if key == "class" and entries not in (len(images[0]), samples):
            raise ArgumentError(
                f"class must have one entry for each of the {len(images[0])} images, got {entries}. Pass one label per image, "
                "or leave 'class' out of data_keys."
            )
    return results


def concatenated(parts: Sequence[Any], axis: int = 0) -> Any:
    """Return the concatenation of tensors along ``axis``, or of arrays, lists or tuples; ``None`` for other values."""
    if all(isinstance(part, Tensor) and part.ndim for part in parts):
        return with_class_of(torch.cat(tuple(parts), axis), parts[0])
    if all(isinstance(part, np.ndarray) and part.ndim for part in parts):
        return np.concatenate(parts)
    are_sequences = all(isinstance(part, list | tuple) and not batches.is_namedtuple(part) for part in parts)
    return type(parts[0])(element for part in parts for element in part) if are_sequences else None


def _concatenated_containers(views: Sequence[Any], batch: int) -> Any:
    """Concatenate the results of one container of torchvision's tensors over all views.

    Concatenated are lists with one element per image, if they hold targets (masks, boxes, keypoints), and tensors with the
    targets of all images, with their mask ``valid`` beside boxes. All other values are taken from the first view.

    Args:
        views: Result of the container for each view.
        batch: Number of images per view.
    """
    first = views[0]
    if isinstance(first, Tensor):
        return concatenated(views) if type_name(first) in TARGET_TYPES else first
    if not holds_targets(first):
        return first
    cls: Any = type(first)
    if isinstance(first, Sequence) and not batches.is_namedtuple(first) and len(first) == batch:
        return cls(element for view in views for element in view)
    names = batches.member_names(first)
    result = {name: _concatenated_containers([batches.member(view, name) for view in views], batch) for name in names}
    if isinstance(first, Mapping) and VALID.name in first and BOXES.class_name in map(type_name, first.values()):
        result[VALID.name] = torch.cat([view[VALID.name] for view in views])
    return batches.replace(first, result)


def pure_tensors(results: Any) -> Any:
    """Return the outputs of a call with plain tensors in place of torchvision's, as ``v2.ToPureTensor`` does."""
    return batches.map_members(_pure, lambda value: isinstance(value, Tensor | PackedTargets), results)


def _pure(value: Tensor | PackedTargets) -> Any:
    """Return a tensor, or packed target dicts, without torchvision's classes. Other subclasses of ``Tensor`` remain."""
    if isinstance(value, Tensor):
        return value.as_subclass(Tensor) if type_name(value) else value
    packed = value.with_columns(FlatColumn(column.packed.plain(), column.joined) for column in value.columns().values())
    return replace(packed, others=pure_tensors(packed.others))
