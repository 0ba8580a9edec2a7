"""Advice about pipelines: what ``gpuaug.fuse`` refuses, warns of or is told to be passed."""

import warnings

import kornia.augmentation as K
import torch
from support.messages.registry import example
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
FLIP = v2.RandomHorizontalFlip(1.0)
TO_FLOAT = v2.ToDtype(torch.float32, scale=True)


def left(*arguments, **options):
    """A fused pipeline without the warning of what is left to its library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpuaug.GpuAugWarning)
        return gpuaug.fuse(*arguments, **options)


class Preset:
    """As in torchvision's references."""

    def __init__(self):
        self.transforms = v2.Compose([FLIP, TO_FLOAT])

    def __call__(self, image):
        return self.transforms(image)


@example("Pass the transforms that it calls: its attribute transforms")
def preset_object(told):
    preset = Preset()
    with told:
        gpuaug.fuse(preset)
    torch.testing.assert_close(gpuaug.fuse(preset.transforms)(IMAGES), torch.stack([preset(image) for image in IMAGES]))


@example("Write out what it does: v2.Resize, K.CenterCrop, v2.ToDtype and v2.Normalize(processor.image_mean, …)")
def image_processor(told):
    class Processor:
        do_resize = True
        image_mean = (0.5, 0.4, 0.3)
        image_std = (0.2, 0.2, 0.2)

        def __call__(self, images):
            cropped = v2.functional.resize(images, [9, 9])[..., 1:7, 1:7]
            return v2.functional.normalize(cropped / 255, self.image_mean, self.image_std)

    processor = Processor()
    with told:
        gpuaug.fuse(processor)
    to_float = v2.ToDtype(torch.float32, scale=True)
    written = [v2.Resize((9, 9)), K.CenterCrop((6, 6)), to_float, v2.Normalize(processor.image_mean, processor.image_std)]
    torch.testing.assert_close(gpuaug.fuse(written)(IMAGES), processor(IMAGES), atol=0.03, rtol=0)


@example("Pass the transforms that it calls, or v2.Compose([function])")
def function_as_pipeline(told):
    def function(image):
        assert image.ndim == 3
        return image.flip(-1)

    with told:
        gpuaug.fuse(function)
    assert torch.equal(left(v2.Compose([function]))(IMAGES), torch.stack([function(image) for image in IMAGES]))


@example("Pass a list of augmentations")
def number_as_pipeline(told):
    with told:
        gpuaug.fuse(3)
    assert torch.equal(gpuaug.fuse([FLIP])(IMAGES), FLIP(IMAGES))


class Cropped(nn.Module):
    """A module that draws for what it is called with."""

    def forward(self, image):
        return v2.RandomCrop(4)(image)


@example("It runs once for the whole batch, so one draw applies to all images")
def module_that_draws_once(told):
    images, module = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(8, 3, 8, 8), Cropped()
    with told:
        augment = gpuaug.fuse(module)
    cropped = augment(images)
    assert all(torch.equal(each, cropped[0]) for each in cropped)
    got = left(v2.Compose([module]))(images)
    assert not all(torch.equal(each, got[0]) for each in got), "one draw per image"


@example(
    "It runs image by image, with separate launches for every image, …. Replace the module",
    "Kornia runs it, with tens of launches per batch, …. Replace the module",
)
def setting_that_is_not_lowered(told):
    with told:
        gpuaug.fuse(v2.Pad(1, padding_mode="symmetric"))
    assert torch.equal(gpuaug.fuse(v2.Pad(1, padding_mode="edge"))(IMAGES), v2.Pad(1, padding_mode="edge")(IMAGES))
    with told:
        gpuaug.fuse(K.RandomMedianBlur())
    gpuaug.fuse(K.RandomGaussianBlur((3, 3), (0.1, 2.0)))(IMAGES)


