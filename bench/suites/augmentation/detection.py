"""Detection: augmentation of images of different sizes, with boxes and instance masks.

    python -m bench run detection

Batches are like COCO's: random uint8 images of about 640 x 480 or 480 x 640 pixels, with about seven objects per image, each
with a box, a label and a mask of the size of the image. RandomResizedCrop to 512 x 512 (30 to 100 % of the area),
RandomHorizontalFlip, ColorJitter without hue and Normalize, to float32. Cases: images alone, with boxes, with boxes and masks.
Rows:

torchvision, workers      v2 in DataLoader workers, boxes clamped and empty boxes removed; then a copy
Kornia, image by image    on the card, one call per image, because Kornia's batches have one size and one number of boxes (for
                          some of the images of a batch, since it is slow); no box is removed
gpuaug, workers           DataLoader workers collate, a StreamedLoader copies and runs gpuaug.fuse(ragged=True) on target dicts
gpuaug                    gpuaug.fuse alone, on a batch that is on the card

Rates are images per second. In rows without workers, ``host_ms`` is the time of one call on the calling thread, with an idle
GPU, and ``gpu_ms`` the time of the GPU for the call, without host time. gpuaug removes no box either: ``valid`` marks valid
boxes, and the host does not wait.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import kornia.augmentation as K
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

import gpuaug
from bench.data import loaders, pipelines
from bench.data.scenes import POOL_IMAGES, Scenes, Target, to_tv_tensors
from bench.harness import call_rows, flags, measurement
from bench.harness.loops import settled_loop
from bench.harness.optional_rows import OptionalRow, peer_row
from gpuaug.benchkit.windows import Variant

CASES = {"images": (), "boxes": ("boxes", "labels"), "boxes and masks": ("boxes", "labels", "masks")}
"""Name of a case: keys of its target dicts."""

KORNIA = "Kornia, image by image"
_KORNIA_IMAGES = 4
_AREA = (0.3, 1.0)


class TorchvisionPipeline:
    """Pipeline in torchvision, for one image and its target."""

    def __init__(self, size: int) -> None:
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=_AREA, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.4, 0.4, 0.4),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(pipelines.MEAN, pipelines.STD),
                v2.ClampBoundingBoxes(),
                v2.SanitizeBoundingBoxes(labels_getter=lambda inputs: inputs[1].get("labels")),
            ]
        )

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        transforms = self.transform if "boxes" in target else v2.Compose(self.transform.transforms[:-2])
        return transforms(*to_tv_tensors(image, target))


def kornia_pipeline(size: int) -> nn.Module:
    """Return the pipeline in Kornia."""
    return K.AugmentationSequential(
        K.RandomResizedCrop((size, size), scale=_AREA),
        K.RandomHorizontalFlip(),
        K.ColorJitter(0.4, 0.4, 0.4, 0.0, p=1.0),
        K.Normalize(torch.tensor(pipelines.MEAN), torch.tensor(pipelines.STD)),
    )


def augment_one_by_one(size: int, items: Sequence[tuple[Tensor, Target]]) -> list[Any]:
    """Call Kornia's pipeline once per image, and return the results."""
    pipeline = kornia_pipeline(size)
    outputs = []
    for image, target in items:
        inputs = [image[None].float() / 255]
        keys = ["input"]
        if "boxes" in target:
            inputs = [*inputs, target["boxes"][None]]
            keys = [*keys, "bbox_xyxy"]
        if "masks" in target:
            inputs = [*inputs, target["masks"][None].float()]
            keys = [*keys, "mask"]
        outputs.append(pipeline(*inputs, data_keys=keys))
    return outputs


def fused_pipeline(size: int) -> Callable[..., Any]:
    """Return the fused pipeline, for ragged images and their targets."""
    return gpuaug.fuse(kornia_pipeline(size), ragged=True)


def collate_stacked(samples: Sequence[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    """Collate images of one size into a batch, and their targets into a list of dicts of plain tensors."""
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), [{key: value.as_subclass(Tensor) for key, value in target.items()} for target in targets]


def move_target(target: Target, device: torch.device) -> Target:
    return {key: value.to(device, non_blocking=True) for key, value in target.items()}


def variants(options: Namespace, batch_size: int, case: str, stack: ExitStack) -> list[OptionalRow]:
    device = options.device
    size = options.size
    keys = CASES[case]
    scenes = Scenes(options.side, keys, count=min(POOL_IMAGES, batch_size))
    items = [(image.to(device), move_target(target, device)) for image, target in scenes.items]
    batch = gpuaug.collate_ragged([image for image, _ in scenes.items]).to(device)
    targets = [target for _, target in items]
    augment = fused_pipeline(size)

    def torchvision_row() -> Variant:
        loader = loaders.endless(scenes.transformed(TorchvisionPipeline(size)), batch_size, options, collate=collate_stacked)

        def steps() -> Iterator[int]:
            for images, batch_targets in loader:
                images.to(device, non_blocking=True)
                for target in batch_targets:
                    move_target(target, device)
                yield len(images)

        return Variant("torchvision, workers", steps, loaders.queue_length(loader))

    def workers_row() -> Variant:
        loader = loaders.endless(scenes, batch_size, options, collate=gpuaug.collate_ragged, pin=False)
        stage = gpuaug.TransformStage(fused_pipeline(size), on={0: "input", 1: "targets"} if keys else 0)
        streamed = gpuaug.StreamedLoader(loader, [stage], device=device, depth=loaders.DEPTH)
        stack.callback(streamed.close)
        queue_length = loaders.queue_length(loader)
        return Variant("gpuaug, workers", settled_loop(streamed, lambda *_: None, 2 * queue_length), queue_length)

    def kornia_row() -> Variant:
        return call_rows.call_row(
            KORNIA, partial(augment_one_by_one, size, items[:_KORNIA_IMAGES]), batch_size, images=_KORNIA_IMAGES
        )

    def call() -> Any:
        return augment(batch, targets, data_keys=["input", "targets"]) if keys else augment(batch)

    return [
        torchvision_row(),
        peer_row(KORNIA, device, kornia_row, needs_gpu=False),
        workers_row(),
        call_rows.call_row("gpuaug", call, batch_size, launches=2 * call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("detection", __doc__, batch="16,64", size=512, seconds=0.3, repeats=3, spare=2)
    parser.add_argument(
        "--side", type=int, default=640, help="longer side of the source images in pixels (default: %(default)s)"
    )
    options = flags.parse(parser, argv)
    first_size = options.batch[0]
    return measurement.measure(
        "detection",
        options,
        [
            ({"case": case, "batch_size": size}, partial(variants, options, size, case))
            for size in options.batch
            # One batch size is enough to show the time that boxes and masks take.
            for case in (CASES if size == first_size else list(CASES)[-1:])
        ],
        baseline="torchvision, workers",
        ours=("gpuaug, workers", "gpuaug"),
        figures=partial(call_rows.batch_figures, device=options.device),
    )
