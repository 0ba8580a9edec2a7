"""Labels as shares of the classes, mixed as the images are: what a cross entropy takes as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.mix import partners, shares


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """How labels become shares of the classes.

    Args:
        classes: How many there are.
        smoothing: How much of a label is spread over all classes, as by ``label_smoothing`` of torch's cross entropy: the
            label's own class has 1 - s + s / K, and all others s / K.
    """

    classes: int
    smoothing: float = 0.0

    @property
    def kept(self) -> float:
        """What of a share is not spread."""
        return 1.0 - self.smoothing

    @property
    def off(self) -> float:
        """The share of a class that is not the label's."""
        return self.smoothing / self.classes

    @property
    def on(self) -> float:
        """The share of the label's class."""
        return self.kept + self.off

    def check(self, labels: Tensor, batch: int) -> None:
        """Refuse what is neither an index nor shares for each image.

        Raises:
            ArgumentError: If it is.
        """
        if labels.shape == (batch,) or (labels.shape == (batch, self.classes) and labels.is_floating_point()):
            return
        raise ArgumentError(
            f"class must be one label for each of the {batch} images, or floating shares of the {self.classes} classes, got "
            f"{tuple(labels.shape)} of {labels.dtype}. Pass class indices, (B,), or shares, (B, num_classes), as floats."
        )

    def type_of(self, labels: Tensor) -> torch.dtype:
        """What the shares are: float32, or what they were already."""
        return labels.dtype if labels.ndim == 2 else torch.float32

    def of(self, labels: Tensor, rows: Tensor | None) -> Tensor:
        """The shares, in torch.

        Args:
            labels: Class indices of any type, or shares. An index that is no class, such as -100, is a row of ``off``.
            rows: A mix's, on the same device; ``None`` where nothing is mixed.

        Shape:
            - labels: (B,) or (B, K)
            - rows: (B, a mix's width), float32
            - returns: (B, K)
        """
        if labels.ndim == 2:
            made = labels.float() * self.kept + self.off
        else:
            # A comparison, since an index that is no class would be written to memory that is not the row's.
            values = labels.float() if labels.is_floating_point() else labels.long()
            own = values[:, None] == torch.arange(self.classes, device=labels.device)
            made = torch.full(own.shape, self.off, dtype=torch.float32, device=labels.device).masked_fill_(own, self.on)
        if rows is not None:
            share = shares(rows)[:, None]
            made = torch.where(share != 0, made * (1 - share) + partners(made, rows) * share, made)
        return made.to(self.type_of(labels))
