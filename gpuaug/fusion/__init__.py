"""A Kornia pipeline in a handful of launches."""

from gpuaug.fusion.draws import Draws
from gpuaug.fusion.explain import Explanation
from gpuaug.fusion.fused import Fused, fuse

__all__ = ["Draws", "Explanation", "Fused", "fuse"]
