"""Decoding task for one ``Encoded`` member of a batch: layout and output buffers."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.ragged import Ragged
from gpuaug.decode.layout import Layout

POISON: int | None = None
"""Byte with which tests fill output buffers before decoding, to detect pixels that were not written; ``None``: no fill."""


@dataclass(slots=True, eq=False)
class Work:
    """Decoding task for one ``Encoded`` member of a batch. Its buffers are allocated on the training thread."""

    encoded: Encoded
    layout: Layout
    data: Tensor
    """(values,) device tensor for the decoded images, at offsets ``Layout.starts``."""
    raw: Tensor | None
    """(bytes,) device tensor for images that the card decodes at full size, and that ``Layout.finish`` downsamples or rotates.

    ``None`` if there are no such images.
    """
    staging: Tensor | None
    """(values,) page-locked host tensor for the images that the CPU decodes, at offsets ``Layout.staged_starts``.

    ``None`` if the CPU decodes no image, or if it decodes into ``data`` because that is in host memory.
    """
    problems: dict[int, str] = field(default_factory=dict)
    """Index of each image that cannot be decoded → reason. Decoders add entries."""
    is_abandoned: bool = False
    """Whether the result is not needed: threads then stop after their current images."""

    @property
    def host(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Buffer into which the CPU decodes, and (B,) offset of each image in it, in values."""
        return (self.data, self.layout.starts) if self.staging is None else (self.staging, self.layout.staged_starts)

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged:
        """Return the decoded images as a ``Ragged`` on ``device``.

        The loader calls this method as it calls ``Tensor.to``. Its copy lane (a CUDA stream) already waits for the decoders'
        events.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.ragged(self.data, self.layout.places().to(device, non_blocking=non_blocking))


def allocate_pixels(length: int, device: torch.device, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """Return a flat tensor of ``length`` bytes for pixels of type ``dtype``. ``length`` must be a multiple of the item size."""
    with torch.inference_mode(False):  # decoding threads run outside of inference mode, and could not write inference tensors
        data = torch.empty(length, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        data = data if POISON is None else data.fill_(POISON)
        return data if dtype == torch.uint8 else data.view(dtype)
