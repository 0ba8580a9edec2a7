"""How pipelines of torchvision's transforms are taken apart: conversions, units, containers."""

import pickle

import kornia.augmentation as K
import pytest
import torch
from support import internals
from support.comparison.replay import photographs
from support.comparison.torchvision_replay import assert_replays, scaled
from support.comparison.values import assert_values
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug
from gpuaug.core.torchvision_types import all_parts
from gpuaug.fusion.normalization import normalized_by

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)

CLASSIFICATION = [v2.PILToTensor(), v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()]
BEHIND = [v2.Normalize(MEAN, STD), v2.RandomErasing(0.5), v2.ToPureTensor()]


def text_of(pipeline):
    with pytest.raises(gpuaug.ArgumentError) as raised:
        gpuaug.fuse(pipeline)
    return str(raised.value)


CONVERSIONS = {
    "ToDtype": [TO_FLOAT],
    "ToDtype by type": [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)],
    "ConvertImageDtype": [v2.ConvertImageDtype()],
    "bytes before": [v2.ToImage(), v2.ToDtype(torch.uint8, scale=True), v2.Identity(), TO_FLOAT],
    "twice": [TO_FLOAT, v2.ToDtype(torch.float32), TO_FLOAT],
    "of v1": [v1.ToTensor()],
    "of timm": [type("MaybeToTensor", (v1.ToTensor,), {"__module__": "timm.data.transforms"})()],
    "of v1, by type": [v1.PILToTensor(), v1.ConvertImageDtype(torch.float)],
    "of other things": [TO_FLOAT, v2.ToDtype({tv_tensors.Mask: None}), v2.ToDtype({tv_tensors.Image: None}, scale=True)],
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_take_no_op(name):
    augment = gpuaug.fuse(v2.Compose([v2.Pad(1, fill=51), *CONVERSIONS[name], v2.Pad(1, fill=0.2)]))
    assert len(internals.program(augment).ops) == 2
    assert augment(photographs(1))[0, 0, 1, 1] == augment(photographs(1))[0, 0, 0, 0] == torch.tensor(51) / 255


CONVERSIONS_OF_TARGETS = {
    "masks": [v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None})],
    "boxes": [v2.ConvertBoundingBoxFormat("CXCYWH")],
    "clamped boxes": [v2.ClampBoundingBoxes()],
    "valid boxes": [v2.SanitizeBoundingBoxes(min_size=3)],
    "plain tensors": [v2.ToPureTensor()],
    "detection": [TO_FLOAT, v2.ConvertBoundingBoxFormat("XYWH"), v2.SanitizeBoundingBoxes(), v2.ToPureTensor()],
}


@pytest.mark.parametrize("name", [*CONVERSIONS, *CONVERSIONS_OF_TARGETS])
def test_pipelines_of_conversions_only_equal_torchvision(name):
    transforms = {**CONVERSIONS, **CONVERSIONS_OF_TARGETS}[name]
    augment, theirs = gpuaug.fuse(v2.Compose(transforms)), v2.Compose(transforms)
    image = photographs(1, 3, 20, 24)[0]
    target = {
        "boxes": tv_tensors.BoundingBoxes([[2.0, 3, 10, 12], [4, 5, 6, 9]], format="XYXY", canvas_size=(20, 24)),
        "labels": torch.tensor([1, 2]),
        "masks": tv_tensors.Mask(torch.ones(2, 20, 24, dtype=torch.uint8)),
    }
    images, targets = augment(image[None], [target], data_keys=["input", "targets"])
    (got,) = gpuaug.sanitize(targets)
    if name in CONVERSIONS:
        assert_values(images[0], scaled(image))
        assert augment(image).shape == image.shape
        assert not augment.geometric_modules  # no warning about targets that are not passed
        assert augment.explain(image[None].shape).launches == 1
        return
    expected_image, expected = theirs(tv_tensors.Image(image), target)
    assert_values(images[0], expected_image.as_subclass(torch.Tensor), atol=1e-7)
    for key, value in expected.items():
        assert (type(got[key]), got[key].dtype) == (type(value), value.dtype)
        assert_values(got[key].as_subclass(torch.Tensor), value.as_subclass(torch.Tensor))


