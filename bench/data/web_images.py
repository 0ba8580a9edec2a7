"""Files as the web has them, for the suite ``files``, made from photographs of ``bench.data.photographs``.

plain    2048 baseline JPEGs, quality 90 to 97, mostly 4:2:0
web      the same images: 78 % baseline JPEGs, 15 % progressive ones, 4 % PNG, 3 % lossy WebP

Every file is a crop of its own, made smaller to a size whose median side is 450 pixels. The draws depend on the seed and the
file's number alone, and files are the same wherever the photographs and Pillow's version are. Files lie in a folder for each
photograph, as ``torchvision.datasets.ImageFolder`` reads them, and are kept in the cache folder of ``gpuaug bench``.
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

# Version of the files: raise it when they change, so that an older cache is not used.
VERSION = 1

COUNTS = {"plain": 2048, "web": 2048}
"""Files of each set."""

SEED = 1

_FORMS = {
    "plain": {"jpeg": 1.0},
    "web": {"jpeg": 0.78, "progressive": 0.15, "png": 0.04, "webp": 0.03},
}
_SUBSAMPLING = {"4:2:0": 0.8, "4:2:2": 0.05, "4:4:4": 0.15}
_QUALITY = (90, 98, 90)  # least, above the largest, most frequent
_ASPECTS = {4 / 3: 0.35, 3 / 2: 0.25, 1.0: 0.15, 3 / 4: 0.12, 2 / 3: 0.08, 16 / 9: 0.05}  # width to height
_MEDIAN_PX, _SPREAD = 450, 0.27  # of the square root of the area, which is log-normal
_LEAST_PX, _LARGEST_PX = 160, 1200
_SHRUNK = (1.0, 1.6)  # from a crop's side to an image's
_ABOUT = "about.json"


class Plan(NamedTuple):
    """The draws of one file."""

    photograph: int
    box: tuple[int, int, int, int]
    """Left, top, right, bottom in the photograph."""

    size: tuple[int, int]
    quality: int
    subsampling: str
    form: str


def make(name: str, *, count: int | None = None, folder: Path | None = None) -> Path:
    """The folder of a set, written on the first call.

    Args:
        name: A key of ``COUNTS``.
        count: Number of files. Left out: the number in ``COUNTS``.
        folder: A folder of packed photographs. Left out: the photographs of installed packages.

    Raises:
        FileNotFoundError: If there are no photographs.
    """
    count = COUNTS[name] if count is None else count
    sources = photographs.paths(folder)
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return cached_folder(f"{name}-{count}-{VERSION}-{digest.hexdigest()[:8]}", partial(_write, name, count, sources))


def about(root: Path) -> dict[str, Any]:
    """Seed, numbers of photographs and crops, and Pillow's version of a folder from ``make``; nothing of another folder."""
    path = root / _ABOUT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def plans(name: str, count: int, sizes: Sequence[tuple[int, int]]) -> list[Plan]:
    """The draws of all files of a set.

    Args:
        name: A key of ``COUNTS``.
        count: Number of files.
        sizes: Width and height of each photograph.
    """
    # Shares are exact, and spread over the files by the seed.
    forms: list[str] = []
    reached = 0.0
    for form, share in _FORMS[name].items():
        reached += share * count
        forms += [form] * (round(reached) - len(forms))
    Random(SEED).shuffle(forms)
    return [_plan(index, form, sizes) for index, form in enumerate(forms)]


def _plan(index: int, form: str, sizes: Sequence[tuple[int, int]]) -> Plan:
    draw = Random(f"{SEED} {index}")
    root_area = min(max(_MEDIAN_PX * math.exp(draw.gauss(0, _SPREAD)), _LEAST_PX), _LARGEST_PX)
    aspect = draw.choices([*_ASPECTS], [*_ASPECTS.values()])[0] * draw.uniform(0.97, 1.03)
    width, height = round(root_area * aspect**0.5), round(root_area / aspect**0.5)
    # Photographs that must be enlarged are the last resort.
    large = [number for number, size in enumerate(sizes) if size[0] >= width and size[1] >= height]
    photograph = draw.choice(large or range(len(sizes)))
    photograph_width, photograph_height = sizes[photograph]
    shrunk = min(math.exp(draw.uniform(*map(math.log, _SHRUNK))), photograph_width / width, photograph_height / height)
    crop_width, crop_height = int(shrunk * width), int(shrunk * height)
    left, top = draw.randint(0, photograph_width - crop_width), draw.randint(0, photograph_height - crop_height)
    box = (left, top, left + crop_width, top + crop_height)
    subsampling = draw.choices([*_SUBSAMPLING], [*_SUBSAMPLING.values()])[0]
    return Plan(photograph, box, (width, height), int(draw.triangular(*_QUALITY)), subsampling, form)


def _write(name: str, count: int, sources: Sequence[Path], root: Path) -> None:
    # Pillow releases the GIL while it decodes, resizes and encodes.
    with ThreadPoolExecutor(allowed_cores()) as pool:
        images = list(pool.map(photographs.read, sources))
        planned = plans(name, count, [image.size for image in images])
        for number in {plan.photograph for plan in planned}:
            (root / sources[number].stem).mkdir()

        def write(index: int) -> None:
            plan = planned[index]
            image = images[plan.photograph].resize(plan.size, Image.Resampling.LANCZOS, box=plan.box)
            _save(image, plan, root / sources[plan.photograph].stem / f"{index:05}")

        # The slowest files first, so that no core waits at the end.
        list(pool.map(write, sorted(range(count), key=lambda index: planned[index].form in ("jpeg", "progressive"))))
    found = {
        "seed": SEED,
        "photographs": len({plan.photograph for plan in planned}),
        "crops": len({(plan.photograph, plan.box) for plan in planned}),
        "forms": Counter(plan.form for plan in planned),
        "pillow": PIL.__version__,
    }
    (root / _ABOUT).write_text(json.dumps(found), encoding="utf-8")


def _save(image: Image.Image, plan: Plan, path: Path) -> None:
    if plan.form == "png":
        image.save(f"{path}.png", compress_level=6)
    elif plan.form == "webp":
        image.save(f"{path}.webp", quality=plan.quality)
    else:
        progressive = plan.form == "progressive"
        image.save(f"{path}.jpg", quality=plan.quality, subsampling=plan.subsampling, progressive=progressive)
