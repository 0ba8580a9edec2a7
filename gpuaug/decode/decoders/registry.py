"""Decoders that a ``DecodeStage`` uses on a device, and reasons why others are not used."""

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
    """Reason why a decoder is not used."""

    cause: Literal["not asked for", "device", "library", "no engines", "failed"]
    words: str
    """Description of the cause: a clause that follows *because*."""


Found: TypeAlias = Mapping[str, FileDecoder | Absence]
"""Decoder or ``Absence``, by name of the decoder, in order: the first whose ``takes`` is true for a file decodes it."""

_made: dict[tuple[torch.device, str], FileDecoder] = {}
"""Decoders by (device, name), created once per process, because setting up nvJPEG takes over a second."""

_making = threading.Lock()


class DecoderTable:
    """Table of the decoders of a stage: the files and libraries of each, or the reason why it is not used."""

    def __init__(self, decoders: Found) -> None:
        self._decoders = decoders

    def __str__(self) -> str:
        rows = []
        for name, each in self._decoders.items():
            if isinstance(each, Absence):
                rows.append(f"{name:8} not used: {each.words}")
            else:
                rows.append(f"{name:8} {each.version}: {each.files}")
        return "\n".join(rows)

    __repr__ = __str__

    def __getitem__(self, name: str) -> FileDecoder | Absence:
        return self._decoders[name]


def find(backend: Backend, device: torch.device) -> Found:
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
            decoders[decoder_type.name] = _on_card(decoder_type, device)
        else:
            decoders[decoder_type.name] = Absence("not asked for", f"backend={backend!r}")
    decoders["cpu"] = Cpu()
    if backend not in ("cpu", "nvdec"):
        _tell(backend, decoders)
    return decoders


def find_clips(backend: Backend, device: torch.device) -> Found:
    """Return the decoders of clips for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` is ``"nvdec"``, and NVDEC cannot be used.

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
            advice = libav.INSTALL if nvdec.cause == "library" else "See that the container may use the capability video"
            warnings.warn(
                f"The CPU decodes clips, which may be too slow for a GPU, because the card does not decode: {nvdec.words}. "
                f"{advice}, or pass backend='cpu' to the DecodeStage.",
                GpuAugWarning,
                stacklevel=3,
            )
    return {"nvdec": nvdec, "pyav": pyav}


def used(decoders: Found) -> list[FileDecoder]:
    """Return the decoders that are used, in order of precedence."""
    return [decoder for decoder in decoders.values() if isinstance(decoder, FileDecoder)]


def _on_card(decoder_type: type[Engines | Hybrid], device: torch.device) -> FileDecoder | Absence:
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    if nvjpeg.find_library() is None:
        others = nvjpeg.other_majors()
        return Absence(
            "library", f"nvJPEG is installed for CUDA {', '.join(others)} alone" if others else "nvJPEG is not installed"
        )
    with _making:
        if (device, decoder_type.name) not in _made:
            try:
                _made[device, decoder_type.name] = decoder_type(device)
            except nvjpeg.NvJpegError as error:
                if decoder_type is Engines and error.status in _NO_ENGINES:
                    return Absence("no engines", f"the card has no JPEG engines ({error.status})")
                return Absence("failed", f"nvJPEG cannot be set up ({nvjpeg.STATUS.get(error.status, error.status)})")
        return _made[device, decoder_type.name]


def _nvdec(device: torch.device) -> FileDecoder | Absence:
    if device.type != "cuda":
        return Absence("device", f"the device is {device}")
    with _making:
        if (device, NvDec.name) not in _made:
            try:
                if nvdec_sessions.library() is None:
                    return Absence("library", "PyNvVideoCodec is not installed")
                decoder = NvDec(device)
            except Exception as error:  # importing PyNvVideoCodec loads libraries of the driver
                return Absence("failed", f"PyNvVideoCodec cannot be set up ({str(error).strip().splitlines()[0]})")
            if not decoder.caps:
                return Absence("no engines", "the card has no video engines")
            _made[device, NvDec.name] = decoder
        return _made[device, NvDec.name]


def _tell(backend: Backend, decoders: Found) -> None:
    """Log, warn or raise an error if a decoder that the user expects is not used."""
    absences = [decoder for decoder in decoders.values() if isinstance(decoder, Absence)]
    if any(decoder.on_card for decoder in used(decoders)):
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
        f"Run pip install 'gpuaug[decode-cu{nvjpeg.major()}]'" if absence.cause == "library" else "See what else uses the card"
    )
    warnings.warn(
        f"The CPU decodes images, which may be too slow for a GPU, because the card does not decode: {absence.words}. "
        f"{advice}, or pass backend='cpu' to the DecodeStage.",
        GpuAugWarning,
        stacklevel=3,
    )
