"""Decoders that a ``DecodeStage`` uses on a device, and reasons why others are not used.

*Engines* are the JPEG decoding hardware of a card. *Hybrid* decoding divides an image's work between host threads and the card.
NVDEC is the video decoding hardware of a card.
"""

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
"""nvJPEG's status codes for a card without JPEG engines.

After any other status, a later attempt to create the decoder may work.
"""


@dataclass(frozen=True)
class Absence:
    """Reason why a decoder is not used."""

    cause: Literal["not asked for", "device", "library", "no engines", "failed"]
    words: str
    """Description of the cause: a clause that follows *because*."""


DecodersByName: TypeAlias = Mapping[str, FileDecoder | Absence]
"""Name → decoder, or the reason why it is not used.

In order of precedence: a file is decoded by the first decoder that takes it.
"""

_created: dict[tuple[torch.device, str], FileDecoder] = {}
"""(device, name) → decoder. A decoder is created once per process, because setting up nvJPEG takes over a second."""

_creation_lock = threading.Lock()


class DecoderTable:
    """Printable table of the decoders of a stage: files and libraries of each decoder, or the reason why it is not used."""

    def __init__(self, decoders: DecodersByName) -> None:
        self._decoders = decoders

    def __str__(self) -> str:
        rows = []
        for name, decoder in self._decoders.items():
            if isinstance(decoder, Absence):
                rows.append(f"{name:8} not used: {decoder.words}")
            else:
                rows.append(f"{name:8} {decoder.version}: {decoder.files}")
        return "\n".join(rows)

    __repr__ = __str__

    def __getitem__(self, name: str) -> FileDecoder | Absence:
        return self._decoders[name]


def find(backend: Backend, device: torch.device) -> DecodersByName:
    """Return the decoders of images for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` names a decoder that cannot be used.

    Warns:
        GpuAugWarning: If a GPU's images are decoded on the CPU because nvJPEG is missing or cannot be set up, or if decoding
            will wait for the training step.
    """
    decoders: dict[str, FileDecoder | Absence] = {}
    for decoder_type in (Engines, Hybrid):
        if backend in ("auto", decoder_type.name):
            decoders[decoder_type.name] = _find_on_card(decoder_type, device)
        else:
            decoders[decoder_type.name] = Absence("not asked for", f"backend={backend!r}")
    decoders["cpu"] = Cpu()
    if backend not in ("cpu", "nvdec"):
        _report_absences(backend, decoders)
    return decoders


def find_clips(backend: Backend, device: torch.device) -> DecodersByName:
    """Return the decoders of clips for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` is ``"nvdec"``, and NVDEC cannot be used.

    Warns:
        GpuAugWarning: If a GPU's clips are decoded on the CPU because PyNvVideoCodec is missing or cannot be loaded.
    """
    nvdec: FileDecoder | Absence = Absence("not asked for", "backend='cpu'")
    if backend != "cpu":
        nvdec = _find_nvdec(device)
    pyav = PyAv() if libav.find_module() is not None else Absence("library", f"PyAV is not installed. {libav.INSTALL}")
    if isinstance(nvdec, Absence) and nvdec.cause != "not asked for":
        if backend == "nvdec":
            raise DeviceError(
                f"backend must be 'auto', or name a decoder that can be used here, got 'nvdec': {nvdec.words}. Leave it out."
            )
        if nvdec.cause != "device":
            advice = libav.INSTALL if nvdec.cause == "library" else "In a container, add video to NVIDIA_DRIVER_CAPABILITIES"
            warnings.warn(
                f"The CPU decodes clips, which may be too slow for a GPU, because the card does not decode: {nvdec.words}. "
                f"{advice}, or pass backend='cpu' to the DecodeStage.",
                GpuAugWarning,
                stacklevel=3,
            )
    return {"nvdec": nvdec, "pyav": pyav}


def usable(decoders: DecodersByName) -> list[FileDecoder]:
    """Return the decoders without absences, in order of precedence."""
    return [decoder for decoder in decoders.values() if isinstance(decoder, FileDecoder)]


def _find_on_card(decoder_type: type[Engines | Hybrid], device: torch.device) -> FileDecoder | Absence:
    """Return the decoder of a device for images, or the reason why there is none."""
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    if nvjpeg.find_library() is None:
        others = nvjpeg.other_majors()
        return Absence(
            "library", f"nvJPEG is installed only for CUDA {', '.join(others)}" if others else "nvJPEG is not installed"
        )
    with _creation_lock:
        if (device, decoder_type.name) not in _created:
            try:
                _created[device, decoder_type.name] = decoder_type(device)
            except nvjpeg.NvJpegError as error:
                if decoder_type is Engines and error.status in _NO_ENGINES:
                    return Absence("no engines", f"the card has no JPEG engines ({error.status})")
                return Absence("failed", f"nvJPEG cannot be set up ({nvjpeg.STATUS.get(error.status, error.status)})")
        return _created[device, decoder_type.name]


def _find_nvdec(device: torch.device) -> FileDecoder | Absence:
    """Return the decoder of a device for clips, or the reason why there is none."""
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    with _creation_lock:
        if (device, NvDec.name) not in _created:
            try:
                if nvdec_sessions.library() is None:
                    return Absence("library", "PyNvVideoCodec is not installed")
                decoder = NvDec(device)
            except Exception as error:  # importing PyNvVideoCodec loads libraries of the driver
                return Absence("failed", f"PyNvVideoCodec cannot be set up ({str(error).strip().splitlines()[0]})")
            if not decoder.caps:
                return Absence("no engines", "the card has no video engines")
            _created[device, NvDec.name] = decoder
        return _created[device, NvDec.name]


def _report_absences(backend: Backend, decoders: DecodersByName) -> None:
    """Log, warn or raise an error if a decoder that the user expects is not used."""
    absences = [decoder for decoder in decoders.values() if isinstance(decoder, Absence)]
    if any(decoder.on_card for decoder in usable(decoders)):
        if isinstance(engines := decoders["engines"], Absence) and engines.cause != "not asked for":
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
    absence = next(absence for absence in reversed(absences) if absence.cause != "not asked for")
    if backend != "auto":
        raise DeviceError(
            f"backend must be 'auto', or name a decoder that can be used here, got {backend!r}: {absence.words}. Leave it out."
        )
    if absence.cause == "device":
        return
    advice = (
        f"Run pip install 'gpuaug[decode-cu{nvjpeg.major()}]'"
        if absence.cause == "library"
        else "Free memory of the card that other processes use"
    )
    warnings.warn(
        f"The CPU decodes images, which may be too slow for a GPU, because the card does not decode: {absence.words}. "
        f"{advice}, or pass backend='cpu' to the DecodeStage.",
        GpuAugWarning,
        stacklevel=3,
    )
