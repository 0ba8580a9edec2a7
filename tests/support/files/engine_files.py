"""JPEGs that differ in what engines may decode wrongly: components, sampling, restart intervals, tables, markers and sizes."""

import functools
import itertools
import re
import struct

import numpy as np
import simplejpeg
from support.files.encoded import encoded, smooth
from support.files.encoded_files import (
    DHT,
    DQT,
    SOF0,
    SOS,
    changed,
    inserted,
    with_one_segment,
    with_tables_of_16_bits,
    without,
)
from support.files.other_encoders import files

SIZES = ((61, 43), (1, 1), (8, 8), (7, 9), (16, 16), (17, 33), (64, 1), (1, 64), (131, 65), (320, 200))
"""Widths and heights, most of them no multiples of the blocks that are coded together."""

RESTARTS = (
    {},
    {"restart_marker_blocks": 1},
    {"restart_marker_blocks": 3},
    {"restart_marker_rows": 1},
    {"restart_marker_rows": 2},
)

ADOBE = struct.pack(">BBH5sHHHB", 0xFF, 0xEE, 14, b"Adobe", 100, 0, 0, 1)


@functools.cache
def engine_files():
    """(bytes of a file, whether engines take it) by a name that says what is special about it."""
    return {**dict(_of_pil()), **dict(_of_turbo()), **dict(_rewritten()), **dict(_of_others())}


def _of_pil():
    for (width, height), restart in itertools.product(SIZES, RESTARTS):
        name = f"{width}x{height} {restart}"
        yield f"grey {name}", (encoded(width, height, mode="L", quality=90, **restart), not restart)
        for subsampling in range(3):
            file = encoded(width, height, subsampling=subsampling, quality=90, **restart)
            yield f"subsampling {subsampling} {name}", (file, True)
    for (width, height), quality in itertools.product(SIZES, (60, 95)):
        options = {"quality": quality, "progressive": True}
        yield f"grey {width}x{height} {options}", (encoded(width, height, mode="L", **options), False)
        for subsampling in range(3):
            yield (
                f"subsampling {subsampling} {width}x{height} {options}",
                (
                    encoded(width, height, subsampling=subsampling, **options),
                    False,
                ),
            )
    for quality, optimize in itertools.product((20, 75, 100), (False, True)):
        options = {"quality": quality, "optimize": optimize}
        yield f"grey {options}", (encoded(61, 43, mode="L", **options), True)
        for subsampling in range(3):
            yield f"subsampling {subsampling} {options}", (encoded(61, 43, subsampling=subsampling, **options), True)


def _of_turbo():
    for (width, height), subsampling in itertools.product(SIZES, ("444", "422", "420", "440", "411", "Gray")):
        pixels = np.asarray(smooth(width, height).convert("L" if subsampling == "Gray" else "RGB"))
        pixels = pixels.reshape(height, width, -1)
        space = "GRAY" if subsampling == "Gray" else "RGB"
        file = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90, space, subsampling)
        yield f"simplejpeg {subsampling} {width}x{height}", (file, subsampling != "411")


def _rewritten():
    for name, whole in {
        "grey": encoded(61, 43, mode="L"),
        "4:4:4": encoded(61, 43, subsampling=0),
        "4:2:0": encoded(61, 43, subsampling=2),
        "restarts": encoded(61, 43, subsampling=0, restart_marker_blocks=2),
    }.items():
        # Identifiers as some cameras have them, without the segment APP0 by which decoders know that they mean YCbCr.
        count = 1 if name == "grey" else 3
        identified = {}
        for first in (0, 1, 2, 7, 200):
            file = without(whole, 0xE0)
            for index in range(count):
                file = changed(file, SOF0, 10 + 3 * index, bytes([first + index]))
                file = changed(file, SOS, 5 + 2 * index, bytes([first + index]))
            identified[f"components from {first}"] = (file, True)
        yield from {
            f"{name}, {kind}": each
            for kind, each in {
                "Huffman tables in one segment": (with_one_segment(whole, DHT), True),
                "quantization tables in one segment": (with_one_segment(whole, DQT), True),
                "quantization tables of 16 bits": (with_tables_of_16_bits(whole), False),
                "no Huffman tables": (without(whole, DHT), False),
                "YCbCr of Adobe's": (inserted(whole, SOF0, ADOBE), True),
                "YCbCr of Adobe's alone": (inserted(without(whole, 0xE0), SOF0, ADOBE), True),
                "a comment": (inserted(whole, SOF0, b"\xff\xfe\0\x06\xff\xd9\xff\xda"), True),
                "a long segment": (inserted(whole, DHT, b"\xff\xe5\xff\xff" + b"\xff\xd8" * 32766 + b"\0"), True),
                "padded markers": (inserted(whole, SOF0, b"\xff\xff\xff"), True),
                "more behind the end": (whole + bytes(99), True),
                "an interval of 0": (inserted(whole, SOS, b"\xff\xdd\0\4\0\0") if name != "restarts" else whole, True),
                "an interval longer than the image": (inserted(whole, SOF0, b"\xff\xdd\0\4\xff\xff"), name != "grey")
                if name != "restarts"
                else (whole, True),
                **identified,
            }.items()
        }.items()


CPU = re.compile("arithmetic|progressive|lossless|cjpeg RGB|4:1:1|4:1:0|2:1:0|two sizes|all components|quality 1$|[24]x|x2")
"""In the names of files that engines do not get."""


def _of_others():
    for name, file in files().items():
        if " bits" not in name:
            grey_restarts = "grey" in name and re.search(r"restart [^0]", name)
            yield name, (file, not (grey_restarts or CPU.search(name)))
