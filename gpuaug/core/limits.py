"""Largest sizes of images, set by the number types in which kernels count pixels and values."""

MOST_SIDE = 2**24
"""Exclusive limit of a side in pixels. Pixel indices are float32, which is exact up to here."""

MOST_WARPED = 2**20
"""Inclusive limit of a side in pixels for warps. Coordinates outside are clamped to it, in the kernels too."""

MOST_ELEMENTS = 2**31
"""Exclusive limit of the number of values of an image, or of a ragged batch. Kernels index values in 32 bits."""
