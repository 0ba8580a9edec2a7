"""Advice about draws, and about the shapes and types that they are for."""

import kornia.augmentation as K
import torch
from support.messages.registry import example
from torchvision.transforms import v2

import gpuaug

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLIP = v2.RandomHorizontalFlip()


@example("The result of as_kornia() is for Kornia's own pipeline")
def kornia_parameters_for_a_fused_pipeline(told):
    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomInvert())
    augment = gpuaug.fuse(pipeline)
    draws = augment.draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        augment(IMAGES, draws=draws.as_kornia())
    torch.testing.assert_close(pipeline(IMAGES, params=draws.as_kornia()), augment(IMAGES, draws=draws))


@example("Draw with this module, for this type: draw(images.shape, dtype=images.dtype)")
def draws_of_another_module(told):
    images, augment = IMAGES, gpuaug.fuse(FLIP)
    with told:
        augment(images, draws=gpuaug.fuse(v2.RandomVerticalFlip()).draw(images.shape, dtype=images.dtype))
    draws = augment.draw(images.shape, dtype=images.dtype)
    assert torch.equal(augment(images, draws=draws), augment(images, draws=draws))


@example("Draw with this module, or replay one view")
def draws_of_other_views(told):
    one, two = gpuaug.fuse(FLIP), gpuaug.fuse(FLIP, views=2)
    draws = two.draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        one(IMAGES, draws=draws)
    views = two(IMAGES, draws=draws)
    assert torch.equal(one(IMAGES, draws=draws.views[1]), views[2:])


@example("Take one: draws.views[0].as_kornia()", "Take one: draws.views[0].as_torchvision()")
def one_of_several_views(told):
    draws = gpuaug.fuse(K.RandomHorizontalFlip(), views=2).draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        draws.as_kornia()
    draws.views[0].as_kornia()
    draws = gpuaug.fuse(FLIP, views=2).draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        draws.as_torchvision()
    draws.views[0].as_torchvision()


@example("got draws for a ragged batch. Use draws.of(sample) instead")
def kornia_form_of_a_ragged_batch(told):
    packed = gpuaug.collate_ragged([torch.zeros(3, 8, 9, dtype=torch.uint8), torch.ones(3, 9, 8, dtype=torch.uint8)])
    draws = gpuaug.fuse(K.RandomResizedCrop((4, 4)), ragged=True).draw(packed, seed=1)
    with told:
        draws.as_kornia()
    assert all(isinstance(draws.of(sample), dict) for sample in range(2))


@example("draws must be of Kornia's modules only for as_kornia()")
def kornia_form_of_torchvision(told):
    draws = gpuaug.fuse([FLIP, K.RandomInvert()]).draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        draws.as_kornia()
    assert all(isinstance(draws.of(sample), dict) for sample in range(2))


@example("for as_torchvision(), got …, …. Use draws.of(sample) instead")
def calls_of_kornia(told):
    draws = gpuaug.fuse([FLIP, K.RandomInvert()]).draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype)
    with told:
        draws.as_torchvision()
    assert all(isinstance(draws.of(sample), dict) for sample in range(2))


@example("Replay them with the same boxes: augment(images, targets, draws=draws)")
def calls_of_a_crop_by_boxes(told):
    images, targets = IMAGES, [{"boxes": torch.tensor([[1.0, 2, 4, 5]])}] * 2
    augment = gpuaug.fuse([v2.RandomIoUCrop(), v2.Resize((8, 8))])
    draws = augment.draw(images.shape, seed=1, dtype=images.dtype)
    with told:
        draws.as_torchvision()
    first, second = (augment(images, targets, draws=draws, data_keys=["input", "targets"]) for _ in range(2))
    assert torch.equal(first[0], second[0])


@example("Fuse with pick='batch' to compare the results")
def kornia_form_of_picks_by_sample(told):
    policy = K.auto.RandAugment(2, 10)
    with told:
        gpuaug.fuse(policy, pick="sample").draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype).as_kornia()
    gpuaug.fuse(policy, pick="batch").draw(IMAGES.shape, seed=1, dtype=IMAGES.dtype).as_kornia()


@example("Leave that operation out")
def images_that_an_operation_does_not_take(told):
    with told:
        gpuaug.fuse(K.auto.RandAugment(2, 10), pick="sample").draw((2, 3, 1, 8), seed=1)
    policy = [[("invert", 0, 1)], [("posterize", 0.0, 8.0)]]
    gpuaug.fuse(K.auto.RandAugment(2, 10, policy=policy), pick="sample").draw((2, 3, 1, 8), seed=1)
    gpuaug.fuse(K.auto.TrivialAugment(policy=policy), pick="sample").draw((2, 3, 1, 8), seed=1)
    gpuaug.fuse(K.auto.AutoAugment(policy=[[("invert", 1.0, None)]]), pick="sample").draw((2, 3, 1, 8), seed=1)


@example("must hold two finite numbers above 0, got")
def ratio_of_zero(told):
    with told:
        gpuaug.fuse(v2.RandomErasing(1.0, ratio=(0.0, 1.0)))
    with told:
        gpuaug.fuse(v2.RandomResizedCrop(8, ratio=(0.0, 1.0)))
    assert not torch.equal(gpuaug.fuse(v2.RandomErasing(1.0, ratio=(0.75, 1.33)))(IMAGES), IMAGES)


@example(
    "shape must be …, got …. Pass images.shape", "shape[…] must be …", "dtype must be …, got …. Pass images.dtype of a batch"
)
def shapes_and_types_of_a_draw(told):
    images, augment = IMAGES, gpuaug.fuse(FLIP)
    with told:
        augment.draw((3, 8, 8))
    with told:
        augment.draw((2, 3, -1, 8))
    with told:
        augment.draw((2, 3, 8, 8), dtype=torch.int64)
    draws = augment.draw(images.shape, dtype=images.dtype)
    assert augment(images, draws=draws).shape == images.shape


@example("Convert other images: v2.functional.to_image(image)")
def image_of_pil_in_a_mosaic(told):
    image = v2.functional.to_pil_image(torch.zeros(3, 8, 8, dtype=torch.uint8))
    with told:
        gpuaug.Mosaic(8)([image] * 4)
    assert gpuaug.Mosaic(8)([v2.functional.to_image(image)] * 4).shape == (3, 8, 8)


@example("Pass draws.of(sample)")
def draws_of_a_batch_for_one_sample(told):
    mosaic = gpuaug.Mosaic(8)
    images = [torch.full((3, 8, 8), number, dtype=torch.uint8) for number in range(4)]
    draws = gpuaug.fuse(mosaic).draw((2, 3, 8, 8), seed=0)
    with told:
        mosaic(images, draws=draws)
    expected = gpuaug.fuse(mosaic)([torch.stack([image] * 2) for image in images], draws=draws)
    assert torch.equal(mosaic(images, draws=draws.of(1)), expected[1])
