"""The decoders of image files: which headers each takes, and how it decodes them."""
