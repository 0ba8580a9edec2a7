"""Target dicts with boxes, masks and keypoints of torchvision's types."""

import torch
from torchvision import tv_tensors


def targets_of(images):
    """For each image: three boxes, the first and the last at its ends, their labels, masks and centres."""
    made = []
    for seed, image in enumerate(images):
        size = tuple(image.shape[-2:])
        end = torch.tensor([size[1], size[0]], dtype=torch.float32)
        least, most = (torch.rand(2, 2, generator=torch.Generator().manual_seed(seed)).sort(0).values * end).unbind()
        boxes = torch.cat((torch.zeros(2), most, least, most, least, end)).view(3, 4)
        masks = torch.stack([image[0] // (index + 1) for index in range(3)])
        made.append(
            {
                "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
                "masks": tv_tensors.Mask(masks),
                "keypoints": tv_tensors.KeyPoints((boxes[:, :2] + boxes[:, 2:]) / 2, canvas_size=size),
                "labels": torch.arange(3),
            }
        )
    return made


def plain(tensor):
    return tensor.as_subclass(torch.Tensor)
