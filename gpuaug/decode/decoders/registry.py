"""The decoders that a ``DecodeStage`` uses on a device, and why the others are not used."""

import logging
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from gpuaug.core.errors import DeviceError, GpuAugWarning
from gpuaug.decode import nvjpeg
from gpuaug.decode.clips import libav
from gpuaug.decode.decoders import nvdec_sessions
from gpuaug.decode.decoders.base import FileDecoder
from gpuaug.decode.decoders.cpu import Cpu
from gpuaug.decode.decoders.engines import Engines
from gpuaug.decode.decoders.hybrid import Hybrid
from gpuaug.decode.decoders.nvdec import NvDec
from gpuaug.decode.decoders.pyav import PyAv

Backend = Literal["auto", "engines", "hybrid", "nvdec", "cpu"]

_log = logging.getLogger("gpuaug")

_NO_ENGINES = {7, 9}
"""Statuses of nvJPEG for a card without JPEG engines. After another status, a later attempt to set nvJPEG up may succeed."""


@dataclass(frozen=True)
class Absence:
    """Why a decoder is not used."""

    cause: Literal["not asked for", "device", "library", "no engines", "failed"]
    words: str
    """The cause with its details: a clause that follows *because*."""


Found: TypeAlias = Mapping[str, FileDecoder | Absence]
"""Each decoder, or its absence, by the decoder's name, in order: the first decoder that takes a file decodes it."""

_made: dict[tuple[torch.device, str], FileDecoder] = {}
"""The decoders of each card, made once in a process: setting nvJPEG up takes over a second."""

_making = threading.Lock()


class DecoderTable:
    """The decoders of a stage: the files and libraries of each, or why it is not used. ``print`` shows a table."""

    def __init__(self, found: Found) -> None:
        self._found = found

    def __str__(self) -> str:
        rows = []
        for name, each in self._found.items():
            if isinstance(each, Absence):
                rows.append(f"{name:8} not used: {each.words}")
            else:
                rows.append(f"{name:8} {each.version}: {each.files}")
        return "\n".join(rows)

    __repr__ = __str__

    def __getitem__(self, name: str) -> FileDecoder | Absence:
        return self._found[name]


def find(backend: Backend, device: torch.device) -> Found:
    """The decoders for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` names a decoder that cannot be used.

    Warns:
        GpuAugWarning: If a GPU's images are decoded on the CPU because nvJPEG is missing or cannot be set up, or if decoding
            will wait for the training step.
    """
    found: dict[str, FileDecoder | Absence] = {}
    for kind in (Engines, Hybrid):
        if backend in ("auto", kind.name):
            found[kind.name] = _on_card(kind, device)
        else:
            found[kind.name] = Absence("not asked for", f"backend={backend!r}")
    found["cpu"] = Cpu()
    if backend not in ("cpu", "nvdec"):
        _tell(backend, found)
    return found


def find_clips(backend: Backend, device: torch.device) -> Found:
    """The decoders of clips for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` is ``"nvdec"``, which cannot be used.

    Warns:
        GpuAugWarning: If a GPU's clips are decoded on the CPU because PyNvVideoCodec is missing or cannot be loaded.
    """
    nvdec: FileDecoder | Absence = Absence("not asked for", "backend='cpu'")
    if backend != "cpu":
        nvdec = _nvdec(device)
    pyav = PyAv() if libav.find() is not None else Absence("library", f"PyAV is not installed. {libav.INSTALL}")
    if isinstance(nvdec, Absence) and nvdec.cause != "not asked for":
        if backend == "nvdec":
            raise DeviceError(
                f"backend must be 'auto', or name a decoder that can be used here, got 'nvdec': {nvdec.words}. Leave it out."
            )
        if nvdec.cause != "device":
            way_out = libav.INSTALL if nvdec.cause == "library" else "See that the container may use the capability video"
            warnings.warn(
                f"The CPU decodes clips, which may be too slow for a GPU, because the card does not decode: {nvdec.words}. "
                f"{way_out}, or pass backend='cpu' to the DecodeStage.",
                GpuAugWarning,
                stacklevel=3,
            )
    return {"nvdec": nvdec, "pyav": pyav}


def used(found: Found) -> list[FileDecoder]:
    """The decoders that are used, in order: the first that takes a file decodes it."""
    return [each for each in found.values() if isinstance(each, FileDecoder)]


def _on_card(kind: type[Engines | Hybrid], device: torch.device) -> FileDecoder | Absence:
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    if nvjpeg.find_library() is None:
        others = nvjpeg.other_majors()
        return Absence(
            "library", f"nvJPEG is installed for CUDA {', '.join(others)} alone" if others else "nvJPEG is not installed"
        )
    with _making:
        if (device, kind.name) not in _made:
            try:
                _made[device, kind.name] = kind(device)
            except nvjpeg.NvJpegError as error:
                if kind is Engines and error.status in _NO_ENGINES:
                    return Absence("no engines", f"the card has no JPEG engines ({error.status})")
                return Absence("failed", f"nvJPEG cannot be set up ({nvjpeg.STATUS.get(error.status, error.status)})")
        return _made[device, kind.name]


def _nvdec(device: torch.device) -> FileDecoder | Absence:
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    with _making:
        if (device, NvDec.name) not in _made:
            try:
                if nvdec_sessions.library() is None:
                    return Absence("library", "PyNvVideoCodec is not installed")
                made = NvDec(device)
            except Exception as error:  # importing it loads the driver's libraries
                return Absence("failed", f"PyNvVideoCodec cannot be set up ({str(error).strip().splitlines()[0]})")
            if not made.caps:
                return Absence("no engines", "the card has no video engines")
            _made[device, NvDec.name] = made
        return _made[device, NvDec.name]


def _tell(backend: Backend, found: Found) -> None:
    """Log, warn or raise where other decoders are used than a user expects."""
    absences = [each for each in found.values() if isinstance(each, Absence)]
    if any(each.on_card for each in used(found)):
        if isinstance(engines := found["engines"], Absence) and engines.cause != "not asked for":
            _log.info("Images are decoded by host threads and the card together, because %s.", engines.words)
        if nvjpeg.queues < nvjpeg.MOST_QUEUES:
            warnings.warn(
                f"Images are not decoded while a model trains, because {nvjpeg.QUEUES} is {nvjpeg.queues}: decoding waits for "
                f"each step. Import gpuaug before anything uses the GPU, or set {nvjpeg.QUEUES}={nvjpeg.MOST_QUEUES} for the "
                "process.",
                GpuAugWarning,
                stacklevel=3,
            )
        return
    why = next(each for each in reversed(absences) if each.cause != "not asked for")
    if backend != "auto":
        raise DeviceError(
            f"backend must be 'auto', or name a decoder that can be used here, got {backend!r}: {why.words}. Leave it out."
        )
    if why.cause == "device":
        return
    way_out = (
        f"Run pip install 'gpuaug[decode-cu{nvjpeg.major()}]'" if why.cause == "library" else "See what else uses the card"
    )
    warnings.warn(
        f"The CPU decodes images, which may be too slow for a GPU, because the card does not decode: {why.words}. "
        f"{way_out}, or pass backend='cpu' to the DecodeStage.",
        GpuAugWarning,
        stacklevel=3,
    )
