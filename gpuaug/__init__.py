"""Feeds a PyTorch training loop from the GPU side: copies, augmentations and frozen encoders, each on its own CUDA stream."""

from typing import TYPE_CHECKING

from gpuaug.cache.feature_cache import FeatureCache
from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    DecodeError,
    DeviceError,
    GpuAugError,
    GpuAugWarning,
    IteratorEndedError,
    SelectionError,
)
from gpuaug.core.ragged import Ragged
from gpuaug.core.streams import step_first
from gpuaug.decode.clips.read_clip import read_clip
from gpuaug.decode.collate_encoded import collate_encoded
from gpuaug.decode.encoded_input import read_encoded
from gpuaug.decode.stage import DecodeStage
from gpuaug.feed.collate_ragged import collate_ragged
from gpuaug.fusion.draws import Draws
from gpuaug.fusion.explain import Explanation
from gpuaug.fusion.forms.sanitize import sanitize
from gpuaug.fusion.fuse import Fused, fuse
from gpuaug.fusion.processors.fused import FusedProcessor
from gpuaug.loader.stats import Stats
from gpuaug.loader.streamed_loader import StreamedLoader
from gpuaug.profiler.profile import profile
from gpuaug.profiler.report import Part, Report
from gpuaug.profiler.timeline import Span, Timeline
from gpuaug.stages.base import Stage, TransformStage
from gpuaug.stages.feature import FeatureStage
from gpuaug.stages.schedule import schedule, until
from gpuaug.viewer.figure import show

if TYPE_CHECKING:
    from gpuaug.fusion.combining import CopyPaste, MixUpBoxes, Mosaic
    from gpuaug.fusion.transforms import FixedSizeCrop, PadIfSmaller
else:

    def __getattr__(name):  # noqa: ANN001, ANN202
        """Import the transforms on first use, because torchvision takes long to import."""
        if name in ("CopyPaste", "FixedSizeCrop", "MixUpBoxes", "Mosaic", "PadIfSmaller"):
            from gpuaug.fusion import combining, transforms

            return getattr(transforms if name in ("FixedSizeCrop", "PadIfSmaller") else combining, name)
        raise AttributeError(f"module 'gpuaug' has no attribute {name!r}")


__version__ = "0.3.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CopyPaste",
    "DecodeError",
    "DecodeStage",
    "DeviceError",
    "Draws",
    "Encoded",
    "Explanation",
    "FeatureCache",
    "FeatureStage",
    "FixedSizeCrop",
    "Fused",
    "FusedProcessor",
    "GpuAugError",
    "GpuAugWarning",
    "IteratorEndedError",
    "MixUpBoxes",
    "Mosaic",
    "PadIfSmaller",
    "Part",
    "Ragged",
    "Report",
    "SelectionError",
    "Span",
    "Stage",
    "Stats",
    "StreamedLoader",
    "Timeline",
    "TransformStage",
    "collate_encoded",
    "collate_ragged",
    "fuse",
    "profile",
    "read_clip",
    "read_encoded",
    "sanitize",
    "schedule",
    "show",
    "step_first",
    "until",
]
