"""Decoding task for one member of a batch: buffers, and the offset and decoder of each image, from headers and options alone.

A batch holds a *window* of each image: the part that the next stage reads, or the whole image. An *upright* image is rotated as
its EXIF orientation requires. A *card* is a GPU. *Labels* are class indices in a grey or palette image, such as a mask.
Images are decoded *as stored* if they keep the channels and the type in their files.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from gpuaug.core.encoded import SAMPLE_TYPES, Encoded, Format, Headers, is_among
from gpuaug.core.ragged import Ragged, Shapes, Windows
from gpuaug.core.streams import Lane
from gpuaug.decode.decoders.base import FileDecoder


@dataclass(frozen=True)
class Options:
    """Arguments of a ``DecodeStage`` that affect the decoded images."""

    channels: Literal["labels"] | int | None
    """Number of channels; ``None``: number and type as stored in the files; ``"labels"``: one channel of stored values."""
    min_side: int | None
    """Minimum short side of a downsampled JPEG; ``None``: full size."""
    exif: bool
    """Whether images are rotated upright by their EXIF orientation."""
    max_pixels: int
    """Maximum number of pixels of an image."""
    max_bytes: int = 2**32
    """Maximum number of bytes of a decoded image, over all bands."""
    scales_windows: bool = False
    """Whether an image is downsampled as far as its window stays at least as large as the next stage will resize it to."""
    divides_large_files: bool = True
    """Whether a share of the large JPEGs is decoded by a second decoder (``FileDecoder.takes_first``)."""


_VALUE_BYTES = np.array([np.dtype(name).itemsize for name in SAMPLE_TYPES])
"""Bytes per value for each index into ``SAMPLE_TYPES``."""

AnyImage = TypeVar("AnyImage", torch.Tensor, NDArray[np.uint8])

WindowsOf = Callable[[Shapes], Windows | None]
"""Function that returns the windows to decode for images of given sizes; ``None`` to decode whole images."""


class ImageInfo(NamedTuple):
    """Header fields and window of one image as Python numbers, which are read faster than fields of NumPy records."""

    start: int
    """Offset of the file in ``Encoded.data``, in bytes."""
    length: int
    """Length of the file in bytes."""
    format: int
    """Value of ``Format``."""
    channels: int
    """Number of channels in the file; 1 for labels, without alpha."""
    height: int
    """Height in the file, in pixels."""
    width: int
    """Width in the file, in pixels."""
    stored_orientation: int
    """EXIF orientation of the file."""
    orientation: int
    """EXIF orientation to correct: ``stored_orientation``, or 1 (upright) if ``exif=False``."""
    scale: int
    """Factor by which the image is downsampled: 1, 2, 4 or 8."""
    top: int
    """First row of the window, in the upright, downsampled image."""
    left: int
    """First column of the window, in the upright, downsampled image."""
    window_height: int
    """Number of rows of the window."""
    window_width: int
    """Number of columns of the window."""
    label_max: int
    """With ``channels="labels"``, the stored value that PIL decodes to 255; otherwise 0."""
    sampling: int
    """Chroma subsampling of a JPEG, encoded as in ``core.encoded.HEADER``."""


IMAGE = np.dtype([(name, np.int64) for name in ImageInfo._fields])
"""Structured NumPy dtype with the fields of ``ImageInfo``, for loops over images."""


class BatchLayout:
    """Decoders of the images or clips of a batch, and their offsets in flat buffers.

    Args:
        headers: Headers of the batch.
        options: Options of the stage.
        decoders: Decoders in order of precedence. A file is decoded by the first decoder whose ``takes_first`` is true for the
            file, or else by the first decoder whose ``takes`` is true. The last decoder must take all files.
        undecodable: Indices of files that cannot be decoded, at most B - 1. Instead of each of these files, the nearest
            decodable file before it is decoded, cyclically.
        windows: Function that returns the windows of images to decode. Clips, images that need postprocessing
            (``needs_postprocessing``), and images whose decoder cannot decode windows, are decoded whole.
    """

    dtype: torch.dtype = torch.uint8
    """dtype of the decoded pixels."""
    undecoded_pixels: int
    """Number of pixels of the images outside their windows."""

    def __init__(
        self,
        headers: Headers,
        options: Options,
        decoders: Sequence[FileDecoder],
        *,
        undecodable: Collection[int] = (),
        windows: WindowsOf | None = None,
    ) -> None:
        self.batch_headers: Any = headers
        """``Headers`` or ``ClipHeaders`` of the batch."""
        self.sources = source_indices(len(headers.table), undecodable)
        """(B,) index of the file that is decoded for each image or clip."""
        self.headers = table = headers.table[self.sources]
        """(B,) records of ``HEADER`` or ``CLIP``, of the files that are decoded."""
        self.stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        """(B, 2) heights and widths in the files."""
        # (decoders, B): 1 if ``takes`` is true, 2 if ``takes_first`` is also true. ``argmax`` returns the first maximum.
        priorities = np.stack([decoder.takes(table) for decoder in decoders]).astype(np.uint8)
        if options.divides_large_files:
            priorities += np.stack([decoder.takes_first(table) for decoder in decoders])
        self.decoders = priorities.argmax(0)
        """(B,) index into ``decoders`` of the decoder of each image or clip."""
        self.on_card = np.array([decoder.on_card for decoder in decoders])[self.decoders]
        """(B,) mask of the images or clips that the card decodes."""
        self.lay_out(options, decoders, windows)

    @staticmethod
    def problems(headers: Headers, options: Options) -> dict[int, str]:
        """Return index → reason for each image or clip that cannot be decoded according to its header and the options.

        This base class reports files that cannot be read, or have more pixels than ``max_pixels``.
        """
        reasons = dict(headers.problems)
        pixels = headers.table["height"].astype(np.int64) * headers.table["width"]
        for index in np.flatnonzero(pixels > options.max_pixels).tolist():
            height, width = headers.table["height"][index], headers.table["width"][index]
            reasons.setdefault(index, f"its {width}x{height} pixels are more than max_pixels={options.max_pixels}")
        return reasons

    def lay_out(self, options: Options, decoders: Sequence[FileDecoder], windows: WindowsOf | None) -> None:
        """Set the shapes and offsets of the images or clips. For the arguments see ``BatchLayout``."""
        raise NotImplementedError

    def place(self, lengths: NDArray[np.int64], raw_lengths: NDArray[np.int64]) -> None:
        """Set the offsets of the images in the buffers of ``Work``: the images follow one another without gaps.

        Args:
            lengths: (B,) number of decoded values per image.
            raw_lengths: (B,) number of bytes per image in the temporary buffer ``Work.raw``; 0 for images that do not need it.
        """
        self.lengths = lengths
        """(B,) number of decoded values per image."""
        self.starts, self.length = _offsets(lengths)
        """(B,) offset of each image in ``Work.data``, and the total number of values."""
        self.staged_starts, self.staged_length = _offsets(np.where(self.on_card, 0, lengths))
        """(B,) offset in ``Work.staging`` of each image that the CPU decodes, and the total number of values."""
        self.raw_starts, self.raw_length = _offsets(raw_lengths)
        """(B,) offset of each image in ``Work.raw``, and the total number of bytes."""

    def finish(self, data: torch.Tensor, raw: torch.Tensor | None) -> None:
        """Convert images in ``raw``, if there are any, and write them to ``data``, on the current stream."""
        raise NotImplementedError

    def batch(self, data: torch.Tensor) -> Ragged | torch.Tensor:
        """Return the decoded batch in the buffer ``data``. The ``places`` of a ``Ragged`` are on the host."""
        raise NotImplementedError


def _offsets(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the (B,) offsets of adjacent ranges of ``lengths``, and their total length."""
    return lengths.cumsum() - lengths, int(lengths.sum())


