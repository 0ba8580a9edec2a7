"""Suites of augmentation: speed, kernels, and the accuracy of a model trained on augmented images."""
