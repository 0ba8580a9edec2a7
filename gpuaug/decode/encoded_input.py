"""Recognition of encoded images in samples, and access to their bytes, in a file or in memory."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from gpuaug.core.errors import ArgumentTypeError, DecodeError
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.headers import parse

_SIGNATURES = (
    b"\xff\xd8\xff",  # JPEG
    b"\x89PNG\r\n\x1a\n",
    b"GIF8",
    b"BM",
    *(b"II*\0", b"MM\0*", b"II\0*", b"MM*\0"),  # TIFF; the last two are invalid, but PIL reads them
    *(b"II+\0", b"MM\0+"),  # BigTIFF
    *(b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),  # JPEG 2000
)
_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
"""Brands of AVIF and HEIF in an ISO base media file. Bytes 4 to 7 are ``ftyp`` in videos, too, so the brand decides."""

_NETPBM = re.compile(rb"P(?:[1-6f]|0CMYK|y(?:P|RGBA|CMYK))[ \t-\r]+[0-9#]").match
"""Match PBM, PGM, PPM and related formats: magic number, then size or comment. The magic number alone may be a label."""


class EncodedFile:
    """Image file that is not read yet, as ``read_encoded`` returns it.

    Args:
        path: Path of the file.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def height(self) -> int:
        """Height in pixels of the image after rotation by its EXIF orientation.

        Raises:
            OSError: If the file does not exist or cannot be read.
            DecodeError: If the file is not an image.

        Cost:
            Reads the file. The batch reads it again, from the page cache.
        """
        return self._size()[0]

    @property
    def width(self) -> int:
        """Width in pixels of the image after rotation by its EXIF orientation. See ``height``."""
        return self._size()[1]

    def _size(self) -> list[int]:
        with open(self.path, "rb") as file:
            header = parse(file.read())
        if header.problem:
            raise DecodeError(f"{self.path} has no size, because of its header: {header.problem}. Leave it out of the dataset.")
        sides = [header.height, header.width]
        return sides[::-1] if header.orientation > 4 else sides  # 5 to 8 swap height and width

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"EncodedFile({self.path!r})"


def _refuse_to_flatten(file: EncodedFile) -> NoReturn:
    raise ArgumentTypeError(
        f"Transforms of a dataset must be given images, got {file}, which is not read yet: they would move boxes and not the "
        "image. Give the transforms to the loader: stages=[gpuaug.DecodeStage(), gpuaug.fuse(transform, ragged=True)]."
    )


# torchvision's v2 transforms flatten each sample with torch's pytrees, and pass unknown types through without an error.
register_pytree_node(
    EncodedFile,
    _refuse_to_flatten,
    lambda _values, _context: EncodedFile(""),
    serialized_type_name="gpuaug.EncodedFile",
)


def read_encoded(path: str | os.PathLike[str]) -> EncodedFile:
    """Return a file that ``collate_encoded`` reads directly into the batch: ``ImageFolder(root, loader=gpuaug.read_encoded)``.

    Args:
        path: Path of an image file. A missing file is reported when the batch is collated.

    Returns:
        Object with the attributes ``path``, ``height`` and ``width``; the last two read the file. It has no pixels, so
        transforms cannot run in the dataset: torchvision's v2 transforms raise ``ArgumentTypeError``. Pass transforms to the
        loader as stages.

    Raises:
        ArgumentTypeError: If ``path`` is neither a str nor a path of ``pathlib``.

    Cost:
        No access to the file.

    Examples:
        >>> read_encoded("photos/cat.jpg").path
        'photos/cat.jpg'
    """
    _tell_torchvision_of_sizes()
    try:
        return EncodedFile(os.fsdecode(path))
    except TypeError as error:
        raise ArgumentTypeError(
            f"The path of an image must be a str or a path of pathlib, got {type(path).__name__}. "
            "Return the bytes of a file as they are."
        ) from error


def _tell_torchvision_of_sizes() -> None:
    """Register ``EncodedFile`` for torchvision's ``get_size``, which ``wrap_dataset_for_transforms_v2`` calls for boxes.

    torchvision has no public function to register a type. Without its private registry, the wrapper raises ``TypeError``.
    """
    functional = sys.modules.get("torchvision.transforms.v2.functional")
    kernels = getattr(getattr(functional, "_utils", None), "_KERNEL_REGISTRY", {}).get(getattr(functional, "get_size", None))
    if kernels is not None:
        kernels.setdefault(EncodedFile, EncodedFile._size)


def are_encoded(members: Sequence[Any], path: str) -> bool:
    """Return whether a member of the batch holds encoded images or clips.

    The type of the first value decides. Bytes may also be labels: they are images if any sample begins with an image signature.
    Samples that are bytes or text themselves (``path`` is empty) are images, or paths of images.

    Args:
        members: Value of the member per sample.
        path: Path of the member within a sample.
    """
    first = members[0]
    if type(first) is Clip:
        return True
    if not path:
        return isinstance(first, str) or _is_encoded(first)
    if _is_bytes(first):
        return any(_is_bytes(value) and _begins_like_image(_view(value)) for value in members)
    return _is_encoded(first)


def named(value: Any, path: str, where: str) -> tuple[str, memoryview | None]:
    """Return (name, bytes) of an encoded image in memory, where the name may be empty, or (path, ``None``) of a file.

    Raises:
        ArgumentTypeError: If ``value`` is not an encoded image.
    """
    if type(value) is EncodedFile:
        return value.path, None
    if _is_bytes(value):
        return "", _view(value)
    if _is_row(value):
        name = value["path"] or ""
        content = value["bytes"]
        if content is None and name:
            return name, None
        return name, _view(b"" if content is None else content)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not path):
        return os.fsdecode(value), None
    refuse(value, where)


def refuse(value: Any, where: str) -> NoReturn:
    """Raise the error for a ``value`` that must be an encoded image, but is not.

    Raises:
        ArgumentTypeError: Always.
    """
    type_name = type(value).__name__
    if _is_bytes(value):
        type_name = f"{type_name} that begin with {bytes(_view(value)[:8])!r}"
        advice = "Return the bytes of the file as they are."
    elif isinstance(value, str):
        advice = "Return gpuaug.read_encoded(path) from the dataset."
    elif getattr(value, "ndim", 0) >= 2 or hasattr(value, "getbands"):
        advice = "For decoded images use gpuaug.collate_ragged."
    else:
        advice = "An ImageFolder gives them with loader=gpuaug.read_encoded."
    raise ArgumentTypeError(
        "Encoded images must be gpuaug.read_encoded(path), a path of pathlib, the bytes of a file or a dict of 'bytes' and "
        f"'path', got {type_name} in {where}. {advice}"
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
    """Return whether ``value`` is an undecoded image of Hugging Face's ``datasets``."""
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
    return (
        start.startswith(_SIGNATURES)
        or (start[:4] == b"RIFF" and start[8:] == b"WEBP")
        or (start[:1] == b"P" and _NETPBM(bytes(data[:64])) is not None)
    )
