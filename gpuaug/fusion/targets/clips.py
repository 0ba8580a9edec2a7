"""Inputs of a call on clips: clips are flattened to frames before the passes, and unflattened after them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import type_name
from gpuaug.fusion.clips import ClipForm
from gpuaug.fusion.ops.base import Array
from gpuaug.fusion.ops.boxes import FORMS, rank
from gpuaug.fusion.targets.masks import to_device


class ClipInputs:
    """Convert the inputs of one call from clips to frames and back. Inputs of a call on images are not changed.

    Args:
        form: How the pipeline takes clips.
        images: Images or clips of the call, as the user passed them.

    Raises:
        ArgumentError: If the pipeline takes clips only, and ``images`` are images.
    """

    def __init__(self, form: ClipForm, images: Any) -> None:
        self.form = form
        self.is_single = type_name(images) == "Video" and images.ndim == 4
        """True for a single clip (T, C, H, W), without a batch axis."""
        self.frames = form.frames_of(images[None] if self.is_single else images)
        """Number of frames per input clip; 0 for images."""
        self._out_frames = self.frames
        self._chosen: Sequence[int] = range(self.frames)
        """Indices of the input frames that the output has, in order."""
        self._lists: dict[int, type] = {}
        """List type, by index of the input, for inputs that hold one list of target dicts per clip."""

    def has_frames(self, key: str, value: Any) -> bool:
        """Return whether an input has a frame axis."""
        if not self.frames or not isinstance(value, Tensor | Ragged):
            return False
        if isinstance(value, Ragged):
            return key == "input"
        axes = 3 + rank(FORMS[key]) if key in FORMS else 3 if key == "valid" else 0
        return key in ("input", "mask") or value.ndim == axes

    def is_per_frame(self, index: int) -> bool:
        """Return whether an input is a list with one list of target dicts per clip."""
        return index in self._lists

    def flat(self, key: str, value: Any) -> Any:
        """Flatten images and masks (B, T, …) to (B · T, …), and boxes and keypoints (B, T, n, …) to (B, T · n, …)."""
        if not self.has_frames(key, value) or isinstance(value, Ragged):
            return value
        if key == "input":
            plain = value.as_subclass(Tensor)
            return self.form.images(plain[None] if self.is_single else plain)
        if key == "mask":
            return self.form.images(value) if value.ndim == 5 else value.flatten(0, 1)
        return value.flatten(0, 1) if self.form.draws_per_frame else value.flatten(1, 2)

    def deep(self, key: str, result: Any, value: Any) -> Any:
        """Restore the frame axis of the result of an input. ``value`` is the input as the user passed it."""
        if not self.has_frames(key, value):
            return result
        if key == "input" or (key == "mask" and value.ndim == 5):
            return self.form.clips(result, self._out_frames)
        if key == "mask":
            return result.unflatten(0, (-1, self._out_frames))
        return result.reshape(len(value), -1, value.shape[2], *result.shape[2:])

    def dicts(self, key: str, index: int, value: Any) -> Any:
        """Flatten an input with one list of target dicts per clip to one list. Other inputs are returned as they are.

        Raises:
            ArgumentError: If a clip does not have one target dict per frame.
        """
        nested = isinstance(value, list | tuple) and bool(value) and all(isinstance(clip, list | tuple) for clip in value)
        if key != "targets" or not self.frames or not nested:
            return value
        for clip in value:
            if len(clip) != self.frames:
                raise ArgumentError(
                    f"targets must hold one dict for each of the {self.frames} frames of a clip, got {len(clip)}. "
                    "Pass one dict for each clip, or one for each frame."
                )
        self._lists[index] = type(value)
        return [record for clip in value for record in clip]

    def lists(self, values: list[Any]) -> None:
        """Restore one list of target dicts per clip, in place in ``values``, the results of all inputs."""
        for index, list_type in self._lists.items():
            dicts = values[index]
            starts = range(0, len(dicts), self.frames)
            values[index] = list_type(list_type(dicts[start + frame] for frame in self._chosen) for start in starts)

    def choose(self, indices: Array | None, values: list[Any], keys: Sequence[str], inputs: Sequence[Any]) -> None:
        """Select the masks, boxes and keypoints of the frames that a plan keeps, in place in ``values``.

        Args:
            indices: Index of the input frame for each output frame; ``None`` for all frames.
            values: Inputs, as ``flat`` returned them. The plan itself selects the frames of images.
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
        self._chosen = [self._chosen[frame] for frame in indices.tolist()]
        self._out_frames = len(self._chosen)
