"""Ops lowered from ``torchvision.transforms.v2``. File names match those of the ops lowered from Kornia, in ``ops``."""
