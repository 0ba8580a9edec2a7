"""Place and decoder of each image in a batch, computed from the headers and the stage's options alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, Headers
from gpuaug.core.ragged import Ragged, Shapes

SLAB_STEP = 1.125
"""Factor between sizes of memory blocks for pixels, so that batches of similar size reuse one cached block."""


@dataclass(frozen=True)
class Options:
    """The arguments of a ``DecodeStage`` that decide the decoded images."""

    channels: int
    min_side: int | None
    exif: bool
    max_pixels: int


class Taker(Protocol):
    """Interface of a decoder for a layout."""

    @property
    def on_card(self) -> bool:
        """Whether it writes whole images, as stored, to the device's memory."""

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether it decodes each file, by the records of ``HEADER`` alone."""


class Layout:
    """The places of a batch's images in one flat buffer.

    Args:
        headers: The batch's headers.
        options: The stage's options.
        decoders: The decoders. The first that takes a file decodes it; the last takes all files.
        bad: Images that cannot be decoded. Each is replaced by the nearest good one before it, cyclically; one must be good.
    """

    def __init__(self, headers: Headers, options: Options, decoders: Sequence[Taker], *, bad: Collection[int] = ()) -> None:
        self.sources = nearest_good(len(headers.table), bad)
        """(B,) index of the file that is decoded for each image."""
        self.headers = table = headers.table[self.sources]
        self.channels = options.channels
        stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        jpeg = np.isin(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG))
        self.scales = np.where(jpeg, _scales(stored.min(1), options.min_side), 1)
        """(B,) downsampling factor of each image: 1, 2, 4 or 8."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        self.stored = stored
        """(B, 2) heights and widths in the files."""
        shrunk = -(-stored // self.scales[:, None])
        sizes = np.where((self.orientations > 4)[:, None], shrunk[:, ::-1], shrunk)
        self.shapes = Shapes(sizes, options.channels, "hwc")
        lengths = sizes.prod(1) * options.channels
        self.starts = lengths.cumsum() - lengths
        """(B,) index of each image's first value in the buffer."""
        self.length = int(lengths.sum())
        """Number of values of all images."""
        self.decoders = np.stack([each.takes(table) for each in decoders]).argmax(0)
        """(B,) index of the decoder of each image."""
        on_card = np.array([each.on_card for each in decoders])[self.decoders]
        staged = np.where(on_card, 0, lengths)
        self.staged_starts = staged.cumsum() - staged
        """(B,) index of each image's first value in memory for the images that the CPU decodes alone."""
        self.staged_length = int(staged.sum())
        """Number of values of the images that the CPU decodes."""
        self.needs_postprocessing = on_card & ((self.scales > 1) | (self.orientations > 1))
        """(B,) bool: the card decodes this image at full size into the temporary buffer ``raw``.

        ``finish`` then downsamples or rotates it into the batch.
        """
        raw_lengths = np.where(self.needs_postprocessing, stored.prod(1) * options.channels, 0)
        self.raw_starts = raw_lengths.cumsum() - raw_lengths
        self.raw_length = int(raw_lengths.sum())

    def places(self) -> torch.Tensor:
        """(B, 3) int64: index of the first value, height and width of each image, as in ``Ragged.places``."""
        return torch.from_numpy(np.column_stack([self.starts, self.shapes.sizes]))

    def image(self, data: NDArray[np.uint8], index: int, start: int) -> NDArray[np.uint8]:
        """View (h, w, C) of one image in flat memory, which begins at ``start``."""
        height, width = self.shapes.sizes[index].tolist()
        return data[start : start + height * width * self.channels].reshape(height, width, self.channels)

    def ragged(self, data: torch.Tensor, places: torch.Tensor) -> Ragged:
        """The decoded batch."""
        return Ragged(data[: self.length], places, self.shapes)

    def finish(self, data: torch.Tensor, raw: torch.Tensor | None) -> None:
        """Downsample and rotate the images in ``raw`` into ``data``, on the current stream.

        Cost:
            Up to six launches for each image that needs it.
        """
        for index in np.flatnonzero(self.needs_postprocessing).tolist():
            assert raw is not None
            (height, width), start = self.stored[index].tolist(), int(self.raw_starts[index])
            image = raw[start : start + height * width * self.channels].view(height, width, self.channels)
            scale = int(self.scales[index])
            if scale > 1:
                planes = image.permute(2, 0, 1)[None].float()
                planes = torch.nn.functional.avg_pool2d(planes, scale, ceil_mode=True, count_include_pad=False)
                image = planes[0].round_().to(torch.uint8).permute(1, 2, 0)
            upright = turned(image, int(self.orientations[index]))
            first = int(self.starts[index])
            data[first : first + upright.numel()].view(upright.shape).copy_(upright)


def turned(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """An image (H, W, C) upright, given its EXIF orientation."""
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (0,), 7: (0, 1), 8: (1,)}.get(orientation)
    image = image.flip(flips) if flips else image
    return image.transpose(0, 1) if orientation > 4 else image


def nearest_good(count: int, bad: Collection[int]) -> NDArray[np.int64]:
    """(B,) index of the file for each image: its own, or for a bad image the nearest good one before it, cyclically."""
    sources = np.arange(count)
    if bad:
        good = np.setdiff1d(sources, np.fromiter(bad, np.int64))
        sources = good[np.searchsorted(good, sources, side="right") - 1]
    return sources


def problems(headers: Headers, options: Options) -> dict[int, str]:
    """Why images cannot be decoded according to their headers, by index."""
    found = dict(headers.problems)
    pixels = headers.table["height"].astype(np.int64) * headers.table["width"]
    for index in np.flatnonzero(pixels > options.max_pixels).tolist():
        height, width = headers.table["height"][index], headers.table["width"][index]
        found.setdefault(index, f"its {width}x{height} pixels are more than max_pixels={options.max_pixels}")
    return found


def slab_length(length: int) -> int:
    """Bytes to allocate for ``length`` bytes: the next power of ``SLAB_STEP``, in whole pages of 4096."""
    step = max(int(SLAB_STEP ** np.ceil(np.log(max(length, 1)) / np.log(SLAB_STEP))), length)
    return -(-step // 4096) * 4096


def _scales(shortest: NDArray[np.int64], min_side: int | None) -> NDArray[np.int64]:
    scales = np.ones(len(shortest), np.int64)
    if min_side is not None:
        for scale in (2, 4, 8):
            scales[-(-shortest // scale) >= min_side] = scale
    return scales
