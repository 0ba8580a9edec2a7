"""Decoders that a ``DecodeStage`` uses on a device, and reasons why others are not used.

A *card* is a GPU. *Engines* are the JPEG decoding hardware of some cards, and NVDEC is the video decoding hardware. *Hybrid*
decoding divides the work for each image between host threads and the card. These three are the decoders of a card.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from gpuaug.core.errors import DeviceError, warn
from gpuaug.decode import nvjpeg
from gpuaug.decode.clips import libav
from gpuaug.decode.decoders import nvdec
from gpuaug.decode.decoders.base import FileDecoder
from gpuaug.decode.decoders.cpu import Cpu
from gpuaug.decode.decoders.engines import Engines
from gpuaug.decode.decoders.hybrid import Hybrid
from gpuaug.decode.decoders.pyav import PyAv

Backend = Literal["auto", "engines", "hybrid", "nvdec", "cpu"]
"""Argument ``backend`` of ``DecodeStage``: one decoder of a card, ``"cpu"`` for none, or ``"auto"`` for all usable ones."""

_FREE_MEMORY = "Free memory of the card that other processes use"
_ADD_VIDEO = "In a container, add video to NVIDIA_DRIVER_CAPABILITIES"

_log = logging.getLogger("gpuaug")

_NO_ENGINES = {7, 9}
"""nvJPEG's status codes for a card without JPEG engines: architecture mismatch, implementation not supported.

Any other error status means that the decoder could not be created now, for example because the card has no free memory.
"""


@dataclass(frozen=True)
class Absence:
    """Reason why a decoder is not used."""

    words: str
    """Reason as a clause for messages, after "because" or a colon. A sentence with advice may follow."""
    advice: str = ""
    """Advice for a warning, without a period; empty if no warning is raised, such as for a device that the user has chosen."""

    @property
    def description(self) -> str:
        """Text after the name in a row of ``DecoderTable``."""
        return f"not used: {self.words}"


DecodersByName: TypeAlias = Mapping[str, FileDecoder | Absence]
"""Name of a decoder → decoder, or the reason why it is not used.

