"""Cases of the suite ``files``: their files, rows and steps.

A case is named ``SET``, ``LOOP`` or ``SET/LOOP``. A case without a loop only loads; without a set, its files are the small
ones.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torchvision import models

from bench.data import encoded_images, raw_images, web_images
from bench.harness.loops import Trainer, autocast_dtype
from bench.peers import decoders, file_loaders
from bench.peers.file_loaders import DALI, LOADERS, MAPPED, OURS, OURS_MIN_SIDE, WORKERS, FileCase, LoaderSpec

SETS = (*encoded_images.COUNTS, *web_images.COUNTS)
DECODE, RAW, NO_ENGINES, CPU = "decode", "raw", "no-engines", "cpu"
STEP_ALONE, STEP_BESIDE = "step alone", "step, engines beside"

_CAMERA_SHARE = 8  # divisor of the batch size, since an image has fifty times the pixels
_RAW_IMAGES, _RAW_PX = 4096, 256  # 0.8 GB, more than caches hold


class CaseName(NamedTuple):
    """Parsed name of a case: a set of files, and a loop. The loop is empty where batches are only loaded."""

    file_set: str
    loop: str

    @property
    def loads_only(self) -> bool:
        """Whether rows are loaders without a training step. They are measured with every number of cores."""
        return self.loop in ("", NO_ENGINES, CPU)

    @property
    def exists(self) -> bool:
        """Whether the suite has a case of this name."""
        loops = ("", DECODE, NO_ENGINES, CPU, *models.list_models(module=models))
        return self == ("small", RAW) or (self.file_set in SETS and self.loop in loops)


@dataclass(frozen=True)
class Case:
    """Rows to compare, with their files and their step.

    Args:
        title: Name of the case in the result.
        files: Files that the rows read.
        loaders: Name of a row: its loader.
        step: Called with the images and labels of each batch.
        trains: Whether ``step`` is a training step, so that the host may run ahead of the device.
        ceiling: Name of the row that is an upper bound for the others.
        settings_key: Key of the best settings of the rows. Cases with a training step use the key of the loaders of the same
            files, and start from their settings.
    """

    title: str
    files: FileCase
    loaders: dict[str, LoaderSpec]
    step: Callable[[Any, Any], object]
    trains: bool = False
    ceiling: str = decoders.ENGINES
    settings_key: str = ""

    @property
    def labels(self) -> dict[str, Any]:
        """Labels of the rows in the result."""
        return {"case": self.title, "cores": self.files.cores, "batch_size": self.files.batch_size}


def parse_name(name: str) -> CaseName:
    """Split the name of a case into its set of files and its loop."""
    file_set, slash, loop = name.partition("/")
    return CaseName(file_set, loop) if slash or file_set in SETS else CaseName("small", file_set)


def make(name: str, batch_size: int, options: Namespace) -> Case:
    """Return the case called ``name``. Writes its files if they are missing."""
    case_name = parse_name(name)
    cores = options.cores[0]
    title = f"{case_name.file_set}, {case_name.loop}".removeprefix("small, ") if case_name.loop else case_name.file_set
    title = "data" if name == "small" and options.data else title.replace("-", " ")
    title += f", {cores} core{'s' * (cores > 1)}" + (f", held to {options.rate:g} images/s" if options.rate else "")
    if case_name.file_set == "camera":
        batch_size = max(1, batch_size // _CAMERA_SHARE)
    files = FileCase(_corpus(case_name, options), batch_size, options.size, options.device, cores, options.workers)
    if case_name.loop == "":
        left_out = {MAPPED} if case_name.file_set == "camera" else {MAPPED, OURS_MIN_SIDE}
        loaders = {row: loader for row, loader in LOADERS.items() if row not in left_out}
        loaders |= {decoders.ENGINES: decoders.DECODERS[decoders.ENGINES]}
    elif case_name.loop == NO_ENGINES:
        loaders = file_loaders.WITHOUT_ENGINES
    elif case_name.loop == CPU:
        loaders = file_loaders.ON_CPU
    elif case_name.loop == DECODE:
        loaders = decoders.DECODERS
    elif case_name.loop == RAW:
        loaders = {MAPPED: LOADERS[MAPPED]}
    else:
        return _training(case_name, title, files)
    return Case(title, files, loaders, no_step, settings_key=f"{case_name.file_set} {case_name.loop}")


def no_step(*_: object) -> None:
    """Step of a loop that only loads."""


def _corpus(case_name: CaseName, options: Namespace) -> encoded_images.Corpus:
    if case_name.loop == RAW:
        root = raw_images.make(encoded_images.make("small"), _RAW_IMAGES, _RAW_PX)
        return encoded_images.Corpus(root, _RAW_IMAGES, 3.0 * _RAW_PX**2, (_RAW_PX, _RAW_PX), {"count": _RAW_IMAGES})
    if case_name.file_set in web_images.COUNTS:
        root = web_images.make(case_name.file_set, folder=options.photographs)
        corpus = encoded_images.corpus(root)
        return corpus._replace(facts=corpus.facts | web_images.facts(root))
    if case_name.file_set == "small" and options.data:
        return encoded_images.corpus(options.data)
    return encoded_images.corpus(encoded_images.make(case_name.file_set))


def _training(case_name: CaseName, title: str, files: FileCase) -> Case:
    device = files.device
    dtype = autocast_dtype(files.device)
    model = models.get_model(case_name.loop, weights=None).to(device, memory_format=torch.channels_last)
    shape = (files.batch_size, 3, files.size, files.size)
    image_batches = [torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2)]
    resident = [(images, torch.randint(1000, shape[:1], device=device)) for images in image_batches]
    loaders = {name: LOADERS[name] for name in (WORKERS, DALI, OURS)} | {
        STEP_BESIDE: LoaderSpec(partial(decoders.decode_beside_step, resident=cycle(resident)), needs_gpu=True),
        STEP_ALONE: LoaderSpec(lambda *_: cycle(resident)),
    }
    step = Trainer(model, autocast=dtype)
    return Case(title, files, loaders, step, trains=True, ceiling=STEP_ALONE, settings_key=f"{case_name.file_set} ")
