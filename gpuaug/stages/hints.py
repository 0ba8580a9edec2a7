"""Warnings, errors and notes for transforms that do not fit the batches."""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.errors import ArgumentTypeError, GpuAugError, GpuAugWarning, add_note
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_transforms import torchvision_class
from gpuaug.stages.selection import Selection

_DATA_KEYS = {"boxes": "bbox_xyxy", "bbox": "bbox_xywh", "masks": "mask", "mask": "mask", "keypoints": "keypoints"}
"""Keys of targets that move with their image, and Kornia's data keys for them."""

_GEOMETRY = (
    "kornia.augmentation._2d.geometric",
    "torchvision.transforms.v2._geometry",
    "torchvision.transforms.v2._auto_augment",
)
"""Modules whose classes move pixels."""

_MIXES = (
    "kornia.augmentation._2d.mix.mixup",
    "kornia.augmentation._2d.mix.cutmix",
    "torchvision.transforms.v2._augment._BaseMixUpCutMix",
)
"""Modules and classes that mix images, and their labels with them."""

_MEANT = "If that is meant, pass lambda images: transform(images)."


def check_first(transform: Any, batch: Batch, values: tuple[Any, ...], selection: Selection) -> None:
    """Look at the first batch of a stage.

    Args:
        transform: The stage's transform.
        batch: The whole batch.
        values: Arguments of ``transform``.
        selection: The stage's ``on`` and ``into``.

    Raises:
        ArgumentTypeError: If ``transform`` cannot take images of different sizes, and these have.

    Warns:
        GpuAugWarning: If ``transform`` moves images and leaves boxes, masks or keypoints beside them, or mixes them and leaves
            their labels; if it is fused, and images seem to have their channels last.
    """
    if any(isinstance(value, Ragged) for value in values):
        _refuse_ragged(transform)
    parts = [*_parts(getattr(transform, "pipeline", transform))]
    if hasattr(transform, "pipeline"):
        keys = selection.data_keys or ["input"]
        images = values[keys.index("input") if "input" in keys else 0]
        _warn_of_layout(images)
    if selection.on is None or selection.into is not ... or not batches.is_container(batch):
        return  # targets that stay beside the result still fit their images
    moving, mixing = _names(parts, _GEOMETRY), _names(parts, _MIXES)
    members = {name: batches.member(batch, name) for name in batches.member_names(batch)} if moving or mixing else {}
    if moving:
        _warn_of_targets(transform, moving, members, values, selection)
    if mixing:
        _warn_of_labels(transform, mixing, members, values, selection)


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
    transform: Any, moving: str, members: Mapping[Any, Any], values: tuple[Any, ...], selection: Selection
) -> None:
    given = [id(leaf) for leaf in batches.leaves(values)]
    frames = [tuple(value.shape[-2:]) for value in values if isinstance(value, torch.Tensor)]
    left: dict[str, None] = {}
    on: dict[Any, str] = {}
    for name, member in members.items():
        found = [key for key, leaf in _targets(member, name, frames) if id(leaf) not in given]
        if found:
            left.update(dict.fromkeys(found))
            on[name] = _DATA_KEYS[found[0]] if isinstance(member, torch.Tensor) else "targets"
    if left:
        warnings.warn(
            f"{', '.join(left)} beside images stay where they were, because {moving} is given images alone. "
            f"{_line(transform, on, selection)} {_MEANT}",
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


def _parts(pipeline: Any) -> Iterator[Any]:
    """``pipeline`` and its submodules, also those in lists of torchvision's containers."""
    yield pipeline
    held = [*pipeline.children()] if isinstance(pipeline, nn.Module) else []
    held += pipeline if isinstance(pipeline, list | tuple) else []
    inner = getattr(pipeline, "transforms", None)
    held += inner if isinstance(inner, list | tuple) else []
    for part in held:
        yield from _parts(part)


def _names(parts: list[Any], classes: tuple[str, ...]) -> str:
    """The names of the parts whose classes, or those they come from, are among these."""
    found = {
        type(part).__name__
        for part in parts
        if any(f"{kind.__module__}.{kind.__qualname__}".startswith(classes) for kind in type(part).__mro__)
    }
    return ", ".join(sorted(found))


def _targets(value: Any, name: Any, frames: list[tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The boxes, masks and keypoints in a member of a batch, by name."""
    if isinstance(value, torch.Tensor):
        if name in _DATA_KEYS and value.ndim >= 2 and _fits(name, tuple(value.shape), frames):
            yield name, value
    elif batches.is_container(value):
        for inner in batches.member_names(value):
            yield from _targets(batches.member(value, inner), inner if isinstance(inner, str) else name, frames)


def _fits(name: str, shape: tuple[int, ...], frames: list[tuple[int, ...]]) -> bool:
    """Whether a tensor's shape fits its name."""
    if name in ("masks", "mask"):  # and not which patches a model sees
        return not frames or shape[-2:] in frames
    return shape[-1] in ((2, 3) if name == "keypoints" else (4,))


def _explain_integers(error: Exception, values: tuple[Any, ...]) -> None:
    """Add a note to the error of a transform that needs floating-point images and was given integers."""
    for tensor in batches.tensors(values):
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim >= 3 and _is_about(error, tensor.dtype):
            dtype = str(tensor.dtype).removeprefix("torch.")
            fused = "pass gpuaug.fuse(transform), which scales them for Kornia, or " if tensor.dtype is torch.uint8 else ""
            add_note(
                error,
                f"The transform was given {dtype} images, as they were loaded. If it wants floating images in [0, 1], as "
                f"Kornia does, {fused}scale them first: TransformStage(lambda images: transform(images.float() / 255)).",
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
