"""Decoders by themselves: the same files, in memory, decoded again and again, with no loader and nothing behind them.

Each gives (images, labels) without an end, as the loaders do, and may run ahead of the device.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import torch
from torch import Tensor

import gpuaug
from bench.harness.optional_rows import MissingError
from bench.peers.file_loaders import Batches, FileCase, Way
from bench.peers.nvjpeg import BatchedDecoder
from gpuaug.benchkit.photos import class_folders

ENGINES = "engines alone"
OURS = "gpuaug alone"
CPU = "gpuaug, CPU alone"
NVIMAGECODEC = "nvImageCodec alone"
TORCHCODEC = "torchcodec alone"
TORCHVISION = "torchvision alone"

_BATCHES = 4
_AHEAD = 3  # steps that a training loop may be ahead of the device while decoding goes on beside it


def paths(case: FileCase) -> list[list[str]]:
    """The files of a few batches, of all classes. A folder with fewer is gone through again."""
    samples = class_folders(case.root, None).samples
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    endless = cycle(samples[index][0] for index in order)
    return [[next(endless) for _ in range(case.batch_size)] for _ in range(_BATCHES)]


def encoded(case: FileCase) -> list[Any]:
    """The same as gpuaug's workers collate it, page-locked for a GPU."""
    made = [gpuaug.collate_encoded([gpuaug.read_encoded(path) for path in batch]) for batch in paths(case)]
    return [batch.pin_memory() for batch in made] if case.device.type == "cuda" else made


def loader_alone(case: FileCase, stack: ExitStack, *, backend: str) -> Batches:
    """``gpuaug.DecodeStage`` in a loader over encoded batches that are in memory."""
    ready = [(batch, range(len(batch))) for batch in encoded(case)]
    loader = gpuaug.StreamedLoader(cycle(ready), [gpuaug.DecodeStage(backend=backend)], device=case.device)
    stack.callback(loader.close)
    return iter(loader)


def _engines(case: FileCase) -> Batches:
    decoder = BatchedDecoder(case.device)
    for batch in cycle([decoder.prepare(files) for files in _in_memory(case)]):
        decoder.decode(batch)
        yield batch, range(case.batch_size)


def beside_training(case: FileCase, stack: ExitStack, *, resident: Batches) -> Batches:
    """Batches that are on the card already, while a thread decodes as many files and throws them away.

    What decoding costs a training step, apart from the loader, the copies and the augmentation: decoding goes on at the pace of
    the step, on a stream of high priority, and the loop is a few steps ahead of the device at most.

    Args:
        case: The files.
        stack: Ends the thread.
        resident: What is trained on.
    """
    started, ended, failed = Semaphore(0), [False], []
    decoder = BatchedDecoder(case.device)
    batches = [decoder.prepare(files) for files in _in_memory(case)]

    def decode() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(case.device, priority=-1)):
                for batch in cycle(batches):
                    started.acquire()
                    if ended[0]:
                        return
                    decoder.decode(batch)
        except Exception as error:  # raised in the loop, whose row it is
            failed.append(error)

    thread = Thread(target=decode, daemon=True)

    def end() -> None:
        ended[0] = True
        started.release()
        thread.join()

    def looped() -> Iterator[tuple[Any, Any]]:
        trained: deque[torch.cuda.Event] = deque()
        for images, labels in resident:
            if failed:
                raise failed[0]
            started.release()
            yield images, labels
            trained.append(torch.cuda.Event())
            trained[-1].record()
            if len(trained) > _AHEAD:
                trained.popleft().synchronize()

    thread.start()
    stack.callback(end)
    return looped()


def _nvimagecodec(case: FileCase) -> Batches:
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


def _torchcodec(case: FileCase) -> Batches:
    try:
        from torchcodec.decoders import decode_jpeg
    # A RuntimeError where the libraries that it is linked to are missing.
    except (ImportError, RuntimeError) as error:
        raise MissingError(f"not installed: {error}") from None
    return _in_torch(case, lambda files: decode_jpeg(files, device=case.device))


def _torchvision(case: FileCase) -> Batches:
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


def _way(decode: Callable[..., Batches], *, needs_gpu: bool = False, **options: Any) -> Way:
    return Way(lambda case, _stack: decode(case, **options), needs_gpu=needs_gpu)


DECODERS: dict[str, Way] = {
    ENGINES: _way(_engines, needs_gpu=True),
    OURS: Way(partial(loader_alone, backend="auto")),
    CPU: Way(partial(loader_alone, backend="cpu")),
    NVIMAGECODEC: _way(_nvimagecodec),
    TORCHCODEC: _way(_torchcodec),
    TORCHVISION: _way(_torchvision),
}
"""Row name to the decoder."""
