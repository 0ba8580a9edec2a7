"""A Kornia pipeline in a handful of launches."""

from gpuaug.fuse.batchdraws import Draws
from gpuaug.fuse.explain import Explanation
from gpuaug.fuse.module import Fused, fuse

__all__ = ["Draws", "Explanation", "Fused", "fuse"]
