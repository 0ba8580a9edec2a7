"""Real photographs without a download: crops of the photographs in scikit-image's wheel, kept as JPEGs."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from gpuaug import ArgumentError

# Version of the files: raise it when they change, so that an older cache is not used.
VERSION = 1
CROPS_PER_PHOTOGRAPH = 32
_SIDE_PX = (300, 500)

# One class each. Drawings, masks and charts in the same folder compress unlike photographs and are left out.
PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)


def class_folders(root: str | os.PathLike[str], transform: Any) -> Any:
    """The images under ``root`` as a ``torchvision.datasets.ImageFolder``.

    Args:
        root: A folder of class folders.
        transform: Called on each decoded image.

    Raises:
        ArgumentError: If ``root`` is not such a folder.
    """
    from torchvision.datasets import ImageFolder

    try:
        images = ImageFolder(os.fspath(root), transform=transform, allow_empty=True)
        reason = "" if len(images) else "no images in it"
    except OSError as error:
        reason = error.strerror or "no folders in it"
    if reason:
        raise ArgumentError(
            f"data must be a folder of class folders with images in them, got {os.fspath(root)!r} ({reason}). "
            "Arrange the images as <data>/<class>/<image>.jpg, or leave it out for the photographs of scikit-image."
        )
    return images


def photographs() -> Path:
    """The folder of class folders with the built-in photographs, written on the first call.

    It lies under ``$XDG_CACHE_HOME/gpuaug``, or ``~/.cache/gpuaug``.

    Raises:
        ArgumentError: If the installed scikit-image ships none of the photographs.
    """
    return written_once(f"photographs-{VERSION}", _build)


def written_once(name: str, build: Callable[[Path], None]) -> Path:
    """A folder of files that are made once and kept under ``$XDG_CACHE_HOME/gpuaug``, or ``~/.cache/gpuaug``.

    Args:
        name: The folder's name.
        build: Writes the files into an empty folder, its argument.
    """
    cache = _cache_folder()
    finished = cache / name
    if finished.is_dir():
        return finished
    cache.mkdir(parents=True, exist_ok=True)
    # Beside its final place, so that the rename is atomic and an interrupted build is never taken for a data set.
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(building)
        building.chmod(0o755)  # mkdtemp's 0o700 would keep a shared cache to its maker
        try:
            building.rename(finished)
        except OSError:
            if not finished.is_dir():  # else another process has finished the same files first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return finished


def _cache_folder() -> Path:
    # The XDG specification says that a relative path there is to be ignored.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "gpuaug"


def _build(root: Path) -> None:
    from PIL import Image

    sources = resources.files("skimage").joinpath("data")
    found = [name for name in PHOTOGRAPHS if sources.joinpath(name).is_file()]
    if not found:
        raise ArgumentError(
            f"There are no photographs to read, because scikit-image has none in {sources}. "
            "Install it from a wheel, or pass a folder of your own with --data."
        )
    for name in found:
        folder = root / Path(name).stem
        folder.mkdir()
        draw = random.Random(name)
        with sources.joinpath(name).open("rb") as file, Image.open(file) as opened:
            photograph = opened.convert("RGB")
        for index in range(CROPS_PER_PHOTOGRAPH):
            width, height = (draw.randint(_SIDE_PX[0], min(_SIDE_PX[1], side)) for side in photograph.size)
            left, top = draw.randint(0, photograph.width - width), draw.randint(0, photograph.height - height)
            crop = photograph.crop((left, top, left + width, top + height))
            crop.save(folder / f"{index:03}.jpg", quality=90)
