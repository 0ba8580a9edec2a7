"""Published recipes on the card, as their projects write them: gpuaug beside its competitors.

    python -m bench run recipes
    python -m bench recipes --cases "DINOv2;YOLO, letterbox" --batch 256

A batch of uint8 images is on the device, and the recipe makes of it what the training step takes: floating images, and target
dicts. ``bench/data/recipes`` holds the recipes, and ``tests/recipes`` compares them with torchvision's functions. Images of
one size have 256 x 256 pixels, photographs of every size about 640 x 480 or 480 x 640 and seven objects, as in COCO. The output
sizes are the projects' own. All scale with ``--size``. Where the program gives the recipe floats, all rows get
floats: BYOL, LeRobot, and the eleven bands of L8 Biome. Rows:

torchvision v2                  the recipe with v2's classes, in one call per view for the whole batch: one draw for all images,
                                where the recipe draws for each. Classes of timm, open_clip and LeRobot are called as they are;
                                classes of timm and open_clip get floats, since their own conversion takes only PIL images
torchvision v2, image by image  photographs of every size: a call for each, since a batch has one size (for some of the images,
                                since it is slow), and the results stacked
Kornia                          torchgeo's recipe, of Kornia's modules
DALI                            recipes for one size that its operators can express; each image draws for itself
gpuaug                          gpuaug.fuse of the recipe as it is published; each image draws for itself. Photographs of every
                                size are a Ragged batch with targets by gpuaug.collate_ragged. Boxes that are gone are dropped
                                by gpuaug.sanitize in every recipe with boxes, for which the host waits

Rates are in input images, however many views they have. *gpuaug* has ``host_ms``, the calling thread's time for a batch with an
idle card, and ``gpu_ms``, the card's time alone, where the host does not wait for the card.
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
from bench.harness.optional_rows import OptionalRow, Skipped, peer_row
from bench.peers import dali, dali_recipes
from gpuaug.benchkit.windows import Variant

TORCHVISION = "torchvision v2"
ONE_BY_ONE = "torchvision v2, image by image"
KORNIA = "Kornia"
DALI = "DALI"
OURS = "gpuaug"

_IMAGES_ALONE = 8
"""Images of a batch that torchvision is called for one by one."""

View = tuple[Callable[..., Any], int]
"""(Function that makes a pipeline, number of views that it makes of an image.)"""

Views = Callable[[int], Sequence[View]]
"""Pipelines of a recipe, from ``--size``."""


@dataclass(frozen=True)
class Case:
    """One recipe.

    Args:
        views: Pipelines of the recipe.
        dali: Builds DALI's graph, as the values of ``dali.PIPELINES`` do.
        keys: Keys of the target dicts of photographs of every size, or ``semantic`` for a label map. Empty: images of one size.
        floats: Number of channels of images that are given as floats; 0 for uint8.
        converted: Whether torchvision's row converts the images to floats, which the recipe does for PIL images alone.
        by_kornia: Whether the recipe is made of Kornia's modules.
        package: Package that makes the recipe.
    """

    views: Views
    dali: Callable[..., Any] | None = None
    keys: tuple[str, ...] = ()
    floats: int = 0
    converted: bool = False
    by_kornia: bool = False
    package: str = ""

    @property
    def is_for_tensors(self) -> bool:
        """Whether it takes tensors as it is published. Conversions of v1 take PIL images."""
        return bool(self.keys or self.floats or self.converted)


def _view(
    make: Callable[..., Any], share: float = 7 / 8, *, count: int = 1, **settings: Any
) -> Callable[[int], Sequence[View]]:
    """Views of one pipeline, of ``share`` of the side that goes in."""
    return lambda size: [(partial(make, round(share * size), **settings), count)]


def _dino(large: float, small: float, **settings: Any) -> Views:
    """Two global crops of ``large`` of the side, and eight local ones of ``small``."""
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


_crop = dali_recipes.crop_and_flip
_BOXES = ("boxes", "labels")

CASES = {
    "references": Case(_view(classification.references), _crop),
    **{
        f"references, {policy}": Case(
            _view(classification.references, policy=policy), partial(dali_recipes.with_policy, policy=policy)
        )
        for policy in ("ra", "ta_wide", "imagenet")
    },
    "timm": Case(
        _view(classification.timm, is_training=True, color_jitter=0.4), dali_recipes.timm, converted=True, package="timm"
    ),
    "timm, validation": Case(_view(classification.timm), dali_recipes.timm_validation, converted=True, package="timm"),
    "open_clip": Case(_view(classification.open_clip, jitter=True), dali_recipes.open_clip, converted=True),
    "DINOv2": Case(_dino(7 / 8, 3 / 8), partial(dali_recipes.dino, large=7 / 8, small=3 / 8)),
    "DINOv3": Case(_dino(1.0, 7 / 16, transforms=v2), partial(dali_recipes.dino, large=1.0, small=7 / 16)),
    "MAE": Case(_view(self_supervised.mae), partial(_crop, area=(0.2, 1.0), cubic=True)),
    "SimMIM": Case(_view(self_supervised.sim_mim, 3 / 4), partial(_crop, share=3 / 4, area=(0.67, 1.0))),
    "SimCLR": Case(_view(self_supervised.sim_clr, count=2), dali_recipes.sim_clr),
    "BYOL": Case(_view(self_supervised.byol, 1.0, count=2), floats=3),
    "references, ssdlite": Case(_view(detection.ssdlite, 5 / 4), keys=_BOXES),
    "references, lsj": Case(_view(detection.lsj, 4.0), keys=_BOXES),
    "references, segmentation": Case(_segmentation, keys=("semantic",)),
    "YOLO, letterbox": Case(_view(detection.yolo_validation, 5 / 2), keys=_BOXES),
    "RT-DETR": Case(_view(detection.rt_detr, 5 / 2), keys=_BOXES),
    "Mask2Former": Case(_view(detection.mask_2_former, 4.0), keys=(*_BOXES, "masks")),
    "torchgeo, L8 Biome": Case(_view(torchgeo.l8_biome), floats=11, by_kornia=True),
    "LeRobot": Case(_lerobot, floats=3),
}
"""Recipes by name."""


def variants(options: Namespace, case: Case, batch_size: int, _stack: ExitStack) -> list[OptionalRow]:
    if case.package and find_spec(case.package) is None:
        return [Skipped(name, f"not installed: {case.package}") for name in (TORCHVISION, DALI, OURS)]
    rows = on_photographs if case.keys else on_a_batch
    return rows(options, case, batch_size)


def on_a_batch(options: Namespace, case: Case, batch_size: int) -> list[OptionalRow]:
    """Rows of a recipe for images of one size."""
    device, size = options.device, options.size
    images = torch.randint(256, (batch_size, case.floats or 3, size, size), dtype=torch.uint8, device=device)
    if case.floats:
        images = images.float() / 255
    views = case.views(size)

    def by_kornia() -> Variant:
        ((make, _),) = views
        pipeline = make()
        return row(KORNIA, lambda: pipeline({"image": images})["image"])

    def by_torchvision() -> Variant:
        made = [(make() if case.is_for_tensors else make(transforms=v2), count) for make, count in views]
        given = [(pipelines.Scaled(each) if case.converted else each, count) for each, count in made]
        return row(TORCHVISION, lambda: [pipeline(images) for pipeline, count in given for _ in range(count)])

    def by_dali() -> Variant:
        call = dali.build(case.dali, images, None, torch.float32)
        return call_rows.call_row(DALI, lambda: read_tensors(call()), batch_size, launches=None, discard=3)

    def row(name: str, call: AugmentCall, launches: int = call_rows.MANY_LAUNCHES) -> Variant:
        return call_rows.call_row(name, lambda: read_tensors(call()), batch_size, launches=launches * len(views))

    fused = [gpuaug.fuse(make(), views=count) for make, count in views]
    peer = peer_row(KORNIA, device, by_kornia, needs_gpu=False) if case.by_kornia else by_torchvision()
    return [
        peer,
        *([peer_row(DALI, device, by_dali)] if case.dali else []),
        row(OURS, lambda: [augment(images) for augment in fused], call_rows.FEW_LAUNCHES),
    ]


def on_photographs(options: Namespace, case: Case, batch_size: int) -> list[OptionalRow]:
    """Rows of a recipe for photographs of every size, with their targets."""
    device = options.device
    semantic = "semantic" in case.keys
    scenes = Scenes(options.size * 5 // 2, ("masks",) if semantic else case.keys, count=batch_size)
    samples = [to_tv_tensors(*item) for item in scenes.items]
    if semantic:
        # A label map, in which a later object lies above an earlier one.
        samples = [(image, tv_tensors.Mask(target["masks"].amax(0))) for image, target in samples]
    ((make, _),) = case.views(options.size)
    pipeline = make()
    augment = gpuaug.fuse(make(), ragged=True)
    some = [move(sample, device) for sample in samples[:_IMAGES_ALONE]]
    loader = DataLoader(samples, batch_size, collate_fn=gpuaug.collate_ragged, pin_memory=device.type == "cuda")
    ((images, targets),) = gpuaug.StreamedLoader(loader, device=device)

    def one_by_one() -> Any:
        images, targets = zip(*(pipeline(*sample) for sample in some), strict=True)
        return read_tensors((torch.stack(images), torch.stack(targets) if semantic else targets))

    def ours() -> Any:
        found, moved_targets = augment(images, targets, data_keys=["input", "mask" if semantic else "targets"])
        return read_tensors((found, torch.stack(list(moved_targets)) if semantic else gpuaug.sanitize(moved_targets)))

    return [
        call_rows.call_row(ONE_BY_ONE, one_by_one, batch_size, images=_IMAGES_ALONE),
        call_rows.call_row(OURS, ours, batch_size, launches=call_rows.FEW_LAUNCHES),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = flags.parser("recipes", __doc__, batch="64", seconds=0.1, repeats=3)
    parser.add_argument("--cases", metavar="NAME;NAME", help="measure only these recipes, separated by semicolons")
    options = flags.parse(parser, argv)
    del options.workers  # nothing is loaded
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
        # Of ours alone: figures of all rows would take as long as the windows.
        figures=lambda row: call_rows.batch_figures(row, options.device) if row.name == OURS else {},
    )
