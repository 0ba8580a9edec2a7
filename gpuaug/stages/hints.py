"""Warnings, errors and notes for transforms that do not fit the batches."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError, GpuAugError, GpuAugWarning, add_note
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import TARGET_TYPES, all_parts, torchvision_class, type_name
from gpuaug.stages.selection import Selection

_DATA_KEYS = {"boxes": "bbox_xyxy", "bbox": "bbox_xywh", "masks": "mask", "mask": "mask", "keypoints": "keypoints"}
"""Keys of targets that move with their image, and Kornia's data keys for them."""

_GEOMETRY = (
    "kornia.augmentation._2d.geometric",
    "torchvision.transforms.v2._geometry",
    "torchvision.transforms.v2._auto_augment",
)
"""Modules whose classes move pixels."""

_MIXES_LABELS = (
    "kornia.augmentation._2d.mix.mixup",
    "kornia.augmentation._2d.mix.cutmix",
    "torchvision.transforms.v2._augment._BaseMixUpCutMix",
)
"""Modules and classes that mix images, and their labels with them."""

_MIXES = ("kornia.augmentation._2d.mix", "torchvision.transforms.v2._augment._BaseMixUpCutMix")
"""Modules and classes that put pixels of one image into another, or elsewhere, but not boxes, masks or keypoints."""

_MEANT = "If that is meant, pass lambda images: transform(images)."


def check_first(
    transform: Any, batch: Batch, values: tuple[Any, ...], selection: Selection, others: Iterable[Selection] = ()
) -> None:
    """Look at the first batch of a stage.

    Args:
        transform: The stage's transform.
        batch: The whole batch.
        values: Arguments of ``transform``.
        selection: The stage's ``on`` and ``into``.
        others: Those of the other stages of the loader. Members that these take for images, or make of images, are no targets.

    Raises:
        ArgumentTypeError: If ``transform`` cannot take images of different sizes, and these have.

    Warns:
        GpuAugWarning: If ``transform`` moves or mixes images and leaves boxes, masks or keypoints beside them, or mixes them
            and leaves their labels; if it is fused, and images seem to have their channels last.
    """
    if any(isinstance(value, Ragged) for value in values):
        _refuse_ragged(transform)
    parts = [*all_parts(transform)]
    if hasattr(transform, "pipeline"):
        keys = selection.data_keys or ["input"]
        images = values[keys.index("input") if "input" in keys else 0]
        _warn_of_layout(images)
    if selection.on is None or selection.into is not ... or not batches.is_container(batch):
        return  # targets that stay beside the result still fit their images
    names = _names(parts, _GEOMETRY), _names(parts, _MIXES), _names(parts, _MIXES_LABELS)
    moving, mixing, mixing_labels = names
    if not any(names):
        return
    images = {name for other in others for name in other.image_names(batch)}
    members = {name: batches.member(batch, name) for name in batches.member_names(batch) if name not in images}
    if moving or mixing:
        _warn_of_targets(transform, moving, mixing, members, values, selection)
    if mixing_labels:
        _warn_of_labels(transform, mixing_labels, members, values, selection)


def _warn_of_layout(images: Any) -> None:
    """Warn of images that would be taken for some of more channels than they seem to have."""
    if not isinstance(images, torch.Tensor) or images.ndim not in (3, 4) or images.shape[-3] <= 4:
        return
    last = images.shape[-1] in (3, 4)
    if images.ndim == 3:
        way_out = "images.permute(2, 0, 1)" if last else "images[:, None]"
    elif last:
        way_out = "images.permute(0, 3, 1, 2)"
    else:
        return
    warnings.warn(
        f"Images of {tuple(images.shape)} are taken for {images.shape[-3]} channels, because images are (B, C, H, W) or one "
        f"(C, H, W). If they have others, put lambda images: {way_out} before this stage. {_MEANT}",
        GpuAugWarning,
        stacklevel=3,
    )


