"""Which values in a sample are encoded images, and where their bytes are: in a file, or in memory."""

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
    *(b"II*\0", b"MM\0*", b"II\0*", b"MM*\0"),  # TIFF; two are mistakes of writers, which PIL reads
    *(b"II+\0", b"MM\0+"),  # BigTIFF
    *(b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),  # JPEG 2000
)
_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
"""Brands of AVIF and HEIF in an ISO base media file. Bytes 4 to 7, ``ftyp``, are those of a video too."""

_NETPBM = re.compile(rb"P(?:[1-6f]|0CMYK|y(?:P|RGBA|CMYK))[ \t-\r]+[0-9#]").match
"""PBM, PGM, PPM and their like, by a magic number with a size or a comment behind it: a label may be the number alone."""


class EncodedFile:
    """An image file that is not read yet. Made by ``read_encoded``.

    Args:
        path: The file's path.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def height(self) -> int:
        """Height in pixels, of the image turned upright.

        Raises:
            OSError: If there is no such file.
            DecodeError: If it is no image.

        Cost:
            Reads the file. The batch reads it again, from the page cache.
        """
        return self._size()[0]

    @property
    def width(self) -> int:
        """Width in pixels, as ``height``."""
        return self._size()[1]

    def _size(self) -> list[int]:
        with open(self.path, "rb") as file:
            header = parse(file.read())
        if header.problem:
            raise DecodeError(f"{self.path} has no size, because of its header: {header.problem}. Leave it out of the dataset.")
        sides = [header.height, header.width]
        return sides[::-1] if header.orientation > 4 else sides  # 5 to 8 turn it by a quarter

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"EncodedFile({self.path!r})"


def _refuse_to_flatten(file: EncodedFile) -> NoReturn:
    raise ArgumentTypeError(
        f"Transforms of a dataset must be given images, got {file}, which is not read yet: they would move boxes and not the "
        "image. Give the transforms to the loader: stages=[gpuaug.DecodeStage(), gpuaug.fuse(transform, ragged=True)]."
    )


# torchvision's v2 transforms pass on what they do not know. They flatten each sample with torch's pytrees.
register_pytree_node(
    EncodedFile,
    _refuse_to_flatten,
    lambda _values, _context: EncodedFile(""),
    serialized_type_name="gpuaug.EncodedFile",
)


def read_encoded(path: str | os.PathLike[str]) -> EncodedFile:
    """Name a file that ``collate_encoded`` reads straight into the batch: ``ImageFolder(root, loader=gpuaug.read_encoded)``.

    Args:
        path: Path of an image file. A missing file is found when the batch is made.

    Returns:
        An object with the path as ``path``, and ``height`` and ``width``, which read the file. It holds no
        pixels, so transforms of the dataset cannot run on it:
        torchvision's v2 transforms raise ``ArgumentTypeError``. Give transforms to the loader as stages.

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
    """Have torchvision's ``get_size`` take files: ``wrap_dataset_for_transforms_v2`` calls it for the canvas of boxes.

    torchvision has no public function for that. Without the private one, the wrapper raises its own ``TypeError``.
    """
    functional = sys.modules.get("torchvision.transforms.v2.functional")
    kernels = getattr(getattr(functional, "_utils", None), "_KERNEL_REGISTRY", {}).get(getattr(functional, "get_size", None))
    if kernels is not None:
        kernels.setdefault(EncodedFile, EncodedFile._size)


def are_encoded(members: Sequence[Any], path: str) -> bool:
    """Whether a member of the batch holds encoded images or clips.

    Its first value decides. Bytes may also be labels: they are images if they begin with an image signature in any sample.
    Samples that are bytes or text themselves (``path`` is empty) are images, or paths of images.

    Args:
        members: The member's value in each sample.
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
    """(name, bytes) of an encoded image in memory, with a name that may be empty; (path, ``None``) of a file to read.

    Raises:
        ArgumentTypeError: If ``value`` is no encoded image.
    """
    if type(value) is EncodedFile:
        return value.path, None
    if _is_bytes(value):
        return "", _view(value)
    if _is_row(value):
        name = value["path"] or ""
        held = value["bytes"]
        if held is None and name:
            return name, None
        return name, _view(b"" if held is None else held)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not path):
        return os.fsdecode(value), None
    refuse(value, where)


def refuse(value: Any, where: str) -> NoReturn:
    """Raise the error for a ``value`` that is no encoded image where one is expected.

    Raises:
        ArgumentTypeError: Always.
    """
    kind = type(value).__name__
    if _is_bytes(value):
        kind = f"{kind} that begin with {bytes(_view(value)[:8])!r}"
        way_out = "Return the bytes of the file as they are."
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
    """Whether ``value`` is an undecoded image of Hugging Face's datasets."""
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
