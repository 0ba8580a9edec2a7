"""Warnings, errors and notes about transforms that do not fit the batches.

*Members* are the entries of a batch. *Targets* are annotations in a batch that belong to pixels of the images: masks, boxes and
keypoints. *Target dicts* are targets in one dict per image. A *data key* is Kornia's name for a type of input of a transform. A
*fused* transform is a result of ``gpuaug.fuse``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from gpuaug.core import batch as batches
from gpuaug.core.batch import Batch
from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import ArgumentTypeError, GpuAugError, add_note, warn
from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import MASKS, TARGET_KEYS, TARGET_TYPES, type_name
from gpuaug.core.torchvision_types import torchvision_class
from gpuaug.stages.first_call import FirstCall, target_dicts
from gpuaug.stages.selection import Selection

_MASK_DATA_KEYS = {**MASKS.keys, **dict.fromkeys(MASKS.data_keys, MASKS.keys[MASKS.name])}
"""Usual names of masks in a batch, among them Kornia's data keys → data key: ``masks`` and ``mask`` → ``mask``."""

_TARGET_DATA_KEYS = {**{key: kind.keys[key] for key, kind in TARGET_KEYS.items()}, **_MASK_DATA_KEYS}
"""Usual names of targets in a batch → data key, such as ``boxes`` → ``bbox_xyxy``."""


def check_first(call: FirstCall, batch: Batch, other_selections: Iterable[Selection] = ()) -> None:
    """Check that a stage's transform fits the first batch.

    Args:
        call: First call of the transform.
        batch: The whole first batch.
        other_selections: Selections of the loader's other stages: members that a stage reads (``on``) and writes (``into``).
            Members that these stages read as images, or write, are not treated as targets.

    Raises:
        ArgumentTypeError: If the images differ in size and the transform cannot take such images.

    Warns:
        GpuAugWarning: If the transform moves or mixes images without their targets, or mixes images without their labels; if
            the transform is fused or moves pixels, and images seem to have their channels last.
    """
    if any(isinstance(value, Ragged) for value in call.values):
        _refuse_ragged(call)
    if _library_module(call) is not None:  # without this error, torchvision would return encoded images unchanged
        refuse_encoded(call.values)
    if call.is_fused or call.moving_parts:
        _warn_of_layout(call)
    selection = call.selection
    if selection.on is None or selection.into is not ... or not batches.is_container(batch):
        return  # with ``into``, the original images, to which the targets belong, stay in the batch
    images = {name for other in other_selections for name in other.image_names(batch)}
    members = {name: batches.member(batch, name) for name in batches.member_names(batch) if name not in images}
    if call.moving_parts or call.mixing_parts:
        _warn_of_targets(call, members)
    if call.label_mixing_parts:
        _warn_of_labels(call, members)


def _warn_of_layout(call: FirstCall) -> None:
    """Warn if the axis that the transform reads as channels seems to be the height or width.

    Channels seem to be last if the last axis has 1, 3 or 4 entries, and the two axes before are longer than 4.
    """
    keys = call.selection.normalized_keys or ["input"]
    images = call.values[keys.index("input") if "input" in keys else 0]
    if not isinstance(images, torch.Tensor) or images.ndim not in (3, 4, 5) or images.shape[-3] <= 4:
        return
    if images.shape[-1] in (1, 3, 4) and images.shape[-2] > 4:
        way_out = f"images.movedim(-1, {images.ndim - 3})"
    elif images.ndim == 3 and call.is_fused:  # perhaps a batch (B, H, W) of grey images without an axis of channels
        way_out = "images[:, None]"
    else:
        return
    warn(
        f"Images of shape {tuple(images.shape)} are read with {images.shape[-3]} channels, because the layout is (B, C, H, W), "
        f"(C, H, W) for one image, or (B, T, C, H, W) for clips. For another layout, put lambda images: {way_out} before this "
        "stage. If this is intended, disable this warning with warnings.filterwarnings('ignore', 'Images of shape')."
    )


