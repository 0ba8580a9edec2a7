"""Encoded images for tests, made by PIL, and what PIL makes of them."""

import io

import numpy as np
from PIL import Image, ImageOps


def smooth(width, height, seed=0):
    """A PIL image without hard edges, which chroma subsampling leaves nearly as it is."""
    noise = np.random.default_rng(seed).integers(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(width=48, height=32, form="JPEG", *, seed=0, mode="RGB", orientation=1, **options):
    """The bytes of one file."""
    file, exif = io.BytesIO(), Image.Exif()
    if orientation != 1:
        exif[274] = orientation
        options["exif"] = exif
    smooth(width, height, seed).convert(mode).save(file, form, **options)
    return file.getvalue()


def by_pil(file, *, mode="RGB", upright=True):
    """(H, W, C) uint8."""
    with Image.open(io.BytesIO(file)) as image:
        if mode == "L":
            image.draft("L", image.size)  # the luma of a JPEG as it is in the file
        array = np.asarray((ImageOps.exif_transpose(image) if upright else image).convert(mode))
    return array if array.ndim == 3 else array[..., None]


def mixed_files():
    """Files of every kind: JPEGs of all orientations and samplings, progressive, CMYK and grey ones, and other formats."""
    turned = [encoded(40 + 8 * number, 30 + number, seed=number, orientation=number + 1) for number in range(8)]
    sampled = [encoded(50, 37, seed=20 + number, subsampling=number) for number in range(3)]
    jpegs = [encoded(33, 44, mode="CMYK"), encoded(30, 20, progressive=True), encoded(31, 21, mode="L"), encoded(1, 1)]
    others = [encoded(50, 20, "PNG", seed=number, mode=mode) for number, mode in enumerate(("RGB", "L", "P", "RGBA"))]
    return [*turned, *sampled, *jpegs, *others, encoded(20, 30, "WEBP"), encoded(20, 30, "GIF")]


def psnr_db(first, second):
    """Peak signal-to-noise ratio of two uint8 arrays."""
    error = ((first.astype(float) - second.astype(float)) ** 2).mean()
    return 10 * np.log10(255**2 / max(error, 1e-9))


def room_of(layout, data, index, start):
    """View (h, w, C) of the decoded part of one image of a batch, in flat memory, which begins at ``start``."""
    height, width = layout.windows[index, 2:].tolist()
    return data[start : start + height * width * layout.channels].reshape(height, width, layout.channels)
