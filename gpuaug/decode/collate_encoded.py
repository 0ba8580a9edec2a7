"""``collate_encoded``: pack undecoded image files into one flat buffer.

A *member* is an entry of a batch. A *row* of a feature cache is the cached result of the stages for one sample: one tensor per
*column*, that is, per member of the batch that the stages have computed.
"""

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.batch import Batch
from gpuaug.core.encoded import HEADER, Encoded, Headers, RowHeaders, Rows, has_varying_shape
from gpuaug.core.errors import ArgumentError
from gpuaug.decode.clips.pack import pack_clips
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.encoded_input import CachedFile, are_encoded, begins_like_video, name_and_bytes, refuse
from gpuaug.decode.file_bytes import check_size, file_problem, open_file
from gpuaug.decode.formats.header import Header
from gpuaug.decode.headers import parse
from gpuaug.decode.limits import LimitError
from gpuaug.feed.collate_members import MemberCollate, allocate_tensor, position_text
from gpuaug.feed.worker import READ_EVENT

ALIGN = 64
"""Alignment of each file in the buffer in bytes, and padding after the last file.

Decoders read whole words, and beyond the end of a file.
"""


def collate_encoded(samples: Sequence[Any], *, flatten: Hashable | None = None) -> Batch:
    """Make a batch of undecoded images or clips: ``DataLoader(dataset, collate_fn=gpuaug.collate_encoded)``.

    An image is one of: a path, as ``read_encoded(path)`` or of ``pathlib``, or as a str if it is the whole sample; the bytes of
    a file, as bytes, bytearray, memoryview, or a uint8 tensor or array (bytes,); Hugging Face's ``{"bytes": …, "path": …}``; a
    result of ``PIL.Image.open`` that is open, on its first page, without ``draft()`` and not decoded. A
    clip is ``read_clip(path, …)``. Of its video, the batch holds only the packets from which frames of the clip are decoded.
    Samples have the structures that ``collate_ragged`` accepts. Other members are collated as by ``collate_ragged``.

    Args:
        samples: Samples of the same structure. A member holds images or clips if its value in the first sample is an image or
            a clip. Bytes may also be labels: a member of bytes holds images if one of its values begins like an image file.
        flatten: Key or index of a member that is a list of images per sample, whose length differs between samples and may be
            0. In the batch, this member has all images, in the order of the samples, and a further member has their numbers per
            sample, (B,) int64: in a dict ``"images_counts"`` for ``flatten="images"``, in a tuple the last element. Default: a
            list of images has the same length in each sample, and the batch has a list of ``Encoded``.

    Returns:
        Batch of the samples' structure, as ``default_collate`` returns it (a list for a tuple), with one ``Encoded`` per member
        of images or clips. ``Encoded.headers.problems`` describes files and headers that cannot be read. In a worker of a
        ``StreamedLoader`` the files may be in page-locked memory that is overwritten once the batch is decoded. So return
        the batch from the collate function, and keep no reference to it.

    Raises:
        ArgumentTypeError: If no member is an encoded image, or a sample lacks an image that the first sample has.
        ArgumentError: If ``samples`` is empty, samples differ in structure, clips differ in number of frames, or ``flatten``
            does not name a list in each sample.
        DeviceError: If there are clips, and PyAV is not installed.

    Cost:
        On the host, one copy of the bytes, from the page cache into the buffer, plus about 15 µs per image. In a worker
        of a ``StreamedLoader`` the decoder reads this buffer, without another copy. The first clip of a video in a process
        reads all packets of the video, to find the time stamps, in some 10 µs per frame of 340x256. Every clip reads the
        packets from the key frame before the clip to the end of the clip: 30 KB to 1 MB. A process keeps 8 videos open, and the
        time stamps of 1024 videos.

    Examples:
        >>> import io
        >>> from PIL import Image
        >>> packed = io.BytesIO()
        >>> Image.new("RGB", (40, 30)).save(packed, "JPEG")
        >>> images, labels = collate_encoded([(packed.getvalue(), 3), (read_encoded("missing.jpg"), 4)])
        >>> images.headers.table["height"].tolist(), images.headers.problems, labels
        ([30, 0], {1: '[Errno 2] No such file or directory'}, tensor([3, 4]))
    """
    return MemberCollate(are_encoded, _pack, refuse)(samples, flatten)


def _pack(images: Sequence[Any], path: str) -> Encoded | Rows:
    """Pack the images or clips of one member, and the rows of a feature cache for images that are not read.

    Args:
        images: (B,) values of the member, one per sample.
        path: Path of the member within a sample, for error messages.

    Raises:
        ArgumentTypeError: If a value is not an encoded image or clip.
    """
    if images and type(images[0]) is Clip:
        return pack_clips(images, path)
    if images and all(type(image) is CachedFile for image in images):
        return _pack_rows(images, lambda files: _pack_files(files, path))
    return _pack_files(images, path)