REFUSED = {
    "half, not scaled": (v2.ToDtype(torch.float16), "must convert images to float32 for gpuaug.fuse, got torch.float16."),
    "not scaled, by chance": (
        v2.RandomApply([v2.ToDtype(torch.float32)]),
        "RandomApply must hold transforms that do not convert images, got a conversion. Put the conversion after",
    ),
    "by chance": (
        v2.RandomApply([v2.Compose([TO_FLOAT])]),
        "RandomApply must hold transforms that do not convert images, got a conversion. Put the conversion after",
    ),
    "means of bytes": (
        [TO_FLOAT, v2.Normalize([123.675, 0.0, 0.0], [58.395, 1.0, 1.0])],
        "mean and std of Normalize_1 must be for images in [0, 1], got a mean of 123.675 and a std of 58.395. Divide both "
        "by 255, by 65535 for uint16 images or by 32767 for int16 ones.",
    ),
    "nothing": (v2.Compose([v2.ToImage(), v2.Identity()]), "augmentation or conversion, got none in Compose. Add one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pipelines_that_mean_something_else_are_refused(name):
    pipeline, text = REFUSED[name]
    assert text in text_of(pipeline)


UNSCALED = v2.ToDtype(torch.float32)
FLOATS_OF_BYTES = {
    "at the end": lambda unscaled: [v2.RandomHorizontalFlip(), *unscaled],
    "at the beginning": lambda unscaled: [*unscaled, v2.RandomResizedCrop(24), v2.GaussianBlur(3)],
    "between": lambda unscaled: [
        v2.RandomCrop(24),
        *unscaled,
        v2.RandomApply([v2.RandomErasing(1.0)]),
        v2.RandomHorizontalFlip(),
    ],
    "a function": lambda unscaled: [*unscaled, v2.RandomCrop(24), v2.Lambda(lambda image: image * 2), v2.RandomVerticalFlip()],
    "Kornia's": lambda unscaled: [*unscaled, K.RandomHorizontalFlip(), K.RandomErasing(), K.RandomCrop((24, 24))],
    "behind Kornia's": lambda unscaled: [K.RandomHorizontalFlip(), *unscaled, v2.RandomCrop(24)],
}
UNSCALED_FORMS = {
    "scale=False": [UNSCALED],
    "from PIL": [v2.PILToTensor(), v2.ToImage(), UNSCALED],
    "by type": [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None})],
    "twice": [UNSCALED, v2.ConvertImageDtype(), TO_FLOAT],
    "in a Compose": [v2.Compose([UNSCALED])],
}


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("form", UNSCALED_FORMS)
@pytest.mark.parametrize("name", FLOATS_OF_BYTES)
@pytest.mark.every(4)
def test_floats_of_bytes_are_those_in_the_unit_range_times_255(name, form):
    in_unit_range, unscaled = (gpuaug.fuse(FLOATS_OF_BYTES[name](end)) for end in ([TO_FLOAT], UNSCALED_FORMS[form]))
    for images in (photographs(4), photographs(4, dtype=torch.uint16), photographs(6).unflatten(0, (2, 3))):
        largest = torch.iinfo(images.dtype).max
        results = []
        for augment in (in_unit_range, unscaled):
            torch.manual_seed(0)
            results.append(augment(images))
        assert_values(results[1] / largest, results[0], atol=5e-7)


class Doubling(nn.Module):
    def forward(self, images):
        return 2 * images


