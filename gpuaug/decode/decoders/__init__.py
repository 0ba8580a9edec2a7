"""Decoders of image files and clips: which files each takes by their headers, and how it decodes them."""
