"""Clips of video frames: batches with five axes. Their frames are augmented as images, with one draw of parameters per clip."""

from dataclasses import dataclass
from typing import Any

from kornia import augmentation as K
from torch import Tensor

from gpuaug.core.errors import ArgumentError, warn
from gpuaug.core.ragged import Ragged
from gpuaug.core.torchvision_types import all_parts
from gpuaug.fusion.ops.base import Size


@dataclass(frozen=True, slots=True)
class ClipLayout:
    """Layout of clips that a pipeline accepts: (B, T, C, H, W), unless a ``VideoSequential`` of Kornia sets another layout."""

    channels_first: bool = False
    """Whether clips are (B, C, T, H, W), Kornia's ``data_format="BCTHW"``."""
    draws_per_frame: bool = False
    """Whether parameters are drawn per frame, Kornia's ``same_on_frame=False``."""
    is_required: bool = False
    """Whether images without a frame axis are an error, as for Kornia's ``VideoSequential``."""

    @property
    def axes(self) -> str:
        """Axes of a batch of clips, for messages."""
        return "(B, C, T, H, W)" if self.channels_first else "(B, T, C, H, W)"

    @property
    def shapes(self) -> str:
        """Shapes that the pipeline accepts, for messages."""
        return self.axes if self.is_required else f"(B, C, H, W) or {self.axes}"

    def frames_of(self, images: Any) -> int:
        """Return the number of frames per clip; 0 for images.

        Raises:
            ArgumentError: If the pipeline accepts only clips, and ``images`` has no frame axis; or if clips have no frames.
        """
        if isinstance(images, Tensor) and images.ndim == 5:
            frames = int(images.shape[2 if self.channels_first else 1])
            if not frames:
                raise ArgumentError(
                    f"input must have at least one frame per clip, {self.axes}, got {tuple(images.shape)}. "
                    "Leave clips without frames out of the dataset."
                )
            return frames
        # Of ragged clips, a VideoSequential that draws per frame accepts none: they are refused below.
        if isinstance(images, Ragged) and images.shapes.frames and not self.draws_per_frame:
            return images.shapes.frames
        if self.is_required:
            raise ArgumentError(
                f"input must be {self.axes} for a VideoSequential, got "
                f"{tuple(images.shape) if isinstance(images, Tensor) else images}. For images, put its modules into another "
                "container: AugmentationSequential(*video.children())."
            )
        return 0

    def warn_if_channels_first(self, clips: Tensor) -> None:
        """Warn if ``clips`` are probably (B, C, T, H, W), and the pipeline reads (B, T, C, H, W)."""
        frames, channels = clips.shape[1:3]
        # Probably axes of channels: 3 entries in place of the frames; or 1, and more entries than an image has channels.
        looks_channels_first = frames == 3 or (frames == 1 and channels > 4)
        if self.channels_first or channels in (1, 3) or clips.shape[-1] in (1, 3, 4) or not looks_channels_first:
            return
        warn(
            f"Clips of shape {tuple(clips.shape)} are augmented as {frames} frames of {channels} channels, because their axes "
            "are (B, T, C, H, W). If they are (B, C, T, H, W), pass clips.transpose(1, 2)."
        )

    def size(self, shape: Any) -> Size:
        """Return the size of clips of shape ``shape``. If parameters are drawn per frame, every frame counts as an image."""
        batch, frames, channels, height, width = shape
        if self.channels_first:
            frames, channels = channels, frames
        if self.draws_per_frame:
            return Size(batch * frames, channels, height, width)
        return Size(batch, channels, height, width, frames)

    def images(self, clips: Tensor) -> Tensor:
        """Return the frames of clips as images, clip by clip, (B · T, C, H, W). Non-contiguous clips are copied."""
        return (clips.transpose(1, 2) if self.channels_first else clips).flatten(0, 1)

    def clips(self, images: Tensor, frames: int) -> Tensor:
        """Invert the method ``images``: return clips of ``frames`` frames each, from images (B · T, C, H, W)."""
        result = images.unflatten(0, (-1, frames)) if len(images) else images.view(0, frames, *images.shape[1:])
        return result.transpose(1, 2) if self.channels_first else result


def clip_layout_of(pipeline: Any) -> ClipLayout:
    """Return the layout of clips that a pipeline accepts.

    Raises:
        ArgumentError: If ``VideoSequential`` modules of the pipeline have different layouts.
    """
    layouts = {
        ClipLayout(part.data_format == "BCTHW", not part.same_on_frame, is_required=True)
        for part in all_parts(pipeline)
        if isinstance(part, K.VideoSequential)
    }
    if len(layouts) > 1:
        raise ArgumentError(
            "pipeline must have VideoSequential modules of one data_format and same_on_frame, got several. "
            "Fuse each separately, in a stage of its own."
        )
    return layouts.pop() if layouts else ClipLayout()