@example("pipeline must be an instance, got the class")
def class_as_pipeline(told):
    with told:
        gpuaug.fuse(v2.RandomHorizontalFlip)
    assert torch.equal(gpuaug.fuse(v2.RandomHorizontalFlip(1.0))(IMAGES), IMAGES.flip(-1))


@example("Add one, such as a RandomHorizontalFlip()")
def empty_pipeline(told):
    with told:
        gpuaug.fuse([])
    gpuaug.fuse([v2.RandomHorizontalFlip()])
    gpuaug.fuse([K.RandomHorizontalFlip()])


@example("Convert the images in the function: image.float()")
def function_of_changing_type(told):
    calls = []

    def function(image):
        calls.append(image)
        return image if (len(calls) - 1) // 2 % 2 else image / 255  # one type per batch of two

    with told:
        left(v2.Compose([FLIP, function]))(IMAGES)
    assert left(v2.Compose([FLIP, lambda image: image.float()]))(IMAGES).dtype is torch.float32


@example("Put v2.ToDtype(torch.float32, scale=True) before it")
def normalize_of_bytes(told):
    normalize = v2.Normalize([0.5] * 3, [0.5] * 3)
    with told:
        gpuaug.fuse([FLIP, normalize])(IMAGES)
    pipeline = [FLIP, v2.ToDtype(torch.float32, scale=True), normalize]
    torch.testing.assert_close(gpuaug.fuse(pipeline)(IMAGES), v2.Compose(pipeline)(IMAGES))


@example("mean and std of … must be for images in [0, 1]")
def means_of_bytes(told):
    mean, std = torch.tensor([124.0, 116, 104]), torch.tensor([58.0, 57, 57])
    with told:
        gpuaug.fuse([TO_FLOAT, v2.Normalize(mean, std)])(IMAGES)
    got = gpuaug.fuse([TO_FLOAT, v2.Normalize(mean / 255, std / 255)])(IMAGES)
    torch.testing.assert_close(got, v2.Normalize(mean.tolist(), std.tolist())(IMAGES.float()), rtol=1e-4, atol=1e-5)


@example("… of … must be in […, …] for … images")
def fill_outside_of_bytes(told):
    with told:
        gpuaug.fuse([v2.Pad(1, fill=300), v2.RandomErasing(1.0, value=300)])(IMAGES)
    assert torch.equal(gpuaug.fuse(v2.Pad(1, fill=200))(IMAGES), v2.Pad(1, fill=200)(IMAGES))


@example("fill of … must be 0 for masks")
def fill_of_masks(told):
    mask, keys = torch.ones(2, 1, 8, 8), ["input", "mask"]
    with told:
        gpuaug.fuse(v2.RandomAffine(0, (0.5, 0.5), fill=7))(IMAGES, mask, data_keys=keys)
    augment = gpuaug.fuse(v2.RandomAffine(0, (0.5, 0.5), fill={tv_tensors.Image: 7, tv_tensors.Mask: 0}))
    assert augment(IMAGES, mask, data_keys=keys)[1].unique().tolist() in ([0, 1], [1])


@example("must return all images of a batch in one type")
def function_of_another_type_by_chance(told):
    def function(image):
        return image.long()

    with told:
        left(v2.Compose([FLIP, function]))(IMAGES)
    pipeline = [FLIP, v2.ToDtype(torch.float32, scale=True), lambda image: image * 0.5]
    torch.testing.assert_close(left(v2.Compose(pipeline))(IMAGES), IMAGES.flip(-1) / 255 * 0.5)


@example("must return all images of a batch in one size")
def function_of_several_sizes(told):
    def function(image):
        return image[:, : 4 + int(image[0, 0, 0] > 100)]

    with told:
        left(v2.Compose([FLIP, function]))(IMAGES)
    got = left(v2.Compose([FLIP, lambda image: v2.functional.resize(function(image), [6, 6])]))(IMAGES)
    expected = torch.stack([v2.functional.resize(function(image), [6, 6]) for image in IMAGES.flip(-1)])
    assert torch.equal(got, expected)


