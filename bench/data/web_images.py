"""Image files in formats as on the web, for the suite ``files``, made from photographs of ``bench.data.photographs``.

plain    2048 baseline JPEGs, quality 90 to 97, mostly 4:2:0
web      the same images: 78 % baseline JPEGs, 15 % progressive ones, 4 % PNG, 3 % lossy WebP

Every file is another crop, downscaled to a size whose median side is 450 pixels. The draws depend only on the seed and the
index of the file, and the files are the same on all machines with the same photographs and version of Pillow. There is a folder
per photograph, as ``torchvision.datasets.ImageFolder`` reads them, in the cache folder of ``gpuaug bench``.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import PIL
from PIL import Image

from bench.data import photographs
from gpuaug.benchkit.environment import allowed_cores
from gpuaug.benchkit.photos import cached_folder

# Version of the files. Raise it when the files change, so that an older cache is not used.
VERSION = 1

COUNTS = {"plain": 2048, "web": 2048}
"""Number of files in each set."""

SEED = 1

_FORMATS = {
    "plain": {"jpeg": 1.0},
    "web": {"jpeg": 0.78, "progressive": 0.15, "png": 0.04, "webp": 0.03},
}
_SUBSAMPLING = {"4:2:0": 0.8, "4:2:2": 0.05, "4:4:4": 0.15}
_QUALITY = (90, 98, 90)  # smallest, largest + 1, most frequent
_ASPECTS = {4 / 3: 0.35, 3 / 2: 0.25, 1.0: 0.15, 3 / 4: 0.12, 2 / 3: 0.08, 16 / 9: 0.05}  # width to height
_MEDIAN_PX, _SIGMA = 450, 0.27  # of the square root of an image's area, which is log-normally distributed
_SMALLEST_PX, _LARGEST_PX = 160, 1200
_DOWNSCALE = (1.0, 1.6)  # side of the crop over the side of the image
_FACTS = "about.json"


class Plan(NamedTuple):
    """Random parameters of a file."""

    photograph: int
    box: tuple[int, int, int, int]
    """Left, top, right and bottom of the crop in the photograph, in pixels."""

    size: tuple[int, int]
    quality: int
    subsampling: str
    file_format: str


def make(name: str, *, count: int | None = None, folder: Path | None = None) -> Path:
    """Return the folder of a set, which the first call writes.

    Args:
        name: Key of ``COUNTS``.
        count: Number of files. Default: the number in ``COUNTS``.
        folder: Folder of packed photographs. Default: photographs of installed packages.

    Raises:
        FileNotFoundError: If there are no photographs.
    """
    count = COUNTS[name] if count is None else count
    sources = photographs.paths(folder)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return cached_folder(f"{name}-{count}-{VERSION}-{digest.hexdigest()[:8]}", partial(_write, name, count, sources))


def facts(root: Path) -> dict[str, Any]:
    """Return seed, numbers of photographs and crops, and version of Pillow of a folder of ``make``. Else empty."""
    path = root / _FACTS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def plans(name: str, count: int, sizes: Sequence[tuple[int, int]]) -> list[Plan]:
    """Draw the parameters of all files of a set.

    Args:
        name: Key of ``COUNTS``.
        count: Number of files.
        sizes: Width and height of each photograph.
    """
    # Formats have exactly their shares, in an order that the seed determines.
    file_formats: list[str] = []
    cumulative = 0.0
    for file_format, share in _FORMATS[name].items():
        cumulative += share * count
        file_formats += [file_format] * (round(cumulative) - len(file_formats))
    Random(SEED).shuffle(file_formats)
    return [_plan(index, file_format, sizes) for index, file_format in enumerate(file_formats)]


def _plan(index: int, file_format: str, sizes: Sequence[tuple[int, int]]) -> Plan:
    generator = Random(f"{SEED} {index}")
    root_area = min(max(_MEDIAN_PX * math.exp(generator.gauss(0, _SIGMA)), _SMALLEST_PX), _LARGEST_PX)
    aspect = generator.choices([*_ASPECTS], [*_ASPECTS.values()])[0] * generator.uniform(0.97, 1.03)
    width, height = round(root_area * aspect**0.5), round(root_area / aspect**0.5)
    # A photograph that must be enlarged is drawn only if no other is large enough.
    large = [number for number, size in enumerate(sizes) if size[0] >= width and size[1] >= height]
    photograph = generator.choice(large or range(len(sizes)))
    photograph_width, photograph_height = sizes[photograph]
    downscale = min(
        math.exp(generator.uniform(*map(math.log, _DOWNSCALE))), photograph_width / width, photograph_height / height
    )
    crop_width, crop_height = int(downscale * width), int(downscale * height)
    left, top = generator.randint(0, photograph_width - crop_width), generator.randint(0, photograph_height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    subsampling = generator.choices([*_SUBSAMPLING], [*_SUBSAMPLING.values()])[0]
    return Plan(photograph, box, (width, height), int(generator.triangular(*_QUALITY)), subsampling, file_format)


def _write(name: str, count: int, sources: Sequence[Path], root: Path) -> None:
    # Pillow releases the GIL while it decodes, resizes and encodes.
    with ThreadPoolExecutor(allowed_cores()) as pool:
        images = list(pool.map(photographs.load, sources))
        file_plans = plans(name, count, [image.size for image in images])
        for number in {plan.photograph for plan in file_plans}:
            (root / sources[number].stem).mkdir()

        def write(index: int) -> None:
            plan = file_plans[index]
            image = images[plan.photograph].resize(plan.size, Image.Resampling.LANCZOS, box=plan.box)
            _save(image, plan, root / sources[plan.photograph].stem / f"{index:05}")

        # Start with the slowest files, so that no core is idle at the end.
        list(pool.map(write, sorted(range(count), key=lambda index: file_plans[index].file_format in ("jpeg", "progressive"))))
    set_facts = {
        "seed": SEED,
        "photographs": len({plan.photograph for plan in file_plans}),
        "crops": len({(plan.photograph, plan.box) for plan in file_plans}),
        "forms": Counter(plan.file_format for plan in file_plans),
        "pillow": PIL.__version__,
    }
    (root / _FACTS).write_text(json.dumps(set_facts), encoding="utf-8")


def _save(image: Image.Image, plan: Plan, path: Path) -> None:
    if plan.file_format == "png":
        image.save(f"{path}.png", compress_level=6)
    elif plan.file_format == "webp":
        image.save(f"{path}.webp", quality=plan.quality)
    else:
        progressive = plan.file_format == "progressive"
        image.save(f"{path}.jpg", quality=plan.quality, subsampling=plan.subsampling, progressive=progressive)
