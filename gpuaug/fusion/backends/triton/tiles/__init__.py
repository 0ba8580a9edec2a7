"""Triton kernels of images and masks that are combined."""

from gpuaug.fusion.backends.triton.tiles.images import write_tiles
from gpuaug.fusion.backends.triton.tiles.objects import paste_objects

__all__ = ["paste_objects", "write_tiles"]
