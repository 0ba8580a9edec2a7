"""The cases of the suite ``files``: their files, rows and steps."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torchvision import models

from bench.data import encoded_images, raw_images
from bench.harness.loops import Trainer, half
from bench.peers import decoders
from bench.peers.file_loaders import DALI, LOADERS, MAPPED, OURS, OURS_SCALED, WORKERS, FileCase, Way

LOADING = ("small", "camera", "mix")
DECODE, RAW = "decode", "raw"
STEP, BESIDE = "step alone", "step, engines beside"

_CAMERA_SHARE = 8  # divisor of the batch size: an image has fifty times the pixels
_RAW_IMAGES, _RAW_PX = 4096, 256  # 0.8 GB, more than caches hold


@dataclass(frozen=True)
class Case:
    """Rows that are measured with each other.

    Args:
        title: Name of the case in the result.
        files: The files that its rows read.
        ways: Name of a row: its way.
        step: Called with each batch.
        trains: Whether ``step`` is a training step, so that the host may run ahead of the device.
        ceiling: The row that is an upper bound for the others.
    """

    title: str
    files: FileCase
    ways: dict[str, Way]
    step: Callable[[Any, Any], object]
    trains: bool = False
    ceiling: str = decoders.ENGINES

    @property
    def labels(self) -> dict[str, Any]:
        """Labels of the case's rows."""
        return {"case": self.title, "cores": self.files.cores, "batch_size": self.files.batch_size}


def is_known(kind: str) -> bool:
    """Whether ``kind`` is the name of a case."""
    return kind in {*LOADING, DECODE, RAW} or kind in models.list_models(module=models)


def make(kind: str, batch_size: int, options: Namespace) -> Case:
    """The case ``kind``. Writes its files if they are missing."""
    cores = options.cores[0]
    title = "data" if kind == "small" and options.data else kind
    title += f", {cores} core{'s' * (cores > 1)}" + (f", held to {options.rate:g} images/s" if options.rate else "")
    if kind == "camera":
        batch_size = max(1, batch_size // _CAMERA_SHARE)
    files = FileCase(_corpus(kind, options), batch_size, options.size, options.device, cores, options.workers)
    if kind in LOADING:
        left_out = {MAPPED} if kind == "camera" else {MAPPED, OURS_SCALED}
        ways = {name: way for name, way in LOADERS.items() if name not in left_out}
        return Case(title, files, ways | {decoders.ENGINES: decoders.DECODERS[decoders.ENGINES]}, nothing)
    if kind == DECODE:
        return Case(title, files, decoders.DECODERS, nothing)
    if kind == RAW:
        return Case(title, files, {MAPPED: LOADERS[MAPPED]}, nothing)
    return _training(kind, title, files)


def nothing(*_: object) -> None:
    """The step of a loop that only loads."""


def _corpus(kind: str, options: Namespace) -> encoded_images.Corpus:
    if kind in ("camera", "mix"):
        return encoded_images.corpus(encoded_images.make(kind))
    if kind == RAW:
        root = raw_images.make(encoded_images.make("small"), _RAW_IMAGES, _RAW_PX)
        return encoded_images.Corpus(root, _RAW_IMAGES, 3.0 * _RAW_PX**2, (_RAW_PX, _RAW_PX))
    return encoded_images.corpus(options.data or encoded_images.make("small"))


def _training(model_name: str, title: str, files: FileCase) -> Case:
    device, dtype = files.device, half(files.device)
    model = models.get_model(model_name, weights=None).to(device, memory_format=torch.channels_last)
    shape = (files.batch_size, 3, files.size, files.size)
    images = [torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2)]
    resident = [(each, torch.randint(1000, shape[:1], device=device)) for each in images]
    ways = {name: LOADERS[name] for name in (WORKERS, DALI, OURS)} | {
        BESIDE: Way(partial(decoders.beside_training, resident=cycle(resident)), needs_gpu=True),
        STEP: Way(lambda *_: cycle(resident)),
    }
    return Case(title, files, ways, Trainer(model, autocast=dtype), trains=True, ceiling=STEP)
