"""Networks of the suites, of such sizes that encoding and training take as long as in real loops."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision import models


class Encoder(nn.Sequential):
    """Encoder of images to feature maps with ``8 * width`` channels, in four levels. A level halves the side.

    Input are float images, or uint8 images, which the encoder scales to [0, 1].
    """

    def __init__(self, width: int = 64, convs: int = 3) -> None:
        channels = [3, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            _conv(channels_in if downsample else channels_out, channels_out, stride=2 if downsample else 1)
            for channels_in, channels_out in pairwise(channels)
            for downsample in [True] + [False] * (convs - 1)
        ]
        super().__init__(*blocks)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.is_floating_point() else images.float() / 255)


class Decoder(nn.Sequential):
    """Decoder of feature maps to one score per class and pixel: ``Encoder`` in reverse, with transposed convolutions."""

    def __init__(self, classes: int, width: int = 64) -> None:
        channels = [8 * width, 4 * width, 2 * width, width]
        blocks = []
        for channels_in, channels_out in pairwise(channels):
            blocks += [_upsample(channels_in, channels_out), _conv(channels_out, channels_out)]
        # The last layer computes scores from half of the side: another level there would cost more than all others together.
        super().__init__(*blocks, nn.ConvTranspose2d(channels[-1], classes, 4, stride=2, padding=1))


class Tail(nn.Sequential):
    """Network from feature maps to one score per class, which takes about as long as ``Encoder``."""

    def __init__(self, classes: int, width: int = 64) -> None:
        channels = 8 * width
        super().__init__(
            *(_conv(channels, channels) for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )


class Classifier(nn.Sequential):
    """Nine convolutions of stride two, with ``width`` to ``256 * width`` channels, and a linear layer.

    With their padding, a side of one pixel stays one pixel, so that 256 pixels can be halved nine times.
    """

    def __init__(self, classes: int, width: int = 16) -> None:
        channels = [3] + [width << level for level in range(9)]
        blocks = []
        for channels_in, channels_out in pairwise(channels):
            blocks += [nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1), nn.ReLU(inplace=True)]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], classes))


class Mlp(nn.Sequential):
    """Classification head on frozen features: three linear layers."""

    def __init__(self, features: int, classes: int, width: int = 2048) -> None:
        super().__init__(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


class LightAugmentation(nn.Module):
    """Light augmentation in about ten launches: scale, flip half of the images, blur, normalise."""

    def __init__(self, taps: int = 7) -> None:
        super().__init__()
        window = torch.hann_window(taps + 2)[1:-1]
        weights = (window / window.sum()).expand(3, 1, 1, taps)
        self.register_buffer("weights_x", weights.contiguous())
        self.register_buffer("weights_y", weights.transpose(2, 3).contiguous())
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        images = images.float() / 255
        flip_mask = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        images = torch.where(flip_mask, images.flip(3), images)
        images = nn.functional.conv2d(images, self.weights_x, padding="same", groups=3)
        images = nn.functional.conv2d(images, self.weights_y, padding="same", groups=3)
        return (images - self.mean) / self.std


def trunk(name: str) -> tuple[nn.Module, int]:
    """Return a torchvision ResNet or ViT without its last layer, with random weights, and the number of its features."""
    model = models.get_model(name, weights=None)
    head = "fc" if hasattr(model, "fc") else "heads"
    last_layer = [module for module in getattr(model, head).modules() if isinstance(module, nn.Linear)][-1]
    setattr(model, head, nn.Identity())
    return model, last_layer.in_features


def _conv(channels_in: int, channels_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)
    )


def _upsample(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(channels_in, channels_out, 4, stride=2, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
