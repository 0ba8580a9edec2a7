"""A batch of random images with masks or boxes, in the form in which each library takes it."""

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
    """Images (B, 3, H, W) uint8, with masks (B, 1, H, W) uint8 or a target dict for each image, on the device."""

    images: Tensor
    masks: Tensor | None = None
    targets: Sequence[dict[str, Tensor]] | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The images, and the masks or targets if there are any."""
        return tuple(part for part in (self.images, self.masks, self.targets) if part is not None)

    def for_torchvision(self) -> tuple[Any, ...]:
        """The inputs of one call of torchvision's on the whole batch.

        All boxes are in one tensor, and each label has the index of its image beside it.
        """
        wrapped: list[Any] = [tv_tensors.Image(self.images)]
        if self.masks is not None:
            wrapped.append(tv_tensors.Mask(self.masks))
        if self.targets is not None:
            boxes = torch.cat([target["boxes"] for target in self.targets])
            owners = [torch.full_like(target["labels"], index) for index, target in enumerate(self.targets)]
            labels = torch.stack((torch.cat([target["labels"] for target in self.targets]), torch.cat(owners)), 1)
            wrapped.append({"boxes": tv_tensors.wrap(boxes, like=self.targets[0]["boxes"]), "labels": labels})
        return tuple(wrapped)

    def samples(self) -> list[tuple[Any, ...]]:
        """The inputs of a call of torchvision's for each image, on the host."""
        images, *rest = moved(self.parts, torch.device("cpu"))
        if self.masks is not None:
            rest = [map(tv_tensors.Mask, rest[0])]
        return list(zip(map(tv_tensors.Image, images), *rest, strict=True))

    def loaded(self) -> tuple[Any, ...]:
        """The images, and the target dicts as a training loop gets them from a loader that collates by ``collate_ragged``."""
        samples = [(each.as_subclass(Tensor), target) for each, target in self.samples()]
        device = self.images.device
        loader = DataLoader(samples, len(samples), collate_fn=gpuaug.collate_ragged, pin_memory=device.type == "cuda")
        ((_, targets),) = gpuaug.StreamedLoader(loader, device=device)
        return self.images, targets

    def by_key(self) -> dict[str, Tensor]:
        """Tensors for the whole batch by data key, boxes padded to (B, n, 4). The last, ``valid``, is gpuaug's own."""
        found = {"input": self.images}
        if self.masks is not None:
            found["mask"] = self.masks
        if self.targets is not None:
            boxes = [target["boxes"].as_subclass(Tensor) for target in self.targets]
            counts = torch.tensor([len(part) for part in boxes], device=self.images.device)
            found["bbox_xyxy"] = pad_sequence(boxes, batch_first=True)
            found["valid"] = torch.arange(found["bbox_xyxy"].shape[1], device=self.images.device) < counts[:, None]
        return found


def random_batch(batch_size: int, size: int, device: torch.device, *, masks: bool = False, boxes: bool = False) -> Batch:
    """Random images of ``size`` pixels a side on ``device``, with masks or boxes if asked for."""
    images = torch.randint(256, (batch_size, 3, size, size), dtype=torch.uint8, device=device)
    labels = torch.randint(21, (batch_size, 1, size, size), dtype=torch.uint8, device=device) if masks else None
    return Batch(images, labels, _targets(batch_size, size, device) if boxes else None)


def _targets(batch_size: int, size: int, device: torch.device) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    found = [random_images.random_objects(size, size, draw) for _ in range(batch_size)]
    for target in found:
        target["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(size, size))
    return moved(found, device)


def moved(parts: Any, device: torch.device) -> Any:
    """Lists and dicts of tensors on ``device``."""
    # To the host a copy that does not block is not complete when it returns.
    return tree_map_only(Tensor, lambda part: part.to(device, non_blocking=device.type == "cuda"), parts)


def read(result: Any) -> Any:
    """``result`` itself, after each of its tensors has been asked for its shape and its memory, as the step of a model does."""
    if isinstance(result, Tensor):
        tuple(result.shape)
        result.data_ptr()
    elif isinstance(result, (list, tuple, dict)):
        for member in result.values() if isinstance(result, dict) else result:
            read(member)
    return result


def collated(items: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Images and masks stacked; the tensors of target dicts joined, since each that a worker sends takes a file descriptor."""
    parts: list[Any] = []
    for part in zip(*items, strict=True):
        if isinstance(part[0], Tensor):
            parts.append(torch.stack(part))
        else:
            joined = {key: torch.cat([target[key] for target in part]) for key in part[0]}
            parts.append((joined, [len(target["boxes"]) for target in part]))
    return parts


def separated(part: Any) -> Any:
    """A part of ``collated``'s, joined target dicts as one for each image again."""
    if isinstance(part, Tensor):
        return part
    joined, counts = part
    each = zip(*(values.split(counts) for values in joined.values()), strict=True)
    return [dict(zip(joined, values, strict=True)) for values in each]
