"""What users could take instead of gpuaug: DALI, timm, torchvision, SPDL, FFCV, published snippets."""
