"""Samples of a loader, drawn before and after its stages; :func:`show` is public."""

from gpuaug.viewer.figure import show

__all__ = ["show"]
