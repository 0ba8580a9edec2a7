"""Windows of images, known before the pixels are: those that the call draws, and all that the call reads."""

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from support import internals
from support.batches.ragged import SIZES, cut, images_of, overwritten, pack
from support.comparison.replay import left_to_kornia
from support.comparison.values import assert_values
from support.ops.compositions import AROUND, KORNIA, NEAREST, SIDES, TORCHVISION, kornia_pads, made, torchvision_pads
from support.public.fuzzing import cases, outcome
from torchvision.transforms import InterpolationMode, v2

import gpuaug
from gpuaug.core.ragged import Shapes
from gpuaug.core.rng import CallSeeds, Position
from gpuaug.fusion.ops.base import Size

# Pipelines are made by chance.
pytestmark = left_to_kornia

POSITION = Position(seed=5, epoch=0, rank=0, batch=2)
SCALES = st.sampled_from([(0.01, 0.2), (0.3, 1.0), (1.2, 1.6)])
RATIOS = st.sampled_from([(0.75, 1.3), (0.1, 0.3), (3.0, 9.0)])
RESIZED_CROPS = st.one_of(
    made(
        K.RandomResizedCrop,
        size=SIDES,
        scale=SCALES,
        ratio=RATIOS,
        resample=st.sampled_from(["nearest", "bilinear"]),
        align_corners=st.booleans(),
        same_on_batch=st.booleans(),
    ),
    made(v2.RandomResizedCrop, size=SIDES, scale=SCALES, ratio=RATIOS, interpolation=st.just(NEAREST)),
    made(
        v2.RandomResizedCrop,
        size=SIDES,
        scale=SCALES,
        ratio=RATIOS,
        interpolation=st.sampled_from([InterpolationMode.BILINEAR, InterpolationMode.BICUBIC]),
        antialias=st.just(True),
    ),
)
PADDED_CROPS = st.one_of(
    kornia_pads(
        K.RandomCrop, "padding_mode", "fill", size=SIDES, padding=st.none() | st.integers(0, 9), pad_if_needed=st.just(True)
    ),
    torchvision_pads(v2.RandomCrop, size=SIDES, padding=st.none() | AROUND, pad_if_needed=st.just(True)),
    kornia_pads(K.PadTo, "pad_mode", "pad_value", size=SIDES),
)
PLAIN_CROPS = st.one_of(
    made(K.RandomCrop, size=SIDES, same_on_batch=st.booleans()),
    made(v2.RandomCrop, size=SIDES),
    made(K.CenterCrop, size=SIDES),
    made(v2.CenterCrop, size=SIDES),
)
OTHERS = st.sampled_from(
    [
        lambda: K.RandomAffine(30.0, translate=(0.3, 0.3), p=0.7),
        lambda: K.RandomAffine(30.0, padding_mode="border", resample="nearest"),
        lambda: K.RandomPerspective(0.6, p=1.0),
        lambda: v2.RandomAffine(40, scale=(0.4, 1.0), fill=99),
        lambda: K.ColorJitter(0.4, 0.4, 0.4, 0.1),
        lambda: K.RandomGaussianBlur((3, 3), (0.5, 1.5)),
        lambda: K.RandomMedianBlur(7),
        lambda: K.RandomErasing(p=1.0),
        lambda: K.RandomMixUpV2(),
        lambda: K.auto.RandAugment(2, 9),
    ]
).map(lambda make: make())
BEHIND = st.lists(OTHERS | KORNIA | TORCHVISION, max_size=3)
NARROW = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4)
WIDE = st.lists(st.tuples(st.integers(15, 30), st.integers(15, 30)), min_size=1, max_size=4)
SETTINGS = st.fixed_dictionaries({"views": st.integers(1, 3), "antialias": st.booleans(), "dtype": st.just(torch.float32)})


def windows_at(augment, shapes, position=POSITION, name="transform"):
    """The windows that a stage of this name asks for."""
    with CallSeeds(position, name):
        found = augment.windows_read(shapes)
    return None if found is None else found.table


def called_at(augment, batch):
    """What the stage makes of the batch."""
    with CallSeeds(POSITION, "transform"):
        return augment(batch)


