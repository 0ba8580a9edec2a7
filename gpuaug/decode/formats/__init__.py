"""Formats of image files: signatures, parsers of metadata, and decoders on the CPU."""