def _warn_of_targets(call: FirstCall, members: Mapping[Any, Any]) -> None:
    """Warn if members have targets that the transform does not change along with the images, and give advice.

    ``members``: name → value.
    """
    search = TargetSearch(None if call.images is None else _batch_size(call.images), _sizes(call.images))
    target_labels: dict[str, None] = {}  # ``_Target.label`` of unchanged targets; a dict in place of a set, to keep the order
    on: dict[Any, str] = {}  # name of a member → data key with which the stage would transform its targets
    without_key: dict[str, None] = {}  # names, for the message, of targets that no data key would transform
    has_typed = False  # whether a target is a tensor of torchvision's classes
    for name, member in members.items():
        are_target_dicts = call.data_keys.get(name) == "targets"
        targets = [target for target in search.targets(member, name) if id(target.value) not in call.transformed_ids]
        if are_target_dicts:  # under such a key, (n, 4) may be probabilities of four classes instead of boxes
            targets = [target for target in targets if not re.search("label|class", str(target.name))]
        target_labels.update(dict.fromkeys(target.label for target in targets))
        plain = [target for target in targets if not type_name(target.value)]
        has_typed |= len(plain) < len(targets)
        keys = {None if are_target_dicts else target.data_key(member) for target in plain}  # None: no data key would help
        if len(keys) == 1 and None not in keys:
            on[name] = str(keys.pop())
        else:
            names = (repr(name) if target.name == name else f"{target.name!r} in {name!r}" for target in plain)
            without_key.update(dict.fromkeys(names))
    if not target_labels:
        return
    listed_targets = ", ".join(target_labels)
    if call.mixing_parts:
        warn(
            f"{listed_targets} no longer match the images, because {call.mixing_parts} mixes the images only. Leave "
            f"{call.mixing_parts} out for batches with {listed_targets}, or mix images and {listed_targets} in the dataset. "
            "If this is intended, disable this warning with warnings.filterwarnings('ignore', '.*no longer match the images')."
        )
        return
    lines = [f"Pass {call.with_members(on)}."] if on else []
    if has_typed:
        lines.append(f"Pass gpuaug.fuse({call.code}), which also transforms torchvision's Mask, BoundingBoxes and KeyPoints.")
    if without_key:
        lines.append(
            f"In collate_fn, convert {', '.join(without_key)} to tv_tensors.Mask, BoundingBoxes or KeyPoints, which "
            "gpuaug.fuse(…) transforms along with the images."
        )
    warn(
        f"{listed_targets} no longer match the images, because {call.moving_parts} transforms the images without them. "
        f"{' '.join(lines)} Or transform images and {listed_targets} together in the dataset. "
        "If this is intended, disable this warning with warnings.filterwarnings('ignore', '.*no longer match the images')."
    )


def _warn_of_labels(call: FirstCall, members: Mapping[Any, Any]) -> None:
    """Warn if a transform that mixes labels receives no member that seems to hold labels, although there are such members."""
    batch_size = None if call.images is None else _batch_size(call.images)
    passed_ids = set(map(id, batches.leaves(call.values)))
    labels = {name: member for name, member in members.items() if _are_labels(member, batch_size)}
    if labels and not any(id(member) in passed_ids for member in labels.values()):
        warn(
            f"labels no longer match the images, because {call.label_mixing_parts} receives the images only. "
            f"Pass {call.with_members({next(iter(labels)): 'class'})}. "
            "If this is intended, disable this warning with warnings.filterwarnings('ignore', '.*no longer match the images')."
        )


def _are_numbers(values: Iterable[Any]) -> bool:
    """Return whether each value is a number, or a tensor or array with at most one axis."""
    return all(isinstance(value, Number) or getattr(value, "ndim", 2) < 2 for value in values)


def _sizes(images: torch.Tensor | Ragged | None) -> set[tuple[int, ...]]:
    """Return the set of (height, width) of the images; empty if ``images`` is ``None`` or has fewer than three axes."""
    if isinstance(images, Ragged):
        return set(map(tuple, images.shapes.sizes.tolist()))
    return {tuple(images.shape[-2:])} if images is not None and images.ndim >= 3 else set()