@example("must hold transforms that do not convert images")
def conversion_by_chance(told):
    with told:
        gpuaug.fuse(v2.RandomApply([FLIP, TO_FLOAT], p=1.0))
    got = gpuaug.fuse([v2.RandomApply([FLIP], p=1.0), TO_FLOAT])(IMAGES)
    torch.testing.assert_close(got, TO_FLOAT(FLIP(IMAGES)))


@example("must hold torchvision's transforms, got")
def kornia_by_chance(told):
    with told:
        gpuaug.fuse(v2.RandomApply([K.RandomHorizontalFlip(p=1.0)], p=1.0))
    assert torch.equal(gpuaug.fuse(v2.RandomApply([FLIP], p=1.0))(IMAGES), FLIP(IMAGES))


def in_a_dataset(transform):
    """A ragged batch of images after a transform in the dataset."""
    return gpuaug.collate_ragged([transform(image) for image in IMAGES.repeat(1, 1, 4, 4)])


@example("must hold transforms that gpuaug.fuse fuses together")
def sizes_drawn_by_chance(told):
    jitter = v2.RandomOrder([v2.ScaleJitter((16, 16)), v2.GaussianBlur(3), v2.Resize(9)])
    crop = v2.RandomCrop((4, 4), pad_if_needed=True)
    with told:
        gpuaug.fuse([jitter, crop])
    assert gpuaug.fuse(crop, ragged=True)(in_a_dataset(jitter)).shape == (2, 3, 4, 4)


@example("must be a transform that gpuaug.fuse lowers, as it draws a size per image")
def sizes_drawn_by_a_subclass(told):
    class Jitter(v2.ScaleJitter):
        def make_params(self, flat_inputs):
            return super().make_params(flat_inputs)

    crop = v2.RandomCrop((4, 4), pad_if_needed=True)
    with told:
        gpuaug.fuse([Jitter((16, 16), (0.5, 2.0)), crop])
    assert gpuaug.fuse(crop, ragged=True)(in_a_dataset(Jitter((16, 16), (0.5, 2.0)))).shape == (2, 3, 4, 4)


@example("must convert images to float32 for gpuaug.fuse")
def conversion_to_half(told):
    half = v2.ToDtype(torch.float16, scale=True)
    with told:
        gpuaug.fuse([FLIP, half])
    got = gpuaug.fuse([FLIP, v2.ToDtype(torch.float32, scale=True)], dtype=torch.float16)(IMAGES)
    torch.testing.assert_close(got, half(FLIP(IMAGES)))


@example("which clamps floats or reflects them at 1")
def inversion_of_floats_of_bytes(told):
    unscaled, invert = v2.ToDtype(torch.float32), v2.RandomInvert(1.0)
    normalize = v2.Normalize([127.5] * 3, [127.5] * 3)
    with told:
        gpuaug.fuse([unscaled, invert, normalize])(IMAGES)
    expected = normalize(invert(IMAGES).float())
    torch.testing.assert_close(gpuaug.fuse([invert, unscaled, normalize])(IMAGES), expected)
    scaled = [v2.ToDtype(torch.float32, scale=True), invert, v2.Normalize([0.5] * 3, [0.5] * 3)]
    torch.testing.assert_close(gpuaug.fuse(scaled)(IMAGES), expected)


@example("must hold a single mix, or be a RandomChoice of only mixes")
def mix_beside_a_flip(told):
    mixes = [v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)]
    with told:
        gpuaug.fuse([TO_FLOAT, v2.RandomChoice([*mixes, FLIP])])
    augment = gpuaug.fuse([FLIP, TO_FLOAT, v2.RandomChoice(mixes)])
    assert augment(IMAGES, torch.tensor([0, 1]), data_keys=["input", "class"])[1].shape == (2, 3)


