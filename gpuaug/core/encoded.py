"""Batches of undecoded images or clips: the bytes of image files or video packets in one flat buffer, and header fields.

A *member* is an entry of a batch. A *clip* is a number of frames of a video. A *packet* is a unit of the coded data of a video,
usually one frame.

If the stages of a loader have a feature cache, a batch may have *rows* of the cache in place of images: what these stages have
computed from each sample. A row has one tensor per *column*: a column is the values of one member of the batch for all samples.
Names of columns::

    latents          tensor (B, …) in the member ``latents``: one tensor (…) per row
    states::cls      tensor (B, …) in the dict ``states``
    target[]::boxes  tensor of any shape in a list of B dicts, such as the boxes of an image
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from gpuaug.core.errors import ArgumentTypeError, whole_number
from gpuaug.core.ragged import Leaf


class Undecoded:
    """Base class of encoded images, which have no pixels. Attributes of tensors and PIL images raise an error with advice."""

    __slots__ = ()
    _way_out: ClassVar[str] = "Put gpuaug.DecodeStage() into stages, before other stages."

    if not TYPE_CHECKING:  # otherwise any attribute would pass type checks

        def __getattr__(self, name: str) -> NoReturn:
            reason = "" if name.startswith("_") else f", because its images are not decoded. {self._way_out}"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}")


def refuse_transforms(cls: type[Undecoded]) -> None:
    """Make torchvision's v2 transforms raise an error for samples with an instance of ``cls``.

    The transforms flatten each sample with torch's pytrees, and pass unknown types through without an error.
    """
    register_pytree_node(cls, _refuse_to_flatten, lambda _values, _context: None, serialized_type_name=f"gpuaug.{cls.__name__}")


def _refuse_to_flatten(value: Any) -> NoReturn:
    raise ArgumentTypeError(
        f"Transforms of a dataset must receive decoded images, got {value}, which they would not transform. {value._way_out}"
    )


class Format(IntEnum):
    """Format of an encoded image. JPEGs have several formats, because decoders differ in the JPEGs that they support."""

    UNREADABLE = 0
    """Cannot be decoded. ``Headers.problems`` has the reason."""
    JPEG = 1
    """Baseline JPEG (SOF0, 8 bits) in one scan: YCbCr, or grey without restart markers. The JPEG engines of a GPU decode it
    correctly if they support its chroma sampling."""
    OTHER_JPEG = 2
    """JPEG of 8 bits that is none of the other formats: several scans, arithmetic coding, SOF1, grey with restart markers, or
    colours other than grey and YCbCr."""
    OTHER = 3
    """An image of another format, such as GIF, or a PNG or TIFF that no other value of this class describes."""
    LOSSLESS_JPEG = 4
    """Lossless JPEG (SOF3) of 8 bits. Decoders cannot downsample it: simplejpeg ignores the size and writes the whole image."""
    PROGRESSIVE_JPEG = 5
    """Progressive JPEG (SOF2) of 8 bits, Huffman-coded, grey or YCbCr."""
    DEEP = 6
    """PNG or TIFF of 16 bits, or TIFF with bands in addition to colours and alpha. Decoded as stored only: ``channels=None``,
    or ``"labels"`` for grey."""
    PNG = 7
    """PNG of 8 bits in grey, RGB or RGBA that libspng decodes to PIL's pixels. All other PNGs of 8 bits are ``OTHER``."""
    WEBP = 8
    """WebP."""


