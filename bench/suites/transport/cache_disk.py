"""Rate at which a later epoch reads the rows of a feature cache from the disk, and the rate of the disk.

    python -m bench run cache_disk

Rows of 64 KiB, as of latents at 512 pixels, which the suite records first. Before each reading, the files of rows are removed
from the page cache; ``cached_share`` is the share of their pages that were in memory nevertheless. Rows:

disk      ceiling: threads read all files from the first byte to the last, as many threads as workers
cached    an epoch in random order through a ``StreamedLoader``, without a step, from the first batch to the last
"""

import ctypes
import mmap
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.harness import flags, measurement
from bench.harness.console import print_rows
from gpuaug.benchkit.environment import environment

ROW_SHAPE = 8, 64, 64
PIECE_BYTES = 4 << 20
COLUMNS = "name", "gb_per_s", "of_ceiling", "cached_share"


class Named(Dataset[dict[str, Any]]):
    """``count`` samples of one small file, each with an ``id`` that names its row."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": gpuaug.read_encoded(self.path), "id": str(index)}


class Noise(nn.Module):
    """Encoder whose features, (B, 8, 64, 64) bfloat16, are random numbers that no file system compresses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(ROW_SHAPE))

    def forward(self, images: Tensor) -> Tensor:
        return (self.noise + images.float().mean((1, 2, 3)).view(-1, 1, 1, 1)).bfloat16()


def stacked(images: gpuaug.Ragged) -> Tensor:
    """Return images of one size as a tensor (B, 3, H, W)."""
    return torch.stack(list(images))


def files_of(folder: Path) -> list[Path]:
    """Return the files of rows of a cache."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def drop(paths: Sequence[Path]) -> float:
    """Remove files from the page cache. Returns the share of their pages that are in memory nevertheless."""
    os.sync()
    cached = count = 0
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = np.memmap(path, np.uint8, "r")
        flags = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        # Unlike a read that must not wait, the call starts no reading ahead.
        ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, len(mapped), flags.ctypes.data)))
        cached += int((flags % 2).sum())
        count += len(flags)
    return cached / count


def read_files(paths: Sequence[Path], threads: int) -> float:
    """Read files whole. Returns bytes per second."""

    def read(path: Path) -> int:
        buffer = bytearray(PIECE_BYTES)
        total = 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
        return total

    start = perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, paths))
    return total / (perf_counter() - start)


def read_epoch(loader: gpuaug.StreamedLoader, device: torch.device) -> float:
    """Read an epoch of rows. Returns bytes of rows per second, from the first batch to the last."""
    batches = iter(loader)
    next(batches)
    start = perf_counter()
    total = sum(batch["features"].nbytes for batch in batches)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return total / (perf_counter() - start)


def measure_readers(options: Namespace, root: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (bytes per second, cached share) of each repeat, for each row."""
    image, rows = root / "image.png", root / "rows"
    Image.new("RGB", (8, 8)).save(image)
    cache = gpuaug.FeatureCache(rows)
    encode = gpuaug.FeatureStage(Noise().to(options.device), on="image", into="features", cache=cache)
    files = DataLoader(
        cache.wrap(Named(image, options.count), key="id"),
        options.batch[0],
        shuffle=True,
        num_workers=options.workers,
        collate_fn=gpuaug.collate_encoded,
    )
    results: dict[str, list[tuple[float, float]]] = {"disk": [], "cached": []}
    stages = [gpuaug.DecodeStage(on="image"), gpuaug.TransformStage(stacked, on="image"), encode]
    with gpuaug.StreamedLoader(files, stages, device=options.device, seed=0) as loader:
        dropped = -1
        while dropped != loader.stats().rows_dropped:  # a slow disk drops rows, which the next epoch encodes again
            dropped = loader.stats().rows_dropped
            for _ in loader:
                pass
        paths = files_of(rows)
        read_before = loader.stats().rows_read
        readers: dict[str, Callable[[], float]] = {
            "disk": lambda: read_files(paths, max(options.workers, 1)),
            "cached": lambda: read_epoch(loader, options.device),
        }
        for _ in range(options.repeats):
            for name, read in readers.items():
                share = drop(paths)
                results[name].append((read(), share))
        rows_read = loader.stats().rows_read - read_before
    if rows_read != options.count * options.repeats:
        raise RuntimeError(f"{options.count * options.repeats} rows must be read, got {rows_read}.")
    return results


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("cache_disk", __doc__, batch="64", repeats=3)
    parser.add_argument("--count", type=int, default=65_536, help="number of rows (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary folder)")
    options = flags.parse(parser, argv)
    machine = environment(options.device)
    start = perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure_readers(options, Path(folder))
    ceiling = median(rate for rate, _ in results["disk"])
    rows = [
        {
            "case": "rows of 64 KiB",
            "name": name,
            "batch_size": options.batch[0],
            "gb_per_s": median(rate for rate, _ in rates) / 1e9,
            "gb_per_s_low": min(rate for rate, _ in rates) / 1e9,
            "gb_per_s_high": max(rate for rate, _ in rates) / 1e9,
            "of_ceiling": median(rate for rate, _ in rates) / ceiling,
            "cached_share": max(share for _, share in rates),
        }
        for name, rates in results.items()
    ]
    print_rows([{key: row[key] for key in COLUMNS} for row in rows], "cache_disk: bytes of rows per second")
    settings = {
        "baseline": "disk",
        "ours": ["cached"],
        "ceilings": ["disk"],
        "columns": list(COLUMNS),
        "row_bytes": 2 * torch.Size(ROW_SHAPE).numel(),
    }
    return measurement.finish("cache_disk", options, rows, settings, machine, start)
