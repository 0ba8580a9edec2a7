"""A long run of small batches, in which no resource of the process may grow.

    python -m bench soak                                          100 000 batches on a CPU, 1 000 000 on a GPU
    python -m bench soak --batches 20000                          fewer
    python -m bench soak --json bench/results/soak.json           and python -m bench plot draws it
    python -m bench soak --folder web --batch 64 --seconds 1200   files as on the web, for 20 minutes

Loaders take turns, each for one epoch with a new iterator: a list; a generator, read by a thread; the ring with two workers;
a transform and a frozen encoder, captured on a GPU; ragged images through ``gpuaug.fuse``; encoded images through a
``DecodeStage``; and a new loader per loop, where loops end early and keep their batches. About 100 times per run, between
epochs, resident, private, shared and reserved GPU memory, threads and descriptors are read. Each resource is a row, whose
``growth`` is the median of the last quarter of its readings minus the median of the second quarter; the first quarter is
warm-up. The run fails if a resource has grown by more than ``ALLOWED``. ``/dev/shm`` is only shown, since other processes write
there too. Ctrl-C ends the run with the readings so far.

With ``--folder``, one loader runs instead: workers pack the image files of a folder of class folders, or of the set ``web`` of
the suite ``files``, a ``DecodeStage`` decodes them, and ``gpuaug.fuse`` crops them to 224x224. A file that cannot be decoded is
replaced. Workers start anew in each epoch.
"""

import gc
import io
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuaug
from bench.data import web_images
from bench.harness import flags, measurement, processes
from bench.harness.console import console
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.photos import class_folders

BATCHES = {"cpu": 100_000, "cuda": 1_000_000}
"""Default number of batches per type of device."""

MAX_EPOCH_BATCHES = 2000
"""Largest number of batches in an epoch. Short runs have shorter epochs, and slow loaders a half or a tenth of this."""

READINGS = 100

ALLOWED = {
    "resident memory": 16 << 20,
    "private memory": 16 << 20,
    "shared memory": 1 << 20,
    "reserved GPU memory": 4 << 20,
    "threads": 0,
    "descriptors": 0,
}
"""Largest allowed ``growth`` of each resource. Values for memory, in bytes, allow for fragmentation of the heap."""


