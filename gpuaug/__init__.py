"""Feeds a PyTorch training loop from the GPU side: copies, augmentations and frozen encoders on lanes of their own."""

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
from gpuaug.loader import Stats, StreamedLoader
from gpuaug.stages import Stage, TransformStage

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "FeatureStage",
    "GpuAugError",
    "GpuAugWarning",
    "IteratorEndedError",
    "SelectionError",
    "Stage",
    "Stats",
    "StreamedLoader",
    "TransformStage",
]