def _warn_of_targets(
    transform: Any, moving: str, mixing: str, members: Mapping[Any, Any], values: tuple[Any, ...], selection: Selection
) -> None:
    passed = {id(leaf) for leaf in batches.leaves(values)}
    images = next((value for value in values if isinstance(value, torch.Tensor | Ragged)), None)
    search = _Search(images)
    remaining: dict[str, None] = {}
    on: dict[Any, str] = {}
    unnamed: dict[Any, None] = {}
    is_typed = False
    for name, member in members.items():
        found = [target for target in search.targets(member, name) if id(target.value) not in passed]
        remaining.update(dict.fromkeys(target.what for target in found))
        is_typed |= any(type_name(target.value) for target in found)
        keys = {target.data_key(member) for target in found if not type_name(target.value)}
        if len(keys) == 1 and None not in keys:
            on[name] = str(keys.pop())
        elif keys:
            unnamed[name] = None
    if not remaining:
        return
    targets = ", ".join(remaining)
    if mixing:
        warnings.warn(
            f"{targets} beside images no longer belong to the pixels, because {mixing} mixes the images alone. Leave {mixing} "
            f"out where batches have {targets}, or mix both in the dataset. {_MEANT}",
            GpuAugWarning,
            stacklevel=3,
        )
        return
    lines = [_line(transform, on, selection)] if on else []
    if is_typed:
        lines.append("Pass gpuaug.fuse(transform), in which torchvision's tensors follow by their type.")
    if unnamed:
        listed = ", ".join(map(repr, unnamed))
        lines.append(
            f"Make tensors in {listed} torchvision's, tv_tensors.Mask or tv_tensors.BoundingBoxes, in collate_fn: these "
            "follow in gpuaug.fuse(…) by their type."
        )
    warnings.warn(
        f"{targets} beside images stay where they were, because {moving} is given images alone. {' '.join(lines)} {_MEANT}",
        GpuAugWarning,
        stacklevel=3,
    )


def _warn_of_labels(
    transform: Any, mixing: str, members: Mapping[Any, Any], values: tuple[Any, ...], selection: Selection
) -> None:
    batch = next((len(value) for value in values if isinstance(value, torch.Tensor | Ragged)), None)
    given = [id(leaf) for leaf in batches.leaves(values)]
    labels = {name: member for name, member in members.items() if _are_labels(member, batch)}
    if labels and not any(id(member) in given for member in labels.values()):
        warnings.warn(
            f"labels beside images stay as they were, because {mixing} is given images alone. "
            f"{_line(transform, {next(iter(labels)): 'class'}, selection)} {_MEANT}",
            GpuAugWarning,
            stacklevel=3,
        )


def _are_labels(value: Any, batch: int | None) -> bool:
    """Whether these may be a batch's labels: one number for each image, or shares of classes."""
    is_tensor = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch
    return is_tensor and (value.ndim == 1 or (value.ndim == 2 and value.is_floating_point()))


def _line(transform: Any, on: Mapping[Any, str], selection: Selection) -> str:
    """What to type to hand over ``on`` too."""
    chosen = 0 if selection.on is ... else selection.on
    on = {**(chosen if isinstance(chosen, Mapping) else {chosen: "input"}), **on}
    fused = "transform" if hasattr(transform, "pipeline") else "gpuaug.fuse(transform)"
    return f"Pass gpuaug.TransformStage({fused}, on={on})."


def explain(error: Exception, values: tuple[Any, ...]) -> None:
    """Add a note to the error of a transform that does not take the images' dtype or form."""
    if any(isinstance(value, Ragged) for value in values) and not isinstance(error, GpuAugError):
        add_note(
            error,
            "The transform was given a gpuaug.Ragged, images of different sizes. gpuaug.fuse(…, ragged=True) gives them one: "
            "put it before this stage, or around the transform.",
        )
    _explain_integers(error, values)


def _refuse_ragged(transform: Any) -> None:
    """Refuse transforms of Kornia's and torchvision's for a ``Ragged``: some would return it unchanged."""
    first = transform[0] if type(transform) is nn.Sequential and len(transform) else transform
    if type(first).__module__.startswith("kornia.") or torchvision_class(first) is not None:
        raise ArgumentTypeError(
            f"transform must take images of different sizes, which the batch has, got {type(first).__name__}, which takes a "
            "tensor (B, C, H, W). Pass gpuaug.fuse(transform, ragged=True), whose first crop or resize gives them one size."
        )


def _names(parts: list[Any], classes: tuple[str, ...]) -> str:
    """The names of the parts whose classes, or those they come from, are among these."""
    found = {
        type(part).__name__
        for part in parts
        if any(f"{kind.__module__}.{kind.__qualname__}".startswith(classes) for kind in type(part).__mro__)
    }
    return ", ".join(sorted(found))


class _Target(NamedTuple):
    """A tensor or array of a batch that seems to belong to the pixels of the images."""

    what: str
    """``masks``, ``boxes`` or ``keypoints``, or the name by which it was found."""
    name: Any
    """Key of the value, or of the container that holds it."""
    value: Any

    def data_key(self, member: Any) -> str | None:
        """Data key of the member of the batch that the value is in, or ``None`` without one."""
        if isinstance(member, torch.Tensor):
            return _DATA_KEYS[self.what]
        if not isinstance(member, list | tuple) or not isinstance(self.value, torch.Tensor):
            return None
        if any(isinstance(each, Mapping) for each in member):
            return "targets" if self.name in ("boxes", "bbox", "masks", "keypoints") else None
        return "mask" if self.what == "masks" and all(isinstance(each, torch.Tensor) for each in member) else None


