"""``Call``: images and settings of one call of a fused pipeline, which the adapters of all inputs read.

An *adapter* (``Dense``, ``Container``) reads one input of the call, and returns its result in the form of the input. A *target
dict* holds the annotations of one image, such as ``{"boxes": …}``. A *sample* is an image or a clip.

The class is not in ``record.py``, because a ``Record`` refers to its adapters. If they referred to the record, the reference
cycle would keep all tensors of the call in memory until Python's garbage collector runs. So they refer to the ``Call``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gpuaug.core.ragged import Ragged
from gpuaug.core.targets import type_name
from gpuaug.fusion.backends.readers import dtype_of, size_of
from gpuaug.fusion.clips import ClipLayout
from gpuaug.fusion.forms.data_keys import check_input
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.torchvision.target_conversions import TargetConversions
from gpuaug.fusion.options import BoxFormatName
from gpuaug.fusion.pixels import IMAGE_DTYPES


class Call:
    """Images and settings of one call.

    Args:
        images: Images as the user passed them.
        boxes: Format of the boxes in target dicts, such as ``"xyxy"``.
        conversions: Conversions of the output targets, and minimum width, height and area of a valid box.
        clip_layout: Order of the axes of clips that the pipeline accepts.

    Raises:
        ArgumentTypeError: If ``images`` are not a tensor of a supported type or a ``Ragged``.
        ArgumentError: If ``images`` do not have the shape of a batch of images or clips.
    """

    out: tuple[int, int]
    """(height, width) of the output images. ``Record.results`` sets this attribute and the next two."""
    keepdim: bool
    """Whether a single image that was passed without a batch axis is returned without a batch axis."""
    views: int
    """Number of views, that is, random augmentations of each image."""

    def __init__(self, images: Any, boxes: BoxFormatName, conversions: TargetConversions, clip_layout: ClipLayout) -> None:
        self.images, self.boxes, self.conversions, self.clip_layout = images, boxes, conversions, clip_layout
        is_usual = type(images) is Tensor and images.ndim in (4, 5) and images.dtype in IMAGE_DTYPES
        self.is_usual = is_usual and not images.requires_grad
        """True for a batch in a ``torch.Tensor``, not a subclass, that needs no further check. Its plan is cached by shape."""
        if not self.is_usual:
            check_input("input", images)
        is_tensor = isinstance(images, Tensor)
        self.is_unbatched = is_tensor and images.ndim == 3
        """True for a single image (C, H, W), without a batch axis."""
        self.is_video = type(images) is not Tensor and type_name(images) == "Video"
        """True for images of torchvision's class ``Video``."""
        self.is_single_clip = self.is_video and images.ndim == 4
        """True for a single clip (T, C, H, W), without a batch axis."""
        images = images[None] if self.is_unbatched or self.is_single_clip else images
        may_be_clips = not is_tensor or images.ndim == 5 or clip_layout.is_required
        self.frames = clip_layout.frames_of(images) if may_be_clips else 0
        """Number of frames per input clip; 0 for images."""
        if self.frames and is_tensor and not self.is_single_clip:
            clip_layout.warn_if_channels_first(images)
        self.frame_indices: Sequence[int] = range(self.frames)
        """Index of the input frame for each frame of an output clip. Ops that select frames replace it."""
        shape = images.shape if is_tensor else ()
        self.size: Size = size_of(images) if not is_tensor else clip_layout.size(shape) if self.frames else Size(*shape)
        """Number of samples, channels, height, width and frames. Height and width are (B,) arrays for a ``Ragged``."""
        self.dtype = images.dtype if is_tensor else dtype_of(images)
        self.device = images.device
        self.image_layouts = images.places[:: self.size.images_per_sample] if isinstance(images, Ragged) else None
        """For a ``Ragged``, its ``places``: (B, 3 or 4) int64 (offset, height, width, …) of each image or of the first frame
        of each clip. ``None`` for images of one size."""
        self.input_sizes = (self.size.height, self.size.width) if self.image_layouts is None else self.image_layouts
        """(height, width) of all images; for a ``Ragged``, ``image_layouts``."""

    def sides(self, samples: Sequence[int], *, per_frame: bool) -> list[tuple[int, int]]:
        """Return (height, width) of each of ``samples``, indices of images or clips. With ``per_frame``, indices of frames."""
        size = self.size.per_frame() if per_frame else self.size
        if not isinstance(size.height, np.ndarray):
            return [(size.height, size.width)] * len(samples)
        # Converted to Python integers, because they are compared faster than NumPy's.
        sides = list(zip(size.height.tolist(), size.width.tolist(), strict=True))
        return [sides[sample] for sample in samples]

    def image_name(self, index: int, *, per_frame: bool) -> str:
        """Return the name of an image or clip for messages, such as "sample 3"; with ``per_frame``, of the frame ``index``."""
        sample, frame = divmod(index, self.size.images_per_sample if per_frame else 1)
        return f"frame {frame} of sample {sample}" if per_frame else f"sample {sample}"

    def output_frames(self, elements: Sequence[Any]) -> list[list[Any]]:
        """Return one list per clip with the elements of its output frames. ``elements``: one per input frame, clip by clip."""
        return [[elements[start + frame] for frame in self.frame_indices] for start in range(0, len(elements), self.frames)]
