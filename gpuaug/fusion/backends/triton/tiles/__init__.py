"""Triton kernels of images and masks that are combined."""