def _pack_files(images: Sequence[Any], path: str) -> Encoded:
    """Pack the images of one member. For the arguments and errors see ``_pack``."""
    sources = [name_and_bytes(image, path, position_text(index, path)) for index, image in enumerate(images)]
    problems: dict[int, str] = {}
    lengths = []
    for index, (name, content) in enumerate(sources):
        if content is None:
            sys.audit(READ_EVENT, name)  # ``OpenedFiles`` records the path, for the error about a worker that hangs
        try:
            lengths.append(check_size(os.stat(name).st_size if content is None else len(content)))
        except (OSError, ValueError, LimitError) as error:
            lengths.append(0)
            problems[index] = file_problem(error)
    # At least one spare byte after each file: a read of one byte more than the length shows whether the file has grown.
    padded_lengths = [(length // ALIGN + 1) * ALIGN for length in lengths]
    starts = [0, *accumulate(padded_lengths)]
    data = allocate_tensor((starts.pop() + ALIGN,), torch.uint8)  # the last start is the end of the padded files
    buffer = data.numpy().data
    records = []
    zeros = bytes(ALIGN)
    for index, ((name, content), start, length, padded_length) in enumerate(
        zip(sources, starts, lengths, padded_lengths, strict=True)
    ):
        end = start + length
        problem = problems.pop(index, "")  # added again below, so that the problems are in the order of the images
        if content is not None and not problem:
            buffer[start:end] = content
        elif not problem:
            problem = _read(name, buffer[start : end + 1], length)
        # A reused buffer holds bytes of earlier files.
        buffer[end : start + padded_length] = zeros[: start + padded_length - end]
        header = Header(problem=problem) if problem else parse(buffer[start:end])
        if header.problem and not problem and begins_like_video(buffer[start:end]):
            header = Header(problem="it is a video: return gpuaug.read_clip(…) from the dataset")
        if header.problem:
            problems[index] = header.problem
        records.append((start, 0 if problem else length, *header[:-1]))  # all fields of the header but the last, ``problem``
    buffer[-ALIGN:] = zeros
    return Encoded(data, Headers(np.array(records, HEADER), [name for name, _ in sources], problems, member=path))


def _read(path: str, buffer: memoryview, length: int) -> str:
    """Read a file of ``length`` bytes into ``buffer``. Return the reason why it cannot be read, or an empty string."""
    try:
        with open_file(path) as file:
            count = file.readinto(buffer) or 0
            # A call may read fewer bytes than requested.
            while 0 < count < length and (next_count := file.readinto(buffer[count:])):
                count += next_count
    except (OSError, ValueError, LimitError) as error:
        return file_problem(error)
    return "" if count == length else "its size has changed while it was read"


def _pack_rows(files: Sequence[CachedFile], pack_files: Callable[[Sequence[CachedFile]], Encoded]) -> Rows:
    """Pack the rows of a batch. If a row is missing, pack all files, too.

    Stages run on whole batches, because a sample's random numbers depend on its index in the batch, and any sample may replace
    a sample whose file cannot be decoded.

    Args:
        files: (B,) images of one member.
        pack_files: Function that packs images.

    Raises:
        ArgumentError: If the rows differ in their columns, in the dtype or number of axes of a column, or in the shape of a
            column that has one shape per batch; if images are in lists of different lengths.
    """
    if len({file.number for file in files}) > 1:  # without ``flatten``, a member has the images of one index in the samples
        raise ArgumentError(
            "flatten must be None for a data set with a feature cache, which has one row per sample, got lists with "
            f"{len(files)} images in all. Leave out flatten=, or pass the data set without cache.wrap."
        )
    is_missing = [file.row is None for file in files]
    rows = [file.row for file in files if file.row is not None]
    descriptions = dict.fromkeys(", ".join(_column_text(*column) for column in sorted(row.items())) for row in rows)
    if len(descriptions) > 1:
        raise ArgumentError(
            f"The rows of a batch must have the same columns, dtypes and shapes, got {' and '.join(descriptions)}. "
            "Batch images of one size together, with a batch sampler that has a bucket per size."
        )
    columns = {}
    shapes = {}
    for name, part in rows[0].items() if rows else ():  # ``part``: the first row's tensor of the column
        substitute = part.new_empty((0,) * part.dim()) if has_varying_shape(name) else part  # for a missing row
        parts = [substitute if file.row is None else file.row[name] for file in files]
        if has_varying_shape(name):
            shapes[name] = np.array([row_part.shape for row_part in parts], np.int64).reshape(len(files), -1)
            out = allocate_tensor((int(shapes[name].prod(1).sum()),), part.dtype)
            columns[name] = torch.cat([row_part.reshape(-1) for row_part in parts], out=out)
        else:
            columns[name] = torch.stack(parts, out=allocate_tensor((len(files), *part.shape), part.dtype))
    encoded = pack_files(files) if any(is_missing) else None
    files_to_record = [] if encoded is None else files
    ids = np.array([file.row_id for file in files_to_record], np.int64)
    names = [file.name for file in files_to_record]
    inputs = [file.inputs for file in files_to_record]
    return Rows(encoded, columns, RowHeaders(np.array(is_missing), ids, names, inputs, shapes))


def _column_text(name: str, part: Tensor) -> str:
    """Return text that must be equal in all rows of a batch: name, dtype, and shape, or the number of axes if it may vary."""
    shape = f"of {part.dim()} axes" if has_varying_shape(name) else tuple(part.shape)
    return f"{name} {part.dtype} {shape}"
