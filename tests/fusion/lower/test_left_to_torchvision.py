"""What torchvision runs itself, image by image, in a pipeline of its transforms."""

import functools
import pickle
import re

import pytest
import torch
from support import internals
from support.comparison.replay import overriding, photographs
from support.comparison.torchvision_replay import scaled
from support.comparison.values import assert_values
from support.ops.other_arguments import made as changeable
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import gpuaug
from gpuaug.fusion.lower.torchvision import LOWERED
from gpuaug.fusion.ops.fallback import COLOUR_ONLY
from gpuaug.fusion.policies.torchvision import TorchvisionPolicy

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
left_to_torchvision = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")


class Halves(nn.Module):
    def forward(self, image):
        assert image.ndim == 3
        return image // 2 if image.dtype == torch.uint8 else image / 2


class Flip(v2.Transform):
    def transform(self, inpt, params):
        return inpt.flip(-1)


LEFT = " is not fused, because gpuaug.fuse does not lower it: {}. "
IMAGE_BY_IMAGE = " image by image, with separate launches for every image"

REASONS = {
    "subclass": (Flip(), "no lowering for this type"),
    "subclass of an op": (overriding(v2.RandomInvert)(), "a subclass of RandomInvert that overrides check_inputs"),
    "subclass of a container": (
        overriding(v2.RandomApply, "forward")([v2.RandomInvert()]),
        "a subclass of RandomApply that overrides forward",
    ),
    "mode": (v2.Resize(20, interpolation=InterpolationMode.NEAREST), "interpolation='nearest'"),
    "cubic": (
        v2.Resize(20, interpolation=InterpolationMode.BICUBIC, antialias=False),
        "interpolation='bicubic' without antialias",
    ),
    "symmetric": (v2.Pad(2, padding_mode="symmetric"), "padding_mode='symmetric'"),
    "expand": (v2.RandomRotation((90, 90), expand=True, center=(3, 4)), "expand=True with a center"),
    "corners": (v2.RandomPerspective(1.0, p=0.0), "distortion_scale=1, with which corners may meet"),
    "size by chance": (
        v2.RandomApply([v2.RandomInvert(), v2.Resize((8, 8))], p=1.0),
        "Resize_1 in it may change the size of some images",
    ),
    "long order": (v2.RandomOrder([v2.RandomInvert()] * 5), "its random order needs 25 ops, more than 24"),
    "function": (v2.Lambda(torch.clone), "no lowering for this type"),
    "weights": (v2.AugMix(alpha=0.0), "mixture_width, alpha or severity is out of range"),
    "no chains": (v2.AugMix(mixture_width=0), "mixture_width, alpha or severity is out of range"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_has_no_lowering_is_left_to_torchvision_and_named(name):
    transform, reason = REASONS[name]
    with pytest.warns(gpuaug.GpuAugWarning) as caught:
        augment = gpuaug.fuse([v2.RandomHorizontalFlip(), transform, TO_FLOAT])
    (text,) = (str(each.message) for each in caught)
    assert text.startswith(f"{type(transform).__name__}_1 ")
    assert LEFT.format(reason) in text
    assert IMAGE_BY_IMAGE in text
    images = photographs(3)
    assert augment(images).dtype == torch.float32  # and warns no more
    line = augment.explain((64, 3, 32, 48)).lines[1]
    assert (line.package, line.reason) == ("torchvision", reason)
    assert f"left to torchvision, image by image, 64 calls a batch: {reason}" in str(augment.explain((64, 3, 32, 48)))
    assert f"; left to torchvision: {type(transform).__name__}_1" in repr(augment)


def test_a_change_of_the_number_of_channels_in_a_random_container_is_left_to_torchvision():
    augment = gpuaug.fuse(v2.RandomApply([v2.RGB()]))
    (line,) = augment.explain((4, 1, 32, 48)).lines
    assert line.reason == "in a random container the number of channels of the output depends on the draw"
    assert not augment.explain((4, 3, 32, 48)).lines[0].reason


def test_a_transform_in_an_order_is_warned_of_once():
    with pytest.warns(gpuaug.GpuAugWarning) as caught:
        augment = gpuaug.fuse([v2.RandomOrder([v2.Lambda(torch.clone), v2.RandomInvert()]), TO_FLOAT])
    assert len(caught) == 1
    assert augment(photographs(4)).shape == (4, 3, 32, 48)


@left_to_torchvision
def test_a_conversion_in_a_module_of_the_users_is_its_own_affair():
    class Own(nn.Sequential):
        """Runs as it is."""

    images = photographs(2)
    got = gpuaug.fuse(v2.Compose([Own(TO_FLOAT), v2.Pad(1, fill=0.5)]))(images)
    assert got.dtype == torch.float32
    assert (got[:, :, 0] == 0.5).all()
    assert (
        len(internals.program(gpuaug.fuse(v2.Compose([v2.Pad(1, fill=127), nn.Sequential(v2.RandomInvert(), TO_FLOAT)]))).ops)
        == 2
    )


@left_to_torchvision
def test_what_is_left_is_given_the_bytes_that_torchvision_would_have():
    images = photographs(6)
    expected = torch.stack([functional.equalize(functional.horizontal_flip(image)) for image in images])
    made = [v2.RandomHorizontalFlip(1.0), overriding(v2.RandomEqualize)(1.0), Halves(), TO_FLOAT, Halves()]
    assert_values(gpuaug.fuse(v2.Compose(made))(images), scaled(expected // 2) / 2)


@left_to_torchvision
def test_what_is_left_gives_its_size_to_what_follows():
    images = photographs(5)
    choice = v2.RandomChoice([v2.RandomResizedCrop(24), v2.Compose([v2.GaussianBlur(3), v2.CenterCrop(24)])])
    order = v2.RandomOrder([*[v2.RandomInvert()] * 4, v2.RandomCrop(24)])
    own = overriding(v2.RandomCrop)(24)
    for made in (choice, order, own, v2.Resize((24, 24), interpolation=InterpolationMode.NEAREST)):
        augment = gpuaug.fuse([made, v2.RandomCrop(20), TO_FLOAT])
        assert augment(images).shape == (5, 3, 20, 20)
    grey = overriding(v2.Grayscale)()
    assert gpuaug.fuse([grey, v2.RandomHorizontalFlip(), TO_FLOAT, v2.Normalize([0.5], [0.25])])(images).shape == (5, 1, 32, 48)


@left_to_torchvision
def test_draws_of_what_is_left_are_keyed_and_differ_between_samples():
    images = photographs(1).expand(16, 3, 32, 48).contiguous()
    augment = gpuaug.fuse([TO_FLOAT, v2.RandomApply([v2.RandomOrder([v2.RandomErasing(1.0, value="random")] * 5)], p=0.5)])
    draws = pickle.loads(pickle.dumps(augment.draw(images.shape, seed=1)))
    state = torch.get_rng_state()
    made = augment(images, draws=draws)
    assert_values(made, augment(images, draws=draws))
    assert_values(torch.get_rng_state(), state)
    changed = [bool((one != image).any()) for one, image in zip(made, scaled(images), strict=True)]
    assert changed == [bool(draws.of(sample)) for sample in range(16)]
    assert 3 < sum(changed) < 13
    assert len({tuple(one.flatten().tolist()) for one in made}) == sum(changed) + 1


@left_to_torchvision
def test_samples_of_a_size_that_an_op_does_not_take_are_left_to_torchvision():
    images = photographs(4, height=20, width=48)
    augment = gpuaug.fuse([v2.CenterCrop(24), TO_FLOAT])
    expected = torch.stack([functional.center_crop(image, [24, 24]) for image in images])
    assert_values(augment(images), scaled(expected))
    with pytest.raises(ValueError, match="Required crop size") as raised:
        gpuaug.fuse([v2.RandomCrop(24), TO_FLOAT])(images)
    assert raised.value.__notes__ == ["gpuaug: raised by torchvision, which runs RandomCrop_0: crops 24x24 out of 20x48."]
    grey = photographs(32, channels=1)
    made = gpuaug.fuse([v2.RandomApply([v2.ColorJitter((0.4, 0.5))]), TO_FLOAT])(grey)
    skipped = sum(torch.equal(one, image) for one, image in zip(made, scaled(grey), strict=True))
    assert 4 < skipped < 28


@left_to_torchvision
def test_results_of_what_is_left_are_tensors_of_one_size():
    images = photographs(4)
    sizes = v2.RandomApply([v2.Resize((8, 8))])
    with pytest.raises(gpuaug.ArgumentError) as raised:
        [gpuaug.fuse([sizes, TO_FLOAT])(images) for _ in range(20)]
    text = "^RandomApply_0 must return all images of a batch in one size, got .*3x8x8.*. Run it in the dataset"
    assert re.match(text, str(raised.value))
    with pytest.raises(gpuaug.ArgumentTypeError) as raised:
        gpuaug.fuse(v2.Compose([v2.Lambda(lambda image: None), TO_FLOAT]))(images)
    assert "Lambda_0 must return a tensor, got NoneType" in str(raised.value)


@left_to_torchvision
def test_masks_and_boxes_follow_what_moves_nothing_and_no_more():
    images, masks = photographs(2), photographs(2, channels=1)
    made, kept = gpuaug.fuse([v2.RandomOrder([v2.RandomErasing()] * 5), v2.RandomErasing(1.0), TO_FLOAT])(
        images, masks, data_keys=["input", "mask"]
    )
    assert_values(kept, masks)
    assert made.shape == images.shape
    augment = gpuaug.fuse([Flip(), TO_FLOAT])
    labels = torch.arange(2)
    assert augment(images, labels, data_keys=["input", "class"])[1] is labels
    with pytest.raises(
        gpuaug.ArgumentError, match=r"Flip_0 must be .* so that mask can be transformed .*, got a module that torchvision runs"
    ):
        augment(images, masks, data_keys=["input", "mask"])


LATER = (v2.FiveCrop, v2.TenCrop, v2.RandomIoUCrop, v2.UniformTemporalSubsample, *TorchvisionPolicy.lowers, v2.AugMix)
"""Transforms that make several images of one, look at boxes, take clips, or pick what they do."""

TRANSFORMS = [v2.ToDtype, *(kind for kind in LOWERED if kind.__module__.startswith("torchvision.") and kind not in LATER)]


def target():
    boxes = tv_tensors.BoundingBoxes([[2.0, 3, 10, 12]], format="XYXY", canvas_size=(20, 24))
    return {"boxes": boxes, "labels": torch.tensor([1]), "masks": tv_tensors.Mask(photographs(1, 1, 20, 24)[0])}


def surely(transform):
    """Set the probability of a transform to 1."""
    if hasattr(transform, "p"):
        transform.p = 1.0
    return transform


@pytest.mark.parametrize("kind", TRANSFORMS, ids=lambda kind: kind.__name__)
def test_transforms_that_move_nothing_are_those_that_leave_targets_unchanged_in_torchvision(kind):
    dtype = torch.uint8 if kind is v2.JPEG else torch.float32
    image = tv_tensors.Image(photographs(1, 3, 20, 24, dtype=dtype)[0])
    if kind is v2.LinearTransformation:  # whose matrix is for images of 48 numbers
        image = tv_tensors.Image(image[:, :4, :4])
    _, expected = surely(changeable(kind))(image, target())
    unchanged = all(torch.equal(expected[key], value) for key, value in target().items())
    assert unchanged == (kind.__name__ in COLOUR_ONLY)


IN_CONTAINERS = {
    "RandomOrder": lambda make: v2.RandomOrder([make() for _ in range(5)]),
    "in a RandomApply": lambda make: v2.RandomApply([v2.RandomOrder([v2.Identity(), *(make() for _ in range(4))])], p=1.0),
    "in a Compose": lambda make: v2.Compose([v2.RandomOrder([v2.Compose([make()]) for _ in range(5)])]),
    "beside a choice": lambda make: v2.RandomOrder([*(make() for _ in range(4)), v2.RandomChoice([make(), make()])]),
}


@left_to_torchvision
@pytest.mark.parametrize("container", IN_CONTAINERS)
@pytest.mark.parametrize(
    "name", ["GaussianBlur", "JPEG", "RandomErasing", "RandomSolarize", "GaussianNoise", "RandomVerticalFlip"]
)
def test_containers_left_to_torchvision_move_nothing_if_their_members_do_not(container, name):
    augment = gpuaug.fuse(IN_CONTAINERS[container](lambda: surely(changeable(getattr(v2, name)))))
    dtype = torch.uint8 if name in ("JPEG", "RandomSolarize") else torch.float32
    call = functools.partial(augment, photographs(1, 3, 20, 24, dtype=dtype), [target()], data_keys=["input", "targets"])
    if name not in COLOUR_ONLY:
        with pytest.raises(gpuaug.ArgumentError, match="must be fused, or not move pixels"):
            call()
        return
    (got,) = gpuaug.sanitize(call()[1])
    for key, value in target().items():
        assert_values(got[key].as_subclass(torch.Tensor), value.as_subclass(torch.Tensor))


class Negative(v2.Transform):
    _transformed_types = (tv_tensors.Image, tv_tensors.Video)

    def transform(self, inpt, params):
        return functional.invert(inpt)


class InvertsImages(nn.Module):
    def forward(self, image):
        assert image.ndim == (4 if isinstance(image, tv_tensors.Video) else image.ndim)
        return tv_tensors.wrap(255 - image, like=image) if isinstance(image, tv_tensors.Image | tv_tensors.Video) else image


ASKING = {
    "Lambda": lambda: v2.Lambda(lambda image: 255 - image, tv_tensors.Image, tv_tensors.Video),
    "Lambda for videos": lambda: v2.Lambda(lambda image: 255 - image, tv_tensors.Video),
    "_transformed_types": Negative,
    "isinstance": lambda: v2.Compose([InvertsImages()]),
    "a function": lambda: v2.Compose([lambda image: InvertsImages()(image)]),
    "of two": lambda: v2.Compose([InvertsImages(), Negative(), v2.ToImage(), Negative()]),
    "made": lambda: v2.Compose([v2.Lambda(tv_tensors.Image), InvertsImages()]),
    "lost": lambda: v2.Compose([v2.Lambda(lambda image: 255 - image), InvertsImages()]),
}
CONTAINERS = {
    "alone": lambda transform: [transform],
    "Compose": lambda transform: [v2.Compose([transform])],
    "RandomApply": lambda transform: [v2.RandomApply([transform], p=1.0)],
    "RandomChoice": lambda transform: [v2.RandomChoice([v2.Compose([transform])])],
    "a subclass": lambda transform: [overriding(v2.RandomApply, "forward")([transform], p=1.0)],
    "after ToImage": lambda transform: [v2.ToImage(), v2.RandomHorizontalFlip(1.0), transform],
    "after ToPureTensor": lambda transform: [v2.ToPureTensor(), transform],
    "after both": lambda transform: [v2.ToPureTensor(), v2.ToImage(), v2.Pad(1), transform],
    "between": lambda transform: [v2.RandomHorizontalFlip(1.0), transform, v2.Resize((4, 4), v2.InterpolationMode.NEAREST)],
}
IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).view(2, 3, 8, 8)
CLIPS = torch.stack([IMAGES, 7 + IMAGES, 9 + IMAGES], 1)
SAMPLES = {
    "tensors": IMAGES,
    "Image": tv_tensors.Image(IMAGES),
    "clips": CLIPS,
    "Video": tv_tensors.Video(CLIPS),
}


@left_to_torchvision
@pytest.mark.filterwarnings("ignore:.*the type of")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.every(5)
def test_modules_get_the_type_that_torchvision_would_pass(asking, container):
    transforms = CONTAINERS[container](ASKING[asking]())
    in_dataset = v2.Compose(transforms)
    for name, batch in SAMPLES.items():
        plain = batch.as_subclass(torch.Tensor)
        expected = torch.stack([in_dataset(sample.as_subclass(type(batch))).as_subclass(torch.Tensor) for sample in plain])
        assert_values(gpuaug.fuse(transforms)(batch).as_subclass(torch.Tensor), expected, about=name)


@left_to_torchvision
def test_each_image_has_the_type_that_its_own_modules_made():
    made_pure = v2.RandomApply([v2.Lambda(lambda image: torch.zeros_like(image.as_subclass(torch.Tensor)))], p=0.5)
    out = gpuaug.fuse([made_pure, v2.Lambda(lambda image: 255 - image, tv_tensors.Image)])(
        tv_tensors.Image(IMAGES.repeat(8, 1, 1, 1))
    )
    zeros = out.as_subclass(torch.Tensor).eq(0).flatten(1).all(1)
    assert zeros.any()
    assert_values(out.as_subclass(torch.Tensor)[~zeros], 255 - IMAGES.repeat(8, 1, 1, 1)[~zeros])


BY_TYPE = {tv_tensors.Image: 100, tv_tensors.Video: 200, "others": 0}


@left_to_torchvision
@pytest.mark.parametrize(("name", "expected"), {"tensors": 100, "Image": 100, "clips": 100, "Video": 200}.items())
def test_settings_by_type_are_those_of_the_batch(name, expected):
    images = SAMPLES[name]
    for transform in (v2.Pad(1, fill=BY_TYPE), v2.RandomRotation((45, 45), fill=BY_TYPE)):
        made = gpuaug.fuse(transform)(images).as_subclass(torch.Tensor)
        assert made[..., 0, 0].eq(expected).all()
    floats = {tv_tensors.Image: torch.float32, tv_tensors.Video: None, "others": None}
    dtype = gpuaug.fuse([v2.RandomHorizontalFlip(), v2.ToDtype(floats, scale=True)])(images).dtype
    assert dtype is (torch.uint8 if name == "Video" else torch.float32)


@left_to_torchvision
@pytest.mark.parametrize("name", SAMPLES)
def test_torchvisions_modules_take_plain_tensors_for_images_and_clips(name):
    fill = {tv_tensors.Image: 200, tv_tensors.Video: 200, "others": 0}
    turned = gpuaug.fuse(v2.RandomRotation((45, 45), expand=True, center=(4, 4), fill=fill))(SAMPLES[name])
    assert turned[..., 0, 0].eq(200).all()

    class Seen(v2.AugMix):
        def forward(self, *inputs):
            seen.append(inputs[0])
            return super().forward(*inputs)

    seen = []
    gpuaug.fuse(Seen())(SAMPLES[name])
    expected = tv_tensors.Video if SAMPLES[name].ndim == 5 else tv_tensors.Image
    assert type(SAMPLES[name]) is torch.Tensor or {type(sample) for sample in seen} == {expected}
