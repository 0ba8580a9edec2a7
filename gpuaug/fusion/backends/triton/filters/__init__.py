"""Triton kernels that make a pixel from its neighbours, or from the levels of an image."""
