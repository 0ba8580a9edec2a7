"""Memory and decoder of each clip in a batch, and the conversion of NV12 frames from the card to RGB."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import ClipHeaders, EncodedClips
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.decode.layout import Options, Taker, nearest_good

_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
"""Weights of red and blue in luma, by matrix coefficients (H.273). All other matrices use BT.601."""

_BT601 = (0.299, 0.114)

_QUARTER_TURNS = {1: 0, 8: 1, 3: 2, 6: 3}
"""Number of quarter turns counterclockwise that display a frame, by EXIF orientation."""

MOST_CONVERTED = 2**25
"""Maximum number of pixels that are converted to RGB at once, which takes some ten bytes of memory per pixel."""


class ClipFacts(NamedTuple):
    """Header fields of one clip as Python numbers."""

    start: int
    """Offset of the clip in the data of the batch, in bytes."""
    extradata: int
    """Number of bytes of the parameter sets."""
    codec: str
    library: str
    height: int
    """Height of the stored frames, before they are turned upright."""
    width: int
    matrix: int
    full_range: bool
    orientation: int
    reorder: int
    packets: list[tuple[int, int, int, bool]]
    """(start, size, time stamp, whether it is a key frame) per packet: records of ``PACKET``."""
    positions: dict[int, list[int]]
    """Positions of each frame in the clip, by its time stamp."""


class ClipLayout:
    """Layout of the clips of a batch in one flat buffer.

    Args:
        headers: Headers of the batch.
        options: Options of the stage.
        decoders: Decoders. The first that takes a clip decodes it; the last takes all clips.
        bad: Indices of clips that cannot be decoded. Each is replaced by the nearest good clip before it, cyclically. At least
            one clip must be good.
    """

    undecoded = 0
    dtype = torch.uint8

    def __init__(self, headers: ClipHeaders, options: Options, decoders: Sequence[Taker], *, bad: Collection[int] = ()) -> None:
        self.sources = nearest_good(len(headers.table), bad)
        """(B,) index of the clip that is decoded for each clip."""
        self._headers = headers
        self.headers = table = headers.table[self.sources]
        self.frames = headers.pts.shape[1]
        """Number of frames per clip."""
        self.stored = np.stack([table["height"], table["width"]], 1).astype(np.int64)
        """(B, 2) heights and widths in the files."""
        self.orientations = table["orientation"] if options.exif else np.ones(len(table), np.uint8)
        self.decoders = np.stack([decoder.takes(table) for decoder in decoders]).argmax(0)
        """(B,) index of the decoder of each clip."""
        self.on_card = np.array([decoder.on_card for decoder in decoders])[self.decoders]
        """(B,) whether the card decodes a clip, into ``raw``."""
        self.sizes = np.where((self.orientations > 4)[:, None], self.stored[:, ::-1], self.stored)
        """(B, 2) heights and widths of upright frames."""
        self.lengths = lengths = self.stored.prod(1) * 3 * self.frames
        """(B,) number of bytes of each clip's RGB frames."""
        self.starts = lengths.cumsum() - lengths
        """(B,) offset of each clip in the batch, in bytes."""
        self.length = int(lengths.sum())
        staged = np.where(self.on_card, 0, lengths)
        self.staged_starts = staged.cumsum() - staged
        """(B,) offset of each clip in the staging memory, which holds the clips that the CPU decodes, in bytes."""
        self.staged_length = int(staged.sum())
        raw = np.where(self.on_card, self.stored.prod(1) * 3 // 2 * self.frames, 0)
        self.raw_starts = raw.cumsum() - raw
        """(B,) offset of each clip in ``raw``, in bytes."""
        self.raw_length = int(raw.sum())

    @cached_property
    def facts(self) -> list[ClipFacts]:
        """Header fields of each clip."""
        packets = self._headers.packets.tolist()
        facts = []
        for row, source, orientation in zip(self.headers, self.sources.tolist(), self.orientations.tolist(), strict=True):
            positions: dict[int, list[int]] = {}
            for position, stamp in enumerate(self._headers.pts[source].tolist()):
                positions.setdefault(stamp, []).append(position)
            first = int(row["packets"])
            codec, library = row["codec"].decode(), row["library"].decode()
            facts.append(
                ClipFacts(
                    start=int(row["start"]),
                    extradata=int(row["extradata"]),
                    codec=codec,
                    library=library,
                    height=int(row["height"]),
                    width=int(row["width"]),
                    matrix=int(row["matrix"]),
                    full_range=bool(row["full_range"]),
                    orientation=orientation,
                    reorder=int(row["reorder"]),
                    packets=packets[first : first + int(row["packet_count"])],
                    positions=positions,
                )
            )
        return facts

    def raw_clip(self, raw: Tensor, index: int) -> Tensor:
        """Return a view of the NV12 frames of one clip in ``raw``, (T, 3/2 H, W)."""
        height, width = self.stored[index].tolist()
        start = int(self.raw_starts[index])
        length = self.frames * height * width * 3 // 2
        return raw[start : start + length].view(self.frames, height * 3 // 2, width)

    def clip(self, data: Tensor, index: int, start: int | None = None) -> Tensor:
        """Return a view of the upright RGB frames of one clip, (T, H, W, 3), at offset ``start``, by default in the batch."""
        height, width = self.sizes[index].tolist()
        start = int(self.starts[index]) if start is None else start
        return data[start : start + int(self.lengths[index])].view(self.frames, height, width, 3)

    def finish(self, data: Tensor, raw: Tensor | None) -> None:
        """Convert the NV12 frames in ``raw`` to RGB in ``data``, on the current stream.

        Cost:
            Some 20 launches per run of adjacent clips of one size and the same colours, and per 2**25 of their pixels.
        """
        if raw is None:
            return
        for first, end in self._alike():
            facts = self.facts[first]
            count = (end - first) * self.frames
            area = facts.height * facts.width
            source = raw[int(self.raw_starts[first]) :][: count * area * 3 // 2].view(count, -1, facts.width)
            target = data[int(self.starts[first]) :][: count * area * 3].view(count, *self.sizes[first].tolist(), 3)
            chunk = max(MOST_CONVERTED // area, 1)
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                convert(source[part], target[part], facts.matrix, facts.orientation, full_range=facts.full_range)

    def _alike(self) -> list[tuple[int, int]]:
        """Return (first index, end) per run of adjacent clips that the card decodes and that have the same conversion."""
        runs: list[tuple[int, int]] = []
        conversions = self.headers[["height", "width", "matrix", "full_range", "orientation"]]
        for index in np.flatnonzero(self.on_card).tolist():
            if runs and runs[-1][1] == index and conversions[index] == conversions[index - 1]:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs

    def batch(self, data: Tensor) -> Tensor | Ragged:
        """Return the decoded batch: (B, T, 3, H, W), or a ``Ragged`` of B · T frames if clips differ in size."""
        count = len(self.sizes)
        if (self.sizes == self.sizes[0]).all():
            height, width = self.sizes[0].tolist()
            return data[: self.length].view(count, self.frames, height, width, 3).permute(0, 1, 4, 2, 3)
        sizes = self.sizes.repeat(self.frames, 0)
        lengths = sizes.prod(1) * 3
        places = torch.from_numpy(np.column_stack([lengths.cumsum() - lengths, sizes]))
        return Ragged(data[: self.length], places, Shapes(sizes, 3, "hwc", frames=self.frames))


def upright(frames: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Return a view of a frame, (H, W, 3), turned upright."""
    return np.rot90(frames, _QUARTER_TURNS[orientation])


def convert(nv12: Tensor, rgb: Tensor, matrix: int, orientation: int = 1, *, full_range: bool) -> None:
    """Convert frames from NV12 to RGB, on the current stream. The four pixels that share a chroma sample get the same chroma.

    Args:
        nv12: (T, 3/2 H, W) uint8: H lines of luma, then H/2 lines of chroma, with blue and red alternating.
        rgb: (T, H', W', 3) uint8 output: upright frames.
        matrix: Matrix coefficients (H.273).
        orientation: EXIF orientation.
        full_range: Whether black is 0, not 16.

    Cost:
        Some 20 launches, and ten bytes of temporary memory per pixel.
    """
    height = nv12.shape[1] * 2 // 3
    width = nv12.shape[2]
    turns = _QUARTER_TURNS[orientation]
    red, blue = _WEIGHTS.get(matrix, _BT601)
    green = 1 - red - blue
    scale, gain, black = (1.0, 1.0, 0.0) if full_range else (255 / 219, 255 / 224, 16.0)
    luma = nv12[:, :height].float().sub_(black).mul_(scale).view(-1, height // 2, 2, width // 2, 2)
    chroma = nv12[:, height:].view(-1, height // 2, width // 2, 2).float().sub_(128).mul_(gain)
    cb, cr = chroma[..., 0], chroma[..., 1]
    offsets = (
        cr * (2 * (1 - red)),
        cb * (-2 * blue * (1 - blue) / green) + cr * (-2 * red * (1 - red) / green),
        cb * (2 * (1 - blue)),
    )
    for channel, offset in enumerate(offsets):
        values = (luma + offset[:, :, None, :, None]).round_().clamp_(0, 255)
        rgb[..., channel].copy_(values.view(-1, height, width).rot90(turns, (1, 2)))


@dataclass(slots=True, eq=False)
class ClipWork:
    """One ``EncodedClips`` of a batch and the memory for its frames, allocated on the training thread."""

    encoded: EncodedClips
    layout: ClipLayout
    data: Tensor
    """Flat memory of the decoded frames, on the device."""
    raw: Tensor | None
    """Flat memory of the NV12 frames of clips that the card decodes, on the device."""
    staging: Tensor | None
    """Flat page-locked memory for the clips that the CPU decodes; ``None`` if there are none or it decodes into ``data``."""
    problems: dict[int, str] = field(default_factory=dict)
    """Reason why a clip could not be decoded, by its index in the batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """Return the decoded clips on ``device``. The loader calls this method as it calls ``Tensor.to``."""
        self.layout.finish(self.data, self.raw)
        result = self.layout.batch(self.data)
        if isinstance(result, Ragged):
            return Ragged(result.data, result.places.to(device, non_blocking=non_blocking), result.shapes)
        return result


def problems(headers: ClipHeaders, options: Options) -> dict[int, str]:
    """Return the reason why a clip cannot be decoded according to its header, by index."""
    reasons = dict(headers.problems)
    table = headers.table
    pixels = table["height"].astype(np.int64) * table["width"]
    for index in np.flatnonzero(pixels > options.max_pixels).tolist():
        size = f"{table['width'][index]}x{table['height'][index]}"
        reasons.setdefault(index, f"its {size} pixels are more than max_pixels={options.max_pixels}")
    if options.channels == 1:
        for index in range(len(table)):
            reasons.setdefault(index, "clips are decoded to RGB only, not with channels=1")
    return reasons
