"""``gpuaug.fuse``: a Kornia pipeline in a handful of launches."""
