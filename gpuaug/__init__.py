"""Feeds a PyTorch training loop from the GPU side: copies, augmentations and frozen encoders on lanes of their own."""

from gpuaug.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    GpuAugError,
    GpuAugWarning,
    SelectionError,
    TakenOverError,
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
    "SelectionError",
    "Stage",
    "Stats",
    "StreamedLoader",
    "TakenOverError",
    "TransformStage",
]
