"""Copies of the transforms of torchvision's reference scripts: which are recognized, and which are not."""

import pytest
import torch
from support.comparison.values import assert_values
from support.ops import references
from support.ops.references import FixedSizeCrop, PadIfSmaller
from torch import nn
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.lower.references import is_copy

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
left_to_torchvision = pytest.mark.filterwarnings("ignore:.* gpuaug.fuse does not lower")


def copied(base, **methods):
    """A class of the name of ``base`` with its methods, but for ``methods``."""
    kept = {name: value for name, value in vars(base).items() if name not in ("__dict__", "__weakref__", "__init__")}
    return type(base.__name__, base.__bases__, {**kept, **methods})


def query_size(self, flat_inputs):
    height, width = v2.query_size(flat_inputs)
    return {"padding": [0, 0, max(self.size - width, 0), max(self.size - height, 0)]}


def call_kernel(self, inpt, params):
    return self._call_kernel(v2.functional.pad, inpt, params["padding"], fill=v2._utils._get_fill(self.fill, type(inpt)))


COPIES = {
    "padding": PadIfSmaller,
    "crop": FixedSizeCrop,
    "padding, copied": copied(PadIfSmaller),
    "crop, copied": copied(FixedSizeCrop),
    "other names": copied(PadIfSmaller, make_params=query_size, transform=call_kernel),
}


@pytest.mark.parametrize("name", COPIES)
def test_copy_is_recognized_by_name_and_results(name):
    assert is_copy(COPIES[name])


def pads_left(self, sample):
    _, height, width = v2._utils.query_chw(sample)
    padding = [max(self.size - width, 0), 0, 0, max(self.size - height, 0)]
    return dict(padding=padding, needs_padding=any(padding))  # noqa: C408


def pads_by_one_more(self, sample):
    _, height, width = v2._utils.query_chw(sample)
    padding = [0, 0, max(self.size - width, 0), max(self.size + 1 - height, 0)]
    return dict(padding=padding, needs_padding=any(padding))  # noqa: C408


def one_fill(self, inpt, params):
    return v2.functional.pad(inpt, padding=params["padding"], fill=self.fill["others"])


def masks_alone_are_padded(self, inpt, params):
    return inpt if type(inpt) is v2.Image else v2.functional.pad(inpt, padding=params["padding"])


def raises(self, img, target=None):
    raise min(ValueError)


def seeds(self, img, target=None):
    torch.manual_seed(1)
    return FixedSizeCrop.forward(self, img, target)


def counts_calls(self, img, target=None):
    self.count = getattr(self, "count", 0) + 1
    return FixedSizeCrop.forward(self, img, target)


def first_pixels(self, img, target, top, left, height, width):
    return FixedSizeCrop._crop(self, img, target, 0, 0, height, width)


def masks_padded_by_the_fill(self, img, target, padding):
    if target is not None and "masks" in target:
        target["masks"] = F.pad(target["masks"], padding, self.fill, "constant")
    return F.pad(img, padding, self.fill, self.padding_mode), target


def all_boxes(self, img, target, top, left, height, width):
    target["boxes"] -= torch.as_tensor([left, top, left, top])
    target["masks"] = F.crop(target["masks"], top, left, height, width)
    return F.crop(img, top, left, height, width), target


def two_numbers(self, img, target=None):
    _, height, width = F.get_dimensions(img)
    new_height, new_width = min(height, self.crop_height), min(width, self.crop_width)
    if new_height != height or new_width != width:
        top = int(max(height - self.crop_height, 0) * torch.rand(1))
        left = int(max(width - self.crop_width, 0) * torch.rand(1))
        img, target = self._crop(img, target, top, left, new_height, new_width)
    padding = [0, 0, max(self.crop_width - new_width, 0), max(self.crop_height - new_height, 0)]
    return self._pad(img, target, padding) if any(padding) else (img, target)


class Holder(v2.Transform):
    """A base class of a project."""