def _batch_size(images: torch.Tensor | Ragged) -> int | None:
    """Return the number of images or clips; ``None`` for a tensor without axes."""
    if isinstance(images, Ragged):
        return images.shapes.samples
    return len(images) if images.ndim else None


def _are_labels(value: Any, batch_size: int | None) -> bool:
    """Return whether ``value`` may be the labels of a batch: (B,) class indices, or (B, classes) probabilities."""
    is_tensor = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch_size
    return is_tensor and (value.ndim == 1 or (value.ndim == 2 and value.is_floating_point()))


def explain_error(error: Exception, values: tuple[Any, ...]) -> None:
    """Add notes to an error of a transform that may not accept a ``Ragged``, encoded images, or images of integers."""
    if any(isinstance(value, Ragged) for value in values) and not isinstance(error, GpuAugError):
        add_note(
            error,
            "The transform received a gpuaug.Ragged, images of different sizes. Put gpuaug.fuse(…, ragged=True), which makes "
            "images of one size, before this stage or around the transform.",
        )
    if any(isinstance(value, Encoded) for value in values) and not isinstance(error, GpuAugError):
        add_note(error, "The transform received encoded images. Put gpuaug.DecodeStage() into stages, before this stage.")
    _explain_integers(error, values)


def _refuse_ragged(call: FirstCall) -> None:
    """Raise an error if Kornia's or torchvision's transform gets a ``Ragged``, which some of them would return unchanged."""
    first = _library_module(call)
    if first is not None:
        raise ArgumentTypeError(
            f"transform must accept images of different sizes, which the batch has, got {type(first).__name__}, which takes a "
            f"tensor (B, C, H, W). Pass gpuaug.fuse({call.code}, ragged=True), whose first crop or resize equalises the sizes."
        )


def _library_module(call: FirstCall) -> Any:
    """Return the transform, or the first one in an ``nn.Sequential``, if it is of Kornia or torchvision; else ``None``."""
    first = call.module
    while type(first) is nn.Sequential and len(first):
        first = first[0]
    return first if type(first).__module__.startswith("kornia.") or torchvision_class(first) is not None else None


def refuse_encoded(values: Iterable[Any]) -> None:
    """Raise an error if encoded images are passed to a stage.

    Raises:
        ArgumentTypeError: If one of ``values`` is an ``Encoded``.
    """
    for value in values:
        if isinstance(value, Encoded):
            raise ArgumentTypeError(f"input must be decoded, got {value}. Put a gpuaug.DecodeStage() before this stage.")


class _Target(NamedTuple):
    """A value of a batch that seems to belong to the pixels of the images: a tensor, an array, or numbers in lists."""

    label: str
    """Name for messages: ``"masks"``, ``"boxes"`` or ``"keypoints"``, or the key by which the target was recognised."""
    name: Any
    """Key of the value, or of the list that holds it."""
    value: Any

    def data_key(self, member: Any) -> str | None:
        """Return the data key for ``member``, the member of the batch that contains the target; ``None`` if no key fits."""
        if isinstance(member, torch.Tensor):
            return _TARGET_DATA_KEYS[self.label]
        if not isinstance(member, list | tuple) or not isinstance(self.value, torch.Tensor):
            return None
        if any(target_dicts(member)):
            return "targets" if self.name in TARGET_KEYS else None
        return "mask" if self.label == "masks" and all(isinstance(item, torch.Tensor) for item in member) else None


