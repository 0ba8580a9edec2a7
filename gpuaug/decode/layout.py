"""Buffer offset and decoder of each image in a batch, computed only from the headers and the options of the stage."""

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
"""Ratio of consecutive block sizes of pixel buffers, so that batches of similar size reuse one cached block."""


@dataclass(frozen=True)
class Options:
    """Arguments of a ``DecodeStage`` that affect the decoded images."""

    channels: int | None
    """Number of channels; ``None``: number and type as stored in the files."""
    min_side: int | None
    exif: bool
    max_pixels: int
    scales_windows: bool = False
    """Whether a window is decoded at the smallest scale at which it is at least as large as its size after the resize."""


WindowsOf = Callable[[Shapes], Windows | None]
"""Function from the sizes of images to the windows to decode. It returns ``None`` to decode whole images."""


class Taker(Protocol):
    """Interface of a decoder as ``Layout`` uses it. See ``FileDecoder``."""

    @property
    def on_card(self) -> bool:
        """Whether the decoder writes images to device memory, in the stored orientation and size."""

    @property
    def decodes_windows(self) -> bool:
        """Whether the decoder can decode a window of an image."""

    def takes(self, table: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the (B,) mask of the files that the decoder decodes. ``table``: (B,) records of ``HEADER``."""

    def widened(self, windows: NDArray[np.int64], table: NDArray[np.void], scales: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows that contain ``windows``, enlarged to regions that are faster to decode."""


class ImageFacts(NamedTuple):
    """Header fields and window of one image as Python numbers, which are faster to read than NumPy records."""

    start: int
    """Offset of the file in ``Encoded.data``, in bytes."""
    length: int
    """Length of the file in bytes."""
    format: int
    """Value of the ``Format``."""
    channels: int
    """Number of channels in the file."""
    height: int
    """Height in the file, in pixels."""
    width: int
    """Width in the file, in pixels."""
    stored_orientation: int
    """EXIF orientation of the file."""
    orientation: int
    """EXIF orientation that decoding corrects; 1 if ``exif=False``."""
    scale: int
    """Downsampling factor."""
    window: list[int]
    """Top, left, height and width of the part of the upright, downsampled image that the batch holds."""
    wanted: list[int]
    """Requested part of ``window``. Pixels outside of it are undefined."""
    whole: bool
    """Whether the window is the whole image."""


class Layout:
    """Offsets of the images of a batch in one flat buffer.

    Args:
        headers: Headers of the batch.
        options: Options of the stage.
        decoders: Decoders. The first whose ``takes`` is true for a file decodes it. The last must take all files.
        bad: Indices of images that cannot be decoded, at most B - 1. Each is replaced by the nearest good image before it,
            cyclically.
        windows: Function that returns the windows to decode. Images that need postprocessing, and images whose decoder cannot
            decode windows, are decoded whole.
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
        """dtype of the decoded pixels."""
        stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        jpeg = np.isin(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG))
        self.scales = np.where(jpeg, _scales(stored.min(1), options.min_side), 1)
        """(B,) downsampling factor of each image: 1, 2, 4 or 8."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        self.stored = stored
        """(B, 2) heights and widths in the files."""
        self.decoders = np.stack([decoder.takes(table) for decoder in decoders]).argmax(0)
        """(B,) index of the decoder of each image."""
        on_card = np.array([decoder.on_card for decoder in decoders])[self.decoders]
        self.needs_postprocessing = on_card & ((self.scales > 1) | (self.orientations > 1))
        """(B,) mask of the images that the card decodes at full size into the temporary buffer ``raw``.

        ``finish`` then downsamples or rotates these images into the batch.
        """
        self.shapes = self._whole()
        # Windows are drawn for uint8: a pipeline may draw others for other types, whose files are always decoded whole.
        windows = windows if self.dtype == torch.uint8 else None
        drawn_windows = windows(self.shapes) if windows is not None else None
        if windows is not None and drawn_windows is not None and options.scales_windows and drawn_windows.alone:
            drawn_windows = self._scaled(drawn_windows, windows, jpeg & ~on_card)
        sizes = self.shapes.sizes
        self.windows = np.column_stack([np.zeros_like(sizes), sizes])
        """(B, 4) top, left, height and width of the part of each upright image that the batch holds."""
        self.wanted = self.windows
        """(B, 4) requested part of ``windows``. Pixels outside of it are undefined."""
        if drawn_windows is not None:
            windowed = np.array([decoder.decodes_windows for decoder in decoders])[self.decoders] & ~self.needs_postprocessing
            self.wanted = np.where(windowed[:, None], drawn_windows.table, self.windows)
            self.windows = self.wanted.copy()
            for decoder_index, decoder in enumerate(decoders):
                selected = windowed & (self.decoders == decoder_index) & (self.orientations == 1)
                self.windows[selected] = decoder.widened(self.windows[selected], table[selected], self.scales[selected])
            self.shapes = Shapes(sizes, self.channels, "hwc", self.windows)
        self.undecoded = int(sizes.prod(1).sum() - self.windows[:, 2:].prod(1).sum())
        """Number of pixels outside the windows."""
        self.lengths = lengths = self.windows[:, 2:].prod(1) * self.channels
        """(B,) number of decoded values per image."""
        self.starts = lengths.cumsum() - lengths
        """(B,) offset of each image in the buffer, in values."""
        self.length = int(lengths.sum())
        """Total number of decoded values."""
        staged = np.where(on_card, 0, lengths)
        self.staged_starts = staged.cumsum() - staged
        """(B,) offset of each image that the CPU decodes in ``Work.staging``, in values."""
        self.staged_length = int(staged.sum())
        """Total number of values of the images that the CPU decodes."""
        raw_lengths = np.where(self.needs_postprocessing, stored.prod(1) * self.channels, 0)
        self.raw_starts = raw_lengths.cumsum() - raw_lengths
        self.raw_length = int(raw_lengths.sum())

    def _whole(self) -> Shapes:
        """Return the sizes of the upright, downsampled images."""
        shrunk = -(-self.stored // self.scales[:, None])
        return Shapes(np.where((self.orientations > 4)[:, None], shrunk[:, ::-1], shrunk), self.channels, "hwc")

    def _scaled(self, full_windows: Windows, windows: WindowsOf, scalable: NDArray[np.bool_]) -> Windows | None:
        """Return the windows at the smallest scale at which the window of each image is at least as large as after the resize.

        Crops are drawn again for the downsampled images, from the same random numbers, so their sides are rounded again.
        """
        out, ratios = np.array(full_windows.out), (full_windows.table[:, 2:] // full_windows.out).min(1)
        self.scales = np.where(scalable, 2 ** np.log2(np.clip(ratios, 1, 8)).astype(np.int64), self.scales)
        while True:
            self.shapes = self._whole()
            scaled_windows = windows(self.shapes)
            sides = self.shapes.sizes if scaled_windows is None else scaled_windows.table[:, 2:]
            too_small = (sides < out).any(1) & (self.scales > 1)
            if not too_small.any():
                return scaled_windows
            self.scales[too_small] //= 2

    @cached_property
    def facts(self) -> list[ImageFacts]:
        """Header fields and window per image."""
        table = self.headers
        names = ("start", "length", "format", "channels", "height", "width", "orientation")
        whole = (self.windows[:, 2:] == self.shapes.sizes).all(1)
        columns = (*(table[name] for name in names), self.orientations, self.scales, self.windows, self.wanted, whole)
        return [ImageFacts(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def places(self) -> torch.Tensor:
        """Return ``Ragged.places``: int64, (B, 3), or (B, 4) with windows."""
        if self.shapes.windows is None:
            return torch.from_numpy(np.column_stack([self.starts, self.shapes.sizes]))
        top, left, _, width = self.windows.T
        firsts = self.starts - (top * width + left) * self.channels
        return torch.from_numpy(np.column_stack([firsts, self.shapes.sizes, width]))

    def card_windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (n, 4) top, left, height and width of the part of each file that the card decodes.

        Images that ``finish`` rotates or downsamples are decoded whole.
        """
        whole = np.column_stack([np.zeros_like(self.stored), self.stored])[indices]
        return np.where(self.needs_postprocessing[indices, None], whole, self.windows[indices])

    def ragged(self, data: torch.Tensor, places: torch.Tensor) -> Ragged:
        """Return the decoded batch."""
        return Ragged(data[: self.length], places, self.shapes)

    def finish(self, data: torch.Tensor, raw: torch.Tensor | None) -> None:
        """Downsample and rotate the images in ``raw`` into ``data``, on the current stream.

        Cost:
            Up to six launches per image of ``needs_postprocessing``.
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
    """Rotate an image (H, W, C) upright. ``orientation``: EXIF orientation, 1 to 8. Returns a view or a copy."""
    flips = {2: (1,), 3: (0, 1), 4: (0,), 6: (0,), 7: (0, 1), 8: (1,)}.get(orientation)
    image = image.flip(flips) if flips else image
    return image.transpose(0, 1) if orientation > 4 else image


def nearest_good(count: int, bad: Collection[int]) -> NDArray[np.int64]:
    """Return the (B,) index of the file of each image; for a bad image, of the nearest good image before it, cyclically."""
    sources = np.arange(count)
    if bad:
        good = np.setdiff1d(sources, np.fromiter(bad, np.int64))
        sources = good[np.searchsorted(good, sources, side="right") - 1]
    return sources


def problems(headers: Headers, options: Options) -> dict[int, str]:
    """Return the reason per image that cannot be decoded according to its header, by index."""
    reasons = dict(headers.problems)
    pixels = headers.table["height"].astype(np.int64) * headers.table["width"]
    for index in np.flatnonzero(pixels > options.max_pixels).tolist():
        height, width = headers.table["height"][index], headers.table["width"][index]
        reasons.setdefault(index, f"its {width}x{height} pixels are more than max_pixels={options.max_pixels}")
    if options.channels is not None:
        for index in np.flatnonzero(headers.table["format"] == Format.DEEP).tolist():
            reasons.setdefault(index, f"it has {_kind_of(headers, index)}, which only channels=None decodes")
        return reasons
    good = np.setdiff1d(np.arange(len(headers.table)), np.fromiter(reasons, np.int64))
    kinds = headers.table[["stored", "type"]][good]
    for index in good[kinds != kinds[:1]].tolist():
        first = _kind_of(headers, int(good[0]))
        reasons[index] = f"it has {_kind_of(headers, index)}, and the first image of the batch has {first}"
    return reasons


def _kind_of(headers: Headers, index: int) -> str:
    """Return the number of channels and the type of an image as text."""
    count = int(headers.table["stored"][index])
    return f"{count} channel{'s' if count > 1 else ''} of {SAMPLE_TYPES[int(headers.table['type'][index])]}"


def slab_length(length: int) -> int:
    """Return the size to allocate for ``length`` bytes: the next power of ``SLAB_STEP``, rounded up to pages of 4096 bytes."""
    step = max(int(SLAB_STEP ** np.ceil(np.log(max(length, 1)) / np.log(SLAB_STEP))), length)
    return -(-step // 4096) * 4096


def _scales(shortest: NDArray[np.int64], min_side: int | None) -> NDArray[np.int64]:
    scales = np.ones(len(shortest), np.int64)
    if min_side is not None:
        for scale in (2, 4, 8):
            scales[-(-shortest // scale) >= min_side] = scale
    return scales
