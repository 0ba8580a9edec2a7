"""Published recipes on the card, as their projects write them: gpuaug and other libraries.

    python -m bench run recipes
    python -m bench recipes --cases "DINOv2;YOLO, letterbox" --batch 256

A recipe turns a batch of uint8 images on the device into the input of the training step: float images, and target dicts.
``bench/data/recipes`` has the recipes, and ``tests/recipes`` compares their results with torchvision's. Images of one size have
256 x 256 pixels, photographs of different sizes about 640 x 480 or 480 x 640 and seven objects, as in COCO. Output sizes are
the projects' own. All sizes scale with ``--size``. If a project passes floats to the recipe, all rows get floats: BYOL,
LeRobot, and the eleven bands of L8 Biome. Rows:

torchvision v2                  the recipe with v2's classes, one call per view for the whole batch: one draw for all images,
                                whereas the recipe draws per image. Classes of timm, open_clip and LeRobot are called unchanged;
                                classes of timm and open_clip get floats, since their conversion takes only PIL images
torchvision v2, image by image  photographs of different sizes: one call per image, because a batch has one size (for some of
                                the images, since it is slow); the results are stacked
Kornia                          torchgeo's recipe, of Kornia's modules
DALI                            recipes for one size that DALI's operators can express, with draws per image
gpuaug                          gpuaug.fuse of the published recipe, with draws per image. Photographs of different sizes are a
                                Ragged batch with targets, by gpuaug.collate_ragged. In recipes with boxes, gpuaug.sanitize
                                removes invalid boxes, for which the host waits

Rates are input images per second, also with several views. *gpuaug* has ``host_ms``, the time of one call on the calling
thread, with an idle GPU, and ``gpu_ms``, the time of the GPU for the call without host time, if the host does not wait for it.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from bench.data import pipelines
from bench.data.recipes import classification, detection, lerobot, self_supervised, torchgeo
from bench.data.scenes import Scenes, to_tv_tensors
from bench.data.target_batches import move, read_tensors
from bench.harness import call_rows, flags, measurement
from bench.harness.call_rows import AugmentCall
from bench.harness.optional_rows import OptionalRow, SkippedRow, peer_row
from bench.peers import dali, dali_recipes
from gpuaug.benchkit.windows import Variant

TORCHVISION = "torchvision v2"
ONE_BY_ONE = "torchvision v2, image by image"
KORNIA = "Kornia"
DALI = "DALI"
OURS = "gpuaug"

_SINGLE_IMAGES = 8
"""Number of images of a batch for which torchvision is called one by one."""

View = tuple[Callable[..., Any], int]
"""(function that creates a pipeline, number of views per image from this pipeline)."""

Views = Callable[[int], Sequence[View]]
"""Function that returns the pipelines of a recipe, given ``--size``."""


@dataclass(frozen=True)
class Case:
    """A recipe.

    Args:
        views: Function that returns the pipelines of the recipe.
        dali: Function that builds DALI's graph; see ``dali.PIPELINES``.
        keys: Keys of the target dicts of photographs, or ``semantic`` for a label map. Empty: images of one size, without
            targets.
        float_channels: Number of channels of float images. 0: uint8 images of three channels.
        converts: Whether torchvision's row converts images to floats, because the conversion of the recipe takes only PIL
            images.
        uses_kornia: Whether the recipe consists of Kornia's modules.
        package: Package that creates the recipe.
    """

    views: Views
    dali: Callable[..., Any] | None = None
    keys: tuple[str, ...] = ()
    float_channels: int = 0
    converts: bool = False
    uses_kornia: bool = False
    package: str = ""

    @property
    def is_for_tensors(self) -> bool:
        """Whether the published recipe takes tensors. Conversions of v1 take only PIL images."""
        return bool(self.keys or self.float_channels or self.converts)


def _view(
    make: Callable[..., Any], share: float = 7 / 8, *, count: int = 1, **settings: Any
) -> Callable[[int], Sequence[View]]:
    """Return the ``views`` of a recipe with one pipeline, to ``share`` of ``--size``."""
    return lambda size: [(partial(make, round(share * size), **settings), count)]


def _dino(large: float, small: float, **settings: Any) -> Views:
    """Return the ``views`` of DINO: two global crops to ``large`` of ``--size``, and eight local crops to ``small`` of it."""
    makers = [
        (self_supervised.dino_global_1, large, 1),
        (self_supervised.dino_global_2, large, 1),
        (self_supervised.dino_local, small, 8),
    ]
    return lambda size: [(partial(make, round(share * size), **settings), count) for make, share, count in makers]


def _segmentation(size: int) -> Sequence[View]:
    return [(partial(detection.segmentation, size * 65 // 32, size * 15 // 8), 1)]


def _lerobot(_size: int) -> Sequence[View]:
    return [(lambda: lerobot.ImageTransforms(lerobot.ImageTransformsConfig(enable=True)), 1)]


_dali_crop = dali_recipes.crop_and_flip
_BOXES = ("boxes", "labels")

CASES = {
    "references": Case(_view(classification.references), _dali_crop),
    **{
        f"references, {policy}": Case(
            _view(classification.references, policy=policy), partial(dali_recipes.with_policy, policy=policy)
        )
        for policy in ("ra", "ta_wide", "imagenet")
    },
    "timm": Case(
        _view(classification.timm, is_training=True, color_jitter=0.4), dali_recipes.timm, converts=True, package="timm"
    ),
    "timm, validation": Case(_view(classification.timm), dali_recipes.timm_validation, converts=True, package="timm"),
    "open_clip": Case(_view(classification.open_clip, jitter=True), dali_recipes.open_clip, converts=True),
    "DINOv2": Case(_dino(7 / 8, 3 / 8), partial(dali_recipes.dino, large=7 / 8, small=3 / 8)),
    "DINOv3": Case(_dino(1.0, 7 / 16, transforms=v2), partial(dali_recipes.dino, large=1.0, small=7 / 16)),
    "MAE": Case(_view(self_supervised.mae), partial(_dali_crop, area=(0.2, 1.0), cubic=True)),
    "SimMIM": Case(_view(self_supervised.sim_mim, 3 / 4), partial(_dali_crop, share=3 / 4, area=(0.67, 1.0))),
    "SimCLR": Case(_view(self_supervised.sim_clr, count=2), dali_recipes.sim_clr),
    "BYOL": Case(_view(self_supervised.byol, 1.0, count=2), float_channels=3),
    "references, ssdlite": Case(_view(detection.ssdlite, 5 / 4), keys=_BOXES),
    "references, lsj": Case(_view(detection.lsj, 4.0), keys=_BOXES),
    "references, segmentation": Case(_segmentation, keys=("semantic",)),
    "YOLO, letterbox": Case(_view(detection.yolo_validation, 5 / 2), keys=_BOXES),
    "RT-DETR": Case(_view(detection.rt_detr, 5 / 2), keys=_BOXES),
    "Mask2Former": Case(_view(detection.mask_2_former, 4.0), keys=(*_BOXES, "masks")),
    "torchgeo, L8 Biome": Case(_view(torchgeo.l8_biome), float_channels=11, uses_kornia=True),
    "LeRobot": Case(_lerobot, float_channels=3),
}
"""Name of a case: its recipe."""


def variants(options: Namespace, case: Case, batch_size: int, _stack: ExitStack) -> list[OptionalRow]:
    if case.package and find_spec(case.package) is None:
        return [SkippedRow(name, f"not installed: {case.package}") for name in (TORCHVISION, DALI, OURS)]
    build = photograph_rows if case.keys else batch_rows
    return build(options, case, batch_size)


def batch_rows(options: Namespace, case: Case, batch_size: int) -> list[OptionalRow]:
    """Return the rows of a recipe for images of one size."""
    device, size = options.device, options.size
    images = torch.randint(256, (batch_size, case.float_channels or 3, size, size), dtype=torch.uint8, device=device)
    if case.float_channels:
        images = images.float() / 255
    views = case.views(size)

    def kornia_row() -> Variant:
        ((make, _),) = views
        pipeline = make()
        return row(KORNIA, lambda: pipeline({"image": images})["image"])

    def torchvision_row() -> Variant:
        recipes = [(make() if case.is_for_tensors else make(transforms=v2), count) for make, count in views]
        scaled_recipes = [
            (pipelines.ScaleAndTransform(recipe) if case.converts else recipe, count) for recipe, count in recipes
        ]
        return row(TORCHVISION, lambda: [pipeline(images) for pipeline, count in scaled_recipes for _ in range(count)])

    def dali_row() -> Variant:
        call = dali.build(case.dali, images, None, torch.float32)
        return call_rows.call_row(DALI, lambda: read_tensors(call()), batch_size, launches=None, discard=3)

    def row(name: str, call: AugmentCall, launches: int = call_rows.MANY_LAUNCHES) -> Variant:
        return call_rows.call_row(name, lambda: read_tensors(call()), batch_size, launches=launches * len(views))

    augmenters = [gpuaug.fuse(make(), views=count) for make, count in views]
    library_row = peer_row(KORNIA, device, kornia_row, needs_gpu=False) if case.uses_kornia else torchvision_row()
    return [
        library_row,
        *([peer_row(DALI, device, dali_row)] if case.dali else []),
        row(OURS, lambda: [augment(images) for augment in augmenters], call_rows.FEW_LAUNCHES),
    ]


def photograph_rows(options: Namespace, case: Case, batch_size: int) -> list[OptionalRow]:
    """Return the rows of a recipe for photographs of different sizes, with targets."""
    device = options.device
    semantic = "semantic" in case.keys
    scenes = Scenes(options.size * 5 // 2, ("masks",) if semantic else case.keys, count=batch_size)
    samples = [to_tv_tensors(*item) for item in scenes.items]
    if semantic:
        # A label map, which is 1 where there is an object.
        samples = [(image, tv_tensors.Mask(target["masks"].amax(0))) for image, target in samples]
    ((make, _),) = case.views(options.size)
    pipeline = make()
    augment = gpuaug.fuse(make(), ragged=True)
    single_samples = [move(sample, device) for sample in samples[:_SINGLE_IMAGES]]
    loader = DataLoader(samples, batch_size, collate_fn=gpuaug.collate_ragged, pin_memory=device.type == "cuda")
    ((images, targets),) = gpuaug.StreamedLoader(loader, device=device)

    def augment_one_by_one() -> Any:
        images, targets = zip(*(pipeline(*sample) for sample in single_samples), strict=True)
        return read_tensors((torch.stack(images), torch.stack(targets) if semantic else targets))

    def augment_batch() -> Any:
        augmented, augmented_targets = augment(images, targets, data_keys=["input", "mask" if semantic else "targets"])
        return read_tensors(
            (augmented, torch.stack(list(augmented_targets)) if semantic else gpuaug.sanitize(augmented_targets))
        )

    return [
        call_rows.call_row(ONE_BY_ONE, augment_one_by_one, batch_size, images=_SINGLE_IMAGES),
        call_rows.call_row(OURS, augment_batch, batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("recipes", __doc__, batch="64", seconds=0.1, repeats=3)
    parser.add_argument("--cases", metavar="NAME;NAME", help="measure only these recipes, separated by semicolons")
    options = flags.parse(parser, argv)
    del options.workers  # unused
    names = options.cases.split(";") if options.cases else list(CASES)
    if not set(names) <= set(CASES):
        raise SystemExit(f"--cases must be among {'; '.join(CASES)}, got {options.cases}. Leave it out to measure all of them.")
    return measurement.measure(
        "recipes",
        options,
        [
            ({"case": name, "batch_size": size}, partial(variants, options, CASES[name], size))
            for size in options.batch
            for name in names
        ],
        baseline=(TORCHVISION, ONE_BY_ONE, KORNIA),
        ours=(OURS,),
        # Only for gpuaug's row, since figures of all rows would take as long as the windows.
        figures=lambda row: call_rows.batch_figures(row, options.device) if row.name == OURS else {},
    )
