"""From a file through ``DecodeStage`` and ``fuse``: still videos stay still, and masks and boxes lie on their pixels."""

import random

import kornia.augmentation as K
import numpy as np
import pytest
import torch
from support.video.videos import lossless, pictures
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import gpuaug

FRAMES, HEIGHT, WIDTH = 4, 40, 56

STILL = {
    "resized crop": lambda: v2.RandomResizedCrop(32),
    "crop": lambda: v2.RandomCrop(24, pad_if_needed=True, padding_mode="reflect"),
    "flips": lambda: v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]),
    "rotation": lambda: v2.RandomRotation(40),
    "affine": lambda: v2.RandomAffine(20, (0.1, 0.2), (0.7, 1.2), 10),
    "perspective": lambda: v2.RandomPerspective(p=0.8),
    "zoom out": lambda: v2.Compose([v2.RandomZoomOut(side_range=(1.0, 1.5)), v2.Resize((32, 32))]),
    "jitter": lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.2),
    "photometric": lambda: v2.RandomPhotometricDistort(),
    "grey": lambda: v2.RandomGrayscale(0.5),
    "blur": lambda: v2.GaussianBlur(5),
    "equalize": lambda: v2.RandomEqualize(),
    "solarize": lambda: v2.RandomSolarize(100),
    "erasing": lambda: v2.RandomErasing(0.8),
    "policy": lambda: v2.RandAugment(),
    "another policy": lambda: v2.TrivialAugmentWide(),
}
"""Transforms without noise."""

UINT16_UNIT = {"zoom out", "policy", "another policy", "solarize"}
"""Transforms of bytes, or of whole clips, that come first."""


@pytest.fixture(scope="module")
def still():
    return lossless("still", [next(pictures(1, HEIGHT, WIDTH))] * 12)


@pytest.mark.parametrize("seed", range(8))
def test_a_still_video_stays_still(still, seed):
    shuffled = random.Random(seed // 4).sample(sorted(STILL), len(STILL))  # four seeds share one order, a quarter for each
    names = sorted(shuffled[seed % 4 :: 4], key=lambda name: name not in UINT16_UNIT)
    ragged = seed % 3 == 0
    if ragged:
        names.insert(0, "resized crop")
    augment = gpuaug.fuse(v2.Compose([STILL[name]() for name in names]), ragged=ragged)
    samples = [(gpuaug.read_clip(still, FRAMES, 2, at=number / 2), number) for number in range(3)]
    data = DataLoader(samples, 3, collate_fn=gpuaug.collate_encoded)
    loader = gpuaug.StreamedLoader(data, [gpuaug.DecodeStage(), augment], device="cpu", seed=seed)
    for _ in range(2):
        ((clips, _),) = loader
        assert clips.shape[:3] == (3, FRAMES, 3)
        assert torch.equal(clips, clips[:, :1].expand_as(clips)), names
        assert not torch.equal(clips[0], clips[1]), f"clips draw by themselves: {names}"


def moving():
    """Pictures of a white rectangle that moves over black, its box in each, and its mask."""
    shown, boxes = [], []
    for number in range(12):
        left, top, wide, high = 6 + 2 * number, 5 + number, 9 + number % 3, 7
        picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        picture[top : top + high, left : left + wide] = 255
        shown.append(picture)
        boxes.append([left, top, left + wide, top + high])
    return shown, torch.tensor(boxes, dtype=torch.float32), torch.from_numpy(np.stack(shown)[..., 0] / np.float32(255))


FLOAT = v2.ToDtype(torch.float32, scale=True)
GEOMETRY = {
    "torchvision's crop and flip": (lambda: v2.Compose([v2.RandomCrop((32, 48)), v2.RandomHorizontalFlip(), FLOAT]), True),
    "torchvision's resized crop": (lambda: v2.Compose([v2.RandomResizedCrop((36, 36), scale=(0.5, 1.0)), FLOAT]), True),
    "torchvision's rotation": (lambda: v2.Compose([v2.RandomVerticalFlip(), v2.RandomRotation(60), FLOAT]), False),
    "Kornia's crop and flip": (lambda: [K.RandomCrop((32, 48)), K.RandomHorizontalFlip()], True),
    "Kornia's rotation": (lambda: [K.RandomHorizontalFlip(), K.RandomRotation(60.0)], False),
    "Kornia's of one frame each": (
        lambda: K.VideoSequential(
            K.RandomAffine(20.0, (0.1, 0.1)), K.RandomVerticalFlip(), same_on_frame=False, data_format="BTCHW"
        ),
        False,
    ),
}
"""Pipelines, and whether boxes stay as narrow as their rectangles."""


@pytest.mark.parametrize("case", GEOMETRY)
def test_boxes_and_masks_lie_on_their_pixels_in_every_frame(case):
    make, upright = GEOMETRY[case]
    shown, boxes, masks = moving()
    path = lossless("moving", shown)
    samples = []
    for start in range(6):
        numbers = [start, start + 2, start + 3, start + 6]
        clip = gpuaug.read_clip(path, numbers)
        samples.append({"clip": clip, "boxes": boxes[numbers][:, None], "masks": masks[numbers][:, None]})
    data = DataLoader(samples, 3, collate_fn=gpuaug.collate_encoded)
    augment = gpuaug.fuse(make())
    stage = gpuaug.TransformStage(augment, on={"clip": "input", "boxes": "bbox_xyxy", "masks": "mask"})
    seen = 0
    for batch in gpuaug.StreamedLoader(data, [gpuaug.DecodeStage(), stage], device="cpu", seed=1):
        height, width = batch["clip"].shape[-2:]
        for image, mask, box in zip(
            batch["clip"].flatten(0, 1)[:, 0], batch["masks"].flatten(0, 2), batch["boxes"].flatten(0, 2), strict=True
        ):
            most, least = (F.max_pool2d(sign * image[None], 3, 1, 1)[0] * sign for sign in (1, -1))
            assert (mask[least > 0.99] > 0.9).all()  # but for the edges: NEAREST of torchvision is half a pixel off
            assert (mask[most < 0.01] < 0.1).all()
            rows, columns = torch.nonzero(image > 0.5, as_tuple=True)
            if not len(rows):
                continue
            seen += 1
            left, top, right, bottom = box.tolist()
            inside = [columns.min() - left, rows.min() - top, right - columns.max() - 1, bottom - rows.max() - 1]
            assert min(inside) >= -1.5, (box, inside)
            if upright:
                cut_off = [left <= 0, top <= 0, right >= width, bottom >= height]
                assert all(gap <= 1.5 or cut for gap, cut in zip(inside, cut_off, strict=True)), (box, inside)
    assert seen >= 12