@example("format of … must be XYXY, XYWH or CXCYWH")
def conversion_to_rotated_boxes(told):
    keys, boxes = ["input", "targets"], [{"boxes": torch.tensor([[1.0, 2, 4, 5]])}] * 2
    with told:
        gpuaug.fuse([FLIP, v2.ConvertBoundingBoxFormat("XYWHR")])
    assert gpuaug.fuse([FLIP])(IMAGES, boxes, data_keys=keys)[1][0]["boxes"].tolist() == [[4, 2, 7, 5]]


@example("dtype of … must be set for images and masks only")
def conversion_of_boxes(told):
    keys, boxes = ["input", "targets"], [{"boxes": torch.tensor([[1.0, 2, 4, 5]])}] * 2
    with told:
        gpuaug.fuse([FLIP, v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.BoundingBoxes: torch.int64}, scale=True)])
    _, got = gpuaug.fuse([FLIP, v2.ToDtype({tv_tensors.Image: torch.float32}, scale=True)])(IMAGES, boxes, data_keys=keys)
    assert got[0]["boxes"].long().tolist() == [[4, 2, 7, 5]]


@example("must follow all transforms that move pixels")
def boxes_judged_too_early(told):
    keys = ["input", "targets"]
    boxes = [{"boxes": torch.tensor([[0.0, 0, 2, 2], [4, 4, 7, 7]]), "labels": torch.tensor([1, 2])}] * 2
    with told:
        gpuaug.fuse([v2.SanitizeBoundingBoxes(), v2.CenterCrop(4)])
    _, got = gpuaug.fuse([v2.CenterCrop(4), v2.SanitizeBoundingBoxes()])(IMAGES, boxes, data_keys=keys)
    assert gpuaug.sanitize(got)[0]["labels"].tolist() == [2]


@example("must hold Kornia's modules, got torchvision's")
def torchvision_in_a_container_that_picks(told):
    with told:
        gpuaug.fuse(K.ImageSequential(FLIP, random_apply=1))
    for pipeline in ([FLIP], v2.Compose([FLIP]), v2.RandomChoice([FLIP])):
        assert torch.equal(gpuaug.fuse(pipeline)(IMAGES), FLIP(IMAGES))


@example("of v1. Write v2")
def v1_without_an_equal_form(told):
    with told:
        gpuaug.fuse(v1.AugMix())
    left(v2.AugMix())(IMAGES)


def of_timm(name):
    """A transform with a name and a module of timm's, which is not needed for it."""
    return type(name, (), {"__module__": "timm.data.transforms", "__call__": lambda self, image: image})()


@example("got timm's …. …")
def transforms_of_timm(told):
    for name in ("RandAugment", "AutoAugment", "ToTensor"):
        with told:
            gpuaug.fuse([of_timm(name)])
    for written in (v2.RandAugment(), v2.AutoAugment()):
        assert gpuaug.fuse(written)(IMAGES).shape == IMAGES.shape
    means = torch.tensor([124.0, 116, 104])
    pipeline = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((means / 255).tolist(), [1 / 255] * 3)]
    torch.testing.assert_close(gpuaug.fuse(pipeline)(IMAGES), IMAGES.float() - means.view(3, 1, 1), atol=1e-3, rtol=1e-5)


@example("transforms that map one image to one image")
def pictures_at_the_end(told):
    with told:
        gpuaug.fuse([FLIP, v2.ToPILImage()])
    assert torch.equal(gpuaug.fuse([FLIP])(IMAGES), FLIP(IMAGES))


@example("num_classes of … must equal num_classes of the rest of the pipeline")
def classes_that_differ(told):
    with told:
        gpuaug.fuse([TO_FLOAT, v2.MixUp(num_classes=3)], num_classes=4)
    augment = gpuaug.fuse([TO_FLOAT, v2.MixUp()], num_classes=4)
    assert augment(IMAGES, torch.tensor([0, 1]), data_keys=["input", "class"])[1].shape == (2, 4)


