"""Autocast and torch's default dtype and device change nothing in what ``fuse`` and ``collate_ragged`` give."""

import kornia.augmentation as K
import pytest
import torch
from kornia.augmentation import auto
from support import internals
from support.batches.ragged import images_of, pack, targets_of
from support.comparison.replay import left_to_kornia, photographs
from support.ops.pipelines import CLOSE, EXACT, MEAN, RGB_CLOSE, RGB_EXACT, STD, TIES
from support.public.torch_settings import check_unchanged, default_dtype, difference
from support.targets.detection import annotations, masks, records_of

import gpuaug
from gpuaug.fusion.lower.kornia import LOWERED
from gpuaug.fusion.normalization import normalized_by
from gpuaug.fusion.ops.base import Size
from gpuaug.fusion.ops.mix import MixOp

pytestmark = left_to_kornia

PIPELINES = {
    **EXACT,
    **RGB_EXACT,
    **CLOSE,
    **RGB_CLOSE,
    **TIES,
    "centre": lambda: [K.CenterCrop((20, 24)), K.RandomTranslate((0.1, 0.2)), K.RandomRotation90((1, 3))],
    "shear": lambda: [K.RandomShear((-10.0, 10.0), p=1.0)],
    "normalized by tuples": lambda: [K.Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)), K.Denormalize(MEAN, STD)],
    "mixup, from a range": lambda: [K.RandomMixUpV2(lambda_val=(0.2, 0.7), p=1.0)],
    "mixup, same": lambda: [K.RandomMixUpV2(lambda_val=torch.tensor([0.2, 0.7]), p=1.0, same_on_batch=True)],
    "ranges that float32 rounds": lambda: [
        K.RandomResizedCrop((16, 20), scale=(0.1, 0.7), ratio=(0.7, 1.3)),
        K.RandomContrast((0.1, 0.7), p=1.0),
        K.RandomMixUpV2(lambda_val=(0.1, 0.7), p=1.0),
    ],
    "every magnitude": lambda: [auto.RandAugment(n=4, m=12)],
    "a wide policy": lambda: [auto.TrivialAugment(), auto.AutoAugment("imagenet")],
    "left to Kornia": lambda: [
        K.RandomHorizontalFlip(),
        K.RandomElasticTransform(p=1.0),
        K.RandomMotionBlur(3, 35.0, 0.5, resample="bicubic", p=1.0),
    ],
    "resampled crop, left to Kornia": lambda: [K.RandomCrop((16, 20), cropping_mode="resample"), K.RandomRotation(20.0)],
    "the user's own": lambda: [K.RandomInvert(), torch.nn.Conv2d(3, 3, 3, padding=1)],
}
OF_OWN_DTYPE = {"left to Kornia", "resampled crop, left to Kornia", "the user's own", "a wide policy", "Planckian jitter"}
"""Those with modules that draw, or hold magnitudes or factors, in the dtype that was torch's default when they were made."""

REPEATED = {
    *("affine, nearest", "blur, circular", "blur, replicate", "choice and order", "colour", "crop, replicated"),
    *("cubic behind levels", "filters, each for some", "flips", "jitter between filters", "jitter of normalised images"),
    *("jitter, then jitter", "jitters around a contrast", "mixup, alone", "mixup, never", "noise", "one of, then jitter"),
    *("padded, rotation, flip", "perspective, filled", "resized crop, nearest", "resized crop, of a pixel"),
    *("resized crop, of a square pixel", "self-supervised", "two passes", "two passes, exact"),
    *("zoomed out, drawn size, middle", "every magnitude", "mixup", "resized crop, flip"),
}
"""Pipelines of modules that others have with the same kinds of parameters: slow."""

OPTIONS = {
    "antialias": {"antialias": True},
    "views": {"views": 2},
    "half": {"dtype": torch.float16, "memory_format": torch.channels_last},
}
"""Those that are not tried with every pipeline."""

TARGETS = ["input", "mask", "bbox_xyxy", "valid", "keypoints", "targets"]


