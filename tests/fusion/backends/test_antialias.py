"""Shrinking with every pixel weighed, against torchvision on the same boxes."""

import kornia.augmentation as K
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import internals
from support.comparison.replay import assert_replays, photographs
from support.comparison.values import assert_values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

import gpuaug
from gpuaug.fusion.backends.antialias import filter_weights

MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
SHAPE = (4, 3, 120, 90)


def torchvision_crops(images, draws, size, mode):
    """Each sample's own box, cropped and resized by torchvision."""
    drawn = internals.drawn(draws)[0]
    boxes = torch.tensor([[int(drawn[name][index]) for name in ("y", "x", "height", "width")] for index in range(len(images))])
    return torch.cat(
        [
            F.resized_crop(image[None], *box.tolist(), size, MODES[mode], antialias=True)
            for image, box in zip(images, boxes, strict=True)
        ]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(24, 20), (60, 70), (7, 33), (110, 90), (1, 1)])
def test_antialiased_crops_equal_torchvision(mode, size):
    images = photographs(*SHAPE, dtype=torch.float32)
    for align_corners in (True, False):
        augment = gpuaug.fuse(K.RandomResizedCrop(size, resample=mode, align_corners=align_corners), antialias=True)
        for seed in range(2):
            draws = augment.draw(images.shape, seed=seed)
            torch.testing.assert_close(
                augment(images, draws=draws), torchvision_crops(images, draws, size, mode), atol=2e-5, rtol=0
            )


@pytest.mark.parametrize("mode", MODES)
def test_antialiased_uint8_crops_equal_torchvision_up_to_its_rounding(mode):
    images = photographs(*SHAPE)
    augment = gpuaug.fuse(K.RandomResizedCrop((24, 20), resample=mode), antialias=True)
    draws = augment.draw(images.shape, seed=0)
    expected = torchvision_crops(images, draws, (24, 20), mode).float() / 255
    # In bytes torchvision rounds twice, once along each axis, with weights of 15 bits or so.
    torch.testing.assert_close(augment(images, draws=draws), expected, atol=1.3 / 255, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(30, 31), 40, (130, 95)])
