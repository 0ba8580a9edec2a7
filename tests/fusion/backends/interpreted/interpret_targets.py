"""The kernels for boxes and for masks of several sizes, against torch."""

import itertools
from unittest import mock

import kornia.augmentation as K
import numpy as np
import torch
from support.batches.pairwise import pairwise
from support.comparison.box_windows import TRANSFORMS, difference
from support.comparison.replay import photographs
from support.targets.detection import boxes_of, masks
from support.targets.mask_lists import COUNTS, PIPELINES, SIDES, laid_out, rows_of
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.backends import dispatch
from gpuaug.fusion.backends.triton import backend
from gpuaug.fusion.backends.triton import boxes as box_kernels
from gpuaug.fusion.backends.triton.box_windows import box_windows
from gpuaug.fusion.ops import boxes
from gpuaug.fusion.ops.boxes import KORNIA_FORMATS, TARGET_DICT_FORMATS, BoxMapping

POINTS = boxes.BoxFormat("points", edges=True)
FRAMES = torch.tensor([[0, 20, 30], [7, 40, 25], [9, 33, 64]])
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64)
MASK_DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float32)


def ways():
    """(forms before and after, clipped, with owners, images of several sizes, dtype) for every way boxes can take."""
    forms = [(form, form) for form in (*KORNIA_FORMATS.values(), *TARGET_DICT_FORMATS.values(), POINTS)]
    forms += [(KORNIA_FORMATS["bbox"], KORNIA_FORMATS["bbox_xyxy"]), (KORNIA_FORMATS["bbox"], KORNIA_FORMATS["bbox_xywh"])]
    forms += itertools.permutations([TARGET_DICT_FORMATS[name] for name in ("xyxy", "xywh", "cxcywh")], 2)
    for way in itertools.product(forms, (False, True), (False, True), (False, True), DTYPES):
        (form, _), clip, _, ragged, _ = way
        if not (clip and form.layout == "points") and not (ragged and not form.share):
            yield way


def values_of(form, dtype, generator):
    """(3, 13) boxes or points in and around their frames, some of them without an extent or not a number."""
    places = torch.rand(3, 13, 4, 2, generator=generator) * 60 - 10
    if form.layout == "vertices":
        made = places
    elif form.layout == "points":
        made = torch.cat((places[..., 0, :], torch.ones(3, 13, 1)), -1) if form.edges else places[..., 0, :]
    else:
        made = places[..., :2, :].flatten(-2).clone()
        made[..., 2:] = made[..., 2:].abs() * 0.7 + (made[..., :2] if form.layout == "corners" else 0)
        made[0, 0, 2:] = made[0, 0, :2] if form.layout == "corners" else 0
        made[0, 1, 2] = made[0, 1, 0] - 3 if form.layout == "corners" else -3
        made[1, 2] = torch.tensor([4.0, 4, 9, 9])
    made = made / 40 if form.share else made
    if not dtype.is_floating_point:
        return made.round().to(dtype)
    made[2, 4].view(-1)[0] = torch.nan
    made[2, 5].view(-1)[-1] = torch.inf
    return made.to(dtype)


def boxes_agree(forms, clip, owned, ragged, dtype, generator):
    """Whether the kernel makes the same boxes valid, and of the same values, as torch does."""
    form, to = forms
    values = values_of(form, dtype, generator)
    matrix = torch.eye(3).repeat(3, 1, 1) + torch.randn(3, 3, 3, generator=generator) * torch.tensor([0.2, 0.2, 1e-3])[:, None]
    matrix[:, :2, 2] += torch.randn(3, 2, generator=generator) * 5
    table = torch.full((3, 13), torch.nan)
    table[:, 4:] = matrix.flatten(1)
    owners = None
    if owned:
        owners, values = torch.tensor([0] * 9 + [2] * 30), values.flatten(0, 1)
    valid = (
        torch.rand(values.shape[: 1 if owned else 2], generator=generator) < 0.8 if clip and dtype != torch.float64 else None
    )
    matrices = table[:, 4:].unflatten(1, (3, 3))
    way = BoxMapping(form, to, matrices, FRAMES if ragged else (20, 30), (24, 31), owners, clip, 0.2 if owned else 0.0)
    leaves = dtype if dtype.is_floating_point else torch.float32
    expected, expected_valid = boxes.map_boxes(values, valid, way, leaves)
    got, got_valid = box_kernels.map_boxes(values, valid, way, leaves)
    tolerance = {torch.float16: 0.07, torch.float64: 1e-9}.get(leaves, 2e-4)
    alike = got.dtype == leaves and torch.allclose(
        got, expected, atol=tolerance, rtol=1e-3 if leaves == torch.float16 else 1e-5, equal_nan=True
    )
    if clip:
        return alike and torch.equal(got_valid, expected_valid) and 0 < int(got_valid.sum()) < got_valid.numel()
    return alike and got_valid is None and expected_valid is None


