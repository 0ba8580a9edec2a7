"""The cases of the suite ``files``: their files, rows and steps.

A case is named ``SET``, ``LOOP`` or ``SET/LOOP``. A set alone is loaded; a loop alone runs on the small files.
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
from bench.harness.loops import Trainer, half
from bench.peers import decoders, file_loaders
from bench.peers.file_loaders import DALI, LOADERS, MAPPED, OURS, OURS_SCALED, WORKERS, FileCase, Way

SETS = (*encoded_images.COUNTS, *web_images.COUNTS)
DECODE, RAW, NO_ENGINES, CPU = "decode", "raw", "no-engines", "cpu"
STEP, BESIDE = "step alone", "step, engines beside"

_CAMERA_SHARE = 8  # divisor of the batch size: an image has fifty times the pixels
_RAW_IMAGES, _RAW_PX = 4096, 256  # 0.8 GB, more than caches hold


class Kind(NamedTuple):
    """A case's set of files and its loop; the loop is empty for loading alone."""

    files: str
    loop: str

    @property
    def loads(self) -> bool:
        """Whether rows are loaders without a step, which are measured with every number of cores."""
        return self.loop in ("", NO_ENGINES, CPU)

    @property
    def known(self) -> bool:
        """Whether there is such a case."""
        loops = ("", DECODE, NO_ENGINES, CPU, *models.list_models(module=models))
        return self == ("small", RAW) or (self.files in SETS and self.loop in loops)


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
        searched: Name under which the best settings of the rows are kept. A training step starts from the settings of the
            same files' loaders.
    """

    title: str
    files: FileCase
    ways: dict[str, Way]
    step: Callable[[Any, Any], object]
    trains: bool = False
    ceiling: str = decoders.ENGINES
    searched: str = ""

    @property
    def labels(self) -> dict[str, Any]:
        """Labels of the case's rows."""
        return {"case": self.title, "cores": self.files.cores, "batch_size": self.files.batch_size}


def kind(name: str) -> Kind:
    """The set and the loop that the name of a case says."""
    files, slash, loop = name.partition("/")
    return Kind(files, loop) if slash or files in SETS else Kind("small", files)


def make(name: str, batch_size: int, options: Namespace) -> Case:
    """The case called ``name``. Writes its files if they are missing."""
    found = kind(name)
    cores = options.cores[0]
    title = f"{found.files}, {found.loop}".removeprefix("small, ") if found.loop else found.files
    title = "data" if name == "small" and options.data else title.replace("-", " ")
    title += f", {cores} core{'s' * (cores > 1)}" + (f", held to {options.rate:g} images/s" if options.rate else "")
    if found.files == "camera":
        batch_size = max(1, batch_size // _CAMERA_SHARE)
    files = FileCase(_corpus(found, options), batch_size, options.size, options.device, cores, options.workers)
    if found.loop == "":
        left_out = {MAPPED} if found.files == "camera" else {MAPPED, OURS_SCALED}
        ways = {each: way for each, way in LOADERS.items() if each not in left_out}
        ways |= {decoders.ENGINES: decoders.DECODERS[decoders.ENGINES]}
    elif found.loop == NO_ENGINES:
        ways = file_loaders.WITHOUT_ENGINES
    elif found.loop == CPU:
        ways = file_loaders.ON_CPU
    elif found.loop == DECODE:
        ways = decoders.DECODERS
    elif found.loop == RAW:
        ways = {MAPPED: LOADERS[MAPPED]}
    else:
        return _training(found, title, files)
    return Case(title, files, ways, nothing, searched=f"{found.files} {found.loop}")


def nothing(*_: object) -> None:
    """The step of a loop that only loads."""


def _corpus(found: Kind, options: Namespace) -> encoded_images.Corpus:
    if found.loop == RAW:
        root = raw_images.make(encoded_images.make("small"), _RAW_IMAGES, _RAW_PX)
        return encoded_images.Corpus(root, _RAW_IMAGES, 3.0 * _RAW_PX**2, (_RAW_PX, _RAW_PX), {"count": _RAW_IMAGES})
    if found.files in web_images.COUNTS:
        root = web_images.make(found.files, folder=options.photographs)
        corpus = encoded_images.corpus(root)
        return corpus._replace(facts=corpus.facts | web_images.about(root))
    if found.files == "small" and options.data:
        return encoded_images.corpus(options.data)
    return encoded_images.corpus(encoded_images.make(found.files))


def _training(found: Kind, title: str, files: FileCase) -> Case:
    device = files.device
    dtype = half(files.device)
    model = models.get_model(found.loop, weights=None).to(device, memory_format=torch.channels_last)
    shape = (files.batch_size, 3, files.size, files.size)
    images = [torch.randn(shape, device=device, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2)]
    resident = [(each, torch.randint(1000, shape[:1], device=device)) for each in images]
    ways = {name: LOADERS[name] for name in (WORKERS, DALI, OURS)} | {
        BESIDE: Way(partial(decoders.beside_training, resident=cycle(resident)), needs_gpu=True),
        STEP: Way(lambda *_: cycle(resident)),
    }
    step = Trainer(model, autocast=dtype)
    return Case(title, files, ways, step, trains=True, ceiling=STEP, searched=f"{found.files} ")
