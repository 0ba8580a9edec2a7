"""Advice about pipelines: what ``gpuaug.fuse`` refuses, warns of or is told to be passed."""

import kornia.augmentation as K
import torch
from support.messages.registry import example
from support.messages.values import FLIP, IMAGES, TO_FLOAT, fuse_some
from torch import nn
from torchvision.transforms import v2

import gpuaug


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
    assert torch.equal(fuse_some(v2.Compose([function]))(IMAGES), torch.stack([function(image) for image in IMAGES]))


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
    got = fuse_some(v2.Compose([module]))(images)
    assert not all(torch.equal(each, got[0]) for each in got), "one draw per image"


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
        fuse_some(v2.Compose([FLIP, function]))(IMAGES)
    assert fuse_some(v2.Compose([FLIP, lambda image: image.float()]))(IMAGES).dtype is torch.float32


@example("must return all images of a batch in one type")
def function_of_another_type_by_chance(told):
    def function(image):
        return image.long()

    with told:
        fuse_some(v2.Compose([FLIP, function]))(IMAGES)
    pipeline = [FLIP, v2.ToDtype(torch.float32, scale=True), lambda image: image * 0.5]
    torch.testing.assert_close(fuse_some(v2.Compose(pipeline))(IMAGES), IMAGES.flip(-1) / 255 * 0.5)


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


@example("label_smoothing must come with num_classes")
def smoothing_without_classes(told):
    with told:
        gpuaug.fuse(FLIP, label_smoothing=0.1)
    _, labels = gpuaug.fuse(FLIP, label_smoothing=0.1, num_classes=1000)(
        IMAGES, torch.tensor([1, 2]), data_keys=["input", "class"]
    )
    torch.testing.assert_close(labels.sum(1), torch.ones(2))


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


@example("Pass the modules that it contains in a list: [*module.children()]")
def modules_by_name(told):
    module = nn.ModuleDict({"flip": FLIP, "invert": v2.RandomInvert(1.0)})
    with told:
        gpuaug.fuse(module)
    assert torch.equal(gpuaug.fuse([*module.children()])(IMAGES), 255 - IMAGES.flip(-1))


@example("Pass fill=0 for black")
def fill_by_name(told):
    with told:
        gpuaug.PadIfSmaller(9, fill="black")
    assert not gpuaug.PadIfSmaller(9, fill=0)(IMAGES)[..., 8].any()


@example("Pass (height, width), such as size=(640, 640)")
def size_of_a_box(told):
    with told:
        gpuaug.FixedSizeCrop((0, 0, 640, 640))
    assert gpuaug.FixedSizeCrop(size=(640, 640))(IMAGES).shape == (2, 3, 640, 640)


@example("Pass the smallest side in pixels, such as size=480")
def fraction_as_size(told):
    with told:
        gpuaug.PadIfSmaller(1.5)
    assert gpuaug.PadIfSmaller(size=480)(IMAGES).shape == (2, 3, 480, 480)


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
