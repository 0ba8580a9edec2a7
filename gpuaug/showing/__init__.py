"""Samples of a loader, drawn before and after its stages; :func:`show` is public."""

from gpuaug.showing.figure import show

__all__ = ["show"]
