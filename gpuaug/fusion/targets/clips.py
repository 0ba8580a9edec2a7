"""The inputs of a call on clips: frames as images on the way in, and clips again on the way out."""

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
    """Form of the inputs of one call; of a call on images, it changes nothing.

    Args:
        form: How the pipeline takes clips.
        images: The images or clips of the call, as the user passed them.

    Raises:
        ArgumentError: If the pipeline takes clips alone, and these are images.
    """

    def __init__(self, form: ClipForm, images: Any) -> None:
        self.form = form
        self.is_single = type_name(images) == "Video" and images.ndim == 4
        """True for one clip without an axis for the batch."""
        self.frames = form.frames_of(images[None] if self.is_single else images)
        """Number of frames of every clip that was passed; 0: images."""
        self._out_frames = self.frames
        self._chosen: Sequence[int] = range(self.frames)
        """Indices of the frames that come out."""
        self._lists: dict[int, type] = {}
        """Type of a list that holds one list of target dicts for each clip, by the index of the input."""

    def has_frames(self, key: str, given: Any) -> bool:
        """Whether an input has an axis for frames."""
        if not self.frames or not isinstance(given, Tensor | Ragged):
            return False
        if isinstance(given, Ragged):
            return key == "input"
        axes = 3 + rank(FORMS[key]) if key in FORMS else 3 if key == "valid" else 0
        return key in ("input", "mask") or given.ndim == axes

    def is_per_frame(self, index: int) -> bool:
        """Whether an input is a list of one list of target dicts for each clip."""
        return index in self._lists

    def flat(self, key: str, given: Any) -> Any:
        """Images and masks with frames in place of clips; boxes and keypoints of all frames of a clip as those of one image."""
        if not self.has_frames(key, given) or isinstance(given, Ragged):
            return given
        if key == "input":
            plain = given.as_subclass(Tensor)
            return self.form.images(plain[None] if self.is_single else plain)
        if key == "mask":
            return self.form.images(given) if given.ndim == 5 else given.flatten(0, 1)
        return given.flatten(0, 1) if self.form.draws_per_frame else given.flatten(1, 2)

    def deep(self, key: str, made: Any, given: Any) -> Any:
        """The result of an input, given as ``flat`` returned it, with its axis for frames."""
        if not self.has_frames(key, given):
            return made
        if key == "input" or (key == "mask" and given.ndim == 5):
            return self.form.clips(made, self._out_frames)
        if key == "mask":
            return made.unflatten(0, (-1, self._out_frames))
        return made.reshape(len(given), -1, given.shape[2], *made.shape[2:])

    def dicts(self, key: str, index: int, given: Any) -> Any:
        """Target dicts in one list, given one list of them for each clip.

        Raises:
            ArgumentError: If a clip does not have one for each of its frames.
        """
        nested = isinstance(given, list | tuple) and bool(given) and all(isinstance(clip, list | tuple) for clip in given)
        if key != "targets" or not self.frames or not nested:
            return given
        for clip in given:
            if len(clip) != self.frames:
                raise ArgumentError(
                    f"targets must hold one dict for each of the {self.frames} frames of a clip, got {len(clip)}. "
                    "Pass one dict for each clip, or one for each frame."
                )
        self._lists[index] = type(given)
        return [record for clip in given for record in clip]

    def lists(self, values: list[Any]) -> None:
        """Put target dicts into one list for each clip again, in the list of all results."""
        for index, kind in self._lists.items():
            dicts = values[index]
            firsts = range(0, len(dicts), self.frames)
            values[index] = kind(kind(dicts[first + frame] for frame in self._chosen) for first in firsts)

    def choose(self, chosen: Array | None, values: list[Any], keys: Sequence[str], given: Sequence[Any]) -> None:
        """Keep the masks, boxes and keypoints of the frames that a plan keeps.

        Args:
            chosen: Index of the source of each frame; ``None``: all stay.
            values: The inputs, as ``flat`` returned them. Images are left to the plan.
            keys: Their data keys.
            given: The inputs as the user passed them.
        """
        if chosen is None:
            return
        index: Tensor | None = None
        for number, (key, source) in enumerate(zip(keys, given, strict=True)):
            if key == "input" or not self.has_frames(key, source):
                continue
            if index is None:
                (index,) = to_device([chosen], values[number].device)
            axis = 0 if key == "mask" else 1
            frames = values[number].unflatten(axis, (self._out_frames, -1) if axis else (-1, self._out_frames))
            values[number] = torch.index_select(frames, 1, index).flatten(axis, axis + 1)
        self._chosen = [self._chosen[frame] for frame in chosen.tolist()]
        self._out_frames = len(self._chosen)
