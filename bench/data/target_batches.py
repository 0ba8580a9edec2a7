"""Batches of random images with masks or boxes, in the form that each library takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torchvision import tv_tensors

import gpuaug
from bench.data import random_images


@dataclass(frozen=True)
class Batch:
    """Images (B, 3, H, W) uint8, with masks (B, 1, H, W) uint8 or one target dict per image, on the device."""

    images: Tensor
    masks: Tensor | None = None
    targets: Sequence[dict[str, Tensor]] | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Images, and the masks or targets of the batch."""
        return tuple(member for member in (self.images, self.masks, self.targets) if member is not None)

    def for_torchvision(self) -> tuple[Any, ...]:
        """Return the inputs of one call of a torchvision transform on the whole batch.

        Boxes of all images are in one tensor. Labels are (n, 2): label, index of the image.
        """
        inputs: list[Any] = [tv_tensors.Image(self.images)]
        if self.masks is not None:
            inputs.append(tv_tensors.Mask(self.masks))
        if self.targets is not None:
            boxes = torch.cat([target["boxes"] for target in self.targets])
            image_indices = [torch.full_like(target["labels"], index) for index, target in enumerate(self.targets)]
            labels = torch.stack((torch.cat([target["labels"] for target in self.targets]), torch.cat(image_indices)), 1)
            inputs.append({"boxes": tv_tensors.wrap(boxes, like=self.targets[0]["boxes"]), "labels": labels})
        return tuple(inputs)

    def samples(self) -> list[tuple[Any, ...]]:
        """Return the inputs of one call of a torchvision transform per image, on the host."""
        images, *annotations = move(self.inputs, torch.device("cpu"))
        if self.masks is not None:
            annotations = [map(tv_tensors.Mask, annotations[0])]
        return list(zip(map(tv_tensors.Image, images), *annotations, strict=True))

    def loaded_inputs(self) -> tuple[Any, ...]:
        """Return the images, and the target dicts as a training loop gets them from a loader with ``collate_ragged``."""
        samples = [(image.as_subclass(Tensor), target) for image, target in self.samples()]
        device = self.images.device
        loader = DataLoader(samples, len(samples), collate_fn=gpuaug.collate_ragged, pin_memory=device.type == "cuda")
        ((_, targets),) = gpuaug.StreamedLoader(loader, device=device)
        return self.images, targets

    def by_key(self) -> dict[str, Tensor]:
        """Return tensors by data key. Boxes are padded to (B, n, 4), and ``valid`` (B, n), a key of gpuaug, marks boxes."""
        inputs = {"input": self.images}
        if self.masks is not None:
            inputs["mask"] = self.masks
        if self.targets is not None:
            boxes = [target["boxes"].as_subclass(Tensor) for target in self.targets]
            counts = torch.tensor([len(image_boxes) for image_boxes in boxes], device=self.images.device)
            inputs["bbox_xyxy"] = pad_sequence(boxes, batch_first=True)
            inputs["valid"] = torch.arange(inputs["bbox_xyxy"].shape[1], device=self.images.device) < counts[:, None]
        return inputs


def random_batch(batch_size: int, size: int, device: torch.device, *, masks: bool = False, boxes: bool = False) -> Batch:
    """Return a batch of random images of ``size`` pixels per side on ``device``, with masks or boxes on request."""
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    labels = torch.randint(21, (batch_size, 1, size, size), dtype=torch.uint8, device=device) if masks else None
    return Batch(images, labels, _targets(batch_size, size, device) if boxes else None)


def _targets(batch_size: int, size: int, device: torch.device) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    targets = [random_images.random_objects(size, size, generator) for _ in range(batch_size)]
    for target in targets:
        target["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(size, size))
    return move(targets, device)


def move(container: Any, device: torch.device) -> Any:
    """Move all tensors in nested lists, tuples and dicts to ``device``."""
    # A non-blocking copy to the host would not be complete when it returns.
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"), container)


def read_tensors(result: Any) -> Any:
    """Read shape and address of each tensor in ``result``, as a model does, and return ``result``."""
    if isinstance(result, Tensor):
        tuple(result.shape)
        result.data_ptr()
    elif isinstance(result, (list, tuple, dict)):
        for member in result.values() if isinstance(result, dict) else result:
            read_tensors(member)
    return result


def collate(items: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Stack images and masks, and concatenate targets, since each tensor from a worker takes a file descriptor."""
    columns: list[Any] = []
    for column in zip(*items, strict=True):
        if isinstance(column[0], Tensor):
            columns.append(torch.stack(column))
        else:
            concatenated = {key: torch.cat([target[key] for target in column]) for key in column[0]}
            columns.append((concatenated, [len(target["boxes"]) for target in column]))
    return columns


def split_targets(column: Any) -> Any:
    """Split the concatenated targets of ``collate`` into one dict per image. A tensor is returned unchanged."""
    if isinstance(column, Tensor):
        return column
    concatenated, counts = column
    rows = zip(*(values.split(counts) for values in concatenated.values()), strict=True)
    return [dict(zip(concatenated, values, strict=True)) for values in rows]
