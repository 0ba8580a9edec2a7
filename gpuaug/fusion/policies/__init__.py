"""Ops that pick other ops: RandAugment and the like, and containers with ``random_apply``."""
