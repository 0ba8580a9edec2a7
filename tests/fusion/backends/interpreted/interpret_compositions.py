"""Padding before and behind other ops that move pixels: images and masks of the kernels against those of torch."""

from support.compositions import COMPOSITIONS, SOME, bytes_of
from support.executors import composition_difference


def failures(*, every):
    """Compositions for which the kernels differ from torch."""
    for name in COMPOSITIONS if every else SOME:
        if text := composition_difference(name, bytes_of(batch=2, channels=1)):
            yield text
