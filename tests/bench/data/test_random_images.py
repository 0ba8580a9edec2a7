import torch

from bench.data import random_images


def test_ragged_images_differ_in_size_and_are_the_same_every_time():
    first, second = (random_images.RaggedImages((20, 40), count=5) for _ in range(2))
    sides = {side for image in first.images for side in image.shape[1:]}
    assert len(sides) > 3
    assert min(sides) >= 20
    assert max(sides) <= 40
    assert all(torch.equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    inverted = first.transformed(lambda image: 255 - image)
    assert torch.equal(inverted[3][0], 255 - first[3][0])
    assert inverted[3][1] == first[3][1]


def test_random_objects_lie_in_their_image_and_have_labels():
    generator = torch.Generator().manual_seed(0)
    targets = [random_images.random_objects(40, 60, generator) for _ in range(30)]
    boxes = torch.cat([target["boxes"] for target in targets])
    assert 5 < len(boxes) / 30 < 9
    assert (boxes[:, 2:] - boxes[:, :2] >= torch.tensor([6, 4]) * 0.999).all()
    assert (boxes >= 0).all()
    assert (boxes <= torch.tensor([60, 40, 60, 40])).all()
    assert all(len(target["labels"]) == len(target["boxes"]) >= 1 for target in targets)
