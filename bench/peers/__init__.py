"""Peers, the libraries and snippets with which gpuaug is compared: DALI, timm, torchvision, SPDL, FFCV, published snippets."""