@example("threshold of … must be at most the largest value of the images")
def threshold_of_bytes_for_floats(told):
    with told:
        gpuaug.fuse([TO_FLOAT, v2.RandomSolarize(128, p=1.0)])
    for pipeline in (
        [v2.RandomSolarize(128, p=1.0), v2.ToDtype(torch.float32, scale=True)],
        [v2.ToDtype(torch.float32, scale=True), v2.RandomSolarize(128 / 255, p=1.0)],
    ):
        torch.testing.assert_close(gpuaug.fuse(pipeline)(IMAGES), v2.Compose(pipeline)(IMAGES))


@example("label_smoothing must be in [0, 1)")
def smoothing_of_one(told):
    pipeline = [TO_FLOAT, v2.MixUp(num_classes=3)]
    with told:
        gpuaug.fuse(pipeline, label_smoothing=1.0)
    mixed = gpuaug.fuse(pipeline)(IMAGES, torch.tensor([1, 1]), data_keys=["input", "class"])[1]
    torch.testing.assert_close(mixed, torch.tensor([[0.0, 1, 0]] * 2))


@example("label_smoothing must come with num_classes")
def smoothing_without_classes(told):
    with told:
        gpuaug.fuse(FLIP, label_smoothing=0.1)
    _, labels = gpuaug.fuse(FLIP, label_smoothing=0.1, num_classes=1000)(
        IMAGES, torch.tensor([1, 2]), data_keys=["input", "class"]
    )
    torch.testing.assert_close(labels.sum(1), torch.ones(2))


@example("dtype must be floating for images that … takes out of [0, 1]")
def normalised_bytes(told):
    pipeline = [TO_FLOAT, v2.Normalize([0.5] * 3, [0.5] * 3)]
    with told:
        gpuaug.fuse(pipeline, dtype=torch.uint8)
    assert gpuaug.fuse(pipeline)(IMAGES).dtype is torch.float32


@example("images must have one size, got a ragged batch")
def ragged_batch_for_another_pipeline(told):
    packed = gpuaug.collate_ragged(list(IMAGES))
    with told:
        gpuaug.fuse(v2.Resize((4, 4)))(packed)
    assert gpuaug.fuse(v2.Resize((4, 4)), ragged=True)(packed).shape == (2, 3, 4, 4)
    images, whole = gpuaug.collate_ragged([IMAGES[1]]), gpuaug.fuse(v2.Resize(4))
    with told:
        whole(images)
    assert torch.equal(whole(images[0][None]), whole(IMAGES[1:]))


@example("pipeline must give images one size …, got … at the end")
def ragged_without_a_size(told):
    packed = gpuaug.collate_ragged(list(IMAGES))
    with told:
        gpuaug.fuse([v2.RandomHorizontalFlip()], ragged=True)
    for library, first in ((v2, "RandomResizedCrop"), (v2, "Resize"), (v2, "CenterCrop"), (K, "Resize"), (K, "CenterCrop")):
        pipeline = [getattr(library, first)((6, 6)), library.RandomHorizontalFlip()]
        assert gpuaug.fuse(pipeline, ragged=True)(packed).shape == (2, 3, 6, 6)


@example("must only move and recolour pixels until images have one size …, got …: …. …")
def ragged_blur_first(told):
    packed = gpuaug.collate_ragged(list(IMAGES))
    with told:
        gpuaug.fuse([v2.GaussianBlur(3), v2.Resize((4, 4))], ragged=True)
    assert gpuaug.fuse([v2.Resize((4, 4)), v2.GaussianBlur(3)], ragged=True)(packed).shape == (2, 3, 4, 4)