def is_among(values: NDArray[np.integer[Any]], numbers: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return the mask of the header fields in [0, 255] that are among ``numbers``; for a batch much faster than ``np.isin``."""
    among: NDArray[np.bool_] = _numbers_mask(numbers)[values]
    return among


@functools.cache
def _numbers_mask(numbers: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask (256,) that is true at ``numbers``."""
    return np.isin(np.arange(256), numbers)


SAMPLE_TYPES = ("uint8", "uint16", "int16")
"""dtypes of pixels. ``HEADER`` stores an index into this tuple."""


HEADER = np.dtype(
    [
        ("start", np.int64),  # offset of the file in the buffer, in bytes
        ("length", np.int64),  # length of the file in bytes
        ("height", np.int32),  # height of the image in pixels, before rotation by the EXIF orientation
        ("width", np.int32),  # width of the image in pixels, before rotation
        ("channels", np.uint8),  # components of a JPEG, bands of another image (1 for a palette image)
        ("stored_channels", np.uint8),  # channels if decoded with channels=None; 0 if pages of a TIFF differ
        ("format", np.uint8),  # value of the Format
        ("sampling", np.uint8),  # JPEG: 4·h + v for luma factors h x v (4:4:4 and grey: 5); 0 if a chroma factor is not 1x1
        ("orientation", np.uint8),  # EXIF orientation, 1 to 8
        ("type", np.uint8),  # dtype of the pixels, as an index into SAMPLE_TYPES
        ("label_max", np.uint8),  # stored value that PIL decodes to 255: 255, less for grey of few bits; 0 for colours
    ]
)
"""Structured NumPy dtype: the header fields of one image."""


@dataclass(eq=False, repr=False, slots=True)
class Headers(Leaf):
    """Header fields of a batch's images, on the host.

    Args:
        table: (B,) records of ``HEADER``.
        names: Path of each image; an empty string if it is not known.
        problems: Index of each image that cannot be decoded → reason.
        member: Path of the images within a sample, such as ``['image']``; an empty string if the samples are the images.
    """

    table: NDArray[np.void]
    names: Sequence[str]
    problems: dict[int, str]
    member: str = field(default="", kw_only=True)

    def __repr__(self) -> str:
        return f"Headers({len(self.table)} images)"


@dataclass(frozen=True, eq=False, repr=False)
class Encoded(Undecoded):
    """A batch of encoded images: the files, concatenated.

    ``gpuaug.collate_encoded`` returns an ``Encoded``; ``gpuaug.DecodeStage`` decodes it to a ``Ragged``. ``len()`` is the
    number of images.

    Shape:
        - data: (bytes,) uint8, on the host
        - headers: offset and length of each file in ``data``, and the size, format and orientation of its image

    Examples:
        >>> encoded = collate_encoded([b"no image", b""])
        >>> encoded, encoded.headers.problems[1]
        (Encoded(2 images, 8 bytes), 'it is empty')
    """

    data: Tensor
    headers: Headers

    def __len__(self) -> int:
        return len(self.headers.table)

    def __repr__(self) -> str:
        return f"Encoded({len(self)} images, {self.headers.table['length'].sum()} bytes)"

    def file(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of one file. They share the memory of ``data``.

        Args:
            index: Index of the image, from 0.

        Shape:
            - returns: (bytes,) uint8

        Raises:
            ArgumentError, ArgumentTypeError: If no image has this index.
        """
        index = whole_number("index", index, "Count images from 0.", most=len(self) - 1)
        header = self.headers.table[index]
        return np.asarray(self.data[int(header["start"]) : int(header["start"] + header["length"])], np.uint8)

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory. ``DataLoader(pin_memory=True)`` calls this method.

        Returns:
            The copy.
        """
        return type(self)(self.data.pin_memory(), self.headers)


CLIP = np.dtype(
    [
        ("start", np.int64),  # offset in the buffer, in bytes, of the clip: parameter sets of the codec, then packets
        ("length", np.int64),  # length of the clip in bytes
        ("extradata_size", np.int32),  # number of bytes of the parameter sets
        ("packets", np.int64),  # index, in ClipHeaders.packets, of the first packet of the clip
        ("packet_count", np.int32),  # number of packets
        ("fits_nvdec", np.bool_),  # whether each packet gives one frame, and a clip of H.264 begins with an IDR frame
        # The fields of decode.clips.index.Stream, in their order:
        ("codec", "U16"),
        ("library", "U24"),
        ("tag", "U4"),
        ("bits", np.int32),
        ("pixel_format", "U16"),
        ("height", np.int32),
        ("width", np.int32),
        ("matrix", np.uint8),
        ("full_range", np.bool_),
        ("interlaced", np.bool_),
        ("orientation", np.uint8),
        ("reorder", np.int16),
    ]
)
"""Structured NumPy dtype: the header fields of one clip."""

PACKET = np.dtype([("start", np.int64), ("size", np.int32), ("pts", np.int64), ("key", np.bool_)])
"""Structured NumPy dtype: one packet, of one frame if ``fits_nvdec`` of its clip is true.

``start``: offset in the buffer, in bytes. ``size``: number of bytes. ``pts``: presentation time stamp, or another number that
ascends in display order. ``key``: whether the frame is a key frame.
"""


@dataclass(eq=False, repr=False, slots=True)
class ClipHeaders(Headers):
    """Header fields of a batch's clips, on the host.

    Args:
        table: (B,) records of ``CLIP``.
        names: Path of each video; an empty string if it is not known.
        problems: Index of each clip that cannot be decoded → reason.
        packets: (P,) records of ``PACKET``: the P packets of all clips, clip by clip, in decoding order.
        pts: (B, T) field ``pts`` of the packets of the clips' frames.
        member: Path of the clips within a sample; an empty string if the samples are the clips.
    """

    packets: NDArray[np.void]
    pts: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"ClipHeaders({len(self.table)} clips of {self.pts.shape[1]} frames)"


class EncodedClips(Encoded):
    """A batch of undecoded clips: the video packets to decode, concatenated.

    ``gpuaug.collate_encoded`` returns an ``EncodedClips`` for clips of ``gpuaug.read_clip``; ``gpuaug.DecodeStage`` decodes it
    to frames. ``len()`` is the number of clips.

    Shape:
        - data: (bytes,) uint8, on the host
        - headers: offset of each packet in ``data``, and the codec, size and colours of each clip's frames
    """

    headers: ClipHeaders

    def __repr__(self) -> str:
        clips, frames = self.headers.pts.shape
        return f"EncodedClips({clips} clips of {frames} frames, {self.headers.table['length'].sum()} bytes)"


RowId = tuple[int, int]
"""Identity of one sample: two halves of a hash of its name, and of the sizes of its files and the times of their last changes.
Bytes without a file have a hash of the bytes in place of size and time. Another size or time means that the file has
changed."""

Row = Mapping[str, Tensor]
"""Name of a column → tensor of one sample."""


@dataclass(eq=False, repr=False, slots=True)
class RowHeaders(Leaf):
    """Description of the rows of a batch, on the host.

    Args:
        missing: (B,) bool, whether the row of a sample was not in the cache.
        row_ids: (B, 2) int64, the ``RowId`` of each sample; empty if all rows were read.
        names: Name of each sample; empty if all rows were read.
        inputs: Name → hash of the entries of each sample (``cache/inputs.py``); empty if all rows were read.
        shapes: Name of a column of varying shape → (B, axes) shape in each row. The shape of a missing row has no elements.
    """

    missing: NDArray[np.bool_]
    row_ids: NDArray[np.int64]
    names: Sequence[str]
    inputs: Sequence[Mapping[str, int]]
    shapes: dict[str, NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a feature cache for the samples of a batch, and encoded images if samples have no row.

    Args:
        encoded: Encoded images of all B samples, also of samples that have a row; ``None`` if all rows were read.
        columns: Name of a column → (B, …) tensor, in which missing rows have any values; or, if the shape varies, a flat tensor
            of all rows, from which missing rows are absent.
        headers: Description of the rows.
    """

    encoded: Encoded | None
    columns: dict[str, Tensor]
    headers: RowHeaders


def has_varying_shape(column: str) -> bool:
    """Return whether rows may differ in the shape of this column: it comes from a list of dicts, such as boxes."""
    return "[]::" in column


def split(flat: Tensor, shapes: NDArray[np.int64]) -> list[Tensor]:
    """Return the part of each row of a column of varying shape. ``shapes``: (B, axes) shape of each part."""
    parts = flat.split(shapes.prod(1).tolist())
    return [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