def params(names):
    """Parameters of a test: names of pipelines. Pipelines in ``REPEATED`` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in names]


def moving():
    return [K.RandomHorizontalFlip(), K.RandomResizedCrop((16, 20)), K.RandomRotation(20.0)]


def built(make, seed=0):
    """The modules, whose own weights are the same each time."""
    torch.manual_seed(seed)
    return make()


def outcomes(pipeline, given, keys=None, **options):
    """All that a fused pipeline gives: of a call, of its draws, and of these draws once more."""
    torch.manual_seed(3)
    augment = gpuaug.fuse(pipeline, **options)
    draws = augment.draw(given[0] if options.get("ragged") else given[0].shape, seed=1)
    packages = {op.package for op in internals.program(augment).ops}
    torchvisions = "torchvision" in packages
    told = draws.views[0].as_torchvision if torchvisions else draws.views[0].as_kornia
    if options.get("ragged") or len(packages) > 1:
        told = lambda: [draws.of(sample) for sample in range(len(draws))]  # noqa: E731
    mixes = any(isinstance(op, MixOp) for op in internals.program(augment).ops)
    form = told() if options.get("pick") != "sample" and not (torchvisions and mixes) else None
    return [augment(*given, data_keys=keys), augment(*given, data_keys=keys, draws=draws), plain(form), str(augment.explain())]


def plain(form):
    """Draws in Kornia's form, with parameter items as pairs, or in torchvision's."""
    if isinstance(form, list):
        return [plain(each) for each in form]
    return (form.name, plain(form.data)) if hasattr(form, "data") and not isinstance(form, torch.Tensor) else form


def test_every_module_that_is_lowered_is_tried():
    found = set()
    for name in PIPELINES.keys() - REPEATED:
        for module in PIPELINES[name]():
            found.update(type(each) for each in module.modules())
    assert found >= set(LOWERED)


@pytest.mark.parametrize("name", params(PIPELINES))
@pytest.mark.every(3)
def test_images_are_the_same(name):
    """Also if the modules were made with another default dtype."""
    pipeline, given = built(PIPELINES[name]), [photographs(4, 3, 24, 28)]
    expected = check_unchanged(lambda: outcomes(pipeline, given))
    if name not in OF_OWN_DTYPE:
        with default_dtype(torch.float64):
            made = outcomes(built(PIPELINES[name]), given)
        found = difference(made, expected)
        assert not found


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["resized crop, flip", "self-supervised", "left to Kornia"])
def test_images_are_the_same_with_each_option(name, option):
    pipeline, given = built(PIPELINES[name]), [photographs(4)]
    check_unchanged(lambda: outcomes(pipeline, given, **OPTIONS[option]))


@pytest.mark.parametrize("whole", [False, True], ids=["floating boxes", "whole numbers"])
@pytest.mark.parametrize("views", [1, 2])
def test_targets_are_the_same(views, whole):
    images, boxes, points = photographs(5), annotations("bbox_xyxy"), annotations("keypoints")
    records = records_of()
    if whole:
        boxes, points = boxes.long(), points.long()
        records = [{**record, "boxes": record["boxes"].long()} for record in records]
    given = [images, masks(5, 2, 32, 48, dtype=torch.float16), boxes, torch.ones(5, 4, dtype=torch.bool), points, records]
    pipeline = moving()
    check_unchanged(lambda: outcomes(pipeline, given, TARGETS, views=views, dtype=torch.float16))


def test_targets_through_kornia_are_the_same():
    given = [photographs(5), masks(5, 1, 32, 48, dtype=torch.float32), annotations("bbox_xyxy"), annotations("keypoints")]
    pipeline = [K.RandomHorizontalFlip(p=1.0), K.RandomAffine(20.0, resample="bicubic", p=1.0), K.RandomRotation(20.0)]
    check_unchanged(lambda: outcomes(pipeline, given, [*TARGETS[:3], "keypoints"]))


@pytest.mark.parametrize("labels", [torch.arange(4), torch.rand(4, 6)], ids=["indices", "shares"])
@pytest.mark.parametrize("pick", ["batch", "sample"])
def test_labels_are_the_same(pick, labels):
    pipeline, given = PIPELINES["either mix"](), [photographs(4), labels]
    options = {"num_classes": 6, "label_smoothing": 0.1, "pick": pick}
    check_unchanged(lambda: outcomes(pipeline, given, ["input", "class"], **options))


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("antialias", [False, True])
def test_ragged_batches_are_the_same(antialias, views):
    images, pipeline = images_of(), moving()[:2]
    given = [pack(images), targets_of(images), [target["masks"] for target in targets_of(images)]]
    options = {"ragged": True, "antialias": antialias, "views": views}
    check_unchanged(lambda: outcomes(pipeline, given, ["input", "targets", "mask"], **options))


def test_collated_and_streamed_batches_are_the_same():
    samples = [(image, index, 0.5, {"notes": torch.ones(1, 5)}) for index, image in enumerate(images_of())]
    pipeline = moving()

    def batches():
        augment = gpuaug.fuse(pipeline, ragged=True, antialias=True)
        source = [gpuaug.collate_ragged(samples) for _ in range(2)]
        loader = gpuaug.StreamedLoader(source, [augment], device="cpu", seed=7)
        return [(batch[0].data, batch[0].places, *batch[1:]) for batch in source], list(loader)

    check_unchanged(batches)


def test_sanitized_targets_are_the_same():
    record = {"boxes": torch.rand(3, 4), "labels": torch.arange(3), "valid": torch.tensor([True, False, True])}
    check_unchanged(lambda: gpuaug.sanitize([record]))


def test_found_normalization_is_the_same():
    modules = [K.Normalize(MEAN, STD), K.Normalize(torch.tensor(0.5), torch.tensor([0.2, 0.3, 0.4]))]
    check_unchanged(lambda: normalized_by(modules))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
def test_padding_of_masks_in_triton_is_the_same(dtype):
    pytest.importorskip("triton")
    from gpuaug.fusion.backends.triton.backend import _mask_launch

    pipeline, padded = [K.RandomCrop((20, 24), padding=3, fill=7)], masks(1, 1, 32, 48, dtype=dtype)

    def fills():
        plan = internals.program(gpuaug.fuse(pipeline)).segments.at(0, Size(1, 3, 32, 48), masks=True).plan
        return _mask_launch(plan.passes[0], padded, is_ragged=False)[0]

    check_unchanged(fills)