def test_antialiased_resizes_equal_torchvision(mode, size):
    images = photographs(*SHAPE, dtype=torch.float32)
    side = {} if isinstance(size, int) else {"side": "short"}
    got = gpuaug.fuse(K.Resize(size, resample=mode, **side), antialias=True)(images)
    expected = F.resize(images, list(got.shape[2:]), MODES[mode], antialias=True)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@given(
    count=st.integers(1, 300),
    target=st.integers(1, 120),
    kind=st.sampled_from(["triangle", "cubic"]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_antialias_weights_equal_pytorch(count, target, kind):
    """The response to each pixel by itself is the weights' matrix."""
    pulses = torch.eye(count)[:, None, None, :].expand(-1, 1, 1, -1)
    mode = "bilinear" if kind == "triangle" else "bicubic"
    expected = torch.nn.functional.interpolate(pulses, size=(1, target), mode=mode, antialias=True)[:, 0, 0].T
    torch.testing.assert_close(
        filter_weights(torch.arange(target), count / target, 0, count, kind), expected, atol=1e-5, rtol=0
    )


class LargestTensor(TorchDispatchMode):
    """Largest number of bytes in the memory of a result of torch's functions."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        return result


@pytest.mark.every(5)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(("sides", "size"), [((3000, 2), (6000, 3)), ((3, 9000), (2, 2000)), ((2, 7000), (2, 2600))])
def test_antialias_of_long_images_needs_no_weight_per_pair_of_pixels(sides, size, dtype, mode):
    images = photographs(1, 3, *sides, dtype=dtype)
    resize = v2.Resize(size, MODES[mode], antialias=True)
    with LargestTensor() as largest:
        got = gpuaug.fuse([resize])(images)
    assert largest.num_bytes <= 2**26 < 4 * max(sides) * max(size)
    assert_values(got, resize(images), atol=1 if dtype == torch.uint8 else 2e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(14, 17), (40, 60)])
def test_antialias_spreads_a_pixel_that_is_no_number_as_far_as_pytorch(size, mode, value):
    images = photographs(2, 3, 41, 53, dtype=torch.float32)
    images[0, 1, 20, 30] = images[0, 2, 0, 52] = value
    expected = F.resize(images, list(size), MODES[mode], antialias=True)
    got = gpuaug.fuse(K.Resize(size, resample=mode), antialias=True)(images)
    assert 0 < (~expected.isfinite()).sum() < 200
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    "modules",
    [
        lambda: [K.RandomHorizontalFlip(p=1.0), K.Resize((24, 20)), K.RandomVerticalFlip(p=1.0)],
        lambda: [K.RandomCrop((100, 80), padding=8, padding_mode="reflect"), K.Resize((24, 20))],
        lambda: [K.PadTo((160, 150), pad_value=0.25), K.Resize((40, 30)), K.CenterCrop((24, 20))],
        lambda: [K.Resize((24, 20)), K.PadTo((30, 30), pad_value=0.5)],
    ],
    ids=["flips", "crop", "pad", "pad after"],
)
def test_antialiased_resize_with_flips_pads_and_crops_around_it(modules):
    """One module after the other is one pass, so that the same pixels come of each in a pass of its own."""
    images = photographs(*SHAPE, dtype=torch.float32)
    augment = gpuaug.fuse(modules(), antialias=True)
    draws = augment.draw(images.shape, seed=0)
    step = images
    for number, module in enumerate(modules()):
        alone = gpuaug.fuse(module, antialias=True)
        own = alone.draw(step.shape)
        step = alone(
            step,
            draws=type(own)(own.shape, internals.program(alone).tree, (internals.drawn(draws)[number],), internals.sizes(own)),
        )
    assert len(augment.explain().lines) == 1
    torch.testing.assert_close(augment(images, draws=draws), step, atol=2e-5, rtol=0)


def test_antialias_leaves_masks_at_the_nearest_pixel():
    images, masks = photographs(*SHAPE), photographs(4, 1, 120, 90, seed=3)
    made = {}
    for antialias in (False, True):
        augment = gpuaug.fuse(K.RandomResizedCrop((24, 20), align_corners=False), antialias=antialias)
        draws = augment.draw(images.shape, seed=1)
        made[antialias] = augment(images, masks, data_keys=["input", "mask"], draws=draws)
    assert_values(made[True][1], made[False][1])
    assert not torch.equal(made[True][0], made[False][0])


def test_antialias_leaves_nearest_resampling_alone():
    images = photographs(*SHAPE)
    assert_replays(K.Resize((30, 30), resample="nearest"), images, antialias=True)


@pytest.mark.parametrize(
    ("modules", "shape", "said"),
    [
        ([K.RandomResizedCrop((224, 224))], (8, 3, 256, 256), None),
        ([K.RandomResizedCrop((224, 224))], (8, 3, 512, 512), "RandomResizedCrop_0 may downsample by 2.3 without"),
        ([K.RandomResizedCrop((224, 224), scale=(0.05, 0.2))], (8, 3, 512, 512), None),
        ([K.RandomHorizontalFlip(), K.Resize((32, 100))], (8, 3, 100, 100), "Resize_1 may downsample by 3.1 without"),
        ([K.CenterCrop(200), K.Resize((150, 150))], (8, 3, 400, 400), None),
        ([K.Resize((20, 20), resample="nearest")], (8, 3, 100, 100), None),
    ],
)
def test_explain_notes_which_op_shrinks_without_antialias(modules, shape, said):
    notes = gpuaug.fuse(modules).explain(shape).notes
    if said is None:
        assert notes == ()
    else:
        (note,) = notes
        assert note.startswith(said)
        assert note in str(gpuaug.fuse(modules).explain(shape))
    assert gpuaug.fuse(modules, antialias=True).explain(shape).notes == ()


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([v2.RandomResize(40, 100, antialias=False), v2.CenterCrop(40)], "RandomResize_0 may downsample by 2.5"),
        ([v2.RandomZoomOut(side_range=(1, 3)), v2.Resize((100, 100), antialias=False)], "Resize_1 may downsample by 3.0"),
        ([v2.RandomZoomOut(side_range=(1, 3)), v2.Resize((100, 100))], None),
    ],
)
def test_explain_notes_by_how_much_drawn_sizes_may_shrink(modules, said):
    notes = gpuaug.fuse(modules).explain((8, 3, 100, 100)).notes
    assert [note[: len(said or "")] for note in notes] == ([said] if said else [])
