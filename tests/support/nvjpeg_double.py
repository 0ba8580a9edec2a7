"""A double of nvJPEG for a machine without: PIL decodes, at the addresses and with the pitch that it is given."""

import ctypes
import io

import numpy as np
from PIL import Image

from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders import batched, registry
from gpuaug.decode.decoders.cpu import Cpu

BAD_JPEG = 3


class BatchDecoder:
    """As nvJPEG's. A batch with a file that PIL cannot decode fails as a whole, as nvJPEG has it."""

    version = "double"

    def sizes(self, addresses, lengths):
        return np.array([_size(*file) for file in zip(addresses, lengths, strict=True)], np.int32).reshape(-1, 2)

    def decode(self, addresses, lengths, outputs, form, stream):
        try:
            images = [_decoded(_open(*file), form) for file in zip(addresses, lengths, strict=True)]
        except OSError:
            return BAD_JPEG
        for image, output in zip(images, outputs, strict=True):
            for row, pixels in enumerate(image):
                line = np.ascontiguousarray(pixels)
                ctypes.memmove(int(output["channel"][0]) + row * int(output["pitch"][0]), line.ctypes.data, line.nbytes)
        return 0


ON_CARD = [batched.Engines([BatchDecoder()]), Cpu()]
"""The decoders of a card with engines."""


def use(patch, double=BatchDecoder, kind=batched.Engines):
    """Have stages of every backend but ``"cpu"`` decode by doubles, as ``kind`` does by nvJPEG, on any device."""

    def find(backend, device):
        return (
            {"cpu": Cpu()} if backend == "cpu" else {kind.name: kind([double() for _ in range(kind.most_calls)]), "cpu": Cpu()}
        )

    patch.setattr(registry, "find", find)


def _open(address, length):
    image = Image.open(io.BytesIO(ctypes.string_at(int(address), int(length))))
    assert (image.format, image.mode in ("RGB", "L"), "progressive" in image.info) == ("JPEG", True, False)
    return image


def _size(address, length):
    try:
        return _open(address, length).size[::-1]
    except OSError:
        return 0, 0


def _decoded(image, form):
    mode = "RGB" if form == nvjpeg.OUTPUT_RGBI else "L"
    if mode == "L":
        image.draft("L", image.size)
    return np.asarray(image.convert(mode))