@pytest.mark.filterwarnings("ignore:.*is not fused")
def test_modules_of_kornia_and_of_the_user_get_floats_of_bytes():
    images = photographs(4)
    normalize = K.Normalize(torch.tensor([123.0, 116.0, 103.0]), torch.tensor([58.0, 57.0, 56.0]))
    for before in ([], [Doubling()], [K.ImageSequential(K.RandomVerticalFlip(p=0.0))], [v2.Compose([Doubling()])]):
        made = gpuaug.fuse([v2.RandomCrop(32, padding=0), UNSCALED, *before, normalize])(images[..., :32])
        doubled = any(isinstance(part, Doubling) for module in before for part in all_parts(module))
        assert_values(made, normalize((2 if doubled else 1) * images[..., :32].float()), atol=2e-6)
    erased = gpuaug.fuse([UNSCALED, K.RandomErasing(scale=(0.9, 0.9), value=0.5, p=1.0)])(images)
    assert (erased == 0.5).float().mean() > 0.5


@pytest.mark.filterwarnings("ignore:.*is not fused")
def test_pixels_that_are_only_converted_are_exact():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert_values(gpuaug.fuse([UNSCALED])(levels), levels.float())
    assert_values(gpuaug.fuse([UNSCALED, v2.ToDtype(torch.uint8)])(levels), levels)
    there_and_back = [TO_FLOAT, v2.ToDtype(torch.uint8, scale=True), v2.ToDtype(torch.float32)]
    assert_values(gpuaug.fuse(there_and_back)(levels), levels.float())
    for dtype in (torch.uint16, torch.int16):
        values = torch.arange(torch.iinfo(dtype).max - 4095, torch.iinfo(dtype).max + 1).to(dtype).view(1, 1, 64, 64)
        assert_values(gpuaug.fuse([v2.RandomVerticalFlip(1.0), UNSCALED])(values), values.float().flip(-2))


def test_the_normalization_of_floats_of_bytes_is_undone():
    images = photographs(2)
    transforms = [UNSCALED, v2.Normalize([123.0, 116.0, 103.0], [58.0, 57.0, 56.0])]
    for count in (1, 2):
        augment = gpuaug.fuse(transforms[:count])
        mean, std = normalized_by([augment], 255)
        assert_values(augment(images) * std + mean, scaled(images), atol=1e-6)
    assert normalized_by([gpuaug.fuse([TO_FLOAT, UNSCALED])], 255) is None


REFUSED_FOR_FLOATS_OF_BYTES = [
    v2.RandomPosterize(4),
    v2.RandAugment(),
    v2.AutoAugment(),
    v2.TrivialAugmentWide(),
    v2.AugMix(),
    v2.GaussianNoise(),
    v2.ToDtype(torch.uint8, scale=True),
    K.RandomBrightness(),
    K.ColorJitter(0.4),
    K.RandomMedianBlur(7),
]


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("transform", REFUSED_FOR_FLOATS_OF_BYTES, ids=lambda transform: type(transform).__name__)
def test_transforms_for_the_unit_range_are_refused_for_floats_of_bytes(transform):
    text = rf"images must be in \[0, 1\] for {type(transform).__name__}"
    for transforms in ([UNSCALED, v2.RandomErasing(), transform], [UNSCALED, v2.Lambda(torch.clone), transform]):
        with pytest.raises(gpuaug.ArgumentError, match=text):
            gpuaug.fuse(transforms)(photographs(2))
    gpuaug.fuse([UNSCALED, v2.Normalize([114.0], [57.0]), transform])(photographs(2))  # torchvision does not refuse it
    with pytest.raises(gpuaug.ArgumentError, match=text):
        gpuaug.fuse([UNSCALED, nn.Sequential(v2.RandomVerticalFlip(), transform)])(photographs(2))


