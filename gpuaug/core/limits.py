"""How large images may be: as far as the executors count their pixels and their values."""

MOST_SIDE = 2**24
"""A side has fewer pixels: which pixel is meant is a float32 number, and those are whole up to here."""

MOST_WARPED = 2**20
"""A side of what is warped has no more pixels: what lies outside is brought to this coordinate at most, in the kernels too."""

MOST_ELEMENTS = 2**31
"""An image, or a batch of images that differ in size, has fewer values: kernels count them in 32 bits."""