class Layout(BatchLayout):
    """Windows of the images of a batch, and their offsets in one flat buffer. For the arguments see ``BatchLayout``."""

    @staticmethod
    def problems(headers: Headers, options: Options) -> dict[int, str]:
        """Return index → reason for each image that cannot be decoded according to its header and the options."""
        reasons = BatchLayout.problems(headers, options)
        is_fixed = isinstance(options.channels, int)
        channels = 1 if options.channels == "labels" else options.channels or headers.table["stored_channels"]
        value_bytes = 1 if is_fixed else _VALUE_BYTES[headers.table["type"]]
        pixels = headers.table["height"].astype(np.float64) * headers.table["width"]
        image_bytes = pixels * channels * value_bytes  # floats: sizes in a hostile header may exceed 64 bits
        for index in np.flatnonzero(image_bytes > options.max_bytes).tolist():
            reasons.setdefault(
                index, f"its {int(image_bytes[index])} bytes after decoding are more than max_bytes={options.max_bytes}"
            )
        if is_fixed:
            for index in np.flatnonzero(headers.table["format"] == Format.DEEP).tolist():
                reasons.setdefault(
                    index, f"it has {_channels_and_type(headers, index)}, which is decoded as stored only, with channels=None"
                )
            return reasons
        # Decoded as stored, or as labels: all images must have the type of the first decodable image, and, unless they are
        # labels, its number of channels.
        compared = ["stored_channels", "type"]
        if options.channels == "labels":
            compared = ["type"]
            for index in np.flatnonzero(headers.table["label_max"] == 0).tolist():
                reasons.setdefault(
                    index, f"it has {_channels_and_type(headers, index)}, not the one of a grey image or palette"
                )
        for index in np.flatnonzero(headers.table["stored_channels"] == 0).tolist():
            reasons.setdefault(index, "its pages are not the bands of one image: they differ in size or type, or are too many")
        decodable = np.setdiff1d(np.arange(len(headers.table)), np.fromiter(reasons, np.int64))
        channels_and_types = headers.table[compared][decodable]
        for index in decodable[channels_and_types != channels_and_types[:1]].tolist():
            first = _channels_and_type(headers, int(decodable[0]))
            reasons[index] = f"it has {_channels_and_type(headers, index)}, and the first image of the batch has {first}"
        return reasons

    def lay_out(self, options: Options, decoders: Sequence[FileDecoder], windows: WindowsOf | None) -> None:
        """Set the shapes, windows and offsets of the images. For the arguments see ``BatchLayout``."""
        table, stored, on_card = self.headers, self.stored, self.on_card
        self.as_stored = options.channels is None
        """Whether images are decoded with the channels and the type that are stored in the files."""
        self.label_max = table["label_max"] if options.channels == "labels" else np.zeros(len(table), np.uint8)
        """(B,) stored value that PIL decodes to 255, for images that are decoded as labels; otherwise 0."""
        self.channels = options.channels if isinstance(options.channels, int) else int(table["stored_channels"][0])
        """Number of channels of the decoded images. If they are decoded as stored, the number is the same in all files."""
        if options.channels == "labels":
            self.channels = 1
        # Otherwise the type of the first image: ``problems`` allows no images of several types.
        self.dtype = torch.uint8 if isinstance(options.channels, int) else getattr(torch, SAMPLE_TYPES[int(table["type"][0])])
        is_jpeg = is_among(table["format"], (Format.JPEG, Format.PROGRESSIVE_JPEG, Format.OTHER_JPEG))
        self.scales = np.where(is_jpeg, _scales(stored.min(1), options.min_side), 1)
        """(B,) downsampling factor of each image: 1, 2, 4 or 8."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        """(B,) EXIF orientations to correct."""
        self.needs_postprocessing = on_card & ((self.scales > 1) | (self.orientations > 1))
        """(B,) mask of the images that the card decodes at full size into the temporary buffer ``raw``.

        ``finish`` then downsamples or rotates these images into the batch.
        """
        self.shapes = self._upright_shapes()
        """Sizes of the upright, downsampled images, and their windows."""
        # Windows are computed for uint8. A fused pipeline may crop images of other types differently: they are decoded whole.
        windows = windows if self.dtype == torch.uint8 else None
        requested = windows(self.shapes) if windows is not None else None
        if windows is not None and requested is not None and options.scales_windows and requested.may_downsample:
            # An image is downsampled by 2, 4 or 8 if its window has at least 2, 4 or 8 times the sides of the resized window,
            # ``requested.out``.
            ratios = (requested.table[:, 2:] // requested.out).min(1)
            self.scales = np.where(is_jpeg & ~on_card, 2 ** np.log2(np.clip(ratios, 1, 8)).astype(np.int64), self.scales)
            self.shapes = self._upright_shapes(self.shapes.sizes)
            requested = windows(self.shapes)  # the same windows, downsampled: they are drawn at ``Shapes.full_sizes``
        sizes = self.shapes.sizes
        self.windows = np.concatenate((np.zeros_like(sizes), sizes), 1)
        """(B, 4) top, left, height and width of the window of each upright, downsampled image.

        Windows may be larger than requested. Pixels that the next stage does not read are undefined.
        """
        if requested is not None:
            has_window = np.array([decoder.decodes_windows for decoder in decoders])[self.decoders] & ~self.needs_postprocessing
            self.windows = np.where(has_window[:, None], requested.table, self.windows)
            for decoder_index, decoder in enumerate(decoders):
                selected = has_window & (self.decoders == decoder_index) & (self.orientations == 1)
                if not selected.any():
                    continue
                self.windows[selected] = decoder.enlarge(self.windows[selected], table[selected], self.scales[selected])
            self.shapes = Shapes(sizes, self.channels, "hwc", self.windows, full_sizes=self.shapes.full_sizes)
        areas = self.windows[:, 2] * self.windows[:, 3]  # a fifth of the time of prod(1)
        self.undecoded_pixels = int((sizes[:, 0] * sizes[:, 1] - areas).sum())
        raw_lengths = np.where(self.needs_postprocessing, stored[:, 0] * stored[:, 1] * self.channels, 0)
        self.place(areas * self.channels, raw_lengths)

    def _upright_shapes(self, full_sizes: NDArray[np.int64] | None = None) -> Shapes:
        """Return the sizes of the upright, downsampled images. ``full_sizes``: (B, 2) sizes for which the crops are drawn."""
        downsampled = -(-self.stored // self.scales[:, None])  # rounded up
        is_transposed = (self.orientations > 4)[:, None]  # orientations 5 to 8 swap height and width
        sizes = np.where(is_transposed, downsampled[:, ::-1], downsampled)
        return Shapes(sizes, self.channels, "hwc", full_sizes=full_sizes)

    @cached_property
    def records(self) -> NDArray[np.void]:
        """(B,) records of ``IMAGE``: header fields and window per image."""
        table = self.headers
        file_fields = (table["start"], table["length"], table["format"], np.where(self.label_max, 1, table["channels"]))
        size_fields = (table["height"], table["width"], table["orientation"], self.orientations, self.scales)
        columns = (*file_fields, *size_fields, self.windows, self.label_max, table["sampling"])
        return np.column_stack(columns).astype(np.int64).view(IMAGE)[:, 0]

    @cached_property
    def infos(self) -> list[ImageInfo]:
        """Header fields and window per image."""
        return [ImageInfo(*record) for record in self.records.tolist()]

    def places(self) -> torch.Tensor:
        """Return offsets and sizes of the images, for ``Ragged.places``: (B, 3) int64, or (B, 4) with windows."""
        if self.shapes.windows is None:
            return torch.from_numpy(np.column_stack([self.starts, self.shapes.sizes]))
        top, left, _, width = self.windows.T
        image_starts = self.starts - (top * width + left) * self.channels  # where pixel (0, 0) of the whole image would be
        return torch.from_numpy(np.column_stack([image_starts, self.shapes.sizes, width]))

    def card_windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (n, 4) top, left, height and width of the part of each image that the card decodes.

        Images that ``finish`` rotates or downsamples are decoded whole.
        """
        whole = np.column_stack([np.zeros_like(self.stored), self.stored])[indices]
        return np.where(self.needs_postprocessing[indices, None], whole, self.windows[indices])

    def batch(self, data: torch.Tensor) -> Ragged:
        """Return the decoded batch in the buffer ``data``, with ``places`` on the host."""
        return Ragged(data[: self.length], self.places(), self.shapes)

    def finish(self, data: torch.Tensor, raw: torch.Tensor | None) -> None:
        """Downsample and rotate the images in ``raw`` into ``data``, on the current stream.

        Args:
            data: ``Work.data``, the buffer of the batch.
            raw: ``Work.raw``, the buffer of the images that need postprocessing; ``None`` if there are none.

        Cost:
            Up to six launches per image that needs postprocessing.
        """
        for index in np.flatnonzero(self.needs_postprocessing).tolist():
            assert raw is not None  # allocated if at least one image needs postprocessing
            (height, width), start = self.stored[index].tolist(), int(self.raw_starts[index])
            image = raw[start : start + height * width * self.channels].view(height, width, self.channels)
            scale = int(self.scales[index])
            if scale > 1:
                planes = image.permute(2, 0, 1)[None].float()
                planes = torch.nn.functional.avg_pool2d(planes, scale, ceil_mode=True, count_include_pad=False)
                image = planes[0].round_().to(torch.uint8).permute(1, 2, 0)
            upright = rotated_upright(image, int(self.orientations[index]))
            first = int(self.starts[index])
            data[first : first + upright.numel()].view(upright.shape).copy_(upright)