FORMS = {
    "Compose": lambda: v2.Compose([*CLASSIFICATION, TO_FLOAT, *BEHIND]),
    "list": lambda: [*CLASSIFICATION, TO_FLOAT, *BEHIND],
    "Sequential": lambda: nn.Sequential(*CLASSIFICATION, TO_FLOAT, *BEHIND),
    "Compose in Compose": lambda: v2.Compose([v2.Compose(CLASSIFICATION), v2.Compose([TO_FLOAT, *BEHIND])]),
    "AugmentationSequential": lambda: K.AugmentationSequential(*CLASSIFICATION, TO_FLOAT, *BEHIND),
    "beside Kornia's": lambda: [*CLASSIFICATION, TO_FLOAT, K.Normalize(torch.tensor(MEAN), torch.tensor(STD)), *BEHIND[1:]],
    "of v1": lambda: v1.Compose(
        [
            v1.RandomResizedCrop(24),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
            v1.RandomErasing(0.5),
        ]
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_pipeline_is_one_pass_with_the_same_result(name):
    images = photographs(8)
    expected, got = (gpuaug.fuse(make()) for make in (FORMS["list"], FORMS[name]))
    torch.manual_seed(0)
    wanted = expected(images)
    torch.manual_seed(0)
    torch.testing.assert_close(got(images), wanted, atol=2e-7, rtol=0)
    assert got.explain(images.shape).launches == 1
    assert "left to" not in repr(got)


V1 = {
    "CenterCrop": v1.CenterCrop((3, 5)),
    "ColorJitter": v1.ColorJitter(0.4, (0.2, 3.0), 0, 0.1),
    "GaussianBlur": v1.GaussianBlur((3, 5), (0.2, 1.0)),
    "Grayscale": v1.Grayscale(3),
    "Normalize": v1.Normalize(MEAN, STD),
    "Pad": v1.Pad([1, 2, 3, 4], 0.5, "constant"),
    "RandomAdjustSharpness": v1.RandomAdjustSharpness(2.0, 0.3),
    "RandomAffine": v1.RandomAffine(10, (0.1, 0.2), (0.5, 2.0), (1, 2, 3, 4), v1.InterpolationMode.NEAREST, center=[1, 2]),
    "RandomCrop": v1.RandomCrop(8, [1, 2], True, 0.5, "constant"),
    "RandomErasing": v1.RandomErasing(0.3, (0.1, 0.2), (0.5, 2.0), 0.5),
    "RandomGrayscale": v1.RandomGrayscale(0.3),
    "RandomHorizontalFlip": v1.RandomHorizontalFlip(0.3),
    "RandomInvert": v1.RandomInvert(0.3),
    "RandomPerspective": v1.RandomPerspective(0.3, 0.2, v1.InterpolationMode.NEAREST),
    "RandomResizedCrop": v1.RandomResizedCrop((5, 7), (0.1, 0.5), (0.5, 3.0), v1.InterpolationMode.BICUBIC, True),
    "RandomRotation": v1.RandomRotation((5, 8), v1.InterpolationMode.NEAREST, False, (3, 4)),
    "RandomSolarize": v1.RandomSolarize(0.5, 0.3),
    "RandomVerticalFlip": v1.RandomVerticalFlip(0.3),
    "Resize": v1.Resize(9, max_size=11, antialias=False),
}


@pytest.mark.parametrize("name", V1)
def test_a_transform_of_v1_is_that_of_v2_with_its_settings(name):
    """v1's own transform, run from its parameters in v2's names, gives the same image for the same draws."""
    made = V1[name]
    augment = gpuaug.fuse(made)
    assert type(internals.program(augment).ops[0].module) is getattr(v2, name)
    images = photographs(4, dtype=torch.float32)
    again = gpuaug.fuse(internals.program(augment).ops[0].module)
    assert_values(augment(images, draws=augment.draw(images.shape, 0)), again(images, draws=again.draw(images.shape, 0)))
    torch.manual_seed(0)
    expected = made(images[0])
    torch.manual_seed(0)
    torch.testing.assert_close(internals.program(augment).ops[0].module(images[0]), expected, atol=1e-5, rtol=0)


def test_containers_of_v1_draw_for_each_sample():
    made = v1.RandomApply([v1.RandomChoice([v1.RandomInvert(1.0), v1.RandomOrder([v1.RandomSolarize(0.5, 1.0)])])], p=0.5)
    calls = [[name for name, _ in each] for each in gpuaug.fuse(made).draw((64, 3, 8, 8), seed=0).as_torchvision()]
    assert {tuple(each) for each in calls} == {(), ("invert",), ("solarize",)}


MARKS = {
    "RandomApply": v2.RandomApply([v2.RandomInvert(0.5), v2.RandomHorizontalFlip(1.0)], p=0.3),
    "RandomApply in RandomApply": v2.RandomApply(
        [v2.RandomApply([v2.RandomInvert(1.0)], 0.5), v2.RandomVerticalFlip(1.0)], 0.6
    ),
    "RandomChoice": v2.RandomChoice([v2.RandomInvert(0.7), v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0)]),
    "RandomChoice by weight": v2.RandomChoice(
        [v2.Compose([v2.RandomInvert(1.0), v2.RandomHorizontalFlip(1.0)]), v2.RandomVerticalFlip(1.0)], p=[3.0, 1.0]
    ),
    "RandomChoice of choices": v2.RandomChoice(
        [MARK := v2.RandomChoice([v2.RandomInvert(1.0), v2.Identity()]), v2.RandomHorizontalFlip(1.0)]
    ),
    "RandomOrder": v2.RandomOrder([v2.RandomSolarize(0.5, 1.0), v2.ColorJitter((0.8, 0.8)), v2.RandomInvert(1.0)]),
    "RandomOrder of two": v2.RandomOrder([v2.RandomSolarize(0.5, 0.5), v2.ColorJitter((0.7, 0.7))]),
}


@pytest.mark.parametrize("name", MARKS)
def test_containers_run_what_torchvision_runs_as_often(name):
    """Every outcome makes another image of one, and the two have it as often."""
    count = 1500
    image = torch.tensor([[0.1, 0.2], [0.6, 0.9]]).expand(3, 2, 2)
    augment = gpuaug.fuse(MARKS[name])
    torch.manual_seed(1)
    theirs = torch.stack([MARKS[name](image) for _ in range(count)])
    ours = augment(image.expand(count, 3, 2, 2).contiguous(), draws=augment.draw((count, 3, 2, 2), seed=3))
    kinds, which = torch.cat((theirs, ours)).mul(1e5).round().flatten(1).unique(dim=0, return_inverse=True)
    shares = torch.stack([which.view(2, count).eq(kind).float().mean(1) for kind in range(len(kinds))])
    assert len(kinds) >= 2
    # Five deviations of a share's difference.
    assert_values(shares[:, 0], shares[:, 1], atol=5 * (0.5 / count) ** 0.5)


@pytest.mark.parametrize("name", MARKS)
def test_containers_replay(name):
    assert_replays(MARKS[name], photographs(40, dtype=torch.float32), atol=2e-6)


class Weighted(v2.RandomChoice):
    """A choice by weights as they are: only torchvision's constructor divides them by their sum."""

    def __init__(self, transforms, p):
        super().__init__(transforms)
        self.p = p


@pytest.mark.parametrize("weights", [[1.0, 3.0, 4.0], [1e-3, 0.0, 3e-3], [3.0, 1.0]], ids=str)
def test_weights_of_a_choice_are_relative_as_in_torchvision(weights):
    """By whatever container the choice is lowered: of pixels, of sizes, and of mixes."""
    count = 2000
    torch.manual_seed(0)
    theirs = torch.multinomial(torch.tensor(weights), count, replacement=True).bincount(minlength=3) / count
    pixels = Weighted([v2.RandomSolarize(value, 1.0) for value in (0.2, 0.5, 0.7)], weights)
    sizes = Weighted([v2.Compose([v2.Pad(side), v2.CenterCrop(2)]) for side in (0, 1, 2)], weights)
    values = torch.tensor([0.4, 0.6, 0.9]).view(3, 1, 1).expand(3, 2, 2)
    for made in (pixels, v2.Compose([Weighted([*pixels.transforms], weights), v2.Resize((2, 2))])):
        got = gpuaug.fuse(made)(values.expand(count, 3, 2, 2))[:, :, 0, 0]
        kinds = torch.stack([branch(values)[:, 0, 0] for branch in pixels.transforms])
        ours = (got[:, None] - kinds).abs().amax(2).lt(1e-5).float().mean(0)
        assert_values(ours, theirs, atol=5 * (0.5 / count) ** 0.5)
    draws = gpuaug.fuse(sizes).draw((count, 3, 2, 2), seed=0)
    padded = [dict(calls)["pad"]["padding"][0] if "pad" in dict(calls) else 0 for calls in draws.as_torchvision()]
    assert_values(torch.tensor(padded).bincount(minlength=3) / count, theirs, atol=5 * (0.5 / count) ** 0.5)
    mixes = gpuaug.fuse(Weighted([v2.MixUp(), v2.CutMix(), v2.MixUp()], weights))
    names = [next(iter(mixes.draw((2, 3, 2, 2), seed=seed, dtype=torch.float32).of(0))) for seed in range(400)]
    picked = torch.tensor([int(name[-1]) for name in names]).bincount(minlength=3) / 400
    assert_values(picked, theirs, atol=5 * (0.5 / 400) ** 0.5)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [torch.inf, 1.0], [torch.nan, 1.0], [1.0, 1.0, 1.0]], ids=str)
