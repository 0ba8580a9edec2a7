"""Trials of ``python -m bench chaos``."""
