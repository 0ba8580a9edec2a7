"""A training loop over timm's ``PrefetchLoader``."""

from collections.abc import Iterable

import torch

from bench.harness.loops import Prepare, Serial
from bench.harness.optional_rows import MissingError


class TimmPrefetchLoop(Serial):
    """Loop over timm's ``PrefetchLoader``, which copies the next batch and scales it to [0, 1] on a separate stream.

    Args:
        loader: Iterable of (uint8 images, labels).
        device: Device of the batches.
        prepare: Transform of the float images in the loop, after timm's scaling.

    Raises:
        MissingError: If timm is not installed, or its version is not safe to measure.
    """

    def __init__(self, loader: Iterable, device: torch.device, prepare: Prepare) -> None:
        try:
            from timm.data.loader import PrefetchLoader
        except ImportError as error:
            raise MissingError(f"not installed: {error}") from None
        # timm divides by 255: with this mean and std it only scales to [0, 1].
        prefetch_loader = PrefetchLoader(loader, mean=(0.0,) * 3, std=(1.0,) * 3, device=device)
        if not hasattr(prefetch_loader, "stream"):
            # Older versions overwrite batches: a label overwritten by pixels would stop the run with a device assert.
            raise MissingError("timm must be newer: this one's prefetcher overwrites batches that are still being trained on")
        super().__init__(prefetch_loader, device, prepare)
