import torch
from support.replay import left_to_kornia

from bench.peers import augmenters

pytestmark = left_to_kornia  # RandAugment as its users have it, equalize and auto_contrast included


EVERYWHERE = {"torchvision v2", "Kornia", "Kornia, matrices skipped", "gpuaug", "gpuaug, from torchvision"}


def test_every_way_gives_the_same_shape_and_layout():
    from contextlib import ExitStack

    for case in augmenters.cases(32):
        batch = augmenters.sample(case, 3, 32, torch.device("cpu"))
        for name in EVERYWHERE - {"gpuaug, from torchvision"} if case.masks else EVERYWHERE:
            with ExitStack() as stack:
                found = augmenters.AUGMENTERS[name](case, batch, stack)()
            images, *masks = found if isinstance(found, (list, tuple)) else [found]
            assert images.shape == (3, 3, case.out, case.out), (case.name, name)
            assert images.dtype == case.dtype, (case.name, name)
            assert images.is_contiguous(memory_format=case.memory_format), (case.name, name)
            assert [mask.shape for mask in masks] == [(3, 1, case.out, case.out)] * case.masks
