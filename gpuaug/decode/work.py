"""Decoding task for one ``Encoded`` (undecoded images or clips) of a batch: layout and output buffers.

The *layout* is the offset of each image in flat buffers. A *card* is a GPU, and a *lane* a CUDA stream.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Encoded
from gpuaug.core.errors import GpuAugError
from gpuaug.core.ragged import Ragged, buffer_length
from gpuaug.core.streams import Lane
from gpuaug.decode.layout import BatchLayout

POISON: int | None = None
"""Byte with which tests fill output buffers before decoding, to detect pixels that were not written; ``None``: no fill.

Package code never sets it.
"""


AnyLayout = TypeVar("AnyLayout", bound=BatchLayout, covariant=True)


@dataclass(slots=True, eq=False)
class Work(Generic[AnyLayout]):
    """Decoding task for one ``Encoded`` of a batch. Its buffers are allocated on the training thread."""

    encoded: Encoded
    layout: AnyLayout
    data: Tensor
    """(values,) device tensor for the decoded images or clips, at offsets ``BatchLayout.starts``."""
    raw: Tensor | None
    """(bytes,) device tensor for images that the card decodes in another form, at offsets ``BatchLayout.raw_starts``.

    ``BatchLayout.finish`` converts them, for instance rotates them upright, and writes them to ``data``. ``None`` if there are
    no such images.
    """
    staging: Tensor | None
    """(values,) host tensor for the images that the CPU decodes, at offsets ``BatchLayout.staged_starts``.

    Page-locked with CUDA. ``None`` if the CPU decodes no image, or if ``data`` is in host memory: the CPU then decodes into
    ``data``.
    """
    problems: dict[int, str] = field(default_factory=dict)
    """Index of each image that cannot be decoded → reason. The decoders add entries."""
    is_abandoned: bool = False
    """Whether the result is not needed any more: threads then stop after their current images."""

    @property
    def host(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Buffer into which the CPU decodes, and the (B,) offsets of the images in this buffer, in values."""
        return (self.data, self.layout.starts) if self.staging is None else (self.staging, self.layout.staged_starts)

    def copy_staged(self, indices: NDArray[Any], lane: Lane) -> None:
        """Copy images or clips from ``staging``, if there is one, to ``data``: one copy per run of adjacent images.

        Args:
            indices: (n,) indices of the images to copy, at least one.
            lane: Lane on which the copies are queued.
        """
        if self.staging is None:
            return
        columns = (self.layout.starts, self.layout.staged_starts, self.layout.lengths)
        starts, staged_starts, lengths = (column[np.sort(indices)] for column in columns)
        # A run is a sequence of images that are adjacent in both buffers. A new run starts where an image does not begin at the
        # end of the preceding image in ``data``. Images that are adjacent in ``data`` are adjacent in ``staging``, too, because
        # both buffers have the same order.
        run_starts = np.append(0, np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1)
        runs = starts[run_starts].tolist(), staged_starts[run_starts].tolist(), np.add.reduceat(lengths, run_starts).tolist()
        lane.copy_parts(self.data, self.staging, zip(*runs, strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged | Tensor:
        """Return the decoded images or clips on ``device``.

        The loader calls this method as it calls ``Tensor.to``. The current stream must already wait for the decoders' events.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.batch(self.data).to(device, non_blocking=non_blocking)


class HostMemoryError(GpuAugError, MemoryError):
    """Host memory cannot be allocated, or cannot be page-locked. Callers add advice to the message."""


def allocate_pixels(length: int, device: torch.device, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """Return a flat tensor for at least ``length`` values of type ``dtype``.

    Raises:
        HostMemoryError: If host memory cannot be allocated or page-locked.
    """
    with torch.inference_mode(False):  # decoding threads run outside of inference mode, and could not write inference tensors
        try:
            data = torch.empty(buffer_length(length * dtype.itemsize), dtype=torch.uint8, device=device, pin_memory=pin_memory)
        except RuntimeError as error:
            is_device_memory = isinstance(error, torch.OutOfMemoryError) and device.type != "cpu"  # the loader adds advice
            # An error from deeper frames was raised by a signal handler, such as torch's handler for dead workers.
            if is_device_memory or getattr(error.__traceback__, "tb_next", None) is not None:
                raise
            raise HostMemoryError(*error.args) from error
        data = data if POISON is None else data.fill_(POISON)
        return data if dtype == torch.uint8 else data.view(dtype)
