"""Boxes, masks and keypoints for images, and where Kornia takes them."""

import kornia.augmentation as K
import torch
from support.comparison.replay import photographs

import gpuaug

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

PIPELINES = {
    "flips": lambda p: [K.RandomHorizontalFlip(p=p), K.RandomVerticalFlip(p=p)],
    "crop": lambda p: [K.RandomCrop((14, 20), p=1.0)],
    "centre, pad": lambda p: [K.CenterCrop((20, 30)), K.PadTo((40, 50))],
    "resized crop": lambda p: [K.RandomResizedCrop((20, 24)), K.RandomVerticalFlip(p=p)],
    "rotation": lambda p: [K.RandomRotation(45.0, p=p), K.RandomCrop((20, 30))],
    "perspective": lambda p: [K.RandomPerspective(0.4, p=p), K.RandomHorizontalFlip(p=p)],
    "affine, resize": lambda p: [
        K.RandomAffine(30.0, (0.2, 0.1), (0.7, 1.3), (5.0, 20.0), p=p),
        K.Resize((50, 40), resample="nearest"),
    ],
    "affine, same": lambda p: [K.RandomAffine(30.0, (0.2, 0.1), (0.7, 1.3), p=p, same_on_batch=True)],
    "colour alone": lambda p: [K.RandomInvert(p=p), K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=p)],
    "two warps": lambda p: [K.RandomRotation(30.0, p=p), K.RandomAffine(20.0, (0.2, 0.1), (0.7, 1.3), p=p)],
    "torchvision's references": lambda p: [
        K.RandomHorizontalFlip(p=p),
        K.RandomCrop((30, 40), padding=(5, 5, 4, 4), pad_if_needed=True),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1),
        K.RandomGrayscale(p=0.1),
    ],
    "torchvision's references, with a resized crop": lambda p: [
        K.RandomHorizontalFlip(p=p),
        K.RandomResizedCrop((26, 34), scale=(0.3, 1.0), align_corners=False),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1),
    ],
    "DETR": lambda p: [
        K.RandomHorizontalFlip(p=p),
        K.Resize((40, 60), align_corners=False),
        K.RandomCrop((36, 44)),
        K.Resize((44, 50), align_corners=False),
        K.Normalize(MEAN, STD),
    ],
    "a module of Kornia's between": lambda p: [
        K.RandomHorizontalFlip(p=p),
        K.RandomMedianBlur(7, p=1.0),
        K.RandomRotation(30.0, p=p),
    ],
}


def boxes_of(batch=5, height=32, width=48, seed=0, most=6):
    """Boxes in and partly around images of this size, as corners; none on the second image."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for sample in range(batch):
        count = 0 if sample == 1 else int(torch.randint(1, most, (), generator=generator))
        frame = torch.tensor([width, height], dtype=torch.float32)
        first = torch.rand(count, 2, generator=generator) * frame * 1.1 - frame * 0.1
        made.append(torch.cat((first, first + torch.rand(count, 2, generator=generator) * 20 + 2), 1))
    return made


def records_of(batch=5, height=32, width=48, seed=0, **keys):
    """Target dicts in torchvision's form."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for sample, boxes in enumerate(boxes_of(batch, height, width, seed)):
        n = len(boxes)
        made.append(
            {
                "boxes": boxes,
                "labels": torch.arange(n),
                "masks": torch.randint(1, 10, (n, height, width), generator=generator, dtype=torch.uint8),
                "keypoints": torch.cat((torch.rand(n, 3, 2, generator=generator) * width, torch.ones(n, 3, 1)), 2),
                "image_id": sample,
                **keys,
            }
        )
    return made


def masks(*shape, dtype=torch.uint8, seed=0):
    """Classes, 0 to 9, drawn for each pixel, so that a wrong pixel shows; fractions of 4 where the type has them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    drawn = torch.randint(1, 10, shape, generator=generator).to(dtype)
    return drawn / 4 if dtype.is_floating_point else drawn


def annotations(key, batch=5, count=4, height=32, width=48, seed=0):
    """Boxes and points in and around images of this size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([width, height], dtype=torch.float32)

    def points(*shape):
        return torch.rand(*shape, 2, generator=generator) * spread * 1.2 - spread * 0.1

    if key == "keypoints":
        return points(batch, count)
    if key == "bbox":
        return points(batch, count, 4)
    first, sides = points(batch, count), torch.rand(batch, count, 2, generator=generator) * 20 + 1
    return torch.cat((first, first + sides if key == "bbox_xyxy" else sides), -1)


def through_kornia(modules, images, params, points):
    """Where Kornia takes points that are given by pixel edges, (n, …, 2) for each image."""
    pipeline = K.AugmentationSequential(*modules, data_keys=["input", "keypoints"])
    most = max([len(each.reshape(-1, 2)) for each in points] + [1])
    padded = torch.zeros(len(points), most, 2)
    for row, each in zip(padded, points, strict=True):
        row[: each[..., 0].numel()] = each.reshape(-1, 2) - 0.5
    out, moved = pipeline(images.float() / 255, padded, params=params)
    return tuple(out.shape[2:]), [
        row[: each[..., 0].numel()].reshape(each.shape) + 0.5 for row, each in zip(moved, points, strict=True)
    ]


def corners(boxes):
    """(n, 4, 2)."""
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack((x1, y1, x2, y1, x2, y2, x1, y2), 1).view(-1, 4, 2)


def upright(points, size):
    """The boxes around four points, within the frame."""
    frame = torch.tensor([size[1], size[0]])
    return torch.cat([points.amin(1).clamp(min=0).minimum(frame), points.amax(1).clamp(min=0).minimum(frame)], 1)


def follow_targets(modules, records, seed=0, images=None, **options):
    """(the size that comes out, the dicts that come out, the draws)."""
    images = photographs(len(records)) if images is None else images
    augment = gpuaug.fuse(K.AugmentationSequential(*modules), **options)
    draws = augment.draw(images.shape, seed=seed)
    made, targets = augment(images, records, data_keys=["input", "targets"], draws=draws)
    return tuple(made.shape[2:]), targets, draws