class TargetSearch:
    """Search for values that seem to be masks, boxes or keypoints: by class, by key, or by shape.

    Args:
        batch_size: Number of images; ``None`` if it is not known.
        sizes: (height, width) of the images; empty if they are not known.
    """

    def __init__(self, batch_size: int | None, sizes: set[tuple[int, ...]]) -> None:
        self._batch_size, self._sizes = batch_size, sizes

    def targets(self, value: Any, name: Any, *, per_image: bool = False) -> Iterator[_Target]:
        """Yield the targets within a member of a batch.

        PIL images of the size of an image are treated as masks. Lists of numbers are targets only under the key of a target.

        Args:
            value: The member, or in a recursive call a value within the member.
            name: Key of ``value``, or of the list that holds it.
            per_image: Whether ``value`` belongs to one image, and not to a batch of images.
        """
        if batches.is_pil_image(value):
            if (value.height, value.width) in self._sizes:
                yield _Target("masks", name, value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            kind = TARGET_TYPES.get(type_name(value))
            label = kind.name if kind else self._by_name(value, name) or self._by_shape(value, per_image)
            if label:
                yield _Target(label, name, value)
        elif name in _TARGET_DATA_KEYS and self._has_numbers(value, name):
            yield _Target(name, name, value)
        elif batches.is_container(value) and not isinstance(value, Ragged):
            is_by_index = isinstance(value, list | tuple) and not batches.is_namedtuple(value)
            inner_per_image = per_image or (is_by_index and len(value) == self._batch_size)
            for inner in batches.member_names(value):
                inner_name = name if is_by_index else inner
                yield from self.targets(batches.member(value, inner), inner_name, per_image=inner_per_image)

    def _has_numbers(self, value: Any, name: str) -> bool:
        """Return whether ``value`` has coordinates or pixels in lists, or is a run-length mask. ``name``: key of a target.

        The numbers may be tensors or arrays: ``default_collate`` turns B boxes, lists of four numbers, into a list of four
        tensors (B,).
        """
        if isinstance(value, Mapping):
            return name in _MASK_DATA_KEYS and {"size", "counts"} <= value.keys()
        if not isinstance(value, list | tuple) or not value:
            return False
        if name in _MASK_DATA_KEYS:
            first = value[0]
            if isinstance(first, list | tuple) and first and _are_numbers(first):
                return not self._sizes or (len(value), len(first)) in self._sizes
        elif _are_numbers(value):
            lengths = {len(value), *(len(number) for number in value if getattr(number, "ndim", 0))}
            return 4 in lengths if name != "keypoints" else max(lengths) > 1  # a box has four numbers, a point two or more
        return any(self._has_numbers(inner, name) for inner in value)

    def _by_name(self, value: Any, name: Any) -> str | None:
        """Return ``name`` if it is the key of a target, and ``value`` has a possible shape for such targets; else ``None``."""
        if name not in _TARGET_DATA_KEYS or value.ndim < 2:
            return None
        if name in _MASK_DATA_KEYS:  # a mask of another size may mark patches instead of pixels
            return name if not self._sizes or tuple(value.shape[-2:]) in self._sizes else None
        return name if value.shape[-1] in ((2, 3) if name == "keypoints" else (4,)) else None

    def _by_shape(self, value: Any, per_image: bool) -> str | None:
        """Return ``"masks"`` or ``"boxes"`` if ``value`` has the shape of these; else ``None``."""
        if type_name(value) in ("Image", "Video"):
            return None
        axes = value.ndim if per_image else value.ndim - 1
        if not per_image and (not value.ndim or len(value) != self._batch_size):
            return None
        if axes >= 2 and tuple(value.shape[-2:]) in self._sizes:
            return "masks"
        return "boxes" if axes == 2 and value.shape[-1] == 4 else None


def _explain_integers(error: Exception, values: tuple[Any, ...]) -> None:
    """Add a note to an error of a transform that got images of integers, unless the error cannot come from their dtype."""
    if isinstance(error, GpuAugError | torch.OutOfMemoryError) or not isinstance(error, RuntimeError | TypeError):
        return
    for tensor in batches.tensors(values):
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim >= 3:
            dtype = str(tensor.dtype).removeprefix("torch.")
            way_out = "divide them by the largest value that they may have"
            if tensor.dtype is torch.uint8:
                way_out = (
                    "scale them first: TransformStage(lambda images: transform(images.float() / 255)). For a pipeline of "
                    "Kornia, gpuaug.fuse(transform) scales them"
                )
            add_note(
                error,
                f"The transform received {dtype} images, as the wrapped loader yields them. If it needs floats in [0, 1], "
                f"{way_out}.",
            )
            return
