"""Recognition of encoded images in samples.

A *member* is an entry of a batch, collated from the values at one path in all samples. A *row* is the cached result of the
stages for one sample.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gpuaug.core.encoded import Row, RowId, Undecoded, refuse_transforms
from gpuaug.core.errors import ArgumentTypeError, DecodeError
from gpuaug.decode.clips.read_clip import Clip
from gpuaug.decode.file_bytes import bytes_view, check_size, is_bytes, open_file
from gpuaug.decode.formats.header import Header
from gpuaug.decode.headers import format_of, parse
from gpuaug.decode.limits import MAX_FILE_BYTES, LimitError

_match_video = re.compile(
    rb"....(ftyp|moov|mdat|wide)|\x1a\x45\xdf\xa3|FLV\x01|OggS|\x30\x26\xb2\x75|\0\0\1[\xba\xb3]|RIFF....AVI |G.{187}G.{187}G",
    re.DOTALL,
).match
"""Match the first bytes of a video: MP4 and QuickTime, Matroska, FLV, Ogg, ASF, MPEG, AVI, and a transport stream."""


_TRANSFORMS_TO_LOADER = "Pass the transforms to the loader: stages=[gpuaug.DecodeStage(), gpuaug.fuse(transform, ragged=True)]."


class _UnreadType(type):
    """Metaclass whose ``repr`` gives advice in errors of libraries: "img should be PIL Image. Got <class …>"."""

    def __repr__(cls) -> str:
        return f"{super().__repr__()}, a file that is not read yet. {_TRANSFORMS_TO_LOADER}"


class EncodedFile(Undecoded, metaclass=_UnreadType):
    """Image file that is read when its batch is collated. Returned by ``read_encoded``.

    Args:
        path: Path of the file.
    """

    __slots__ = ("path",)
    _way_out = _TRANSFORMS_TO_LOADER

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def height(self) -> int:
        """Height in pixels of the image after rotation by its EXIF orientation.

        Raises:
            OSError: If the file does not exist or cannot be read.
            DecodeError: If the file is not an image.

        Cost:
            Reads the file. The collate function reads it again, from the page cache.
        """
        return self._size()[0]

    @property
    def width(self) -> int:
        """Width in pixels of the image after rotation by its EXIF orientation. See ``height``."""
        return self._size()[1]

    def _size(self) -> list[int]:
        """Return [height, width] of the image after rotation by its EXIF orientation."""
        try:
            with open_file(self.path) as file:
                header = parse(file.read(check_size(os.fstat(file.fileno()).st_size)))
        except LimitError as error:
            header = Header(problem=str(error))
        if header.problem:
            raise DecodeError(
                f"The size of {self.path} cannot be read, because of its header: {header.problem}. Leave it out of the dataset."
            )
        sides = [header.height, header.width]
        return sides[::-1] if header.orientation > 4 else sides  # 5 to 8 swap height and width

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise the error for a function of arrays in the dataset.

        Raises:
            ArgumentTypeError: Always. NumPy would otherwise make an array that holds the object.
        """
        raise ArgumentTypeError(f"Arrays must be made of images, got {self}, which is not read yet. {_TRANSFORMS_TO_LOADER}")

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"EncodedFile({self.path!r})"


class CachedFile(EncodedFile):
    """Image in a sample of ``FeatureCache.wrap``. It is read only if the feature cache has no row of the sample.

    Args:
        path: Path of the file; an empty string if it is not known.
        content: Bytes of the file; ``None`` for a file that is not read yet.
    """

    __slots__ = ("content", "inputs", "name", "number", "row", "row_id")

    row_id: RowId
    """Identity of the sample."""
    name: str
    """Name of the sample."""
    inputs: Mapping[str, int]
    """Name → hash of the entries of the sample (``cache/inputs.py``); empty if the sample has a row."""
    number: int
    """Index of the image in the sample."""
    row: Row | None
    """Row of the sample; ``None`` if it is missing. If a sample has several images, only the first image holds the row."""

    def __init__(self, path: str, content: memoryview | None) -> None:
        super().__init__(path)
        self.content = content
        self.inputs = {}
        self.row = None


refuse_transforms(EncodedFile)
refuse_transforms(CachedFile)


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
    _register_size_with_torchvision()
    if not isinstance(path, str | os.PathLike):  # bytes are the content of a file, not its path
        raise ArgumentTypeError(
            f"The path of an image must be a str or a path of pathlib, got {type(path).__name__}. "
            "If the dataset has the bytes of the file, return them instead of calling read_encoded."
        )
    return EncodedFile(os.fsdecode(path))


def _register_size_with_torchvision() -> None:
    """Register ``EncodedFile`` for torchvision's ``get_size``, which ``wrap_dataset_for_transforms_v2`` calls for boxes.

    torchvision has no public function to register a type. If a type is not in its private ``_KERNEL_REGISTRY`` (tried with
    torchvision 0.23 and 0.29), the wrapper raises ``TypeError``.
    """
    functional = sys.modules.get("torchvision.transforms.v2.functional")
    kernels = getattr(getattr(functional, "_utils", None), "_KERNEL_REGISTRY", {}).get(getattr(functional, "get_size", None))
    if kernels is not None:
        kernels.setdefault(EncodedFile, EncodedFile._size)


