"""Folders of encoded photographs for the suite ``files``, made from scikit-image's photographs.

small    1024 baseline JPEGs of 400 to 600 by 330 to 500 pixels, 4:2:0, quality 92: ImageNet's mean size
camera   96 baseline JPEGs of about 4000 by 3000 pixels, 4:2:0, quality 90, with noise, for a camera's file size
mix      like small, but every twentieth file is a progressive JPEG, a PNG or a JPEG in CMYK

Files lie in a folder for each photograph, as ``torchvision.datasets.ImageFolder`` reads them, are the same wherever they are
made, and are kept in the cache folder of ``gpuaug bench``.
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

# Version of the files: raise it when they change, so that an older cache is not used.
VERSION = 1

COUNTS = {"small": 1024, "camera": 96, "mix": 1024}
"""Files of each corpus."""

_TEXTURES = ("grass.png", "gravel.png")  # sharp detail everywhere: twice the bytes of the others
_CROP = (0.6, 1.0)  # of a photograph's sides
_SMALL_PX, _CAMERA_PX = ((400, 600), (330, 500)), ((3800, 4200), (2850, 3150))  # widths, heights
_NOISE = 5.0  # standard deviation of a camera's noise, of 255
_OTHERS = ("progressive", "png", "cmyk")  # one of these in turn
_OTHERS_EVERY = 20
_MOST_READ = 4096
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Corpus(NamedTuple):
    """A folder of class folders, and statistics of its files."""

    root: Path
    count: int
    mean_bytes: float
    largest_px: tuple[int, int]
    """The greatest width and the greatest height."""

    facts: dict[str, Any]
    """Description of the files in a result: quantiles of sides and bytes, and a hash over all files if all were read."""


def make(name: str, *, count: int | None = None) -> Path:
    """The folder of a corpus, written on the first call.

    Args:
        name: A key of ``COUNTS``.
        count: Number of files. Left out: the number in ``COUNTS``.

    Raises:
        ArgumentError: If the installed scikit-image ships none of the photographs.
    """
    count = COUNTS[name] if count is None else count
    return cached_folder(f"encoded-{name}-{count}-{VERSION}", partial(_write, name, count))


def corpus(root: Path) -> Corpus:
    """Statistics of a folder of class folders, over all files or some thousands spread over it.

    Reads these files, which brings them into the page cache.

    Raises:
        ArgumentError: If ``root`` is not such a folder.
    """
    paths = [path for path, _ in class_folders(root, None).samples]
    some = paths[:: -(-len(paths) // _MOST_READ)]
    sizes = []
    file_bytes = []
    digest = hashlib.sha256()
    for path in some:
        file = Path(path).read_bytes()
        digest.update(f"{Path(path).relative_to(root).as_posix()} {len(file)} ".encode() + file)
        file_bytes.append(len(file))
        with Image.open(BytesIO(file)) as opened:
            sizes.append(opened.size)
    widths, heights = zip(*sizes, strict=True)
    mean_bytes = sum(file_bytes) / len(some)
    facts = {"count": len(paths), "mean_bytes": round(mean_bytes)}
    facts |= {"side_px": _quantiles([*widths, *heights]), "file_bytes": _quantiles(file_bytes)}
    if some == paths:
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
    # mix has the images of small, so that results differ by the formats only.
    draw = Random(f"{'small' if name == 'mix' else name} {index}")
    width, height = (round(side * draw.uniform(*_CROP)) for side in photograph.size)
    left, top = draw.randint(0, photograph.width - width), draw.randint(0, photograph.height - height)
    size = tuple(draw.randint(*sides) for sides in (_CAMERA_PX if name == "camera" else _SMALL_PX))
    image = photograph.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    if name != "camera":
        return image
    noise = np.random.default_rng(index).standard_normal((image.height, image.width, 1), np.float32) * _NOISE
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def _save(name: str, index: int, image: Image.Image, path: Path) -> None:
    quality = 90 if name == "camera" else 92
    other = _OTHERS[index // _OTHERS_EVERY % len(_OTHERS)] if name == "mix" and index % _OTHERS_EVERY == 0 else ""
    if other == "png":
        image.save(f"{path}.png", compress_level=6)
        return
    if other == "cmyk":
        image = image.convert("CMYK")
    image.save(f"{path}.jpg", quality=quality, subsampling="4:2:0", progressive=other == "progressive")
