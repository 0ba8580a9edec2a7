"""What counts as an encoded image in a sample, and where its bytes are: in a file, or in memory."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentTypeError

_SIGNATURES = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF8",
    b"BM",
    *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF and BigTIFF
    *(b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),  # JPEG 2000
)
_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix")
"""Of AVIF and HEIF, in ISO's container of media: its fourth to seventh byte are those of a video too."""


class EncodedFile:
    """The file of an encoded image, which is not read yet. Made by ``read_encoded``.

    Args:
        path: Where it is.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"EncodedFile({self.path!r})"


def read_encoded(path: str | os.PathLike[str]) -> EncodedFile:
    """Have a file read by ``collate_encoded``, straight into the batch: ``ImageFolder(root, loader=gpuaug.read_encoded)``.

    Args:
        path: Of an image file. Whether it is there is seen when the batch is made.

    Returns:
        An object that has the path as its ``path``. It holds no pixels, so a dataset's transforms come after decoding: on the
        device.

    Raises:
        ArgumentTypeError: If ``path`` is no path.

    Cost:
        No access to the file.

    Examples:
        >>> read_encoded("photos/cat.jpg").path
        'photos/cat.jpg'
    """
    try:
        return EncodedFile(os.fsdecode(path))
    except TypeError as error:
        raise ArgumentTypeError(
            f"The path of an image must be a str or a path of pathlib, got {type(path).__name__}. "
            "Return the bytes of a file as they are."
        ) from error


def are_encoded(members: Sequence[Any], path: str) -> bool:
    """Whether a member, given as one value for each sample, is an encoded image. The first says, and of bytes any.

    Bytes are one if any of them begin as image files do, because labels may be bytes too. If the samples themselves are bytes
    or text (``path`` is empty), they are images, and the paths of images.
    """
    first = members[0]
    if not path:
        return isinstance(first, str) or _is_encoded(first)
    if _is_bytes(first):
        return any(_is_bytes(value) and _begins_like_image(_view(value)) for value in members)
    return _is_encoded(first)


def named(value: Any, path: str, where: str) -> tuple[str, memoryview | None]:
    """The name of an encoded image, which may be empty, and its bytes; or its path, and ``None`` for a file that is to be read.

    Raises:
        ArgumentTypeError: If ``value`` is no encoded image.
    """
    if type(value) is EncodedFile:
        return value.path, None
    if _is_bytes(value):
        return "", _view(value)
    if _is_row(value):
        name, held = value["path"] or "", value["bytes"]
        if held is None and name:
            return name, None
        return name, _view(b"" if held is None else held)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not path):
        return os.fsdecode(value), None
    refuse(value, where)


def refuse(value: Any, where: str) -> NoReturn:
    """Say why ``value``, which stands where an encoded image is expected, is none.

    Raises:
        ArgumentTypeError: In any case.
    """
    kind = type(value).__name__
    if _is_bytes(value):
        kind, way_out = f"{kind} that begin with {bytes(_view(value)[:8])!r}", "Return the bytes of the file as they are."
    elif isinstance(value, str):
        way_out = "Return gpuaug.read_encoded(path) from the dataset."
    elif getattr(value, "ndim", 0) >= 2 or hasattr(value, "getbands"):
        way_out = "What is decoded already is for gpuaug.collate_ragged."
    else:
        way_out = "An ImageFolder gives them with loader=gpuaug.read_encoded."
    raise ArgumentTypeError(
        "Encoded images must be gpuaug.read_encoded(path), a path of pathlib, the bytes of a file or a dict of 'bytes' and "
        f"'path', got {kind} in {where}. {way_out}"
    )


def _is_encoded(value: Any) -> bool:
    return isinstance(value, os.PathLike) or _is_bytes(value) or _is_row(value)


def _is_bytes(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        return True
    if isinstance(value, Tensor):
        return value.dtype is torch.uint8 and value.ndim == 1 and value.is_cpu
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1


def _is_row(value: Any) -> bool:
    """Whether it is what Hugging Face's datasets give for an image that is not decoded."""
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return False
    return (value["bytes"] is None or _is_bytes(value["bytes"])) and isinstance(value["path"], str | None)


def _view(value: Any) -> memoryview:
    view = memoryview(value.numpy() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else memoryview(view.tobytes())


def _begins_like_image(data: memoryview) -> bool:
    start = bytes(data[:12])
    if start[4:8] == b"ftyp":
        return start[8:] in _BRANDS
    return start.startswith(_SIGNATURES) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")
