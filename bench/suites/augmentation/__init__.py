"""Augmentation: speed, kernels, and what a model learns from it."""
