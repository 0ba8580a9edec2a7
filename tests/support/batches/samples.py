"""Samples of several images with target dicts."""

import numpy as np
import torch
from torchvision.transforms import v2

import gpuaug


def target_of(random, height, width, *, masks=torch.bool, keypoints=True):
    """Target dict of 0 to 3 objects. ``masks``: dtype of masks, or ``None``."""
    count = int(random.integers(0, 4))
    corners = np.sort(random.random((count, 2, 2)), 1) * (width, height)
    record = {
        "boxes": torch.tensor(corners.reshape(-1, 4), dtype=torch.float32),
        "labels": torch.tensor(random.integers(0, 90, count)),
        "image_id": int(random.integers(1000)),
        "names": [f"object {index}" for index in range(count)],
    }
    if masks is not None:
        record["masks"] = torch.tensor(random.random((count, height, width)) < 0.4).to(masks)
    if keypoints:
        record["keypoints"] = torch.tensor(random.random((count, 5, 3)) * 20, dtype=torch.float32)
    return record


def samples_of(seed, batch, count, *, dtype=torch.uint8, one_size=False, **kinds):
    """Samples of ``count`` images, with target dicts."""
    random = np.random.default_rng(seed)
    size = random.integers(5, 60, 2).tolist()
    result = []
    for _ in range(batch):
        images, targets = [], []
        for _ in range(count):
            height, width = size if one_size else random.integers(5, 60, 2).tolist()
            image = torch.tensor(random.integers(0, 256, (3, height, width)), dtype=torch.uint8)
            images.append(image if dtype is torch.uint8 else v2.functional.to_dtype(image, dtype, scale=True))
            targets.append(target_of(random, height, width, **kinds))
        result.append({"image": images, "target": targets})
    return result


def stacked(samples):
    """Batch of samples whose images have one size: a tensor per image of a sample."""
    images = [torch.stack(list(column)) for column in zip(*(sample["image"] for sample in samples), strict=True)]
    return {"image": images, "target": [sample["target"] for sample in samples]}


def batch_of(seed, batch, count, layout, dtype, **kinds):
    """(Images, targets) of samples: tensors for the layout "tensors", else ragged images of a layout."""
    samples = samples_of(seed, batch, count, one_size=layout == "tensors", **kinds)
    if layout == "tensors":
        images = stacked(samples)["image"]
        return [v2.functional.to_dtype(member, dtype, scale=True) for member in images], stacked(samples)["target"]
    if layout == "hwc":
        for sample in samples:
            sample["image"] = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in sample["image"]]
    return gpuaug.collate_ragged(samples).values()
