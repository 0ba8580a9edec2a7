"""A double of nvJPEG for a machine without: PIL decodes, at the addresses and with the pitch that it is given."""

import ctypes
import io
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
from PIL import Image

from gpuaug.decode import nvjpeg
from gpuaug.decode.decoders import hybrid, registry
from gpuaug.decode.decoders.cpu import Cpu
from gpuaug.decode.decoders.engines import Engines
from gpuaug.decode.decoders.hybrid import Hybrid

BAD_JPEG = 3


class BatchDecoder:
    """As nvJPEG's. A batch with a file that PIL cannot decode fails as a whole, as nvJPEG has it."""

    version = "double"
    exact_windows = True

    def __init__(self, device):
        self._samplings = {}
        self._numbers = itertools.count(1)
        self.windows = {}
        """Decoding parameters in use → window."""

    def find_sizes(self, files):
        for file in files:
            file["found_height"], file["found_width"] = _size(file["address"], file["length"])

    def set_windows(self, files):
        for file in files:  # threads of two batches may be here at the same time
            file["parameters"] = number = next(self._numbers)
            self.windows[number] = _window(file)

    def put_back(self, files):
        for number in files["parameters"].tolist():
            del self.windows[number]

    def decode(self, calls, stream):
        return [self.decode_call(files, stream) for files in calls]

    def decode_call(self, files, stream):
        try:
            opened = [_open(file["address"], file["length"]) for file in files]
            self._check(int(files["group"][0]), opened)
            images = [_decoded(image, int(files["form"][0])) for image in opened]
        except OSError:
            return BAD_JPEG
        for image, file in zip(images, files, strict=True):
            parameters = int(file["parameters"])
            _write(_cut(image, self.windows[parameters]) if parameters else image, file)
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
        return SimpleNamespace(image=None, backend=self.backend)

    def held_bytes(self, state):
        return 1, 2

    def host_phases(self, states, files):
        return [_outcome(self.host_phase, state, file) for state, file in zip(states, files, strict=True)]

    def card_phases(self, states, files, stream):
        return [_outcome(self.card_phase, state, file) for state, file in zip(states, files, strict=True)]

    def host_phase(self, state, file):
        height, width = int(file["height"]), int(file["width"])
        try:
            image = Image.open(io.BytesIO(content(file)))
            if image.size != (width, height):
                return f"nvJPEG finds {image.width}x{image.height} pixels and its header {width}x{height}"
            state.image = _cut(_decoded(image, int(file["form"])), _window(file))
        except OSError:
            return "nvJPEG finds: bad JPEG"
        return ""

    def card_phase(self, state, file):
        _write(state.image, file)
        state.image = None
        return ""


def use(patch, double=BatchDecoder, phased=PhasedDecoder):
    """Have stages of every backend but ``"cpu"`` decode by doubles of a card with engines, on any device."""
    patch.setattr(nvjpeg, "BatchDecoder", double)
    patch.setattr(nvjpeg, "PhasedDecoder", phased)
    patch.setattr(nvjpeg, "enter", lambda device: None)
    patch.setattr(hybrid, "MAX_IMAGES", 1)
    made = {"engines": Engines("a device"), "hybrid": Hybrid("a device"), "cpu": Cpu()}

    def find(backend, device):
        return {name: each for name, each in made.items() if backend in ("auto", name) or name == "cpu"}

    patch.setattr(registry, "find", find)


def content(file):
    """The bytes of a file, by its record."""
    return ctypes.string_at(int(file["address"]), int(file["length"]))


def _outcome(phase, state, file):
    try:
        return phase(state, file)
    except nvjpeg.NvJpegError as error:
        return error


def _window(file):
    return [int(file[name]) for name in ("top", "left", "window_height", "window_width")]


def _write(image, file):
    for row, pixels in enumerate(image):
        line, (channel, pitch) = np.ascontiguousarray(pixels), file["output"].tolist()
        ctypes.memmove(int(channel[0]) + row * int(pitch[0]), line.ctypes.data, line.nbytes)


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
