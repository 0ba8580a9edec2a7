"""A file of every format that is decoded, in every mode that the format can hold and PIL or tifffile write."""

import functools
import io

import numpy as np
import PIL.Image
from support.files.encoded_files import encoded
from support.files.exif_files import tiff
from support.files.images import noise

HEIGHT, WIDTH = 7, 11


def _netpbm():
    """PBM, PGM and PPM, as text and as bytes, with comments and other maxima."""
    grey, colour = noise(0, HEIGHT, WIDTH), noise(1, HEIGHT, WIDTH, 3)
    size = f"{WIDTH} {HEIGHT}\n".encode()

    def text(array):
        return " ".join(map(str, array.ravel().tolist())).encode()

    return {
        "PBM as text": b"P1\n" + size + text(grey & 1),
        "PGM as text": b"P2\n" + size + b"255\n" + text(grey),
        "PPM as text": b"P3 " + size + b"255\n" + text(colour),
        "PBM": b"P4\n" + size + np.packbits(grey & 1, axis=1).tobytes(),
        "PGM": b"P5\n#a comment\n" + size + b"255\n" + grey.tobytes(),
        "PGM to 100": b"P5\r" + size + b"100\n" + (grey % 101).tobytes(),
        "PPM": b"P6\n" + size + b"255\n" + colour.tobytes(),
        "PPM behind spaces": b"P6 \t\n" + size + b"255\n" + colour.tobytes(),
        "PPM of 16 bits": b"P6\n" + size + b"65535\n" + (colour.astype(">u2") * 257).tobytes(),
        "CMYK as PPM": b"P0CMYK\n" + size + b"255\n" + noise(2, HEIGHT, WIDTH, 4).tobytes(),
    }


def _tiffs():
    """TIFFs of both byte orders, large ones, and such whose first bytes are in the wrong order."""
    little, big = tiff(), tiff(order=">")
    return {
        "TIFF": little,
        "TIFF, big end first": big,
        "TIFF, first bytes swapped": b"II\0*" + little[4:],
        "TIFF, big end first, first bytes swapped": b"MM*\0" + big[4:],
        "BigTIFF": tiff(bigtiff=True),
    }


@functools.cache
def formats():
    """The bytes of each file by the name of its format and mode."""
    size = HEIGHT, WIDTH
    modes = {
        "JPEG": ("RGB", "L", "CMYK", "YCbCr"),
        "PNG": ("RGB", "L", "1", "P", "RGBA", "LA"),
        "WEBP": ("RGB", "RGBA", "L"),
        "GIF": ("P", "L", "1", "RGBA"),
        "BMP": ("RGB", "L", "1", "P", "RGBA"),
        "TIFF": ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr"),
        "JPEG2000": ("RGB", "L", "RGBA", "LA"),
        "AVIF": ("RGB", "RGBA", "L"),
    }
    files = {
        f"{kind} {mode}": encoded(kind, *size, mode) for kind, each in modes.items() if kind in PIL.Image.SAVE for mode in each
    }
    files["PNG with a transparent colour"] = encoded("PNG", *size, transparency=(1, 2, 3))
    files["PNG with transparent colours of a palette"] = encoded("PNG", *size, "P", transparency=bytes(range(0, 250, 9)))
    files["PNG with a transparent grey"] = encoded("PNG", *size, "L", transparency=7)
    files["PNG of 2 bits"] = encoded("PNG", *size, "P", bits=2)
    files["GIF with a transparent colour"] = encoded("GIF", *size, "P", transparency=3)
    files["lossless WebP"] = encoded("WEBP", *size, "RGBA", lossless=True)
    if "JPEG2000" in PIL.Image.SAVE:
        files["JPEG 2000 without a box"] = encoded("JPEG2000", *size, no_jp2=True)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        files[f"TIFF by {compression}"] = encoded("TIFF", *size, compression=compression)
    for kind in ("PNG", "GIF", "WEBP", "TIFF"):
        frames, packed = [PIL.Image.fromarray(noise(seed, *size, 3)) for seed in range(3)], io.BytesIO()
        frames[0].save(packed, kind, save_all=True, append_images=frames[1:])
        files[f"{kind} of several frames"] = packed.getvalue()
    return {**files, **_netpbm(), **_tiffs()}
