"""Top-1 accuracy of a model that is trained with torchvision's augmentation, and of the same model trained with gpuaug's.

    python -m bench accuracy --data DIR      an ImageFolder, split into train and val unless it has these folders
    python -m bench accuracy                 the built-in dataset, made from installed packages: bench.data.character_images
    python -m bench accuracy --make DIR      write the built-in dataset there, and do nothing else

A ResNet-18 is trained from scratch: RandomResizedCrop of 50 to 100 % of the image's area to 64 x 64 pixels,
RandomHorizontalFlip, ColorJitter without hue and Normalize; SGD with one cycle of the learning rate; on a GPU under bfloat16
autocast. For every seed all rows start from the same weights, with the same images in the same order. They differ in the
augmentation:

torchvision, workers     v2 in DataLoader workers, with antialiased crops
gpuaug, from torchvision workers collate ragged batches, and a StreamedLoader runs gpuaug.fuse(ragged=True) of the same pipeline
                         on the device
gpuaug, antialiased      as "gpuaug, from torchvision", but of Kornia's modules, with antialias=True
gpuaug                   as "gpuaug, antialiased", but with Kornia's default: no antialiasing
gpuaug, scaled           with --data: as "gpuaug, from torchvision", but the CPU decodes each image at the smallest scale at
                         which its crop is not enlarged

All models are validated on the same tensors, which torchvision's Resize and CenterCrop compute once on the CPU. Figures of a
row: mean, minimum and maximum of top-1 over the seeds; images per second of the training without its first epoch; the ratio of
this rate to that of torchvision's row for the same seed; seconds of a whole training. Rates, ratios and seconds are medians
over the seeds. Images of the built-in dataset are decoded in advance and held in memory. Images of --data are decoded in every
epoch, in gpuaug's rows by a DecodeStage.

The built-in dataset has 34 characters over photographs, 4080 images for training and 918 for validation. Typefaces and
photographs of validation images do not occur in training. The dataset is small and synthetic: it can show whether two
augmentations train equally well on images that differ in size and are downscaled, but not which accuracy they reach on
ImageNet.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision import models
from torchvision.transforms import v2

import gpuaug
from bench.data import character_images, image_folders
from bench.data.pipelines import MEAN, STD
from bench.harness import flags, measurement
from bench.harness.console import console, print_rows
from bench.harness.loops import Serial, autocast_dtype, top1_percent
from bench.harness.optional_rows import SkippedRow, select_rows
from gpuaug.benchkit import results
from gpuaug.benchkit.environment import environment
from gpuaug.benchkit.windows import synchronize

WORKERS, FUSED, ANTIALIASED, PLAIN = "torchvision, workers", "gpuaug, from torchvision", "gpuaug, antialiased", "gpuaug"
SCALED = "gpuaug, scaled"
COLUMNS = ("name", "top1_percent", "top1_low_percent", "top1_high_percent", "images_per_s", "ratio", "wall_s")

_AREA = (0.5, 1.0)


def torchvision_pipeline(size: int) -> nn.Module:
    """Return the pipeline in torchvision, for one image."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=_AREA, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def fused_pipeline(name: str, size: int) -> nn.Module:
    """Return the fused pipeline of a row of gpuaug, for a ragged batch."""
    if name in (FUSED, SCALED):
        return gpuaug.fuse(torchvision_pipeline(size), memory_format=torch.channels_last, ragged=True)
    pipeline = K.AugmentationSequential(
        K.RandomResizedCrop((size, size), scale=_AREA),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.0, p=1.0),
        K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    )
    return gpuaug.fuse(pipeline, memory_format=torch.channels_last, ragged=True, antialias=name == ANTIALIASED)


def batches(name: str, images: image_folders.Images, seed: int, options: Namespace, stack: ExitStack) -> Iterable:
    """Return an iterable of batches (augmented images, labels) on the device for the row ``name``; each ``iter`` is an epoch.

    ``stack`` closes the loader.
    """
    in_workers = name == WORKERS
    stages = [] if in_workers else [fused_pipeline(name, options.size)]
    dataset, collate = images, gpuaug.collate_ragged
    if in_workers:
        dataset = images.transformed(torchvision_pipeline(options.size))
        collate = None
    elif images.decoded_images is None:
        dataset = images.encoded()
        collate = gpuaug.collate_encoded
        stages.insert(0, gpuaug.DecodeStage(backend="cpu", scale="auto") if name == SCALED else gpuaug.DecodeStage())
    loader = DataLoader(
        dataset,
        batch_size=options.batch[0],
        # A separate generator, so that the order is the same in all rows, whatever else they draw.
        sampler=RandomSampler(images, generator=torch.Generator().manual_seed(seed)),
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        collate_fn=collate,
        pin_memory=in_workers and options.device.type == "cuda",
        drop_last=True,
    )
    if in_workers:
        return Serial(loader, options.device, _channels_last)
    streamed = gpuaug.StreamedLoader(loader, stages, device=options.device, seed=seed)
    stack.callback(streamed.close)
    return streamed