In order of precedence: a file is decoded by the first decoder that takes it (``FileDecoder.takes``).
"""

_created: dict[tuple[torch.device, str], FileDecoder] = {}
"""(device, name) → decoder of a card. It is created once per process, because setting up nvJPEG takes over a second."""

_creation_lock = threading.Lock()


class DecoderTable(dict[str, FileDecoder | Absence]):
    """Printable table of the decoders of a stage: files and libraries of each decoder, or the reason why it is not used.

    Keys and values: as in ``DecodersByName``.
    """

    def __str__(self) -> str:
        return "\n".join(f"{name:8} {decoder.description}" for name, decoder in self.items())

    __repr__ = __str__


def find(backend: Backend, device: torch.device) -> DecodersByName:
    """Return the decoders of images for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` names a decoder that cannot be used.

    Warns:
        GpuAugWarning: If a GPU's images are decoded on the CPU because nvJPEG is missing or cannot be set up, or if decoding
            will wait for the training step.
    """
    decoders = {
        decoder_type.name: _find_on_card(decoder_type, backend, device, _create_jpeg_decoder)
        for decoder_type in (Engines, Hybrid)
    }
    _report_absence("images", backend, decoders)
    if usable(decoders):
        if isinstance(engines := decoders["engines"], Absence) and engines.advice:
            _log.info("Images are decoded by host threads and the card together, because %s.", engines.words)
        if nvjpeg.queues < nvjpeg.MAX_QUEUES:
            warn(
                f"Images are not decoded while a model trains, because {nvjpeg.QUEUES} is {nvjpeg.queues}: decoding waits for "
                f"each step. Import gpuaug before anything uses the GPU, or set {nvjpeg.QUEUES}={nvjpeg.MAX_QUEUES} for the "
                "process."
            )
    return {**decoders, "cpu": Cpu()}


def find_clips(backend: Backend, device: torch.device) -> DecodersByName:
    """Return the decoders of clips for a stage with this ``backend`` on ``device``.

    Raises:
        DeviceError: If ``backend`` is ``"nvdec"``, and NVDEC cannot be used.

    Warns:
        GpuAugWarning: If a GPU's clips are decoded on the CPU because PyNvVideoCodec is missing or cannot be loaded.
    """
    decoder = _find_on_card(nvdec.NvDec, "cpu" if backend == "cpu" else "auto", device, _create_nvdec)
    _report_absence("clips", backend, {"nvdec": decoder})
    reason = f"PyAV {libav.OLDEST} or newer is not installed. {libav.INSTALL}"
    pyav = PyAv() if libav.find_module() is not None else Absence(reason)
    return {"nvdec": decoder, "pyav": pyav}


def usable(decoders: DecodersByName) -> list[FileDecoder]:
    """Return the decoders that are used, in order of precedence."""
    return [decoder for decoder in decoders.values() if isinstance(decoder, FileDecoder)]


def _find_on_card(
    decoder_type: type[Engines | Hybrid | nvdec.NvDec],
    backend: Backend,
    device: torch.device,
    create: Callable[[Any, torch.device], FileDecoder | Absence],
) -> FileDecoder | Absence:
    """Return the decoder of a device: an existing decoder, or a new one by ``create(decoder_type, device)``.

    Returns:
        The decoder, or the reason why it is not used. If it cannot be created, the next call tries again.
    """
    if backend not in ("auto", decoder_type.name):
        return Absence(f"backend={backend!r}")
    if device.type != "cuda":
        return Absence(f"the device is {device}")
    with _creation_lock:
        decoder = _created.get((device, decoder_type.name)) or create(decoder_type, device)
        if isinstance(decoder, FileDecoder):
            _created[device, decoder_type.name] = decoder
    return decoder


def _create_jpeg_decoder(decoder_type: type[Engines | Hybrid], device: torch.device) -> FileDecoder | Absence:
    """Return a new JPEG decoder of a card, or the reason why it cannot be created."""
    if nvjpeg.library() is None:
        others = nvjpeg.other_majors()
        reason = f"nvJPEG is installed only for CUDA {', '.join(others)}" if others else "nvJPEG is not installed"
        return Absence(reason, f"Run pip install 'gpuaug[decode-cu{nvjpeg.major()}]'")
    try:
        return decoder_type(device)
    except nvjpeg.NvJpegError as error:
        if decoder_type is Engines and error.status in _NO_ENGINES:
            return Absence(f"the card has no JPEG engines ({error.status})", _FREE_MEMORY)
        return Absence(f"nvJPEG cannot be set up ({nvjpeg.STATUS.get(error.status, error.status)})", _FREE_MEMORY)


def _create_nvdec(decoder_type: type[nvdec.NvDec], device: torch.device) -> FileDecoder | Absence:
    """Return a new ``NvDec``, or the reason why it cannot be created."""
    try:
        if nvdec.library() is None:
            return Absence("PyNvVideoCodec is not installed", libav.INSTALL)
        # This call raises an error if there is no memory for a CUDA context. PyNvVideoCodec would end the process instead.
        torch.cuda.mem_get_info(device)
        decoder = decoder_type(device)
    except Exception as error:  # any type: the import of PyNvVideoCodec loads libraries of the driver, which may fail
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return Absence(f"PyNvVideoCodec cannot be set up ({reason})", _ADD_VIDEO)
    # ``caps``: limits of each codec that the card decodes. They are empty if it decodes none.
    return decoder if decoder.caps else Absence("the card has no video engines", _ADD_VIDEO)


def _report_absence(content: str, backend: Backend, decoders: DecodersByName) -> None:
    """Warn if no decoder of the card can be used, or raise an error if ``backend`` names one. No warning on other devices.

    Args:
        content: ``"images"`` or ``"clips"``, for the message.
        backend: Argument of the stage, which may name one of the decoders.
        decoders: Decoders of the card. The last can decode the files of the others, too, so the message has its reason.
    """
    absences = [(name, decoder) for name, decoder in decoders.items() if isinstance(decoder, Absence)]
    if len(absences) < len(decoders):
        return
    for name, absence in reversed(absences):
        reason = absence.words
        if name == backend:
            raise DeviceError(
                f"backend must be 'auto', or name a decoder that can be used here, got {backend!r}: {reason}. Leave it out."
            )
        if absence.advice:
            warn(
                f"The CPU decodes {content}, which may be too slow for a GPU, because the card does not decode: {reason}. "
                f"{absence.advice}, or pass backend='cpu' to the DecodeStage."
            )
            return