@example("where they differ in size, got …. Put … after the")
def bands_mixed_before_they_have_one_size(told):
    tiles = gpuaug.collate_ragged([torch.zeros(4, side, 9, dtype=torch.uint8) for side in (8, 6)], channels=None)
    shuffle, crop = K.RandomChannelShuffle(p=1.0), v2.RandomCrop((4, 4))
    with told:
        gpuaug.fuse([shuffle, crop], ragged=True)(tiles)
    assert gpuaug.fuse([crop, shuffle], ragged=True)(tiles).shape == (2, 4, 4, 4)
    with told:
        gpuaug.fuse(v2.RandomOrder([v2.RandomChannelPermutation(), crop]))(torch.zeros(2, 4, 8, 8))
    assert gpuaug.fuse([crop, v2.RandomChannelPermutation()])(torch.zeros(2, 4, 8, 8)).shape == (2, 4, 4, 4)


@example("Put it after the transform to one size")
def colours_of_grey_images_before_they_have_one_size(told):
    photos = gpuaug.collate_ragged([torch.zeros(1, side, 9, dtype=torch.uint8) for side in (8, 6)], channels=None)
    grey, crop = v2.Grayscale(3), v2.RandomCrop((4, 4))
    with told:
        gpuaug.fuse([grey, crop], ragged=True)(photos)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpuaug.GpuAugWarning)  # it is left to torchvision
        assert gpuaug.fuse([crop, grey], ragged=True)(photos).shape == (2, 3, 4, 4)


@example("pipeline must hold at most one crop by boxes")
def two_crops_by_boxes(told):
    crop = [v2.RandomIoUCrop(), v2.Resize((8, 8))]
    with told:
        gpuaug.fuse(crop * 2)
    boxes = [{"boxes": torch.tensor([[1.0, 2, 4, 5]])}] * 2
    assert gpuaug.fuse(crop)(IMAGES, boxes, data_keys=["input", "targets"])[0].shape == (2, 3, 8, 8)


@example("Give it p=1.0, or resize before it")
def views_of_two_sizes(told):
    with told:
        gpuaug.fuse(K.RandomCrop((4, 4), p=0.5), views=2)(IMAGES)
    for pipeline in (K.RandomCrop((4, 4), p=1.0), [K.Resize((4, 4)), K.RandomCrop((4, 4), p=0.5)]):
        assert gpuaug.fuse(pipeline, views=2)(IMAGES).shape == (4, 3, 4, 4)


@example("Make all modules that can be picked return one size")
def picked_views_of_two_sizes(told):
    flip, crop = K.RandomHorizontalFlip(p=1.0), K.CenterCrop((4, 4), p=1.0)
    with told:
        for _ in range(30):
            left(K.ImageSequential(flip, crop, random_apply=1), views=2)(IMAGES)
    for pipeline in (
        K.ImageSequential(K.Resize((4, 4), p=1.0), crop, random_apply=1),
        [K.ImageSequential(flip, crop, random_apply=1), K.Resize((4, 4), p=1.0)],
    ):
        for _ in range(10):
            assert left(pipeline, views=2)(IMAGES).shape == (4, 3, 4, 4)


@example("must have one value, or one per channel of the images")
def values_of_three_channels_for_one(told):
    with told:
        gpuaug.fuse(K.Normalize(torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5] * 3)))(IMAGES[:, :1])
    got = gpuaug.fuse(K.Normalize(torch.tensor([0.5]), torch.tensor([0.5])))(IMAGES[:, :1])
    torch.testing.assert_close(got, IMAGES[:, :1] / 255 * 2 - 1)


@example("Pad or resize before it")
def crop_larger_than_ragged_images(told):
    packed, crop = gpuaug.collate_ragged(list(IMAGES)), v2.RandomCrop((16, 16))
    with told:
        gpuaug.fuse(crop, ragged=True)(packed)
    assert gpuaug.fuse([v2.Pad(8), crop], ragged=True)(packed).shape == (2, 3, 16, 16)


@example("images must have pixels for")
def images_without_pixels(told):
    augment = gpuaug.fuse(v2.Resize((4, 4)))
    with told:
        augment(IMAGES[:, :, :0])
    assert augment(IMAGES).shape == (2, 3, 4, 4)