def are_encoded(members: Sequence[Any], member_path: str) -> bool:
    """Return whether a member of the batch holds encoded images or clips.

    The type of the first value decides. Bytes may also be labels: bytes are images if any value begins like an image file.
    With an empty ``member_path``, bytes are images, and text is the path of an image file.

    Args:
        members: (B,) values of the member, one per sample.
        member_path: Path of the member within a sample; empty if the samples themselves are the values.
    """
    first = members[0]
    if type(first) is Clip:
        return True
    if not member_path:
        return isinstance(first, str) or _is_encoded(first)
    if is_bytes(first):
        return any(is_bytes(value) and format_of(bytes_view(value)) is not None for value in members)
    return _is_encoded(first)


def name_and_bytes(value: Any, member_path: str, position: str) -> tuple[str, memoryview | None]:
    """Return (name or empty string, bytes) of an encoded image in memory, or (path of the file, ``None``) of a file.

    Args:
        value: Value of a member in one sample.
        member_path: Path of the member within the sample; empty if ``value`` is the sample itself.
        position: Position of the value, for the error message.

    Raises:
        ArgumentTypeError: If ``value`` is not an encoded image.
    """
    if type(value) is CachedFile:
        return value.path, value.content
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not member_path):
        return os.fsdecode(value), None
    if is_bytes(value):
        return "", bytes_view(value)
    if _is_hugging_face_image(value):
        name = value["path"] or ""
        content = value["bytes"]
        if content is None and name:
            return name, None
        return name, bytes_view(b"" if content is None else content)
    if _is_pil_file(value) and not _change_of(value):
        position_in_file = value.fp.tell()
        value.fp.seek(0)
        content = value.fp.read(MAX_FILE_BYTES + 1)
        value.fp.seek(position_in_file)  # the position at which PIL continues to read
        return os.fsdecode(getattr(value, "filename", "")), bytes_view(content)
    refuse(value, position)


def refuse(value: Any, position: str) -> NoReturn:
    """Raise the error for a ``value`` that must be an encoded image, but is not.

    Raises:
        ArgumentTypeError: Always.
    """
    type_name = type(value).__name__
    if is_bytes(value):
        data = bytes_view(value)
        type_name = f"{type_name} that begin with {bytes(data[:8])!r}"
        video_advice = "Return gpuaug.read_clip(…) with the bytes of the video."
        advice = video_advice if begins_like_video(data) else "Return the bytes of an image file."
    elif isinstance(value, str):
        advice = "Return gpuaug.read_encoded(path) from the dataset."
    elif _is_pil_file(value):
        type_name = f"{type_name} {_change_of(value)}"
        advice = "Return PIL.Image.open(path) unchanged from the dataset, or for decoded images use gpuaug.collate_ragged."
    elif getattr(value, "ndim", 0) >= 2 or hasattr(value, "getbands"):
        advice = "For decoded images use gpuaug.collate_ragged."
    else:
        advice = "An ImageFolder returns such images with loader=gpuaug.read_encoded."
    raise ArgumentTypeError(
        "Encoded images must be gpuaug.read_encoded(path), a path of pathlib, PIL.Image.open(path), the bytes of a file or "
        f"a dict of 'bytes' and 'path', got {type_name} in {position}. {advice}"
    )


def _is_encoded(value: Any) -> bool:
    """Return whether ``value`` is a path, bytes, a file opened by PIL, or an undecoded image of Hugging Face's ``datasets``."""
    return isinstance(value, os.PathLike) or _is_pil_file(value) or is_bytes(value) or _is_hugging_face_image(value)


def _is_hugging_face_image(value: Any) -> bool:
    """Return whether ``value`` is an undecoded image of Hugging Face's ``datasets``."""
    if not isinstance(value, Mapping) or value.keys() != {"bytes", "path"}:
        return False
    return (value["bytes"] is None or is_bytes(value["bytes"])) and isinstance(value["path"], str | None)


def _is_pil_file(value: Any) -> bool:
    """Return whether PIL has opened ``value`` from a file."""
    module: Any = sys.modules.get("PIL.ImageFile")
    return module is not None and isinstance(value, module.ImageFile)


def _change_of(image: Any) -> str:
    """Return the difference of an image from an unchanged result of ``PIL.Image.open``, as text; empty without a difference."""
    attributes = vars(image)
    has_pixels = attributes.get("_im", attributes.get("im")) is not None  # ``_im`` since Pillow 11, ``im`` before
    if has_pixels or image.fp is None or getattr(image.fp, "closed", False):
        return "that is decoded or closed"
    if image.tell():
        return "on another page"
    return "after draft()" if image.decoderconfig else ""


def begins_like_video(data: memoryview) -> bool:
    """Return whether a video file may begin with these bytes."""
    # ``_match_video`` reads at most 377 bytes: three start bytes of the packets of a transport stream, 188 bytes apart.
    return _match_video(bytes(data[:377])) is not None and format_of(data) is None  # AVIF and HEIF images also have ``ftyp``
