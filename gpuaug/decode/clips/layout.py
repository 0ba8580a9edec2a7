"""Buffer offset and decoder of each clip in a batch, and the conversion of decoded frames to RGB.

A *clip* is a number of selected frames of a video, and its *packets* (encoded frames). An *upright* frame is rotated as its
EXIF orientation requires. The video engines of a card (decoding hardware of a GPU) write frames in the format NV12: H lines of
luma, then H/2 lines with blue and red chroma in turn.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuaug.core.encoded import Headers
from gpuaug.core.ragged import Ragged, Shapes
from gpuaug.decode.clips.index import Stream
from gpuaug.decode.decoders.base import FileDecoder
from gpuaug.decode.layout import BatchLayout, Options, WindowsOf, rotated_upright

_LUMA_WEIGHTS = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
"""Number of the colour matrix in H.273 → weights of red and blue in luma. All other matrices use BT.601."""

_BT601 = (0.299, 0.114)
"""Weights of red and blue in luma according to BT.601."""

MAX_CONVERTED_PIXELS = 2**25
"""Maximum number of pixels that are converted to RGB at once. The conversion takes about ten bytes of memory per pixel."""


class ClipInfo(NamedTuple):
    """Header fields of one clip as Python numbers."""

    start: int
    """Offset of the clip in the data of the batch, in bytes."""
    extradata_size: int
    """Number of bytes of the codec's parameter sets (its ``extradata``), which precede the packets."""
    stream: Stream
    """Codec, size and colours. ``orientation`` is 1 if ``exif=False``."""
    packets: list[tuple[int, int, int, bool]]
    """(start, size, time stamp, whether it is a key frame) per packet: records of ``PACKET``."""
    positions: dict[int, list[int]]
    """Time stamp (``pts`` of ``PACKET``) of each selected frame → positions in the clip at which the frame occurs."""


