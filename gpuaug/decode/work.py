"""One ``Encoded`` of a batch while it is decoded: its layout, and the memory for its pixels."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.ragged import Ragged
from gpuaug.decode.layout import Layout

POISON: int | None = None
"""Byte that memory for pixels is filled with before decoding, for tests: a pixel that is not written then has a wrong value."""


@dataclass(slots=True, eq=False)
class Work:
    """One ``Encoded`` of a batch and the memory for its pixels, allocated on the training thread."""

    encoded: Encoded
    layout: Layout
    data: Tensor
    """Flat, the decoded images, on the device."""
    raw: Tensor | None
    """(bytes,) full-size images for ``Layout.finish``, on the device. ``None`` where no image needs postprocessing."""
    staging: Tensor | None
    """Flat, page-locked memory for the images that the CPU decodes, at ``Layout.staged_starts``.

    ``None`` if the CPU decodes into ``data``, or no image.
    """
    problems: dict[int, str] = field(default_factory=dict)
    """Why an image could not be decoded, by its index in the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged:
        """Return the decoded images as a ``Ragged`` on ``device``.

        The loader calls this where it would copy a tensor; the copy lane already waits for the decoders' events.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.ragged(self.data, self.layout.places().to(device, non_blocking=non_blocking))


def allocated(length: int, device: torch.device, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """``length`` bytes of memory for pixels of a type, which is a multiple of their size."""
    with torch.inference_mode(False):  # else threads outside the consumer's inference mode could not write to it
        data = torch.empty(length, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        data = data if POISON is None else data.fill_(POISON)
        return data if dtype == torch.uint8 else data.view(dtype)
