"""``gpuaug.fuse``: a pipeline of Kornia's or torchvision's in a handful of launches."""
