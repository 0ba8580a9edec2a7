"""Decoders alone: the same files in memory, decoded repeatedly, without a loader or further stages.

Each yields (images, labels) endlessly, like the loaders, and may run ahead of the device.
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
from bench.peers.file_loaders import Batches, FileCase, Way, streamed
from bench.peers.nvjpeg import BatchedDecoder
from gpuaug.benchkit.photos import class_folders

ENGINES = "engines alone"
OURS = "gpuaug alone"
CPU = "gpuaug, CPU alone"
NVIMAGECODEC = "nvImageCodec alone"
TORCHCODEC = "torchcodec alone"
TORCHVISION = "torchvision alone"

_BATCHES = 4


def paths(case: FileCase) -> list[list[str]]:
    """Paths of a few batches of files, from all classes. A folder with fewer files is repeated."""
    samples = class_folders(case.root, None).samples
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    endless = cycle(samples[index][0] for index in order)
    return [[next(endless) for _ in range(case.batch_size)] for _ in range(_BATCHES)]


def encoded(case: FileCase) -> list[Any]:
    """The same files as batches of ``collate_encoded``, page-locked for a GPU."""
    made = [gpuaug.collate_encoded([gpuaug.read_encoded(path) for path in batch]) for batch in paths(case)]
    return [batch.pin_memory() for batch in made] if case.device.type == "cuda" else made


def stage_alone(case: FileCase, stack: ExitStack, *, backend: str = "engines") -> Batches:
    """Encoded batches in memory through a ``StreamedLoader`` whose only stage is a ``gpuaug.DecodeStage``.

    There are no workers, no files to read and no augmentation. The stage is in a loader, because a stage that is called by
    itself sets its decoders up for each batch.
    """
    batches = [[batch, torch.zeros(len(batch))] for batch in encoded(case)]
    return streamed(case, stack, loaders.cycle(batches), [gpuaug.DecodeStage(backend=backend)])


def _engines(case: FileCase, _stack: ExitStack) -> Batches:
    decoder = BatchedDecoder(case.device)
    for batch in cycle([decoder.prepare(files) for files in _in_memory(case)]):
        decoder.decode(batch)
        yield batch, range(case.batch_size)


def beside_training(case: FileCase, stack: ExitStack, *, resident: Batches, backend: str = "engines") -> Batches:
    """Batches that are on the card already, while as many are decoded and dropped.

    Measures the cost of decoding for a training step, without workers and augmentation: the loop waits for each decoded batch
    and drops it.

    Args:
        case: The files.
        stack: Closes the decoding loader.
        resident: The batches that are trained on.
        backend: The ``backend`` of the ``DecodeStage``.
    """
    decoded = stage_alone(case, stack, backend=backend)
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
        kinds = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        decoder = nvimgcodec.Decoder(nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=case.cores, backends=kinds)
    for batch in cycle(_in_memory(case)):
        images = decoder.decode([nvimgcodec.CodeStream(file) for file in batch])
        if any(image is None for image in images):
            raise MissingError(f"{sum(image is None for image in images)} of {len(images)} images were not decoded")
        yield images, images


def _torchcodec(case: FileCase, _stack: ExitStack) -> Batches:
    try:
        from torchcodec.decoders import decode_jpeg
    # Importing raises a RuntimeError where libraries that it is linked to are missing.
    except (ImportError, RuntimeError) as error:
        raise MissingError(f"not installed: {error}") from None
    return _in_torch(case, lambda files: decode_jpeg(files, device=case.device))


def _torchvision(case: FileCase, _stack: ExitStack) -> Batches:
    from torchvision.io import ImageReadMode, decode_jpeg

    return _in_torch(case, lambda files: decode_jpeg(files, mode=ImageReadMode.RGB, device=case.device))


def _in_torch(case: FileCase, decode: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    # Both take tensors of bytes, on the host.
    batches = [[torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in batch] for batch in _in_memory(case)]
    for batch in cycle(batches):
        images = decode(batch)
        yield images, images


def _in_memory(case: FileCase) -> list[list[bytes]]:
    return [[Path(path).read_bytes() for path in batch] for batch in paths(case)]


DECODERS: dict[str, Way] = {
    ENGINES: Way(_engines, needs_gpu=True),
    OURS: Way(partial(stage_alone, backend="auto")),
    CPU: Way(partial(stage_alone, backend="cpu")),
    NVIMAGECODEC: Way(_nvimagecodec),
    TORCHCODEC: Way(_torchcodec),
    TORCHVISION: Way(_torchvision),
}
"""Name of a row: its decoder."""
