"""Decoding task for one ``Encoded`` member of a batch: layout and output buffers."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.ragged import Ragged
from gpuaug.decode.layout import Layout

POISON: int | None = None
"""Byte that output buffers are filled with before decoding, for tests that detect unwritten pixels; ``None``: no fill."""


@dataclass(slots=True, eq=False)
class Work:
    """Decoding task for one ``Encoded`` member of a batch. Its buffers are allocated on the training thread."""

    encoded: Encoded
    layout: Layout
    data: Tensor
    """(values,) device tensor with the decoded images, one behind the other."""
    raw: Tensor | None
    """(bytes,) device tensor with the full-size images for ``Layout.finish``. ``None`` if no image needs postprocessing."""
    staging: Tensor | None
    """(values,) page-locked host tensor for the images that the CPU decodes, at offsets ``Layout.staged_starts``.

    ``None`` if the CPU decodes no image, or decodes into ``data`` directly.
    """
    problems: dict[int, str] = field(default_factory=dict)
    """Reason why an image cannot be decoded, by index of the image in the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged:
        """Return the decoded images as a ``Ragged`` on ``device``.

        The loader calls this method as it calls ``Tensor.to``. Before the call, the copy lane waits for the decoders' events.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.ragged(self.data, self.layout.places().to(device, non_blocking=non_blocking))


def allocated(length: int, device: torch.device, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """Return a flat tensor of ``length`` bytes for pixels of type ``dtype``. ``length`` must be a multiple of the item size."""
    with torch.inference_mode(False):  # decoding threads are not in the training thread's inference mode
        data = torch.empty(length, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        data = data if POISON is None else data.fill_(POISON)
        return data if dtype == torch.uint8 else data.view(dtype)
