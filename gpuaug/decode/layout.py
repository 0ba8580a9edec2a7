"""Where each image of a batch goes, and what decodes it: from the headers and fixed options alone."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import Format, Headers
from gpuaug.core.ragged import Ragged, Shapes

ENGINE_SIDE = 16384
"""Pixels of the longest side that the JPEG engines take."""

ENGINE_SAMPLINGS = (4 * 1 + 1, 4 * 2 + 1, 4 * 2 + 2, 4 * 1 + 2)
"""Chroma samplings that the engines take: 4:4:4 and grey, 4:2:2, 4:2:0, 4:4:0, as ``HEADER`` has them."""

SLAB_STEP = 1.125
"""Memory for pixels is asked for in steps of an eighth, so that batches of about one size use the same memory again."""


@dataclass(frozen=True)
class Options:
    """What a ``DecodeStage`` was told about images."""

    channels: int
    min_side: int | None
    exif: bool
    max_pixels: int


class Layout:
    """The places of a batch's images in one flat buffer.

    Args:
        headers: Of the batch.
        options: The stage's.
        engines: Whether the JPEG engines decode what they take.
        bad: Images that cannot be decoded. Each is replaced by the nearest good one before it, cyclically; one must be good.
    """

    def __init__(self, headers: Headers, options: Options, *, engines: bool, bad: Collection[int] = ()) -> None:
        self.sources = nearest_good(len(headers.table), bad)
        """(B,) index of the file that is decoded for each image."""
        self.headers = table = headers.table[self.sources]
        self.channels = options.channels
        stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        jpeg = np.isin(table["format"], (Format.JPEG, Format.OTHER_JPEG))
        self.scales = np.where(jpeg, _scales(stored.min(1), options.min_side), 1)
        """(B,) factor by which each image is made smaller while it is decoded: 1, 2, 4 or 8."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        self.stored = stored
        """(B, 2) heights and widths in the files."""
        shrunk = -(-stored // self.scales[:, None])
        sizes = np.where((self.orientations > 4)[:, None], shrunk[:, ::-1], shrunk)
        self.shapes = Shapes(sizes, options.channels, "hwc")
        lengths = sizes.prod(1) * options.channels
        self.starts = lengths.cumsum() - lengths
        """(B,) first value of each image in the buffer."""
        self.length = int(lengths.sum())
        """Values of all images."""
        self.by_engines = (
            (table["format"] == Format.JPEG)
            & np.isin(table["sampling"], ENGINE_SAMPLINGS)
            & (stored.max(1) <= ENGINE_SIDE)
            & engines
        )
        """(B,) whether the engines decode it."""
        self.raw = self.by_engines & ((self.scales > 1) | (self.orientations > 1))
        """(B,) whether the engines decode it to memory of its own, from where it is made smaller or turned."""
        raw_lengths = np.where(self.raw, stored.prod(1) * options.channels, 0)
        self.raw_starts = raw_lengths.cumsum() - raw_lengths
        self.raw_length = int(raw_lengths.sum())

    def places(self) -> torch.Tensor:
        """(B, 3) int64: first value, height and width of each image, as ``Ragged`` has them."""
        return torch.from_numpy(np.column_stack([self.starts, self.shapes.sizes]))

    def image(self, data: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
        """The place of one image, (h, w, C), in a flat buffer of all."""
        height, width = self.shapes.sizes[index].tolist()
        start = int(self.starts[index])
        return data[start : start + height * width * self.channels].reshape(height, width, self.channels)

    def ragged(self, data: torch.Tensor, places: torch.Tensor) -> Ragged:
        """The batch, decoded."""
        return Ragged(data[: self.length], places, self.shapes)

    def finish(self, data: torch.Tensor, raw: torch.Tensor | None) -> None:
        """Make images that the engines have decoded whole smaller, and turn them upright. On the device, on the current stream.

        Cost:
            Up to six launches for each of them.
        """
        for index in np.flatnonzero(self.raw).tolist():
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
    """(B,) index of each image itself, or of the nearest good one before it, cyclically, where it is bad."""
    sources = np.arange(count)
    if bad:
        good = np.setdiff1d(sources, np.fromiter(bad, np.int64))
        sources = good[np.searchsorted(good, sources, side="right") - 1]
    return sources


def problems(headers: Headers, options: Options) -> dict[int, str]:
    """Why images cannot be decoded, by index: what their headers show."""
    found = dict(headers.problems)
    pixels = headers.table["height"].astype(np.int64) * headers.table["width"]
    for index in np.flatnonzero(pixels > options.max_pixels).tolist():
        height, width = headers.table["height"][index], headers.table["width"][index]
        found.setdefault(index, f"its {width}x{height} pixels are more than max_pixels={options.max_pixels}")
    return found


def slab_length(length: int) -> int:
    """``length`` rounded up."""
    step = max(int(SLAB_STEP ** np.ceil(np.log(max(length, 1)) / np.log(SLAB_STEP))), length)
    return -(-step // 4096) * 4096


def _scales(shortest: NDArray[np.int64], min_side: int | None) -> NDArray[np.int64]:
    scales = np.ones(len(shortest), np.int64)
    if min_side is not None:
        for scale in (2, 4, 8):
            scales[-(-shortest // scale) >= min_side] = scale
    return scales
