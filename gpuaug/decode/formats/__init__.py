"""Parsers of the metadata of image files."""