class _Search:
    """Finds tensors and arrays that seem to be masks, boxes or keypoints: by type, by name, or by shape.

    Args:
        images: The images, (B, C, H, W) or a ``Ragged``; ``None`` if they are neither.
    """

    def __init__(self, images: torch.Tensor | Ragged | None) -> None:
        self._batch = len(images) if images is not None and (isinstance(images, Ragged) or images.ndim > 0) else None
        self._sizes: set[tuple[int, ...]] = set()
        if isinstance(images, Ragged):
            self._sizes = set(map(tuple, images.shapes.sizes.tolist()))
        elif images is not None and images.ndim >= 3:
            self._sizes = {tuple(images.shape[-2:])}

    def targets(self, value: Any, name: Any, *, per_image: bool = False) -> Iterator[_Target]:
        """The tensors and arrays within a member of a batch.

        Args:
            value: The member, or a value within it.
            name: Key of ``value``, or of the container that holds it.
            per_image: Whether ``value`` belongs to one image.
        """
        if isinstance(value, torch.Tensor | np.ndarray):
            what = TARGET_TYPES.get(type_name(value)) or self._by_name(value, name) or self._by_shape(value, per_image)
            if what:
                yield _Target(what, name, value)
        elif batches.is_container(value) and not isinstance(value, Ragged):
            by_index = isinstance(value, list | tuple) and not batches.is_namedtuple(value)
            inside = per_image or (by_index and len(value) == self._batch)
            for inner in batches.member_names(value):
                own = name if by_index else inner
                yield from self.targets(batches.member(value, inner), own, per_image=inside)

    def _by_name(self, value: Any, name: Any) -> str | None:
        if name not in _DATA_KEYS or value.ndim < 2:
            return None
        if name in ("masks", "mask"):  # not a mask of the patches that a model sees
            return name if not self._sizes or tuple(value.shape[-2:]) in self._sizes else None
        return name if value.shape[-1] in ((2, 3) if name == "keypoints" else (4,)) else None

    def _by_shape(self, value: Any, per_image: bool) -> str | None:
        if type_name(value) in ("Image", "Video"):
            return None
        axes = value.ndim if per_image else value.ndim - 1
        if not per_image and (not value.ndim or len(value) != self._batch):
            return None
        if axes >= 2 and tuple(value.shape[-2:]) in self._sizes:
            return "masks"
        return "boxes" if axes == 2 and value.shape[-1] == 4 else None


def _explain_integers(error: Exception, values: tuple[Any, ...]) -> None:
    """Add a note to the error of a transform that needs floating-point images and was given integers."""
    for tensor in batches.tensors(values):
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim >= 3 and _is_about(error, tensor.dtype):
            dtype = str(tensor.dtype).removeprefix("torch.")
            way_out = "divide them by the largest value that they may have"
            if tensor.dtype is torch.uint8:
                way_out = (
                    "scale them first: TransformStage(lambda images: transform(images.float() / 255)). A pipeline of Kornia's "
                    "gets them so from gpuaug.fuse(transform)"
                )
            add_note(
                error,
                f"The transform was given {dtype} images, as they were loaded. If it wants floating images in [0, 1], "
                f"{way_out}.",
            )
            return


_SPELLED = {
    torch.uint8: ("Byte", "unsigned char"),
    torch.int8: ("Char", "signed char"),
    torch.int16: ("Short", "short"),
    torch.int32: ("Int", "int"),
    torch.int64: ("Long", "long"),
}
"""Names of integer dtypes in errors of torch: "not implemented for 'Byte'", "Input type (unsigned char) and …"."""


def _is_about(error: Exception, dtype: torch.dtype) -> bool:
    """Whether an error is a complaint about an integer dtype, as torch, torchvision and Kornia word it."""
    if isinstance(error, GpuAugError) or dtype not in _SPELLED:
        return False
    if isinstance(error, TypeError):  # "got", because others list a function's signatures, which may name any dtype
        return bool(re.search(rf"\b[Gg]ot {dtype}\b", str(error)))
    name, in_cpp = _SPELLED[dtype]
    wanted = rf"\b{name}\b|[(:=] ?{in_cpp}\b|\bfloating point\b|\bfloat or double\b"
    return isinstance(error, RuntimeError) and bool(re.search(wanted, str(error)))
