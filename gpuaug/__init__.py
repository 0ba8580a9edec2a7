"""Feeds a PyTorch training loop from the GPU side: copies, augmentations and frozen encoders on lanes of their own."""

from gpuaug.counters import Stats
from gpuaug.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    GpuAugError,
    GpuAugWarning,
    IteratorEndedError,
    SelectionError,
)
from gpuaug.features import FeatureStage

# Like ``from time import time``: the function takes the place of the subpackage's name here, and the subpackage's modules are
# imported as ``from gpuaug.fuse.plan import Plan``.
from gpuaug.fuse import Draws, Explanation, Fused, fuse
from gpuaug.loader import StreamedLoader
from gpuaug.packing import collate_ragged
from gpuaug.profiling import profile
from gpuaug.ragged import Ragged
from gpuaug.report import Part, Report
from gpuaug.sanitizing import sanitize
from gpuaug.showing import show
from gpuaug.stages import Stage, TransformStage
from gpuaug.timeline import Span, Timeline

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "Draws",
    "Explanation",
    "FeatureStage",
    "Fused",
    "GpuAugError",
    "GpuAugWarning",
    "IteratorEndedError",
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
    "collate_ragged",
    "fuse",
    "profile",
    "sanitize",
    "show",
]