AnyLayout = TypeVar("AnyLayout", bound=BatchLayout, covariant=True)


@dataclass(slots=True, eq=False)
class Work(Generic[AnyLayout]):
    """Decoding task for one ``Encoded`` of a batch. Its buffers are allocated on the training thread."""

    encoded: Encoded
    layout: AnyLayout
    data: torch.Tensor
    """(values,) device tensor for the decoded images or clips, at offsets ``BatchLayout.starts``."""
    raw: torch.Tensor | None
    """(bytes,) device tensor for images that the card decodes in another form, at offsets ``BatchLayout.raw_starts``.

    ``BatchLayout.finish`` converts them, for instance rotates them upright, and writes them to ``data``. ``None`` if there are
    no such images.
    """
    staging: torch.Tensor | None
    """(values,) host tensor for the images that the CPU decodes, at offsets ``BatchLayout.staged_starts``.

    Page-locked with CUDA. ``None`` if the CPU decodes no image, or if ``data`` is in host memory: the CPU then decodes into
    ``data``.
    """
    problems: dict[int, str] = field(default_factory=dict)
    """Index of each image that cannot be decoded → reason. The decoders add entries."""
    is_abandoned: bool = False
    """Whether the result is not needed any more: threads then stop after their current images."""

    @property
    def host(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
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

    def to(self, device: torch.device, non_blocking: bool = False) -> Ragged | torch.Tensor:
        """Return the decoded images or clips on ``device``.

        The loader calls this method as it calls ``Tensor.to``. The current stream must already wait for the decoders' events.
        """
        self.layout.finish(self.data, self.raw)
        return self.layout.batch(self.data).to(device, non_blocking=non_blocking)


_FLIPS = {2: (1,), 3: (0, 1), 4: (0,), 6: (0,), 7: (0, 1), 8: (1,)}
"""EXIF orientation → axes of an image (H, W, C) to reverse. For 5 and more, the axes H and W are then swapped.

1 needs no change, and 5 only the swap.
"""


def rotated_upright(image: AnyImage, orientation: int) -> AnyImage:
    """Return an image (H, W, C), rotated upright. The result may share the memory of ``image``.

    Args:
        image: Image in the orientation of its file.
        orientation: EXIF orientation, 1 to 8.
    """
    if orientation in _FLIPS:
        axes = _FLIPS[orientation]
        image = image.flip(axes) if isinstance(image, torch.Tensor) else np.flip(image, axes)
    return image.swapaxes(0, 1) if orientation > 4 else image


def source_indices(count: int, undecodable: Collection[int]) -> NDArray[np.int64]:
    """Return the (B,) index of the file that is decoded for each image or clip.

    Args:
        count: Number of images, B.
        undecodable: Indices of files that cannot be decoded. Instead of each, the nearest decodable file before it is
            decoded, cyclically.
    """
    indices = np.arange(count)
    if not undecodable:
        return indices
    decodable = np.setdiff1d(indices, np.fromiter(undecodable, np.int64))
    sources: NDArray[np.int64] = decodable[np.searchsorted(decodable, indices, side="right") - 1]
    return sources


def _channels_and_type(headers: Headers, index: int) -> str:
    """Return the number of channels and the dtype of an image as text."""
    count = int(headers.table["stored_channels"][index])
    return f"{count} channel{'s' if count > 1 else ''} of {SAMPLE_TYPES[int(headers.table['type'][index])]}"


def _scales(short_sides: NDArray[np.int64], min_side: int | None) -> NDArray[np.int64]:
    """Return the (B,) largest factors in (1, 2, 4, 8) at which the downsampled short side has at least ``min_side`` pixels."""
    scales = np.ones(len(short_sides), np.int64)
    if min_side is not None:
        for scale in (2, 4, 8):
            scales[-(-short_sides // scale) >= min_side] = scale
    return scales
