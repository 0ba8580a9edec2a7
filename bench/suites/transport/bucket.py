"""From a bucket to augmented batches on the card: LitData's own transforms in workers, and gpuaug on LitData's bytes.

    python -m bench run bucket
    python -m bench bucket --batch 256 --workers 8 --store-processes 4

The bucket is a folder of the files ``small`` of the suite ``files``, which ``bench.peers.object_store`` serves on this machine:
no network is needed. All rows read it by LitData's ``StreamingRawDataset``, with the same number of workers. The store uses
cores of this machine. The suite needs the packages of the extra ``bench``, litdata and s3fs. Rows:

LitData, with transform     workers decode by torchvision and augment by v2, then a copy
gpuaug                      workers read bytes, DecodeStage, gpuaug.fuse
LitData, bytes alone        workers read bytes and drop them (a ceiling)
store, bytes alone          the same by one connection per worker and Python's http.client (the only row without litdata)
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.io import ImageReadMode, decode_image

import gpuaug
from bench.data import encoded_images, loaders, pipelines
from bench.harness import flags, measurement
from bench.harness.loops import Serial, autocast_dtype, loop
from bench.harness.optional_rows import MissingError, OptionalRow, peer_row
from bench.peers.object_store import ObjectStore
from gpuaug.benchkit.windows import Variant

LITDATA = "LitData, with transform"
OURS = "gpuaug"
BYTES = "LitData, bytes alone"
STORE = "store, bytes alone"


@contextmanager
def served(folder: Path, processes: int) -> Iterator[None]:
    """Context manager in which the clients of S3 read ``folder``, as the bucket of its name."""
    previous = dict(os.environ)
    with ObjectStore(folder.parent, processes) as store:
        os.environ.update(store.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(previous)


def bucket_loader(
    options: Namespace,
    folder: Path,
    batch_size: int,
    cache: str,
    *,
    transform: Callable[[bytes], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    pin: bool = False,
) -> DataLoader:
    """Return an endless ``DataLoader`` of LitData's (file or result of ``transform``, label).

    Only workers read files: LitData's client cannot be used in a process that is forked later.
    """
    try:
        from litdata import StreamingRawDataset
        from litdata.streaming import downloader
    except ImportError as error:
        raise MissingError(f"not installed: {error}") from None
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the store has no certificate
    names = class_names(folder)

    class Photos(StreamingRawDataset):
        def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
            labels = [names.index(self.items[index].path.split("/")[-2]) for index in indices]
            return list(zip(super().__getitems__(indices), labels, strict=True))

    return endless(Photos(f"s3://{folder.name}", cache_dir=cache, transform=transform), options, batch_size, collate, pin=pin)


class Gets(Dataset):
    """(bytes of the file, label) of the files of a bucket, by a connection per process."""

    def __init__(self, folder: Path) -> None:
        names = class_names(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self._samples = [(quote(f"/{folder.name}/{path.relative_to(folder)}"), names.index(path.parent.name)) for path in paths]
        self._address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        self._connection: HTTPConnection | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        address, label = self._samples[index]
        if self._connection is None:
            self._connection = HTTPConnection(self._address)
        self._connection.request("GET", address)
        return self._connection.getresponse().read(), label


def class_names(folder: Path) -> list[str]:
    """Return the names of the class folders. The place of a name is its label."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def endless(
    photos: Dataset,
    options: Namespace,
    batch_size: int,
    collate: Callable[[list[Any]], Any] | None,
    *,
    pin: bool = False,
) -> DataLoader:
    """Return a ``DataLoader`` whose epoch is longer than every measurement."""
    sampler = RandomSampler(photos, replacement=True, num_samples=10**8, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        photos,
        batch_size,
        sampler=sampler,
        num_workers=options.workers,
        collate_fn=collate,
        pin_memory=pin and options.device.type == "cuda",
        drop_last=True,
    )


class DecodeAndAugment:
    """Transform of LitData's row: decode a file, and augment the image."""

    def __init__(self, size: int) -> None:
        self._augment = pipelines.classification_torchvision(size)

    def __call__(self, file: bytes) -> Tensor:
        image = decode_image(torch.frombuffer(bytearray(file), dtype=torch.uint8), mode=ImageReadMode.RGB)
        return self._augment(image)


def drop_files(samples: list[tuple[bytes, int]]) -> tuple[None, Tensor]:
    """Collate function that returns labels only."""
    return None, torch.tensor([label for _, label in samples])


def variants(options: Namespace, folder: Path, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    """Return the rows."""
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(served(folder, options.store_processes))
    dtype = autocast_dtype(options.device) or torch.float32
    load = partial(bucket_loader, options, folder, batch_size, cache)

    def to_output_format(images: Tensor) -> Tensor:
        return images.to(dtype, memory_format=torch.channels_last)

    def row(name: str, batches: Any, loader: DataLoader) -> Variant:
        return Variant(name, loop(batches, lambda *_: None), loaders.queue_length(loader))

    def litdata() -> Variant:
        loader = load(transform=DecodeAndAugment(options.size), pin=True)
        return row(LITDATA, Serial(loader, options.device, to_output_format), loader)

    def ours() -> Variant:
        augment = gpuaug.fuse(
            pipelines.classification_kornia(options.size, cropping="slice"),
            dtype=dtype,
            memory_format=torch.channels_last,
            ragged=True,
            antialias=True,
        )
        loader = load(collate=gpuaug.collate_encoded)
        streamed = gpuaug.StreamedLoader(loader, [gpuaug.DecodeStage(), augment], device=options.device, depth=loaders.DEPTH)
        stack.callback(streamed.close)
        return row(OURS, streamed, loader)

    def bytes_alone() -> Variant:
        loader = load(collate=drop_files)
        return row(BYTES, loader, loader)

    def store_alone() -> Variant:
        loader = endless(Gets(folder), options, batch_size, drop_files)
        return row(STORE, loader, loader)

    makers = {LITDATA: litdata, OURS: ours, BYTES: bytes_alone, STORE: store_alone}
    return [peer_row(name, options.device, make, needs_gpu=False) for name, make in makers.items()]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("bucket", __doc__, batch="256", size=224, seconds=4.0, repeats=3)
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder of class folders in place of the files")
    parser.add_argument("--store-processes", type=int, default=4, help="processes of the store (default: %(default)s)")
    options = flags.parse(parser, argv)
    options.workers = max(1, options.workers)  # the client of this process must stay unused
    folder = (options.data or encoded_images.make("small")).resolve()
    corpus = encoded_images.corpus(folder)
    return measurement.measure(
        "bucket",
        options,
        [
            (
                {"case": "small" if options.data is None else "data", "batch_size": batch_size},
                partial(variants, options, folder, batch_size),
            )
            for batch_size in options.batch
        ],
        baseline=LITDATA,
        ours=(OURS,),
        ceilings=(BYTES, STORE),
        figures=lambda _row: {},
        sample="image",
        files=corpus.facts,
        store_processes=options.store_processes,
    )