def test_weights_that_torchvision_does_not_accept_are_errors(weights):
    for transforms in ([v2.RandomInvert(), v2.Identity()], [v2.MixUp(), v2.CutMix()]):
        with pytest.raises(gpuaug.ArgumentError, match="must hold a finite weight of at least 0 per transform"):
            gpuaug.fuse(Weighted(transforms, weights))


def test_draws_of_a_sample_are_named():
    images = photographs(6, dtype=torch.float32)
    augment = gpuaug.fuse(v2.Compose([v2.ToImage(), v2.ColorJitter(0.4, 0.4), v2.RandomApply([v2.GaussianBlur(3)], p=1.0)]))
    draws = pickle.loads(pickle.dumps(augment.draw(images.shape, seed=0)))
    assert list(draws.of(2)) == ["ColorJitter_1", "RandomApply_2/GaussianBlur_0"]
    assert list(draws.of(2)["ColorJitter_1"]) == ["brightness_factor", "contrast_factor"]


def test_notes_say_which_transforms_have_nothing_left_to_do():
    augment = gpuaug.fuse(v2.Compose([v2.ToImage(), v2.CenterCrop(8), v2.Compose([TO_FLOAT])]))
    note = "ToImage_0, ToDtype_0: nothing to compute, because passes convert images when they read and write them."
    assert augment.explain().notes == (note,)
    boxes = gpuaug.fuse(
        [v2.CenterCrop(8), v2.ConvertBoundingBoxFormat("XYWH"), v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes()]
    )
    names = "ConvertBoundingBoxFormat_1, ClampBoundingBoxes_2, SanitizeBoundingBoxes_3"
    of_boxes = f"{names}: applied to boxes at the end of the pipeline."
    assert boxes.explain().notes == (of_boxes,)
    four = gpuaug.fuse(v2.Resize(8, antialias=False)).explain((2, 3, 64, 64))
    assert four.notes[0].endswith("With antialias=True, the default, it antialiases.")
    assert gpuaug.fuse(v2.Resize(8)).explain((2, 3, 64, 64)).notes == ()


def test_antialias_of_fuse_is_for_kornias_modules_alone():
    crop, resize = internals.program(
        gpuaug.fuse([v2.RandomResizedCrop(16, antialias=False), K.Resize((8, 8))], antialias=True)
    ).ops
    assert (crop.filter, resize.filter) == ("", "triangle")
