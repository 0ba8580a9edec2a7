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