def train(
    name: str, split: image_folders.Split, val_tensors: tuple[Tensor, Tensor], seed: int, options: Namespace
) -> dict[str, float]:
    """Train once. Returns top-1 in percent, images per second without the first epoch, and seconds of the whole training.

    ``val_tensors``: images (N, 3, H, W) float32 and labels (N,), on the device.
    """
    device = options.device
    dtype = autocast_dtype(options.device)
    torch.manual_seed(seed)
    model = models.resnet18(num_classes=len(split.classes)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = len(split.train) // options.batch[0]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.epochs * steps, pct_start=0.2)
    with ExitStack() as stack:
        times_s = [perf_counter()]  # of the start of the training, and of the end of each epoch
        loader = batches(name, split.train, seed, options, stack)
        for _ in range(options.epochs):
            for images, labels in loader:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
            synchronize(device)
            times_s.append(perf_counter())
        del loader
    rate_times_s = times_s[1:] if options.epochs > 1 else times_s  # without the first epoch
    return {
        "top1_percent": top1_percent(model.eval(), val_tensors, dtype),
        "images_per_s": (len(rate_times_s) - 1) * steps * options.batch[0] / (rate_times_s[-1] - rate_times_s[0]),
        "wall_s": times_s[-1] - times_s[0],
    }


def rows_of(runs: dict[str, list[dict[str, float]]], batch_size: int) -> list[dict[str, Any]]:
    """Return the rows of the result. ``runs`` maps the name of each row to results of ``train``, in the order of the seeds."""
    rows = []
    for name, row_runs in runs.items():
        top1, rates = ([run[key] for run in row_runs] for key in ("top1_percent", "images_per_s"))
        # A seed takes the place of a round.
        row: dict[str, Any] = {"name": name, "batch_size": batch_size, "images_per_s": median(rates), "rounds": rates}
        row |= {"top1_percent": fmean(top1), "top1_low_percent": min(top1), "top1_high_percent": max(top1), "top1_seeds": top1}
        row["wall_s"] = median(run["wall_s"] for run in row_runs)
        ratios = [rate / baseline_run["images_per_s"] for rate, baseline_run in zip(rates, runs[WORKERS], strict=True)]
        rows.append(row | {"ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)})
    return rows


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = flags.parser("accuracy", __doc__, batch="128", size=64, repeats=3, spare=2)
    parser.add_argument("--data", type=Path, metavar="DIR", help="an ImageFolder (default: the built-in dataset)")
    parser.add_argument("--make", type=Path, metavar="DIR", help="write the built-in dataset there, and do nothing else")
    parser.add_argument("--epochs", type=int, help="epochs of each training (default: 24; with --quick 2)")
    parser.add_argument("--rate", type=float, default=0.1, help="the highest learning rate (default: %(default)s)")
    options = flags.parse(parser, argv)
    if options.make is not None:
        character_images.make(options.make)
        return None
    options.epochs = options.epochs or (2 if options.quick else 24)
    # ``select_rows`` requires rows with a name. These stand for trainings that run later.
    candidates = [SkippedRow(name, "") for name in (WORKERS, FUSED, ANTIALIASED, PLAIN, *([SCALED] if options.data else []))]
    names = [candidate.name for candidate in select_rows(candidates, options.rows, [WORKERS])]
    del options.seconds  # unused: the time of a row is that of whole epochs; --repeats is the number of seeds
    machine = environment(options.device)
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            character_images.make(Path(folder), **({"copies": 1, "typefaces": 2} if options.quick else {}))
            file_split = image_folders.split(Path(folder))
            split = file_split._replace(train=file_split.train.in_memory(), val=file_split.val.in_memory())
        else:
            split = image_folders.split(options.data)
        images, labels = image_folders.validation_tensors(split.val, options.size)
    val_tensors = images.to(options.device, memory_format=torch.channels_last), labels.to(options.device)
    options.batch = (min(options.batch[0], len(split.train)),)
    settings = {
        "baseline": WORKERS,
        "ours": [FUSED, ANTIALIASED, PLAIN, SCALED],
        "ceilings": [],
        "columns": COLUMNS,
        "images": "the user's" if options.data else "characters of matplotlib's fonts over scikit-image's photographs",
        "train_images": len(split.train),
        "val_images": len(split.val),
        "classes": len(split.classes),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(options.repeats):
        # Every other seed in reverse order, so that slow changes of the machine's speed affect all rows equally.
        for name in names if seed % 2 == 0 else names[::-1]:
            runs[name].append(run := train(name, split, val_tensors, seed, options))
            console.print(f"accuracy: seed {seed}, {name}: {run['top1_percent']:.1f} % in {run['wall_s']:.1f} s")
            measurement.release(options.device)
        if options.json is not None:
            # Write after each seed, so that an interruption loses only one seed.
            partial_result = {"rows": rows_of(runs, options.batch[0]), "settings": settings}
            results.write(
                options.json, results.result("accuracy", **partial_result, device=options.device, environment=machine)
            )
    rows = rows_of(runs, options.batch[0])
    print_rows([{key: row[key] for key in COLUMNS if key in row} for row in rows], "accuracy: top-1 over the seeds")
    return measurement.finish("accuracy", options, rows, settings, machine, start)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
