"""Mosaics of four images with their boxes.

    python -m bench run mosaics

Mosaics of ``--side`` pixels (640). Cases:

images        uint8 images of ``--side`` pixels on the device. Rows: Kornia's ``RandomMosaic``, which takes its partners from
              the batch and does not resize; gpuaug, with four images per mosaic
with boxes    the same with 7 boxes per image; gpuaug only. Rows: target dicts as a loader hands them over; target dicts as a
              stage of a loader gets them, with all boxes in one tensor
from files    from files in the page cache to mosaics on the device. Photographs as on the web, JPEG, with a median side of 450
              pixels, and 7 boxes per image, which the data set holds in memory. Rows: workers that decode with PIL and make
              mosaics in torch; gpuaug: ``collate_encoded``, ``DecodeStage``, and a fused ``Mosaic``; and the ceiling: whole
              images, decoded by ``DecodeStage`` from files in memory

Rates are mosaics per second. ``host_ms`` and ``gpu_ms``: time of one call, on the calling thread with an idle device, and on
the device.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import gpuaug
from bench.data import loaders, web_images
from bench.harness import call_rows, flags, measurement
from bench.harness.optional_rows import OptionalRow
from gpuaug.benchkit.windows import Variant
from gpuaug.core.packed_targets import packed_targets

KORNIA = "Kornia"
WORKERS = "workers"
GPUAUG = "gpuaug"
IN_LOADER = "gpuaug, as a stage"
DECODING = "decoding alone"

BOXES = 7
"""Boxes per image, as in COCO."""

KEYS = ["input", "targets"]
ON = dict(zip(("image", "target"), KEYS, strict=True))


def objects(count: int, side: int) -> dict[str, Tensor]:
    """Return boxes and labels of ``count`` images."""
    corners = np.sort(np.random.default_rng(0).random((count, BOXES, 2, 2)), 2) * side
    boxes = torch.tensor(corners.reshape(count, BOXES, 4), dtype=torch.float32)
    return {"boxes": boxes, "labels": torch.arange(BOXES).repeat(count, 1)}


def target_of(annotations: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    """Return the target dict of one image, as a new object per sample."""
    return {name: values[image] for name, values in annotations.items()}


class Files(Dataset):
    """Samples of four files with target dicts, or with ``mosaic`` mosaics."""

    def __init__(self, count: int, mosaic: gpuaug.Mosaic | None) -> None:
        self.paths = sorted(web_images.make("plain", count=count).glob("*/*.jpg"), key=lambda path: path.name)
        self.mosaic = mosaic
        self.annotations = objects(len(self.paths), 100)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        numbers = np.random.default_rng(index).integers(0, len(self.paths), 4).tolist()
        paths = [self.paths[number] for number in numbers]
        targets = [target_of(self.annotations, number) for number in numbers]
        if self.mosaic is None:
            return {"image": paths, "target": targets}
        images = []
        for path in paths:
            with Image.open(path) as image:
                images.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1))
        image, target = self.mosaic(images, targets)
        return {"image": image, "target": target}


def collated(samples: Sequence[Any]) -> dict[str, Any]:
    return {"image": torch.stack([sample["image"] for sample in samples]), "target": [sample["target"] for sample in samples]}


def image_rows(options: Namespace, batch_size: int, _stack: ExitStack, *, with_boxes: bool) -> list[OptionalRow]:
    side, device = options.side, options.device
    images = [torch.randint(0, 256, (batch_size, 3, side, side), dtype=torch.uint8, device=device) for _ in range(4)]
    mosaic = gpuaug.fuse([gpuaug.Mosaic(side)])
    if with_boxes:
        annotations = objects(4 * batch_size, side)
        lists = [[target_of(annotations, 4 * row + index) for index in range(4)] for row in range(batch_size)]
        ((targets,),) = gpuaug.StreamedLoader([(lists,)], device=device)
        packed = packed_targets(targets, images[0].device)
        return [
            call_rows.call_row(
                label, partial(mosaic, images, form, data_keys=KEYS), batch_size, launches=call_rows.MANY_LAUNCHES
            )
            for label, form in ((GPUAUG, targets), (IN_LOADER, packed))
        ]
    floats = images[0].float() / 255
    kornia = K.RandomMosaic(output_size=(side, side), p=1.0)
    return [
        call_rows.call_row(KORNIA, lambda: kornia(floats), batch_size),
        call_rows.call_row(GPUAUG, lambda: mosaic(images), batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def file_rows(options: Namespace, batch_size: int, stack: ExitStack) -> list[OptionalRow]:
    mosaic = gpuaug.Mosaic(options.side)
    stages = [gpuaug.DecodeStage(), gpuaug.TransformStage(gpuaug.fuse([mosaic]), on=ON)]

    def row(label: str, in_worker: gpuaug.Mosaic | None, own_stages: Sequence[Any]) -> Variant:
        files = Files(options.files, in_worker)
        collate = gpuaug.collate_encoded if in_worker is None else collated
        workers = options.workers
        loader = DataLoader(files, batch_size, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0)
        streamed = gpuaug.StreamedLoader(loader, own_stages, device=options.device, depth=loaders.DEPTH)
        stack.callback(streamed.close)

        def steps() -> Iterator[int]:
            for _ in streamed:
                yield batch_size

        return Variant(label, steps, loaders.queue_length(loader))

    samples = Files(options.files, None)
    numbers = [range(first, first + batch_size) for first in range(0, 4 * batch_size, batch_size)]
    batches = [gpuaug.collate_encoded([samples[index]["image"] for index in part]) for part in numbers]
    decoding = loaders.decoding_alone(DECODING, batches, options, batch_size, stack)
    return [row(WORKERS, mosaic, []), row(GPUAUG, None, stages), decoding]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("mosaics", __doc__, batch="64", seconds=0.6, repeats=3)
    parser.add_argument("--files", type=int, default=512, help="number of files (default: %(default)s)")
    parser.add_argument("--side", type=int, default=640, help="side of the mosaics (default: %(default)s)")
    options = flags.parse(parser, argv)
    cases: list[tuple[dict[str, Any], Any]] = []
    for size in options.batch:
        cases += [
            ({"case": "images", "batch_size": size}, partial(image_rows, options, size, with_boxes=False)),
            ({"case": "with boxes", "batch_size": size}, partial(image_rows, options, size, with_boxes=True)),
            ({"case": "from files", "batch_size": size}, partial(file_rows, options, size)),
        ]
    return measurement.measure(
        "mosaics",
        options,
        cases,
        baseline=(KORNIA, WORKERS),
        ours=(GPUAUG, IN_LOADER),
        ceilings=(DECODING,),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