class RepeatedBatches:
    """Iterable that repeats batches from a list, ``count`` batches in total."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self._batches), self._count)


Epochs = dict[str, tuple[int, Callable[[], None]]]


def epochs(options: Namespace) -> Epochs:
    """Return (number of batches in an epoch, function that runs one epoch) for each loader."""
    side = options.size
    batch_size = options.batch[0]
    pin = options.device.type == "cuda"
    epoch_batches = min(MAX_EPOCH_BATCHES, max(options.batches // 40, 20))

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if pin else tensor

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)

    batches = [(pinned(images(batch_size)), pinned(torch.arange(batch_size))) for _ in range(8)]
    samples = [(image, index) for index, image in enumerate(images(epoch_batches // 2 * batch_size))]
    ragged = [gpuaug.collate_ragged([images(1)[0, :, : side - index % 3] for index in range(batch_size)]) for _ in range(8)]
    encoded = [gpuaug.collate_encoded([_encode_jpeg(images(1)[0]) for _ in range(batch_size)]) for _ in range(8)]
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 8)).to(options.device).requires_grad_(False)
    crop = K.AugmentationSequential(K.RandomResizedCrop((side, side)), K.RandomHorizontalFlip())
    feature_stages = [lambda batch: batch.float() / 255, gpuaug.FeatureStage(encoder)]
    generator = random.Random(0)

    def streamed(loader: Iterable[Any], stages: Sequence[Any] = (), feed: Any = "auto") -> gpuaug.StreamedLoader:
        return gpuaug.StreamedLoader(loader, stages, device=options.device, feed=feed)

    def full_epoch(loader: gpuaug.StreamedLoader) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                pass

        return run

    def left_early() -> None:
        loader = streamed(RepeatedBatches(batches, epoch_batches), feature_stages[:1])
        remaining = epoch_batches // 10
        while remaining > 0:
            count = generator.randint(1, 40)
            kept_batches = list(islice(loader, count))
            remaining -= len(kept_batches)

    worker_options = {"num_workers": 2, "batch_size": batch_size}
    return {
        "list": (epoch_batches, full_epoch(streamed(batches * (epoch_batches // len(batches))))),
        "generator": (epoch_batches, full_epoch(streamed(RepeatedBatches(batches, epoch_batches)))),
        "slots": (
            epoch_batches // 2,
            full_epoch(streamed(RepeatedBatches([(torch.arange(4.0),)] * 8, epoch_batches // 2), feed="ring")),
        ),
        "ring": (epoch_batches // 2, full_epoch(streamed(DataLoader(samples, **worker_options), feed="ring"))),
        "features": (epoch_batches, full_epoch(streamed(batches * (epoch_batches // len(batches)), feature_stages))),
        "ragged": (
            epoch_batches // 10,
            full_epoch(streamed(RepeatedBatches(ragged, epoch_batches // 10), [gpuaug.fuse(crop, ragged=True)])),
        ),
        "decoded": (
            epoch_batches // 10,
            full_epoch(streamed(RepeatedBatches(encoded, epoch_batches // 10), [gpuaug.DecodeStage()])),
        ),
        "left early": (epoch_batches // 10, left_early),
    }


def folder_epochs(options: Namespace) -> Epochs:
    """Return (number of batches in an epoch, function that runs one epoch) of a loader of ``--folder``."""
    dataset = class_folders(web_images.make("web") if options.folder == Path("web") else options.folder, None)
    dataset.loader = gpuaug.read_encoded
    workers = min(options.workers, 2) if options.device.type == "cpu" else options.workers
    files = DataLoader(dataset, options.batch[0], shuffle=True, num_workers=workers, collate_fn=gpuaug.collate_encoded)
    crop = K.AugmentationSequential(K.RandomResizedCrop((224, 224)), K.RandomHorizontalFlip())
    stages = [gpuaug.DecodeStage(on_error="replace"), gpuaug.fuse(crop, ragged=True)]
    loader = gpuaug.StreamedLoader(files, stages, device=options.device)

    def run() -> None:
        for images, _ in loader:
            images.sum()

    return {"files": (len(files), run)}


def _encode_jpeg(image: torch.Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG")
    return file.getvalue()


def run_epochs(epochs: Epochs, options: Namespace) -> tuple[list[tuple[int, dict[str, int]]], dict[str, Any]]:
    """Run epochs of all loaders in turn. Returns the readings (batches so far, resources), and settings of the result."""
    counts, seconds = dict.fromkeys(epochs, 0), dict.fromkeys(epochs, 0.0)
    batches = 0
    readings = list[tuple[int, dict[str, int]]]()
    run_start = perf_counter()
    try:
        while _share_done(options, batches, perf_counter() - run_start) < 1 or len(readings) < 4:
            for name, (count, run) in epochs.items():
                start = perf_counter()
                run()
                seconds[name] += perf_counter() - start
                counts[name] += count
                batches += count
                share = _share_done(options, batches, perf_counter() - run_start)
                if all(counts.values()) and share >= len(readings) / READINGS:
                    gc.collect()  # uncollected garbage does not count as growth
                    readings.append((batches, processes.resource_usage(options.device)))
    except KeyboardInterrupt:
        if len(readings) < 4:
            raise
    kind_settings = {name: {"batches": counts[name], "us_per_batch": 1e6 * seconds[name] / counts[name]} for name in counts}
    return readings, {"kinds": kind_settings, "batches_per_s": batches / (perf_counter() - run_start)}


def _share_done(options: Namespace, batches: int, seconds: float) -> float:
    return seconds / options.seconds if options.seconds else batches / options.batches


def row(name: str, readings: Sequence[tuple[int, int]], took_s: float) -> dict[str, Any]:
    """Return the result's row of a resource, from its readings (batches so far, value)."""
    values = [value for _, value in readings]
    quarter = max(len(values) // 4, 1)
    reference = median(values[quarter : 2 * quarter] or values)
    end = median(values[-quarter:])
    unit = f"_{processes.UNITS[name]}".rstrip("_")
    return {
        "name": name,
        f"start{unit}": values[0],
        f"end{unit}": end,
        f"growth{unit}": end - reference,
        "took_s": took_s,
        "readings": [list(reading) for reading in readings],
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("soak", __doc__, batch="2", size=8, seconds=0)
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="decode the files of a folder of class folders, or of the set web"
    )
    parser.add_argument("--batches", type=int, help=f"number of batches (default: {BATCHES})")
    options = flags.parse(parser, argv)
    options.batches = options.batches or BATCHES.get(options.device.type, BATCHES["cpu"])
    machine = environment(options.device)
    start = perf_counter()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with such small batches a second thread is no faster, and on a busy core a hundred times slower
    gc.collect()
    gc.freeze()  # so that the many collections visit only objects of the run
    try:
        readings, settings = run_epochs((folder_epochs if options.folder else epochs)(options), options)
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
    rows = [row(name, [(at, resources[name]) for at, resources in readings], perf_counter() - start) for name in readings[0][1]]
    result = measurement.finish("soak", options, rows, settings, machine, start)
    growing = []
    for resource_row in rows:
        name = resource_row["name"]
        growth = next(value for key, value in resource_row.items() if key in ("growth", "growth_bytes"))
        console.print(f"{name}: {growth:+,.0f} from the second quarter to the last")
        growing += [name] if growth > ALLOWED.get(name, growth) else []
    if growing:
        raise SystemExit(
            f"The suite failed, because the process holds more and more of: {', '.join(growing)}. The readings are in the file "
            "of --json."
        )
    return result