def windows_drawn(augment, batch, draws):
    """The windows that follow from draws, pixel by pixel, and not from the op's own ``window``."""
    first, sizes = internals.program(augment).ops[0], batch.shapes.sizes
    starts, ends = sizes.copy(), np.zeros_like(sizes)
    for view in draws.views:
        for index, (height, width) in enumerate(sizes):
            own = internals.sizes(view)[0].sample(index)
            drawn = first.sample_draws(internals.drawn(view)[0], index)
            if "width" in drawn:
                sides = zip((drawn["y"], drawn["x"]), (drawn["height"], drawn["width"]), (height, width), strict=True)
                axes = [range(int(start[0]), int(start[0] + count[0])) for start, count, _ in sides]
                # A kernel loads the neighbour of a single pixel.
                axes = [
                    axis if len(axis) > 1 or side == 1 else (*axis, axis[0] - 1 if axis[0] else 1)
                    for axis, side in zip(axes, (height, width), strict=True)
                ]
            else:
                shift, out = np.linalg.inv(first.matrix(drawn, own).reshape(-1, 3, 3)[0])[:2, 2], first.out(own)
                axes = [range(int(shift[1]), int(shift[1]) + out.height), range(int(shift[0]), int(shift[0]) + out.width)]
            for axis, (positions, side) in enumerate(zip(axes, (height, width), strict=True)):
                inside = np.clip(np.array(positions), 0, side - 1)
                starts[index, axis] = min(starts[index, axis], inside.min())
                ends[index, axis] = max(ends[index, axis], inside.max() + 1)
    return np.concatenate((starts, ends - starts), 1)


def check(crop, behind, sizes, settings, layout="chw"):
    """Compare the windows with the draws, and calls on images that have other pixels outside the windows."""
    batch = pack(images_of(sizes), layout)
    augment = outcome(gpuaug.fuse, [crop, *behind], ragged=True, **settings)
    if isinstance(augment, Exception):
        event("not fused")
        return
    before = torch.get_rng_state()
    windows = windows_at(augment, batch.shapes)
    assert_values(torch.get_rng_state(), before)
    got = outcome(called_at, augment, batch)
    if isinstance(got, Exception):
        event("refused")
        return
    with CallSeeds(POSITION, "transform"):
        draws = augment.draw(batch)
    expected = windows_drawn(augment, batch, draws)
    reflects = getattr(internals.program(augment).ops[0], "edge", "") == "reflect"
    whole = np.concatenate((np.zeros_like(batch.shapes.sizes), batch.shapes.sizes), 1)
    if windows is None:
        event("whole")
        assert reflects or (expected == whole).all()
        return
    event("windows")
    assert not reflects
    assert windows.dtype == np.int64
    assert windows.tolist() == expected.tolist()
    assert (windows[:, 2:] > 0).all()
    assert (windows[:, :2] >= 0).all()
    assert (windows[:, :2] + windows[:, 2:] <= batch.shapes.sizes).all()
    about = f"{crop}, {behind}, {windows}"
    assert_values(called_at(augment, overwritten(batch, windows)), got, equal_nan=True, about=about)
    if layout == "hwc":
        assert_values(called_at(augment, cut(batch, windows)), got, equal_nan=True, about=f"{about}, cut")


@cases(6)
@given(st.integers(1, 3))
def test_padding_is_written_where_the_window_lacks_the_first_pixel(side):
    """The torch executor reads the first pixel of an image for all pixels of padding."""
    turned = v2.RandomRotation((90, 90), InterpolationMode.BILINEAR)
    check(v2.RandomCrop((side, side)), [turned], [(15, 15)] * 4, {"dtype": torch.float32}, "hwc")


LAYOUTS = st.sampled_from(["chw", "hwc"])


@cases(25)
@given(RESIZED_CROPS, BEHIND, NARROW, SETTINGS, LAYOUTS)
def test_nothing_outside_the_windows_of_resized_crops_is_read(crop, behind, sizes, settings, layout):
    check(crop, behind, sizes, settings, layout)


@cases(25)
@given(PADDED_CROPS, BEHIND, NARROW, SETTINGS, LAYOUTS)
def test_nothing_outside_the_windows_of_padded_crops_is_read(crop, behind, sizes, settings, layout):
    check(crop, behind, sizes, settings, layout)


@cases(25)
@given(PLAIN_CROPS, BEHIND, WIDE, SETTINGS, LAYOUTS)
def test_nothing_outside_the_windows_of_crops_is_read(crop, behind, sizes, settings, layout):
    check(crop, behind, sizes, settings, layout)


CROPS = {
    "resized": lambda: [K.RandomResizedCrop((12, 14)), K.RandomHorizontalFlip()],
    "resized, torchvision's": lambda: [v2.RandomResizedCrop((12, 14)), v2.ToDtype(torch.float32, scale=True)],
    "crop": lambda: [K.RandomCrop((12, 14)), K.RandomVerticalFlip()],
    "crop, torchvision's": lambda: [v2.RandomCrop((12, 14), padding=4)],
    "centre": lambda: [K.CenterCrop(14)],
    "centre, torchvision's": lambda: [v2.CenterCrop(14)],
}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", CROPS)
def test_windows_are_smaller_than_the_images(name, views):
    batch = pack(images_of())
    windows = windows_at(gpuaug.fuse(CROPS[name](), ragged=True, views=views), batch.shapes)
    assert windows[:, 2:].prod(1).mean() < 0.9 * batch.shapes.sizes.prod(1).mean()


