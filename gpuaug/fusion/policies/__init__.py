"""Ops that pick other ops: automatic augmentation policies such as RandAugment, and containers with ``random_apply``."""
