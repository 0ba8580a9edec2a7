"""``nvjpegDecodeBatched`` alone, on the JPEG engines, called repeatedly with arguments that are created once.

Its rate is an upper bound for loaders that decode on the engines. Source: nvjpeg.h of CUDA 13.
"""

import ctypes
import importlib.util
import io
from ctypes import byref, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.harness.optional_rows import MissingError

_HARDWARE, _RGBI = 3, 5
_IMAGE = np.dtype([("channel", np.uint64, 4), ("pitch", np.uint64, 4)])


class BatchedDecoder:
    """A decoding state of nvJPEG.

    Args:
        device: A CUDA device.

    Raises:
        MissingError: If there is no nvJPEG for torch's CUDA, or the device has no engines.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _library()
        self._device = device
        self._handle, self._state = c_void_p(), c_void_p()
        torch.zeros(1, device=device)
        with torch.cuda.device(device):
            self._call("nvjpegCreateEx", c_int(_HARDWARE), None, None, c_uint(0), byref(self._handle))
            self._call("nvjpegJpegStateCreate", self._handle, byref(self._state))
        self._count = 0

    def prepare(self, files: list[bytes]) -> tuple[Any, ...]:
        """Return the arguments of ``decode`` for a batch of baseline JPEGs. Its images lie in one buffer on the device."""
        starts = np.cumsum([0, *(-(-len(file) // 64) * 64 for file in files)])
        data = torch.empty(int(starts[-1]) + 64, dtype=torch.uint8).pin_memory()
        flat = data.numpy()
        for start, file in zip(starts.tolist(), files, strict=False):
            flat[start : start + len(file)] = np.frombuffer(file, np.uint8)
        sizes = np.array([Image.open(io.BytesIO(file)).size[::-1] for file in files])
        lengths = sizes.prod(1) * 3
        pixels = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=self._device)
        images = np.zeros(len(files), _IMAGE)
        images["channel"][:, 0] = pixels.data_ptr() + lengths.cumsum() - lengths
        images["pitch"][:, 0] = sizes[:, 1] * 3
        addresses = (data.data_ptr() + starts[:-1]).astype(np.uint64)
        return addresses, np.array([len(file) for file in files], np.uint64), images, data, pixels

    def decode(self, prepared: tuple[Any, ...]) -> None:
        """Decode a batch on the current stream."""
        addresses, lengths, images, *_ = prepared
        if len(addresses) != self._count:
            self._count = len(addresses)
            name = "nvjpegDecodeBatchedInitialize"
            self._call(name, self._handle, self._state, c_int(self._count), c_int(1), c_int(_RGBI))
        stream = c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        arrays = [c_void_p(array.ctypes.data) for array in (addresses, lengths, images)]
        self._call("nvjpegDecodeBatched", self._handle, self._state, *arrays, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise MissingError(f"{name} answers {status}")


def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [path for folder in folders or () for path in Path(folder).glob(f"*/lib/libnvjpeg.so.{major}")]
    try:
        return ctypes.CDLL(str(paths[0]) if paths else f"libnvjpeg.so.{major}")
    except OSError as error:
        raise MissingError(f"not installed: {error}") from None