def masks_agree(name, dtype):
    """Whether masks of several sizes come out of the kernel as torch makes them."""
    plan, tables = rows_of(PIPELINES[name])
    given = [masks(n, *sides, dtype=dtype, seed=n) for n, sides in zip(COUNTS, SIDES, strict=True)]
    given = [given[1][:0], given[0].mT.contiguous().mT, given[2]]  # the first holds nothing, the second is not contiguous
    table, step = torch.cat(tables), plan.passes[0]
    values, layout = laid_out(given, [1, 0, 2])
    expected = dispatch.torch_backend.gather_mask(step, values, table, layout)
    # As if a launch had room for two of the five.
    with mock.patch.object(backend, "MOST_SAMPLES", 2):
        got = backend.run_mask(step, values, table, layout)
    # A tap half way between two pixels may fall on either.
    return (
        got.shape == expected.shape
        and (got != expected).float().mean() <= (0.01 if step.front.interpolation else 0)
        and bool(expected.any())
    )


PASSES = {
    "turned, inverted, cropped": [K.RandomRotation(30.0), K.RandomInvert(), K.RandomResizedCrop((14, 16))],
    "two fills": [v2.RandomZoomOut(0.5, (1.0, 2.0)), v2.CenterCrop((40, 48))],
    "two drawn sizes": [v2.RandomResize(12, 30), v2.RandomInvert(), v2.RandomZoomOut(), v2.CenterCrop(20)],
}


def masks_of_several_passes_agree(name):
    """Whether masks come out of all passes as torch makes them, where images differ in size behind some of them."""
    images = [photographs(1, 3, *sides, seed=seed)[0] for seed, sides in enumerate(SIDES)]
    given = [{"masks": masks(n, *sides, dtype=torch.uint8, seed=n)} for n, sides in zip(COUNTS, SIDES, strict=True)]
    augment, batch = gpuaug.fuse(PASSES[name], ragged=True), gpuaug.collate_ragged(images)
    draws = augment.draw(batch, seed=1)
    _, expected = augment(batch, given, data_keys=["input", "targets"], draws=draws)
    with mock.patch.object(dispatch.torch_backend, "gather_mask", backend.run_mask):
        _, got = augment(batch, given, data_keys=["input", "targets"], draws=draws)
    apart = [(one["masks"] != other["masks"]).float() for one, other in zip(got, expected, strict=True)]
    # A tap half way between two pixels may fall on either.
    return torch.cat(apart).mean() <= 0.01 and any(bool(each["masks"].any()) for each in expected)


def padding_agrees(dtype):
    """Whether the kernel pads masks with exactly the fill, and refuses a fill out of the range of their dtype."""
    exact = 2.7 if dtype.is_floating_point else torch.iinfo(dtype).max if dtype.itemsize < 8 else 2**53 + 1
    images, given = photographs(2, 3, 8, 9), masks(2, 8, 9, dtype=dtype, seed=0)[:, None]
    with mock.patch.object(dispatch.torch_backend, "gather_mask", backend.run_mask):
        padded = gpuaug.fuse(v2.Pad(2, fill={tv_tensors.Mask: exact, "others": 0}))
        _, got = padded(images, given, data_keys=["input", "mask"])
        try:
            augment = gpuaug.fuse(v2.Pad(2, fill={tv_tensors.Mask: 1e300, "others": 0}))
            refused = augment(images, given, data_keys=["input", "mask"]) is None
        except gpuaug.ArgumentError:
            refused = True
    expected = torch.full((2, 1, 12, 13), exact, dtype=dtype)
    expected[..., 2:-2, 2:-2] = given
    return torch.equal(got, expected) and refused == (dtype != torch.float64)


def box_crops_agree():
    """Whether images and boxes come out of the kernels as torch makes them, where crops are chosen by boxes."""
    modules = [
        v2.RandomZoomOut(64, (1.0, 2.0)),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(),
        v2.Resize((14, 12), antialias=False),
    ]
    augment = gpuaug.fuse(modules, dtype=torch.float32)
    images, records = photographs(3, 3, 21, 37), [{"boxes": boxes} for boxes in boxes_of(3, 21, 37)]
    draws = augment.draw(images.shape, seed=1)
    expected, torchs = augment(images, records, data_keys=["input", "targets"], draws=draws)
    kernels = {"run": backend.run, "map_boxes": box_kernels.map_boxes, "box_windows": box_windows}
    with mock.patch.multiple(dispatch, **kernels):
        got, others = augment(images, records, data_keys=["input", "targets"], draws=draws)
    for one, other in zip(torchs, others, strict=True):
        if not torch.allclose(one["boxes"], other["boxes"], atol=2e-4) or not torch.equal(one["valid"], other["valid"]):
            return False
    return torch.allclose(got, expected, atol=2e-5) and any(not each["valid"].all() for each in torchs)


def failures(*, every):
    """Boxes and masks for which the kernels differ from torch."""
    generator = torch.Generator().manual_seed(0)
    with np.errstate(all="ignore"):  # some values are nan or inf
        for way in ways() if every else pairwise(list(ways())):
            if not boxes_agree(*way, generator):
                yield f"boxes, {way}"
        for number, name in enumerate(PIPELINES):
            for dtype in MASK_DTYPES if every else MASK_DTYPES[number % 4 :][:1]:
                if not masks_agree(name, dtype):
                    yield f"masks, {name}, {dtype}"
        for name in PASSES:
            if not masks_of_several_passes_agree(name):
                yield f"masks of several passes, {name}"
        for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64):
            if not padding_agrees(dtype):
                yield f"padding of masks, {dtype}"
        if not box_crops_agree():
            yield "crops by boxes"
        for name in TRANSFORMS:
            if text := difference(name, box_windows, torch.device("cpu"), samples=40 if every else 8):
                yield text