BOXES_AND_SIZES = {
    "a flip first": lambda: [K.RandomHorizontalFlip(), K.RandomCrop((12, 12))],
    "a resize": lambda: [v2.Resize((12, 12))],
    "a drawn size": lambda: [v2.RandomResize(12, 20), v2.RandomCrop(12)],
    "a reflection": lambda: [v2.RandomCrop(12, padding=3, padding_mode="reflect")],
    "a crop by boxes": lambda: [v2.RandomIoUCrop(), v2.Resize((12, 12))],
    "a crop by boxes, later": lambda: [v2.CenterCrop(20), v2.RandomIoUCrop(), v2.Resize((12, 12))],
    "a crop that is too large": lambda: [K.CenterCrop((60, 12))],
    "colours, then a crop": lambda: [v2.ColorJitter(0.4), v2.CenterCrop(12)],
    "a warp": lambda: [K.RandomRotation(20.0), K.CenterCrop(12)],
}


@pytest.mark.parametrize("name", BOXES_AND_SIZES)
def test_images_that_are_read_whole_have_no_windows(name):
    assert windows_at(gpuaug.fuse(BOXES_AND_SIZES[name](), ragged=True), pack(images_of()).shapes) is None


def test_batches_that_a_call_refuses_have_no_windows():
    shapes = pack(images_of()).shapes
    assert windows_at(gpuaug.fuse(K.RandomResizedCrop((12, 14))), shapes) is None
    two_channels = Shapes(shapes.sizes, 2, "hwc")
    augment = gpuaug.fuse([K.CenterCrop(12), K.Normalize((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))], ragged=True)
    assert windows_at(augment, two_channels) is None
    empty = Shapes(np.array([[5, 0], [30, 30]]), 3, "hwc")
    assert windows_at(gpuaug.fuse(K.RandomResizedCrop((12, 14)), ragged=True), empty) is None
    none = Shapes(np.zeros((0, 2), dtype=np.int64), 3, "hwc")
    assert windows_at(gpuaug.fuse(K.RandomResizedCrop((12, 14)), ragged=True), none) is None


@pytest.mark.parametrize("kind", [K.RandomResizedCrop, K.RandomCrop])
def test_samples_that_a_crop_skips_are_read_whole(kind):
    crop = kind((12, 14), **({"padding": 5} if kind is K.RandomCrop else {}))
    crop.p = 0.5  # Kornia's own p is that of the batch
    program, size = internals.program(gpuaug.fuse(crop)), Size(64, 3, 12, 14)
    (drawn,) = internals.drawn(program.draw(size, 1))
    whole = (program.ops[0].window(drawn, size) == (0, 0, 12, 14)).all(1)
    assert whole[~drawn["apply_mask"]].all()
    assert not whole[drawn["apply_mask"]].all()
    assert 0 < drawn["apply_mask"].sum() < 64


@pytest.mark.parametrize("views", [1, 2])
def test_windows_of_a_position_are_those_of_the_loader(views):
    batches = [pack(images_of(SIZES[: 3 + index])) for index in range(4)]
    augment = gpuaug.fuse(CROPS["resized"](), ragged=True, views=views)

    def streamed(source):
        stage = gpuaug.TransformStage(augment, name="crop")
        return list(gpuaug.StreamedLoader(source, [stage], device="cpu", seed=7))

    positions = [Position(seed=7, epoch=0, rank=0, batch=index) for index in range(4)]
    windows = [windows_at(augment, batch.shapes, at, "crop") for batch, at in zip(batches, positions, strict=True)]
    others = [overwritten(batch, window) for batch, window in zip(batches, windows, strict=True)]
    for got, expected in zip(streamed(others), streamed(batches), strict=True):
        assert_values(got, expected)
    assert not torch.equal(streamed([overwritten(batches[0], windows[1][:3])])[0], streamed(batches[:1])[0])


@pytest.mark.parametrize(
    ("pipeline", "options", "name"),
    [
        (K.RandomResizedCrop((8, 8)), {"ragged": True}, "RandomResizedCrop"),
        (v2.Compose([v2.CenterCrop(8), v2.RandomVerticalFlip()]), {"ragged": True}, "CenterCrop"),
        (K.Resize((8, 8)), {"ragged": True}, ""),
        (K.RandomResizedCrop((8, 8)), {}, ""),
    ],
)
def test_explain_says_that_a_decoder_leaves_out_what_is_not_read(pipeline, options, name):
    text = str(gpuaug.fuse(pipeline, **options).explain())
    assert ("a preceding DecodeStage decodes only the window" in text) == bool(name)
    assert name in text