class ClipLayout(BatchLayout):
    """Layout of the clips of a batch in one flat buffer.

    The field ``orientation`` of ``headers`` is 1 if ``exif=False``. The card decodes clips as NV12 frames into ``Work.raw``.
    For the arguments see ``BatchLayout``.
    """

    undecoded_pixels = 0
    """Number of pixels that are not decoded: 0, because frames are always decoded whole."""

    @staticmethod
    def problems(headers: Headers, options: Options) -> dict[int, str]:
        """Return index → reason for each clip that cannot be decoded according to its header and the options."""
        reasons = BatchLayout.problems(headers, options)
        if options.channels in (1, "labels"):
            for index in range(len(headers.table)):
                reasons.setdefault(index, f"clips are decoded to RGB only, not with channels={options.channels!r}")
        return reasons

    def lay_out(self, options: Options, decoders: Sequence[FileDecoder], windows: WindowsOf | None) -> None:
        """Set the sizes and offsets of the clips. For the arguments see ``BatchLayout``."""
        self.frames = self.batch_headers.pts.shape[1]
        """Number of frames per clip."""
        if not options.exif:
            self.headers["orientation"] = 1
        is_transposed = self.headers["orientation"] > 4  # orientations 5 to 8 swap height and width
        self.sizes = np.where(is_transposed[:, None], self.stored[:, ::-1], self.stored)
        """(B, 2) heights and widths of upright frames."""
        pixels = self.stored.prod(1) * self.frames
        self.place(lengths=pixels * 3, raw_lengths=np.where(self.on_card, pixels * 3 // 2, 0))

    @cached_property
    def infos(self) -> list[ClipInfo]:
        """Header fields of the clip that is decoded at each index of the batch."""
        packets = self.batch_headers.packets.tolist()
        infos = []
        for record, pts in zip(self.headers.tolist(), self.batch_headers.pts[self.sources].tolist(), strict=True):
            start, _, extradata_size, first, count, _, *stream = record  # the fields of ``CLIP``, in order
            positions: dict[int, list[int]] = {}
            for position, time_stamp in enumerate(pts):
                positions.setdefault(time_stamp, []).append(position)
            infos.append(ClipInfo(start, extradata_size, Stream(*stream), packets[first : first + count], positions))
        return infos

    def slowest_first(self, indices: NDArray[Any]) -> Iterator[tuple[int, ClipInfo]]:
        """Return an iterator, which threads may share, over (index, header fields) in descending order of packets · pixels."""
        cost = self.stored.prod(1) * self.headers["packet_count"]
        ordered = indices[np.argsort(-cost[indices], kind="stable")].tolist()
        return iter([(index, self.infos[index]) for index in ordered])

    def raw_clip(self, raw: Tensor, index: int) -> Tensor:
        """Return a view of the NV12 frames of one clip in ``raw``, (T, 3/2 H, W)."""
        height, width = self.stored[index].tolist()
        start = int(self.raw_starts[index])
        length = self.frames * height * width * 3 // 2
        return raw[start : start + length].view(self.frames, height * 3 // 2, width)

    def clip(self, data: Tensor, index: int, start: int) -> Tensor:
        """Return a view (T, H, W, 3) of the upright RGB frames of one clip.

        Args:
            data: Flat buffer.
            index: Index of the clip.
            start: Offset of the clip in ``data``.
        """
        height, width = self.sizes[index].tolist()
        return data[start : start + int(self.lengths[index])].view(self.frames, height, width, 3)

    def finish(self, data: Tensor, raw: Tensor | None) -> None:
        """Convert the NV12 frames in ``raw`` to RGB in ``data``, on the current stream.

        Cost:
            Some 20 launches per run of adjacent clips with equal sizes and colour matrices, and per 2**25 pixels of a run.
        """
        if raw is None:
            return
        conversions = self.headers[["height", "width", "matrix", "full_range", "orientation"]].tolist()
        on_card = enumerate(np.flatnonzero(self.on_card).tolist())
        # Pairs (number among the clips that the card decodes, index of the clip). The difference is constant in adjacent clips.
        for _, run in itertools.groupby(on_card, lambda pair: (pair[1] - pair[0], conversions[pair[1]])):
            (_, first), *others = run
            height, width, matrix, full_range, orientation = conversions[first]
            count = (len(others) + 1) * self.frames
            area = height * width
            nv12_frames = raw[int(self.raw_starts[first]) :][: count * area * 3 // 2].view(count, -1, width)
            rgb_frames = data[int(self.starts[first]) :][: count * area * 3].view(count, *self.sizes[first].tolist(), 3)
            frames_at_once = max(MAX_CONVERTED_PIXELS // area, 1)
            for nv12, rgb in zip(nv12_frames.split(frames_at_once), rgb_frames.split(frames_at_once), strict=True):
                convert(nv12, rgb, matrix, orientation, full_range=full_range)

    def batch(self, data: Tensor) -> Tensor | Ragged:
        """Return the decoded batch: (B, T, 3, H, W), or a ``Ragged`` of B · T frames if clips differ in size."""
        count = len(self.sizes)
        if (self.sizes == self.sizes[0]).all():
            height, width = self.sizes[0].tolist()
            return data[: self.length].view(count, self.frames, height, width, 3).permute(0, 1, 4, 2, 3)
        sizes = self.sizes.repeat(self.frames, 0)
        lengths = sizes.prod(1) * 3
        offsets_and_sizes = torch.from_numpy(np.column_stack([lengths.cumsum() - lengths, sizes]))
        return Ragged(data[: self.length], offsets_and_sizes, Shapes(sizes, 3, "hwc", frames=self.frames))


def convert(nv12: Tensor, rgb: Tensor, matrix: int, orientation: int = 1, *, full_range: bool) -> None:
    """Convert frames from NV12 to RGB, on the current stream. Chroma is not interpolated: four pixels share a chroma sample.

    Args:
        nv12: (T, 3/2 H, W) uint8: H lines of luma, then H/2 lines of chroma, with blue and red alternating.
        rgb: (T, H', W', 3) uint8 output: upright frames.
        matrix: Number of the colour matrix in H.273.
        orientation: EXIF orientation to correct.
        full_range: Whether black is 0, not 16.

    Cost:
        Some 20 launches, and ten bytes of temporary memory per pixel.
    """
    height = nv12.shape[1] * 2 // 3
    width = nv12.shape[2]
    red, blue = _LUMA_WEIGHTS.get(matrix, _BT601)
    green = 1 - red - blue
    scale, gain, black = (1.0, 1.0, 0.0) if full_range else (255 / 219, 255 / 224, 16.0)
    luma = nv12[:, :height].float().sub_(black).mul_(scale).view(-1, height // 2, 2, width // 2, 2)
    chroma = nv12[:, height:].view(-1, height // 2, width // 2, 2).float().sub_(128).mul_(gain)
    cb, cr = chroma[..., 0], chroma[..., 1]
    # Differences of red, green and blue from luma: cr = (R - luma) / (2 (1 - red)), cb = (B - luma) / (2 (1 - blue)), and G
    # follows from luma = red · R + green · G + blue · B.
    offsets = (
        cr * (2 * (1 - red)),
        cb * (-2 * blue * (1 - blue) / green) + cr * (-2 * red * (1 - red) / green),
        cb * (2 * (1 - blue)),
    )
    for channel, offset in enumerate(offsets):
        values = (luma + offset[:, :, None, :, None]).round_().clamp_(0, 255)
        planes = values.view(-1, height, width).movedim(0, 2)
        rgb[..., channel].copy_(rotated_upright(planes, orientation).movedim(2, 0))
