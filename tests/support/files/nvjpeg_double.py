"""A double of nvJPEG for a machine without: PIL decodes, at the addresses and with the pitch that it is given."""

import ctypes
import io
from types import SimpleNamespace
from unittest import mock

import numpy as np
from PIL import Image

from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders import hybrid, registry
from gpuaug.decode.decoders.cpu import Cpu
from gpuaug.decode.decoders.engines import Engines
from gpuaug.decode.decoders.hybrid import Hybrid
from gpuaug.decode.decoders.phase_loop import OneByOne

BAD_JPEG = 3


class BatchDecoder:
    """As nvJPEG's. A batch with a file that PIL cannot decode fails as a whole, as nvJPEG has it."""

    version = "double"
    exact_windows = True

    def __init__(self, device):
        self._samplings = {}
        self.windows = []

    def sizes(self, addresses, lengths):
        return np.array([_size(*file) for file in zip(addresses, lengths, strict=True)], np.int32).reshape(-1, 2)

    def with_windows(self, windows, form):
        self.windows += windows.tolist()
        return np.arange(len(self.windows) - len(windows), len(self.windows), dtype=np.uint64)

    def put_back(self, parameters, form):
        assert len(set(parameters.tolist())) == len(parameters)

    def decode(self, group, addresses, lengths, outputs, form, stream, parameters=None):
        try:
            opened = [_open(*file) for file in zip(addresses, lengths, strict=True)]
            self._check(group, opened)
            images = [_decoded(image, form) for image in opened]
        except OSError:
            return BAD_JPEG
        for number, (image, output) in enumerate(zip(images, outputs, strict=True)):
            part = image if parameters is None else _cut(image, self.windows[int(parameters[number])])
            for row, pixels in enumerate(part):
                line = np.ascontiguousarray(pixels)
                ctypes.memmove(int(output["channel"][0]) + row * int(output["pitch"][0]), line.ctypes.data, line.nbytes)
        return 0

    def _check(self, group, images):
        """Check that files of a group have one subsampling, and that the largest image comes first: else nvJPEG is slow."""
        samplings = {image.layer[0][1:3] if image.mode == "RGB" else None for image in images}
        assert len(samplings) == 1
        assert samplings == self._samplings.setdefault(group, samplings)
        areas = [image.width * image.height for image in images]
        assert areas == sorted(areas, reverse=True)


with mock.patch.object(nvjpeg, "BatchDecoder", BatchDecoder):
    ON_CARD = [Engines("a device"), Cpu()]
"""The decoders of a card with engines."""


class PhasedDecoder:
    """As nvJPEG's. The host phase decodes, and the card phase copies the pixels."""

    version = "double"
    exact_windows = True

    def __init__(self, device, backend=nvjpeg.HYBRID):
        self.backend = backend

    def state(self, pinned_bytes, device_bytes):
        return SimpleNamespace(image=None, decoder=self)

    def held_bytes(self, state):
        return 1, 2

    def host_phase(self, state, address, length, height, width, form, window):
        try:
            image = Image.open(io.BytesIO(ctypes.string_at(address, length)))
            if image.size != (width, height):
                return f"nvJPEG finds {image.width}x{image.height} pixels and its header {width}x{height}"
            state.image = _cut(_decoded(image, form), window)
        except OSError:
            return "nvJPEG finds: bad JPEG"
        return ""

    def card_phase(self, state, address, pitch, stream):
        for row, pixels in enumerate(state.image):
            line = np.ascontiguousarray(pixels)
            ctypes.memmove(address + row * pitch, line.ctypes.data, line.nbytes)
        state.image = None
        return ""


def use(patch, double=BatchDecoder, phased=PhasedDecoder):
    """Have stages of every backend but ``"cpu"`` decode by doubles of a card with engines, on any device."""
    patch.setattr(nvjpeg, "BatchDecoder", double)
    patch.setattr(nvjpeg, "PhasedDecoder", phased)
    patch.setattr(nvjpeg, "enter", lambda device: None)
    patch.setattr(hybrid, "phases", lambda decoder: OneByOne())
    made = {"engines": Engines("a device"), "hybrid": Hybrid("a device"), "cpu": Cpu()}

    def find(backend, device):
        return {name: each for name, each in made.items() if backend in ("auto", name) or name == "cpu"}

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


def _cut(image, window):
    top, left, height, width = window
    return image[top : top + height, left : left + width]
