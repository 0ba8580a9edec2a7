"""Folders of image files for the suite ``files``, made from scikit-image's photographs.

small    1024 baseline JPEGs of 400 to 600 by 330 to 500 pixels, 4:2:0, quality 92: ImageNet's mean size
camera   96 baseline JPEGs of about 4000 by 3000 pixels, 4:2:0, quality 90, with noise, for files as large as a camera's
mix      like small, but every twentieth file is a progressive JPEG, a PNG or a JPEG in CMYK

There is a folder per photograph, as ``torchvision.datasets.ImageFolder`` reads them, in the cache folder of ``gpuaug bench``.
The files are the same on all machines.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from gpuaug.benchkit.environment import allowed_cores
from gpuaug.benchkit.photos import PHOTOGRAPHS, cached_folder, class_folders

# Version of the files. Raise it when the files change, so that an older cache is not used.
VERSION = 1

COUNTS = {"small": 1024, "camera": 96, "mix": 1024}
"""Number of files in each corpus."""

_TEXTURES = ("grass.png", "gravel.png")  # excluded: files of these detailed textures are twice as large as others
_CROP = (0.6, 1.0)  # side of a crop over the side of the photograph
_SMALL_PX, _CAMERA_PX = ((400, 600), (330, 500)), ((3800, 4200), (2850, 3150))  # widths, heights
_NOISE = 5.0  # standard deviation of a camera's noise, of 255
_RARE_FORMATS = ("progressive", "png", "cmyk")  # formats in mix that are not baseline JPEG, in turn
_RARE_INTERVAL = 20
_MAX_FILES_READ = 4096
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Corpus(NamedTuple):
    """A folder of class folders, and statistics of its files."""

    root: Path
    count: int
    mean_bytes: float
    largest_px: tuple[int, int]
    """Largest width and largest height of the files."""

    facts: dict[str, Any]
    """Description of the files for a result: quantiles of sides and bytes, and a hash of all files if all were read."""


def make(name: str, *, count: int | None = None) -> Path:
    """Return the folder of a corpus, which the first call writes.

    Args:
        name: Key of ``COUNTS``.
        count: Number of files. Default: the number in ``COUNTS``.

    Raises:
        FileNotFoundError: If the installed scikit-image has none of the photographs.
    """
    count = COUNTS[name] if count is None else count
    return cached_folder(f"encoded-{name}-{count}-{VERSION}", partial(_write, name, count))


def corpus(root: Path) -> Corpus:
    """Return statistics of a folder of class folders. If it has more than 4096 files, an evenly spaced subset is read.

    Reading brings the files into the page cache.

    Raises:
        ArgumentError: If ``root`` is not a folder of class folders.
    """
    paths = [path for path, _ in class_folders(root, None).samples]
    read_paths = paths[:: -(-len(paths) // _MAX_FILES_READ)]
    sizes = []
    file_bytes = []
    digest = hashlib.sha256()
    for path in read_paths:
        file = Path(path).read_bytes()
        digest.update(f"{Path(path).relative_to(root).as_posix()} {len(file)} ".encode() + file)
        file_bytes.append(len(file))
        with Image.open(BytesIO(file)) as opened:
            sizes.append(opened.size)
    widths, heights = zip(*sizes, strict=True)
    mean_bytes = sum(file_bytes) / len(read_paths)
    facts = {"count": len(paths), "mean_bytes": round(mean_bytes)}
    facts |= {"side_px": _quantiles([*widths, *heights]), "file_bytes": _quantiles(file_bytes)}
    if read_paths == paths:
        facts["sha256"] = digest.hexdigest()
    return Corpus(root, len(paths), mean_bytes, (max(widths), max(heights)), facts)


def _quantiles(values: Sequence[int]) -> dict[str, int]:
    return {f"p{percent:02}": round(np.percentile(values, percent)) for percent in _PERCENTILES}


def _write(name: str, count: int, root: Path) -> None:
    folder = resources.files("skimage").joinpath("data")
    photographs = []
    for file in PHOTOGRAPHS:
        if folder.joinpath(file).is_file() and file not in _TEXTURES:
            with folder.joinpath(file).open("rb") as opened:
                photographs.append((Path(file).stem, Image.open(opened).convert("RGB")))
    if not photographs:
        raise FileNotFoundError(
            f"There are no photographs to read, because scikit-image has none in {folder}. "
            "Install it from a wheel, or pass a folder of your own with --data."
        )
    for label, _ in photographs[:count]:
        (root / label).mkdir()

    def write(index: int) -> None:
        label, photograph = photographs[index % len(photographs)]
        _save(name, index, _image(name, index, photograph), root / label / f"{index:05}")

    # Pillow and NumPy release the GIL while they resize, draw noise and encode.
    with ThreadPoolExecutor(allowed_cores()) as pool:
        list(pool.map(write, range(count)))


def _image(name: str, index: int, photograph: Image.Image) -> Image.Image:
    # mix has the images of small, so that their results differ only by the formats.
    generator = Random(f"{'small' if name == 'mix' else name} {index}")
    width, height = (round(side * generator.uniform(*_CROP)) for side in photograph.size)
    left, top = generator.randint(0, photograph.width - width), generator.randint(0, photograph.height - height)
    size = tuple(generator.randint(*sides) for sides in (_CAMERA_PX if name == "camera" else _SMALL_PX))
    image = photograph.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    if name != "camera":
        return image
    noise = np.random.default_rng(index).standard_normal((image.height, image.width, 1), np.float32) * _NOISE
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def _save(name: str, index: int, image: Image.Image, path: Path) -> None:
    quality = 90 if name == "camera" else 92
    rare_format = (
        _RARE_FORMATS[index // _RARE_INTERVAL % len(_RARE_FORMATS)] if name == "mix" and index % _RARE_INTERVAL == 0 else ""
    )
    if rare_format == "png":
        image.save(f"{path}.png", compress_level=6)
        return
    if rare_format == "cmyk":
        image = image.convert("CMYK")
    image.save(f"{path}.jpg", quality=quality, subsampling="4:2:0", progressive=rare_format == "progressive")
