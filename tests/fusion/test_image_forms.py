"""Clips, views, strides, types, numbers of channels: the same draws give the same pixels, and calls draw as ``draw`` does."""

import random

import kornia.augmentation as K
import pytest
import torch
from support.batches import clips
from support.comparison.replay import left_to_kornia
from support.comparison.values import assert_values
from support.ops import pipelines
from torchvision.transforms import v2

import gpuaug
from gpuaug.fusion.pixels import converted

pytestmark = left_to_kornia

PIPELINES = {
    **{name: make for group in pipelines.GROUPS for name, make in getattr(pipelines, group).items()},
    **{name: make for name, make in clips.FIRST.items() if not name.startswith("chosen")},
    "a policy": lambda: [K.RandomHorizontalFlip(), K.auto.RandAugment(n=2, m=8)],
    "what Kornia runs": lambda: [K.RandomCrop((14, 14)), K.RandomMedianBlur(7), K.RandomHorizontalFlip()],
    "gates": lambda: [
        v2.RandomApply([v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0)], p=0.5),
        v2.RandomResizedCrop(16),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4), v2.RandomInvert(1.0)], p=0.5),
    ],
    "choices": lambda: [
        v2.RandomChoice([v2.RandomResizedCrop((12, 14)), v2.Compose([v2.RandomResize(5, 20), v2.Resize((12, 14))])]),
        v2.RandomChoice([v2.RandomResizedCrop(8), v2.CenterCrop(8)]),
    ],
    "drawn sizes": lambda: [v2.RandomZoomOut(), v2.ScaleJitter((16, 16), (0.5, 2.0)), v2.RandomCrop(12, pad_if_needed=True)],
}
LAYOUTS = {
    "plain": lambda images: images,
    "channels last": lambda images: images.mT.transpose(-3, -1).contiguous().transpose(-3, -1).mT,
    "transposed": lambda images: images.mT.contiguous().mT,
    "strided": lambda images: images.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda images: images[:1].expand(len(images), *images.shape[1:]),
}
DTYPES = (torch.uint8, torch.uint8, torch.float32, torch.float16, torch.uint16, torch.int16)


def draws_noise(name):
    return any(
        isinstance(module, K.RandomGaussianNoise | K.RandomSaltAndPepperNoise | v2.GaussianNoise)
        for module in PIPELINES[name]()
    )


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.every(3)
def test_every_form_of_the_same_images_gives_the_same_pixels(name):
    """Each frame of a clip and each view, on contiguous images. Every pipeline has a form of its own."""
    choices = random.Random(name)
    views, frames = choices.choice([1, 2, 3]), choices.choice([1, 1, 2, 4])
    layout, dtype = choices.choice(list(LAYOUTS)), choices.choice(DTYPES)
    channels = 3 if name in pipelines.RGB_EXACT | pipelines.RGB_CLOSE else choices.choice([1, 3, 4])
    memory_format = choices.choice([torch.contiguous_format, torch.channels_last])
    if draws_noise(name):
        frames = 1
    videos = LAYOUTS[layout](converted(clips.clips(3, frames, channels, 21, 37), dtype))
    augment, single = gpuaug.fuse(PIPELINES[name](), views=views, memory_format=memory_format), gpuaug.fuse(PIPELINES[name]())
    shape = videos[:, 0].shape
    try:
        draws = augment.draw(shape, seed=3, dtype=dtype)
        expected = [
            torch.stack([single(videos[:, frame].contiguous(), draws=view) for frame in range(frames)], 1)
            for view in draws.views
        ]
    except gpuaug.GpuAugError as error:
        with pytest.raises(type(error)):
            augment(videos)
        return
    form = videos[:, 0] if frames == 1 and choices.random() < 0.7 else videos
    expected = torch.cat(expected) if form is videos else torch.cat(expected)[:, 0]
    got = augment(form, draws=augment.draw(form.shape, seed=3, dtype=dtype))
    assert got.dtype == expected.dtype
    assert_values(got, expected)
    if form.ndim == 4 or views == 1:
        assert got.flatten(0, -4).is_contiguous(memory_format=memory_format)
    torch.manual_seed(7)
    results = [augment(form) for _ in range(4)]  # from the second on, drawn ahead
    torch.manual_seed(7)
    for made in results:
        assert_values(made, augment(form, draws=augment.draw(form.shape, dtype=dtype)))
