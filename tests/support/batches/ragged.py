"""Ragged batches, made image by image, and target dicts for their images."""

import numpy as np
import torch
from support.comparison.replay import as_kornia_takes_them, photographs

import gpuaug
from gpuaug.core.ragged import Ragged, Shapes

SIZES = [(37, 52), (64, 40), (48, 48), (90, 33), (41, 120)]


def images_of(sizes=SIZES, channels=3, dtype=torch.uint8):
    """A photograph of each size, (C, h, w)."""
    return [photographs(1, channels, *size, dtype, seed)[0] for seed, size in enumerate(sizes)]


def pack(images, layout="chw"):
    """The same images in one buffer."""
    sizes = np.array([image.shape[1:] for image in images], dtype=np.int64).reshape(-1, 2)
    channels = images[0].shape[0]
    flat = [(image.permute(1, 2, 0) if layout == "hwc" else image).reshape(-1) for image in images]
    starts = np.concatenate([[0], np.cumsum(sizes.prod(1) * channels)[:-1]])
    places = torch.from_numpy(np.column_stack([starts, sizes]))
    return Ragged(torch.cat(flat), places, Shapes(sizes, channels, layout))


def overwritten(batch, windows):
    """The same batch with other values in all pixels outside the windows, (B, 4): top, left, height and width."""
    others = torch.randint(1, 256, batch.data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    others = others.to(batch.device)
    made = Ragged((batch.data.int() + others).to(batch.data.dtype), batch.places, batch.shapes)
    for target, source, (top, left, height, width) in zip(made, batch, windows.tolist(), strict=True):
        inside = np.s_[:, top : top + height, left : left + width]
        target[inside] = source[inside]
    return made


def cut(batch, windows):
    """The same batch, of layout ``"hwc"``, with the windows alone, (B, 4): top, left, height and width."""
    parts = [
        source.permute(1, 2, 0)[top : top + height, left : left + width].reshape(-1)
        for source, (top, left, height, width) in zip(batch, windows.tolist(), strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])[:-1]])
    sizes, channels = batch.shapes.sizes, batch.shapes.channels
    top, left, _, width = windows.T
    places = np.column_stack([starts - (top * width + left) * channels, sizes, width]).astype(np.int64)
    data = torch.cat([each.to(batch.device) for each in parts])
    return Ragged(data, torch.from_numpy(places).to(batch.device), Shapes(sizes, channels, "hwc", windows))


def targets_of(images, dtype=torch.uint8):
    """One or two objects in each image, with masks of the image's own size."""
    made = []
    for index, image in enumerate(images):
        height, width = image.shape[1:]
        count = 1 + index % 2
        left = torch.arange(count) * 5.0 + 2
        boxes = torch.stack((left, left + 1, left + width / 2, left + height / 3), -1)
        masks = torch.zeros(count, height, width, dtype=dtype)
        for mask, (x, y, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y:bottom, x:right] = index + 1
        points = torch.rand(count, 3, 3, generator=torch.Generator().manual_seed(index)) * 20
        made.append({"boxes": boxes, "labels": torch.arange(count), "masks": masks, "keypoints": points})
    return made


def copies(image, count):
    """A batch of copies of an image: its sample ``index`` draws as the image at ``index`` of a ragged batch, for one seed."""
    return image.expand(count, *image.shape)


def one_by_one(pipeline, images, seed, view=0, **options):
    """Kornia's result for each image, with the draws of a batch of copies of the image."""
    made, augment = [], gpuaug.fuse(pipeline, **options)
    for index, image in enumerate(images):
        batch = copies(image, len(images))
        params = augment.draw(batch.shape, seed=seed).views[view].as_kornia()
        made.append(pipeline(as_kornia_takes_them(batch), params=params)[index])
    return torch.stack(made)
