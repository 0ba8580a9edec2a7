"""JPEGs of noise in every coding, windows of them, and their pixels by libturbojpeg and by PIL."""

import ctypes
import functools
import io
import random
from ctypes import byref, c_int, c_size_t, c_void_p

import numpy as np
from PIL import Image

from gpuaug.core.encoded import HEADER, Format
from gpuaug.decode.decoders import cpu, loops, turbojpeg
from gpuaug.decode.formats import jpeg as jpeg_format
from gpuaug.decode.headers import parse
from gpuaug.decode.layout import IMAGE, ImageInfo

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0", "grey", "4:4:0", "4:1:1")
"""In the order of ``TJSAMP``."""

CODINGS = {
    "baseline": {},
    "progressive": {12: 1},
    "arithmetic": {14: 1},
    "restart": {18: 2},
    "progressive restart": {12: 1, 18: 2},
}
"""Values of ``TJPARAM``."""

SCALES = (1, 2, 4, 8)

GUARD = 2**14

FILLED = 0xA5


@functools.cache
def jpeg(height, width, subsampling="4:2:0", coding="baseline"):
    """A JPEG of noise, which is where samples differ most from their neighbours, in codings that PIL does not write."""
    library, pixels = turbojpeg.library(), np.random.default_rng(height + width).integers(0, 256, (height, width, 3), np.uint8)
    library.tj3Init.restype = c_void_p
    library.tj3Destroy.argtypes = [c_void_p]
    library.tj3Compress8.argtypes = [c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_void_p]
    library.tj3Set.argtypes = [c_void_p, c_int, c_int]
    library.tj3Free.argtypes = [c_void_p]
    handle, made, size = library.tj3Init(0), c_void_p(), c_size_t()
    for name, value in {3: 95, 4: SUBSAMPLINGS.index(subsampling), **CODINGS[coding]}.items():
        assert library.tj3Set(handle, name, value) == 0
    assert library.tj3Compress8(handle, pixels.ctypes.data, width, 0, height, 0, byref(made), byref(size)) == 0
    file = ctypes.string_at(made, size.value)
    library.tj3Free(made)
    library.tj3Destroy(handle)
    return file


def image_info(file, full, scale, region=(0, 0, 0, 0), channels=3, sampling=0):
    return ImageInfo(0, len(file), int(Format.JPEG), channels, *full, 1, 1, scale, *region, 0, sampling)


@functools.cache
def whole(file, channels, scale):
    """(h, w, C), by PIL, which decodes a JPEG with a side shorter than ``scale`` by a smaller one: then ``None``."""
    if scale > 1 and min(size(file)) < scale:
        return None
    info = image_info(file, size(file), scale)
    return cpu._decode_with_pil(np.frombuffer(file, np.uint8), jpeg_format.FORMAT, channels, info)


@functools.cache
def size(file):
    with Image.open(io.BytesIO(file)) as image:
        return image.height, image.width


def decoded(file, window, channels=3, scale=1, full=None, decode_jobs=None):
    """The window, or ``None``. Fails if memory beside its region is written.

    ``decode_jobs``: the loop, or the loop of the process.
    """
    header = parse(file)
    height, width = full or size(file)
    table = np.array([(0, len(file), *header._replace(height=height, width=width)[:-1])], HEADER)
    region = turbojpeg.regions(np.array([window]), table, np.array([scale]))[0].tolist() if header.sampling else window
    job = image_info(file, (height, width), scale, region, header.channels, header.sampling)
    memory = np.full(2 * GUARD + region[2] * region[3] * channels, FILLED, np.uint8)
    mask = np.ones(1, np.bool_)
    decode_jobs = decode_jobs or loops.jpeg_loop()
    copy = np.frombuffer(bytearray(file), np.uint8)
    decode_jobs(copy, memory, np.array([job], IMAGE), np.array([GUARD]), channels, mask)
    assert (memory[:GUARD] == FILLED).all()
    assert (memory[-GUARD:] == FILLED).all()
    pixels = memory[GUARD:-GUARD].reshape(region[2], region[3], channels)
    return pixels[:, window[1] - region[1] :][:, : window[3]] if mask[0] else None


def some_windows(height, width, count, seed):
    """Windows with many at the edges and many that are narrow, where interpolation has no neighbours."""
    draw = random.Random(seed)
    for _ in range(count):
        sides = [draw.choice((1, 2, 3, draw.randint(1, side), side)) for side in (height, width)]
        sides = [min(side) for side in zip(sides, (height, width), strict=True)]
        room = (height - sides[0], width - sides[1])
        top, left = (draw.choice((0, left, draw.randint(0, left), draw.randint(0, left))) for left in room)
        yield top, left, *sides


def scans_of(file):
    return [at for at in range(len(file)) if file[at : at + 2] == b"\xff\xda"]
