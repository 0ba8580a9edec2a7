"""Photographs for benchmarks without a download: crops of the photographs in scikit-image's wheel, stored as JPEGs."""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from gpuaug import ArgumentError

VERSION = 1
"""Version of the files. Increase the version when the files change, so that an older cache is not used."""

CROPS_PER_PHOTOGRAPH = 32
"""Number of files that are written for each photograph."""

_SIDE_PX = (300, 500)
"""Smallest and largest side of a crop."""

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
"""Files of scikit-image. Each photograph is a class.

Drawings, masks and charts are left out, because they compress differently from photographs.
"""


def class_folders(root: str | os.PathLike[str], transform: Any) -> Any:
    """Return the images under ``root`` as a ``torchvision.datasets.ImageFolder``.

    Args:
        root: A folder of class folders.
        transform: Transform of a decoded image.

    Raises:
        ArgumentError: If ``root`` is not a folder of class folders with images.
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
            "Arrange the images as <data>/<class>/<image>.jpg, or leave data out for the photographs of scikit-image."
        )
    return images


def photographs() -> Path:
    """Return the folder of class folders with the photographs. The first call writes the folder (see ``cached_folder``).

    Raises:
        ArgumentError: If the installed scikit-image contains none of the photographs.
    """
    return cached_folder(f"photographs-{VERSION}", _build)


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder under ``$XDG_CACHE_HOME/gpuaug``, or ``~/.cache/gpuaug``. The first call writes its files.

    Args:
        name: Name of the folder.
        build: Function that writes the files. Its argument is an empty folder.
    """
    cache = _cache_folder()
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # In the same parent folder, so that the rename is atomic and an interrupted build is never used as a dataset.
    building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(building)
        building.chmod(0o755)  # with mkdtemp's 0o700, other users could not read a shared cache
        try:
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written the same files first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _cache_folder() -> Path:
    # The XDG specification requires programs to ignore a relative path in this variable.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "gpuaug"


def _build(root: Path) -> None:
    """Write random crops of each photograph into a folder of its class. The crops are the same in every run."""
    from PIL import Image

    sources = resources.files("skimage").joinpath("data")
    names = [name for name in PHOTOGRAPHS if sources.joinpath(name).is_file()]
    if not names:
        raise ArgumentError(
            f"There are no photographs to read, because scikit-image has none in {sources}. "
            "Install scikit-image from a wheel, or pass a folder of images with --data."
        )
    for name in names:
        folder = root / Path(name).stem
        folder.mkdir()
        rng = random.Random(name)
        with sources.joinpath(name).open("rb") as file, Image.open(file) as opened:
            photograph = opened.convert("RGB")
        for index in range(CROPS_PER_PHOTOGRAPH):
            width, height = (rng.randint(_SIDE_PX[0], min(_SIDE_PX[1], side)) for side in photograph.size)
            left, top = (
                rng.randint(0, photograph.width - width),
                rng.randint(0, photograph.height - height),
            )
            crop = photograph.crop((left, top, left + width, top + height))
            crop.save(folder / f"{index:03}.jpg", quality=90)
