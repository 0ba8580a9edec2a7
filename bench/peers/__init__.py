"""Competitors of gpuaug: DALI, timm, torchvision, SPDL, FFCV, published snippets."""
