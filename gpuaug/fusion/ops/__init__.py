"""Ops: what one augmentation draws, and what it does to a pixel. One family of modules a file."""
