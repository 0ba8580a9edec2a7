"""Place and decoder of each image in a batch, computed from the headers and the stage's options alone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import SAMPLE_TYPES, Format, Headers
from gpuaug.core.ragged import Ragged, Shapes, Windows

SLAB_STEP = 1.125
"""Factor between sizes of memory blocks for pixels, so that batches of similar size reuse one cached block."""


@dataclass(frozen=True)
class Options:
    """The arguments of a ``DecodeStage`` that decide the decoded images."""

    channels: int | None
    """``None``: as the files of a batch have them, in the type that they have."""
    min_side: int | None
    exif: bool
    max_pixels: int
    scales_windows: bool = False
    """Whether windows are decoded at the smallest scale at which they keep the size that they are resized to."""


WindowsOf = Callable[[Shapes], Windows | None]
"""Function of the sizes of images that gives the window of each that is to be decoded. ``None``: whole images."""


class Taker(Protocol):
    """Interface of a decoder for a layout."""

    @property
    def on_card(self) -> bool:
        """Whether it writes images as stored to the device's memory."""

    @property
    def decodes_windows(self) -> bool:
        """Whether it decodes the window of an image."""

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """(B,) whether it decodes each file, by the records of ``HEADER`` alone."""

    def widened(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Windows that contain those wanted, and are decoded in less time."""


class ImageFacts(NamedTuple):
    """Header fields and window of one image as Python numbers, which threads read faster than records of NumPy."""

    start: int
    """First byte of the file in the batch's files."""
    length: int
    """Bytes of the file."""
    format: int
    """Number of the ``Format``."""
    channels: int
    """Channels in the file."""
    height: int
    """In the file, as is ``width``."""
    width: int
    stored_orientation: int
    """Orientation in the file's EXIF."""
    orientation: int
    """Orientation that is undone."""
    scale: int
    """Downsampling factor."""
    window: list[int]
    """Top, left, height and width of the part of the upright, downsampled image that the batch holds."""
    wanted: list[int]
    """Part of ``window`` that was asked for. Pixels beside it are undefined."""
    whole: bool
    """Whether the window is the whole image."""


class Layout:
    """The places of a batch's images in one flat buffer.

    Args:
        headers: The batch's headers.
        options: The stage's options.
        decoders: The decoders. The first that takes a file decodes it; the last takes all files.
        bad: Images that cannot be decoded. Each is replaced by the nearest good one before it, cyclically; one must be good.
        windows: Windows of the images that are decoded. Images that the card does not decode in their final form are decoded
            whole, as are those whose decoder decodes no windows.
    """

    def __init__(
        self,
        headers: Headers,
        options: Options,
        decoders: Sequence[Taker],
        *,
        bad: Collection[int] = (),
        windows: WindowsOf | None = None,
    ) -> None:
        self.sources = nearest_good(len(headers.table), bad)
        """(B,) index of the file that is decoded for each image."""
        self.headers = table = headers.table[self.sources]
        self.channels = int(table["stored"][0]) if options.channels is None else options.channels
        name = SAMPLE_TYPES[0] if options.channels is not None else SAMPLE_TYPES[int(table["type"][0])]
        self.dtype: torch.dtype = getattr(torch, name)
        """Type of the decoded pixels."""
        stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        jpeg = np.isin(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG))
        self.scales = np.where(jpeg, _scales(stored.min(1), options.min_side), 1)
        """(B,) downsampling factor of each image: 1, 2, 4 or 8."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        self.stored = stored
        """(B, 2) heights and widths in the files."""
        self.decoders = np.stack([each.takes(table) for each in decoders]).argmax(0)
        """(B,) index of the decoder of each image."""
        on_card = np.array([each.on_card for each in decoders])[self.decoders]
        self.needs_postprocessing = on_card & ((self.scales > 1) | (self.orientations > 1))
        """(B,) bool: the card decodes this image at full size into the temporary buffer ``raw``.

        ``finish`` then downsamples or rotates it into the batch.
        """
        self.shapes = self._whole()
        # A pipeline may draw other windows for another type, and the files of other types are decoded whole in any case.
        windows = windows if self.dtype == torch.uint8 else None
        found = windows(self.shapes) if windows is not None else None
        if windows is not None and found is not None and options.scales_windows and found.alone:
            found = self._scaled(found, windows, jpeg & ~on_card)
        sizes = self.shapes.sizes
        self.windows = np.column_stack([np.zeros_like(sizes), sizes])
        """(B, 4) top, left, height and width of the part of each upright image that the batch holds."""
        self.wanted = self.windows
        """(B, 4) part of ``windows`` that was asked for. Pixels beside it are undefined."""
        if found is not None:
            cut = np.array([each.decodes_windows for each in decoders])[self.decoders] & ~self.needs_postprocessing
            self.wanted = np.where(cut[:, None], found.table, self.windows)
            self.windows = self.wanted.copy()
            for number, decoder in enumerate(decoders):
                own = cut & (self.decoders == number) & (self.orientations == 1)
                self.windows[own] = decoder.widened(self.windows[own], table[own], self.scales[own])
            self.shapes = Shapes(sizes, self.channels, "hwc", self.windows)
        self.undecoded = int(sizes.prod(1).sum() - self.windows[:, 2:].prod(1).sum())
        """Number of pixels outside of the windows."""
        self.lengths = lengths = self.windows[:, 2:].prod(1) * self.channels
        """(B,) number of values of each image that are decoded."""
        self.starts = lengths.cumsum() - lengths
        """(B,) index of each image's first value in the buffer."""
        self.length = int(lengths.sum())
        """Number of values of all images that are decoded."""
        staged = np.where(on_card, 0, lengths)
        self.staged_starts = staged.cumsum() - staged
        """(B,) index of each image's first value in memory for the images that the CPU decodes alone."""
        self.staged_length = int(staged.sum())
        """Number of values of the images that the CPU decodes."""
        raw_lengths = np.where(self.needs_postprocessing, stored.prod(1) * self.channels, 0)
        self.raw_starts = raw_lengths.cumsum() - raw_lengths
        self.raw_length = int(raw_lengths.sum())

    def _whole(self) -> Shapes:
        """Sizes of the upright images at their scales."""
        shrunk = -(-self.stored // self.scales[:, None])
        return Shapes(np.where((self.orientations > 4)[:, None], shrunk[:, ::-1], shrunk), self.channels, "hwc")

    def _scaled(self, found: Windows, windows: WindowsOf, scalable: NDArray[np.bool_]) -> Windows | None:
        """Windows at the smallest scale of each image at which its window has the size that it is resized to.

        Crops are drawn anew for images of that scale, from the same random numbers. Their sides are rounded anew, too.
        """
        out, times = np.array(found.out), (found.table[:, 2:] // found.out).min(1)
        self.scales = np.where(scalable, 2 ** np.log2(np.clip(times, 1, 8)).astype(np.int64), self.scales)
        while True:
            self.shapes = self._whole()
            again = windows(self.shapes)
            sides = self.shapes.sizes if again is None else again.table[:, 2:]
            small = (sides < out).any(1) & (self.scales > 1)
            if not small.any():
                return again
            self.scales[small] //= 2

    @cached_property
    def facts(self) -> list[ImageFacts]:
        """Facts of each image."""
        table = self.headers
        names = ("start", "length", "format", "channels", "height", "width", "orientation")
        whole = (self.windows[:, 2:] == self.shapes.sizes).all(1)
        columns = (*(table[name] for name in names), self.orientations, self.scales, self.windows, self.wanted, whole)
        return [ImageFacts(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    def places(self) -> torch.Tensor:
        """(B, 3) or, with windows, (B, 4) int64: ``Ragged.places``."""
        if self.shapes.windows is None:
            return torch.from_numpy(np.column_stack([self.starts, self.shapes.sizes]))
        top, left, _, width = self.windows.T
        firsts = self.starts - (top * width + left) * self.channels
        return torch.from_numpy(np.column_stack([firsts, self.shapes.sizes, width]))

    def card_windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(n, 4) top, left, height and width of the part of each file that the card decodes.

        That is the whole of an image that ``finish`` turns or downsamples.
        """
        whole = np.column_stack([np.zeros_like(self.stored), self.stored])[indices]
        return np.where(self.needs_postprocessing[indices, None], whole, self.windows[indices])

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
    if options.channels is not None:
        for index in np.flatnonzero(headers.table["format"] == Format.DEEP).tolist():
            found.setdefault(index, f"it has {_kind_of(headers, index)}, which only channels=None decodes")
        return found
    good = np.setdiff1d(np.arange(len(headers.table)), np.fromiter(found, np.int64))
    kinds = headers.table[["stored", "type"]][good]
    for index in good[kinds != kinds[:1]].tolist():
        first = _kind_of(headers, int(good[0]))
        found[index] = f"it has {_kind_of(headers, index)}, and the first image of the batch has {first}"
    return found


def _kind_of(headers: Headers, index: int) -> str:
    """Channels and type of an image, in words."""
    count = int(headers.table["stored"][index])
    return f"{count} channel{'s' if count > 1 else ''} of {SAMPLE_TYPES[int(headers.table['type'][index])]}"


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
