"""Decoders alone: the same files in memory, decoded repeatedly, without a loader or further stages.

Each decoder is an endless iterator of (images, labels), like the loaders, and may run ahead of the device.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpuaug
from bench.data import loaders
from bench.harness.optional_rows import MissingError
from bench.peers.file_loaders import Batches, FileCase, LoaderSpec, streamed, torchcodec_decoders
from bench.peers.nvjpeg import BatchedDecoder
from gpuaug.benchkit.photos import class_folders

ENGINES = "engines alone"
OURS = "gpuaug alone"
CPU = "gpuaug, CPU alone"
NVIMAGECODEC = "nvImageCodec alone"
TORCHCODEC = "torchcodec alone"
TORCHVISION = "torchvision alone"

_BATCH_COUNT = 4


def path_batches(case: FileCase) -> list[list[str]]:
    """Return the paths of a few batches of files, drawn from all classes. If there are too few files, they are repeated."""
    samples = class_folders(case.root, None).samples
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled_paths = cycle(samples[index][0] for index in order)
    return [[next(shuffled_paths) for _ in range(case.batch_size)] for _ in range(_BATCH_COUNT)]


def encoded_batches(case: FileCase) -> list[Any]:
    """Return the files of ``path_batches`` as batches of ``collate_encoded``, page-locked if the device is a GPU."""
    batches = [gpuaug.collate_encoded([gpuaug.read_encoded(path) for path in batch]) for batch in path_batches(case)]
    return [batch.pin_memory() for batch in batches] if case.device.type == "cuda" else batches


def decode_stage_alone(case: FileCase, stack: ExitStack, *, backend: str = "engines") -> Batches:
    """Decode encoded batches in memory by a ``StreamedLoader`` whose only stage is a ``gpuaug.DecodeStage``.

    There are no workers, no files to read and no augmentation. A loader is needed, because a stage outside of a loader
    creates its decoders for each batch.
    """
    batches = [[batch, torch.zeros(len(batch))] for batch in encoded_batches(case)]
    return streamed(case, stack, loaders.repeat_batches(batches), [gpuaug.DecodeStage(backend=backend)])


def _engines(case: FileCase, _stack: ExitStack) -> Batches:
    decoder = BatchedDecoder(case.device)
    for batch in cycle([decoder.prepare(files) for files in _file_contents(case)]):
        decoder.decode(batch)
        yield batch, range(case.batch_size)


def decode_beside_step(case: FileCase, stack: ExitStack, *, resident: Batches, backend: str = "engines") -> Batches:
    """Yield batches that are on the card already; for each of them, one batch is decoded and dropped.

    Measures the cost of decoding for a training step, without workers and augmentation.

    Args:
        case: Files to decode.
        stack: Closes the decoding loader.
        resident: Batches for the training step.
        backend: Argument ``backend`` of the ``DecodeStage``.
    """
    decoded = decode_stage_alone(case, stack, backend=backend)
    for images, labels in resident:
        next(decoded)
        yield images, labels


def _nvimagecodec(case: FileCase, _stack: ExitStack) -> Batches:
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    if case.device.type == "cuda":
        decoder = nvimgcodec.Decoder(device_id=case.device.index or 0, max_num_cpu_threads=case.cores)
    else:
        backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        decoder = nvimgcodec.Decoder(nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=case.cores, backends=backends)
    for batch in cycle(_file_contents(case)):
        images = decoder.decode([nvimgcodec.CodeStream(file) for file in batch])
        if any(image is None for image in images):
            raise MissingError(f"{sum(image is None for image in images)} of {len(images)} images were not decoded")
        yield images, images


def _torchcodec(case: FileCase, _stack: ExitStack) -> Batches:
    decoders = torchcodec_decoders()
    return _decode_tensors(case, lambda files: decoders.decode_jpeg(files, device=case.device))


def _torchvision(case: FileCase, _stack: ExitStack) -> Batches:
    from torchvision.io import ImageReadMode, decode_jpeg

    return _decode_tensors(case, lambda files: decode_jpeg(files, mode=ImageReadMode.RGB, device=case.device))


def _decode_tensors(case: FileCase, decode: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    # torchcodec and torchvision take tensors of bytes, on the host.
    batches = [[torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in batch] for batch in _file_contents(case)]
    for batch in cycle(batches):
        images = decode(batch)
        yield images, images


def _file_contents(case: FileCase) -> list[list[bytes]]:
    return [[Path(path).read_bytes() for path in batch] for batch in path_batches(case)]


DECODERS: dict[str, LoaderSpec] = {
    ENGINES: LoaderSpec(_engines, needs_gpu=True),
    OURS: LoaderSpec(partial(decode_stage_alone, backend="auto")),
    CPU: LoaderSpec(partial(decode_stage_alone, backend="cpu")),
    NVIMAGECODEC: LoaderSpec(_nvimagecodec),
    TORCHCODEC: LoaderSpec(_torchcodec),
    TORCHVISION: LoaderSpec(_torchvision),
}
"""Name of a row: its decoder, as an endless loader."""
