"""A long run of small batches, in which no resource of the process may grow.

    python -m bench soak                                          100 000 batches on a CPU, 1 000 000 on a GPU
    python -m bench soak --batches 20000                          fewer
    python -m bench soak --json bench/results/soak.json           and python -m bench plot draws it

Loaders of several kinds take turns, each for an epoch with an iterator of its own: a list; a generator, which a thread reads;
the ring with two workers; a transform and a frozen encoder, captured on a GPU; ragged images through ``gpuaug.fuse``; encoded
images through a ``DecodeStage``; and loops that are left early with batches kept, on a new loader each. A hundred times in
all, between epochs, it reads resident, private, shared and reserved GPU memory, threads and descriptors. Each is a row, whose
``growth`` is the median of the last quarter of its readings minus the median of the second quarter; the first quarter is
warm-up. The run fails if one has grown by more than ``ALLOWED``. ``/dev/shm`` is only shown, since other processes write there
too. Ctrl-C ends the run with the readings so far.
"""

import gc
import io
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import kornia.augmentation as K
import torch
from torch import nn
from torch.utils.data import DataLoader

import gpuaug
from bench.harness import flags, measurement, processes
from bench.harness.console import console
from gpuaug.benchkit.environment import environment

BATCHES = {"cpu": 100_000, "cuda": 1_000_000}
"""Default number of batches, by type of device."""

MOST_EPOCH = 2000
"""Most batches of an epoch. Fewer if a kind would have less than ten epochs; slow kinds have a part of that."""

READINGS = 100

ALLOWED = {
    "resident memory": 16 << 20,
    "private memory": 16 << 20,
    "shared memory": 1 << 20,
    "reserved GPU memory": 4 << 20,
    "threads": 0,
    "descriptors": 0,
}
"""Largest ``growth`` of each resource. For memory in bytes, about the fragmentation of a heap."""


class Repeated:
    """Some batches, repeated by a generator."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self._batches), self._count)


Kinds = dict[str, tuple[int, Callable[[], None]]]


def kinds(options: Namespace) -> Kinds:
    """(batches of an epoch, function that runs one epoch) of each kind of loader."""
    side = options.size
    batch_size = options.batch[0]
    pin = options.device.type == "cuda"
    epoch = min(MOST_EPOCH, max(options.batches // 40, 20))

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if pin else tensor

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)

    few = [(pinned(images(batch_size)), pinned(torch.arange(batch_size))) for _ in range(8)]
    samples = [(image, index) for index, image in enumerate(images(epoch // 2 * batch_size))]
    ragged = [gpuaug.collate_ragged([images(1)[0, :, : side - index % 3] for index in range(batch_size)]) for _ in range(8)]
    encoded = [gpuaug.collate_encoded([_jpeg(images(1)[0]) for _ in range(batch_size)]) for _ in range(8)]
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 8)).to(options.device).requires_grad_(False)
    crop = K.AugmentationSequential(K.RandomResizedCrop((side, side)), K.RandomHorizontalFlip())
    featured = [lambda batch: batch.float() / 255, gpuaug.FeatureStage(encoder)]
    draw = random.Random(0)

    def streamed(loader: Iterable[Any], stages: Sequence[Any] = (), feed: Any = "auto") -> gpuaug.StreamedLoader:
        return gpuaug.StreamedLoader(loader, stages, device=options.device, feed=feed)

    def whole(loader: gpuaug.StreamedLoader) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                pass

        return run

    def left_early() -> None:
        loader = streamed(Repeated(few, epoch), featured[:1])
        left = epoch // 10
        while left > 0:
            count = draw.randint(1, 40)
            kept = list(islice(loader, count))
            left -= len(kept)

    workers = {"num_workers": 2, "batch_size": batch_size}
    return {
        "list": (epoch, whole(streamed(few * (epoch // len(few))))),
        "generator": (epoch, whole(streamed(Repeated(few, epoch)))),
        "slots": (epoch // 2, whole(streamed(Repeated([(torch.arange(4.0),)] * 8, epoch // 2), feed="ring"))),
        "ring": (epoch // 2, whole(streamed(DataLoader(samples, **workers), feed="ring"))),
        "features": (epoch, whole(streamed(few * (epoch // len(few)), featured))),
        "ragged": (epoch // 10, whole(streamed(Repeated(ragged, epoch // 10), [gpuaug.fuse(crop, ragged=True)]))),
        "decoded": (epoch // 10, whole(streamed(Repeated(encoded, epoch // 10), [gpuaug.DecodeStage()]))),
        "left early": (epoch // 10, left_early),
    }


def _jpeg(image: torch.Tensor) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG")
    return file.getvalue()


def soaked(epochs: Kinds, options: Namespace) -> tuple[list[tuple[int, dict[str, int]]], dict[str, Any]]:
    """Run epochs of all kinds in turn. Returns the readings, (batches so far, resources), and the run's settings."""
    counts, seconds = dict.fromkeys(epochs, 0), dict.fromkeys(epochs, 0.0)
    done = 0
    readings = list[tuple[int, dict[str, int]]]()
    began = perf_counter()
    try:
        while done < options.batches or len(readings) < 4:
            for name, (count, run) in epochs.items():
                start = perf_counter()
                run()
                seconds[name] += perf_counter() - start
                counts[name] += count
                done += count
                if all(counts.values()) and done >= len(readings) * options.batches / READINGS:
                    gc.collect()  # uncollected garbage is no growth
                    readings.append((done, processes.held(options.device)))
    except KeyboardInterrupt:
        if len(readings) < 4:
            raise
    kinds = {name: {"batches": counts[name], "us_per_batch": 1e6 * seconds[name] / counts[name]} for name in counts}
    return readings, {"kinds": kinds, "batches_per_s": done / (perf_counter() - began)}


def row(name: str, readings: Sequence[tuple[int, int]], took_s: float) -> dict[str, Any]:
    """The row of one resource, from its readings (batches, value)."""
    values = [value for _, value in readings]
    quarter = max(len(values) // 4, 1)
    early = median(values[quarter : 2 * quarter] or values)
    late = median(values[-quarter:])
    unit = f"_{processes.UNITS[name]}".rstrip("_")
    return {
        "name": name,
        f"start{unit}": values[0],
        f"end{unit}": late,
        f"growth{unit}": late - early,
        "took_s": took_s,
        "readings": [list(reading) for reading in readings],
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("soak", __doc__, batch="2", size=8)
    parser.add_argument("--batches", type=int, help=f"batches in all (default: {BATCHES})")
    options = flags.read(parser, argv)
    options.batches = options.batches or BATCHES.get(options.device.type, BATCHES["cpu"])
    found_environment = environment(options.device)
    start = perf_counter()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread gains nothing with batches this small, and on a busy core costs a hundredfold
    gc.collect()
    gc.freeze()  # so that each of many collections visits only objects of the run
    try:
        readings, settings = soaked(kinds(options), options)
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
    rows = [row(name, [(at, held[name]) for at, held in readings], perf_counter() - start) for name in readings[0][1]]
    made = measurement.finish("soak", options, rows, settings, found_environment, start)
    grown = []
    for each in rows:
        name = each["name"]
        growth = next(value for key, value in each.items() if key in ("growth", "growth_bytes"))
        console.print(f"{name}: {growth:+,.0f} from the second quarter to the last")
        grown += [name] if growth > ALLOWED.get(name, growth) else []
    if grown:
        raise SystemExit(
            f"The suite failed, because the process holds more and more of: {', '.join(grown)}. The readings are in the file "
            "of --json."
        )
    return made
