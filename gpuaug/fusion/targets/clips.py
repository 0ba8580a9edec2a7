"""Inputs of a call on clips, (B, T, C, H, W): the passes read the T frames of a clip as images.

The frame axis is merged with the batch axis before the passes, and restored after the passes.

Annotations may be per clip or per frame. A *target dict* holds the annotations of one clip or frame.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import type_name
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.ops.base import Array
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, axes_per_box
from gpuaug.fusion.targets.masks import to_device


class ClipInputs:
    """Convert the inputs of one call from clips to frames and back. Inputs of a call on images are not changed.

    Args:
        clip_layout: Layout of clips that the pipeline accepts.
        images: Images or clips of the call, as the user passed them.

    Raises:
        ArgumentError: If the pipeline accepts clips only, and ``images`` are images.
    """

    def __init__(self, clip_layout: ClipLayout, images: Any) -> None:
        self.clip_layout = clip_layout
        self.is_single = type_name(images) == "Video" and images.ndim == 4
        """True for a single clip (T, C, H, W), without a batch axis."""
        self.frames = clip_layout.frames_of(images[None] if self.is_single else images)
        """Number of frames per input clip; 0 for images."""
        if self.frames and isinstance(images, Tensor) and not self.is_single:
            clip_layout.warn_if_channels_first(images)
        self._out_frames = self.frames
        """Number of frames per output clip."""
        self.frame_indices: Sequence[int] = range(self.frames)
        """Index of the input frame per output frame."""
        self._list_types: dict[int, tuple[type, bool]] = {}
        """(type of the list, whether it has one list per clip), by index of the input, for target dicts of frames."""

    def has_frames(self, key: str, value: Any) -> bool:
        """Return whether an input has a frame axis."""
        if not self.frames or not isinstance(value, Tensor | Ragged):
            return False
        if isinstance(value, Ragged):
            return key == "input"
        axes = 3 + axes_per_box(KORNIA_FORMATS[key]) if key in KORNIA_FORMATS else 3 if key == "valid" else None
        return key in ("input", "mask") or value.ndim == axes

    def is_per_frame(self, index: int) -> bool:
        """Return whether an input is a list of target dicts of frames, or has one such list per clip."""
        return index in self._list_types

    def flatten(self, key: str, value: Any) -> Any:
        """Merge the frame axis of an input with another axis.

        Images and masks (B, T, …) become (B · T, …), boxes and keypoints (B, T, n, …) become (B, T · n, …). Other inputs are
        returned unchanged.
        """
        if not self.has_frames(key, value) or isinstance(value, Ragged):
            return value
        if key == "input":
            plain = value.as_subclass(Tensor)
            return self.clip_layout.images(plain[None] if self.is_single else plain)
        if key == "mask":
            return self.clip_layout.images(value) if value.ndim == 5 else value.flatten(0, 1)
        return value.flatten(0, 1) if self.clip_layout.draws_per_frame else value.flatten(1, 2)

    def unflatten(self, key: str, result: Any, value: Any) -> Any:
        """Restore the frame axis in the result of an input. ``value``: the input as the user passed it."""
        if not self.has_frames(key, value):
            return result
        if key == "input" or (key == "mask" and value.ndim == 5):
            return self.clip_layout.clips(result, self._out_frames)
        if key == "mask":
            return result.unflatten(0, (-1, self._out_frames))
        return result.reshape(len(value), -1, value.shape[2], *result.shape[2:])

    def flatten_dicts(self, key: str, index: int, value: Any, images: int) -> Any:
        """Concatenate the lists of an input that holds one list of target dicts per clip. Other inputs are returned unchanged.

        Args:
            key: Data key of the input.
            index: Index of the input.
            value: The input.
            images: Number of frames of all clips.

        Raises:
            ArgumentError: If a clip does not have one target dict per frame.
        """
        if key != "targets" or not self.frames or not isinstance(value, list | tuple) or not value:
            return value
        is_nested = all(isinstance(clip, list | tuple) for clip in value)
        if not is_nested:
            if self.frames > 1 and len(value) == images:
                self._list_types[index] = type(value), False
            return value
        for clip in value:
            if len(clip) != self.frames:
                raise ArgumentError(
                    f"targets must hold one dict for each of the {self.frames} frames of a clip, got {len(clip)}. "
                    "Pass one dict per clip, or one dict per frame."
                )
        self._list_types[index] = type(value), True
        return [record for clip in value for record in clip]

    def unflatten_dicts(self, values: list[Any]) -> None:
        """Select the target dicts of the output frames, in place in ``values``, the results of all inputs.

        Inputs that held one list of target dicts per clip get such lists again.
        """
        for index, (list_type, is_nested) in self._list_types.items():
            dicts = values[index]
            starts = range(0, len(dicts), self.frames)
            clips = [[dicts[start + frame] for frame in self.frame_indices] for start in starts]
            values[index] = list_type(map(list_type, clips) if is_nested else chain.from_iterable(clips))

    def select_frames(self, indices: Array | None, values: list[Any], keys: Sequence[str], inputs: Sequence[Any]) -> None:
        """Select masks, boxes and keypoints of the frames that a plan selects, in place in ``values``.

        The kernels select the images. ``unflatten_dicts`` and ``TypedTargets.results`` select the elements of lists.

        Args:
            indices: Indices of the selected frames; ``None`` for all frames.
            values: Inputs, as ``flatten`` returned them.
            keys: Data key of each input.
            inputs: Inputs as the user passed them.
        """
        if indices is None:
            return
        device_indices: Tensor | None = None
        for position, (key, source) in enumerate(zip(keys, inputs, strict=True)):
            if key == "input" or not self.has_frames(key, source):
                continue
            if device_indices is None:
                (device_indices,) = to_device([indices], values[position].device)
            axis = 0 if key == "mask" else 1
            frames = values[position].unflatten(axis, (self._out_frames, -1) if axis else (-1, self._out_frames))
            values[position] = torch.index_select(frames, 1, device_indices).flatten(axis, axis + 1)
        self.frame_indices = [self.frame_indices[frame] for frame in indices.tolist()]
        self._out_frames = len(self.frame_indices)
