"""Ops: parameter draws and pixel arithmetic of one augmentation each, with one family of augmentations per file."""
