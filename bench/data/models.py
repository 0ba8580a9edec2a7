"""The networks of the suites, sized so that encoder and training cost as much as in real loops."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision import models


class Encoder(nn.Sequential):
    """Images to feature maps: four levels that halve the side and double the channels, from 3 to ``8 * width``.

    Takes float images, or uint8 images, which it scales to [0, 1]: loops pass the loader's images unchanged.
    """

    def __init__(self, width: int = 64, convs: int = 3) -> None:
        channels = [3, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            _conv(before if first else after, after, stride=2 if first else 1)
            for before, after in pairwise(channels)
            for first in [True] + [False] * (convs - 1)
        ]
        super().__init__(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.is_floating_point() else images.float() / 255)


class Decoder(nn.Sequential):
    """Feature maps to one score per class and pixel: the encoder's levels mirrored, with transposed convolutions."""

    def __init__(self, classes: int, width: int = 64) -> None:
        channels = [8 * width, 4 * width, 2 * width, width]
        blocks = []
        for before, after in pairwise(channels):
            blocks += [_up(before, after), _conv(after, after)]
        # Scores come from half the side: one more level there would cost more than all others together.
        super().__init__(*blocks, nn.ConvTranspose2d(channels[-1], classes, 4, stride=2, padding=1))


class Tail(nn.Sequential):
    """Feature maps to one score per class, at about the encoder's cost."""

    def __init__(self, classes: int, width: int = 64) -> None:
        channels = 8 * width
        super().__init__(
            *(_conv(channels, channels) for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )


class Classifier(nn.Sequential):
    """Nine convolutions of stride two, from 3 channels over ``width`` to ``256 * width``, and a linear layer.

    Padding keeps a side of one pixel at one, so a ninth halving of 256 pixels is possible.
    """

    def __init__(self, classes: int, width: int = 16) -> None:
        channels = [3] + [width << level for level in range(9)]
        blocks = []
        for before, after in pairwise(channels):
            blocks += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU(inplace=True)]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))


class Mlp(nn.Sequential):
    """A head on frozen features."""

    def __init__(self, features: int, classes: int, width: int = 2048) -> None:
        super().__init__(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


class LightAugmentation(nn.Module):
    """A light augmentation in a handful of launches: scale, mirror half of the images, blur, normalise."""

    def __init__(self, taps: int = 7) -> None:
        super().__init__()
        window = torch.hann_window(taps + 2)[1:-1]
        weights = (window / window.sum()).expand(3, 1, 1, taps)
        self.register_buffer("across", weights.contiguous())
        self.register_buffer("down", weights.transpose(2, 3).contiguous())
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        images = images.float() / 255
        mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
        images = nn.functional.conv2d(images, self.across, padding="same", groups=3)
        images = nn.functional.conv2d(images, self.down, padding="same", groups=3)
        return (images - self.mean) / self.std


def trunk(name: str) -> tuple[nn.Module, int]:
    """A torchvision ResNet without its last layer, and its number of features. Random weights cost as much as trained ones."""
    made = models.get_model(name, weights=None)
    features = made.fc.in_features
    made.fc = nn.Identity()
    return made, features


def _conv(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


def _up(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )
