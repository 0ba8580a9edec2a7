"""Small JPEGs of encoders other than PIL's, in ``other_encoders.zip``: what only they write.

Made anew by ``python tests/support/files/other_encoders.py``, with ``cjpeg`` and ``jpegtran`` on the path (Debian's
libjpeg-turbo-progs) and ``pip install imagecodecs opencv-python-headless pillow``.
"""

import functools
import io
import itertools
import subprocess
import zipfile
from pathlib import Path

PACKED = Path(__file__).with_suffix(".zip")


@functools.cache
def files():
    """The bytes of each file by a name that says what is special about it."""
    with zipfile.ZipFile(PACKED) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def _by_command(ppm, *command):
    return subprocess.run(command, input=ppm, capture_output=True, check=True).stdout


def _made():
    import cv2
    import imagecodecs
    import numpy as np
    from PIL import Image

    def picture(width, height, seed=0):
        noise = np.random.default_rng(seed).integers(0, 255, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
        return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)

    def ppm(image):
        packed = io.BytesIO()
        image.save(packed, "PPM")
        return packed.getvalue()

    whole, grey = ppm(picture(61, 43)), ppm(picture(61, 43, 1).convert("L"))
    samplings = {"4:4:4": "1x1", "4:2:2": "2x1", "4:2:0": "2x2", "4:4:0": "1x2", "4:1:1": "4x1", "4:1:0": "4x2", "2:1:0": "1x4"}
    for (name, factors), restart in itertools.product(samplings.items(), ("0", "1", "1B", "3B")):
        options = ["-sample", f"{factors},1x1,1x1", "-restart", restart]
        yield f"cjpeg {name} restart {restart}", _by_command(whole, "cjpeg", *options)
    for factors, restart in itertools.product(("1x1", "2x1", "1x2", "2x2", "4x1"), ("0", "1", "2B")):
        options = ["-grayscale", "-sample", factors, "-restart", restart]
        yield f"cjpeg grey {factors} restart {restart}", _by_command(grey, "cjpeg", *options)
    for name, options in {
        "all components 2x1": ["-sample", "2x1,2x1,2x1"],
        "chroma of two sizes": ["-sample", "2x2,2x1,1x2"],
        "optimized": ["-optimize"],
        "one table": ["-qslots", "0"],
        "quality 1": ["-quality", "1"],
        "quality 1 baseline": ["-quality", "1", "-baseline"],
        "quality 100 4:4:4": ["-quality", "100", "-sample", "1x1"],
        "RGB": ["-rgb"],
        "progressive": ["-progressive"],
        "arithmetic": ["-arithmetic"],
        "progressive arithmetic": ["-arithmetic", "-progressive"],
    }.items():
        yield f"cjpeg {name}", _by_command(whole, "cjpeg", *options)
    from_colour = _by_command(whole, "cjpeg", "-sample", "2x2")
    for name, options in {
        "grey of 4:2:0": ["-grayscale"],
        "turned": ["-rotate", "90", "-trim"],
        "restart": ["-restart", "1"],
    }.items():
        yield f"jpegtran {name}", _by_command(from_colour, "jpegtran", *options)
    array = np.asarray(picture(61, 43, 2))
    for name, data in {"RGB": array, "grey": np.ascontiguousarray(array[..., 0])}.items():
        yield f"imagecodecs lossless {name}", imagecodecs.jpeg8_encode(data, lossless=True, predictor=4)
        yield f"imagecodecs {name}", imagecodecs.jpeg8_encode(data, level=90)
        for bits in (12, 16) if data.ndim == 2 else (12,):
            deep = data.astype(np.uint16) << (bits - 8)
            yield (
                f"imagecodecs lossless {name} of {bits} bits",
                imagecodecs.jpeg_encode(deep, lossless=True, bitspersample=bits),
            )
        yield f"imagecodecs {name} of 12 bits", imagecodecs.jpeg_encode(data.astype(np.uint16) << 4, bitspersample=12)
    yield (
        "imagecodecs lossless of another encoder",
        imagecodecs.ljpeg_encode(np.ascontiguousarray(array[..., 0]), bitspersample=8),
    )
    for interval in (0, 1, 5):
        options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval]
        yield f"OpenCV restart {interval}", cv2.imencode(".jpg", array, options)[1].tobytes()
        yield f"OpenCV grey restart {interval}", cv2.imencode(".jpg", array[..., 0], options)[1].tobytes()
    yield "OpenCV progressive", cv2.imencode(".jpg", array, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()


if __name__ == "__main__":
    with zipfile.ZipFile(PACKED, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in _made():
            packed.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