EDITED = {
    "pads left": copied(PadIfSmaller, make_params=pads_left),
    "pads one more": copied(PadIfSmaller, make_params=pads_by_one_more),
    "one fill for images and masks": copied(PadIfSmaller, transform=one_fill),
    "pads masks alone": copied(PadIfSmaller, transform=masks_alone_are_padded),
    "another name": type("PadToSize", (v2.Transform,), dict(vars(copied(PadIfSmaller)))),
    "another base": type("PadIfSmaller", (Holder,), dict(vars(copied(PadIfSmaller)))),
    "raises": copied(FixedSizeCrop, forward=raises),
    "seeds": copied(FixedSizeCrop, forward=seeds),
    "keeps a state": copied(FixedSizeCrop, forward=counts_calls),
    "first pixels": copied(FixedSizeCrop, _crop=first_pixels),
    "masks by the fill": copied(FixedSizeCrop, _pad=masks_padded_by_the_fill),
    "keeps all boxes": copied(FixedSizeCrop, _crop=all_boxes),
    "two random numbers": copied(FixedSizeCrop, forward=two_numbers),
    "a property": copied(FixedSizeCrop, fill=property(lambda _: 3)),
}


@pytest.mark.parametrize("name", EDITED)
def test_edited_copy_is_not_recognized(name):
    assert not is_copy(EDITED[name])


@left_to_torchvision
def test_edited_copy_is_run_by_torchvision():
    """Images of this size are padded on the left, as the class says."""
    padding = EDITED["pads left"]()
    padding.size, padding.fill = 40, {"others": 0}
    augment = gpuaug.fuse([padding, TO_FLOAT])
    assert augment.explain((2, 3, 40, 30)).lines[0].reason == "no lowering for this type"
    made = augment(torch.full((2, 3, 40, 30), 255, dtype=torch.uint8))
    assert made.shape == (2, 3, 40, 40)
    assert not made[..., :10].any()


def test_what_an_instance_replaces_is_named():
    crop = FixedSizeCrop((20, 30))
    crop.register_forward_hook(lambda *_: None)
    with pytest.warns(gpuaug.GpuAugWarning, match="it has forward hooks"):
        gpuaug.fuse(v2.Compose([crop, TO_FLOAT]))
    padding = v2.Compose([type("Other", (PadIfSmaller,), {"transform": call_kernel})(9), TO_FLOAT])
    with pytest.warns(gpuaug.GpuAugWarning, match="a subclass of PadIfSmaller that overrides transform"):
        gpuaug.fuse(padding)


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda crop: [v2.RandomHorizontalFlip(), crop],
        lambda crop: v2.Compose([crop]),
        lambda crop: nn.Sequential(crop, v2.RandomHorizontalFlip()),
        lambda crop: crop,
        lambda crop: [type("Named", (FixedSizeCrop,), {})((20, 30))],
    ],
    ids=["list", "Compose", "Sequential", "alone", "subclass"],
)
def test_copy_is_fused_wherever_it_stands(pipeline):
    augment = gpuaug.fuse(pipeline(FixedSizeCrop((20, 30), fill=9)))
    explanation = augment.explain((2, 3, 25, 25))
    assert [line.reason for line in explanation.lines] == [""]
    assert explanation.launches == 1


@left_to_torchvision
def test_a_padding_mode_that_masks_do_not_have_is_not_fused():
    augment = gpuaug.fuse(v2.Compose([FixedSizeCrop((20, 30), padding_mode="edge"), TO_FLOAT]))
    reason = "padding_mode='edge' for images, but not for masks"
    assert augment.explain((2, 3, 25, 25)).lines[0].reason == reason


def test_recognition_draws_no_random_number_of_the_users():
    state = torch.get_rng_state()
    is_copy.cache_clear()
    assert is_copy(references.FixedSizeCrop)
    assert_values(torch.get_rng_state(), state)
    with torch.device("meta"):
        is_copy.cache_clear()
        assert is_copy(references.FixedSizeCrop)
