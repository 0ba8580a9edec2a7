"""MixUp and CutMix, ops that mix each image with another one of its batch; and the mixed labels.

A sample's row names its partner, so a mix is a gather across the batch. All mixes have rows of one form, so that one kernel
does any of them: within a rectangle a pixel is the partner's, elsewhere it is a weighted mean with it. MixUp uses an
empty rectangle; CutMix a weight of 0. A sample that the op does not apply to is its own partner with lam 0, as in Kornia's
labels.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor, nn

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, FrontOp, OpDraws, Size, column, host_tensor
from gpuaug.fusion.ops.sampler import Sampler

_PARTNER, LAM, WEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM, _WIDTH = range(1, 9)
RECTANGLE = slice(_LEFT, _WIDTH)
"""Left, top, right and bottom."""


class MixOp(FrontOp):
    """An op on an image and another one of the batch, its partner.

    A row holds the apply mask; the partner's index, among the images of the same call; lam, the partner's share of the
    sample, by which labels are mixed; its weight outside of the rectangle; and the rectangle: x and y of its first pixel and
    of the one after its last. The apply mask is one for the whole batch, and where it is false lam, weight and rectangle are 0.
    Kornia mixes images and labels, and raises for masks, boxes and keypoints.
    """

    kernel = "mix"
    width = _WIDTH
    needs_own_batch = True

    targets: ClassVar[tuple[str, ...]] = ("input", "class")
    """The data keys of the module."""

    num_classes: int | None = None
    """Number of classes that the module was given; ``None`` if it was given none."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Partners, a random permutation of the batch (also with ``same_on_batch``), and lam."""
        return {"partner": sampler.permutation(size.batch)[0], **self.draw_lam(sampler, size)}

    @abstractmethod
    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw lam, or the numbers that it follows from."""

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill ``out``, (B, row_width) float32; columns that ``write`` leaves are 0."""
        apply_mask = drawn["apply_mask"]
        out[:, 0] = apply_mask
        out[:, LAM:] = 0
        if apply_mask.all():
            out[:, _PARTNER] = drawn["partner"]
            self.write(drawn, size, out)
        else:
            out[:, _PARTNER] = np.arange(size.batch)

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """The partner's pixels within the rectangle, weighted means outside."""
        other, weight = partners(images, rows), column(rows, WEIGHT)
        # With weight 0 the sample stays bit for bit: a product would be NaN if the partner is infinite.
        mean = torch.where(weight != 0, images * (1 - weight) + other * weight, images)
        x = torch.arange(images.shape[3], device=images.device)
        y = torch.arange(images.shape[2], device=images.device)[:, None]
        left, top, right, bottom = (column(rows, index) for index in (_LEFT, _TOP, _RIGHT, _BOTTOM))
        return torch.where((x >= left) & (x < right) & (y >= top) & (y < bottom), other, mean)

    def spread(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Name the frame of the partner: of another clip, the frame with the same index."""
        rows[:, _PARTNER] = rows[:, _PARTNER] * frames + frame

    def kornia_lam(self, rows: Tensor) -> Tensor:
        """The last column of labels in Kornia's form (its lambda), (B,): the partner's share."""
        return rows[:, LAM]

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Each sample's own label, its partner's, and the number that goes with them, as Kornia returns them.

        Args:
            labels: Of whole numbers or floating.
            rows: Of the whole batch, on the same device.

        Shape:
            - labels: (B,)
            - rows: (B, row_width)
            - returns: (B, 3) float32, with further axes in front where Kornia has them

        Raises:
            ArgumentError: If there is not one label for each sample.

        Cost:
            A few launches, no copy.
        """
        if labels.shape != rows.shape[:1]:
            raise ArgumentError(
                f"class must be one label for each of the {len(rows)} images, got {tuple(labels.shape)}. "
                "Pass class indices, (B,), and make them one-hot by num_classes."
            )
        values = labels.float()
        return torch.stack((values, partners(values, rows), self.kornia_lam(rows)), -1)


class MixUp(MixOp):
    """RandomMixUpV2: a weighted mean with the partner."""

    words = "mixup"

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._bounds = _bounds(module._param_generator.lambda_val)  # type: ignore[union-attr]

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """The partner's weight."""
        return {"lambda": sampler.within(*self._bounds)}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The partners, and their weights."""
        return {"mixup_pairs": torch.from_numpy(drawn["partner"]), "mixup_lambdas": torch.from_numpy(drawn["lambda"])}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The partner's weight, which equals lam."""
        out[:, LAM] = out[:, WEIGHT] = drawn["lambda"]


class CutMix(MixOp):
    """RandomCutMixV2: pastes a rectangle of the partner."""

    counts_pixels = True
    words = "cutmix"

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        generator: Any = module._param_generator
        self._bounds = _bounds(generator.cut_size)
        self._concentration = 1.0 if generator.beta is None else float(generator.beta)
        # The newer of Kornia's two conventions: the label gives the share of the image that stays.
        self._lam_is_own = bool(module.use_correct_lambda)

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:
        """Why this module is left to Kornia, or ``None``."""
        generator: Any = module._param_generator
        if generator.num_mix != 1:
            return f"num_mix={generator.num_mix}"
        if generator.beta is not None and torch.as_tensor(generator.beta, device="cpu").numel() != 1:
            return "beta has several values"
        return None

    def draw_lam(self, sampler: Sampler, size: Size) -> OpDraws:
        """Sides in pixels with the image's aspect ratio, from a beta-distributed share, and a first pixel at which they fit."""
        low, high = self._bounds
        kept = np.minimum(np.maximum(sampler.beta(self._concentration), low), high)
        frame = np.array([size.width, size.height], dtype=np.float32)
        sides = np.floor(np.sqrt(1 - kept)[:, None] * frame)
        room = frame - sides
        # Close to one, a product in float32 rounds up to the next whole number.
        return {"start": np.minimum(np.floor(sampler.uniform(2).T * (room + 1)), room), "sides": sides}

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The partners, and the corners of the rectangles, clockwise and inclusive."""
        if size.batch == 0:
            return {
                "mix_pairs": host_tensor(np.zeros((0, 3)), np.int64),
                "crop_src": host_tensor(np.zeros((0, 4, 2)), np.float32),
            }
        (left, top), (right, bottom) = drawn["start"].T, (drawn["start"] + drawn["sides"] - 1).T
        corners = np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(1, size.batch, 4, 2)
        return {
            "mix_pairs": torch.from_numpy(drawn["partner"])[None],
            "crop_src": torch.from_numpy(corners),
            "image_shape": host_tensor([size.height, size.width], np.float32),
        }

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The rectangle, and its share of the image."""
        start, sides = drawn["start"], drawn["sides"]
        out[:, LAM] = sides[:, 0] * sides[:, 1] / np.float32(size.width * size.height)
        out[:, _LEFT : _TOP + 1] = start
        np.add(start, sides, out=out[:, _RIGHT : _BOTTOM + 1])

    def kornia_lam(self, rows: Tensor) -> Tensor:
        """The rectangle's share of the image, or in Kornia's newer convention that of the rest; 0 if it does not apply."""
        lam = super().kornia_lam(rows)
        return torch.where(rows[:, 0] != 0, 1 - lam, lam) if self._lam_is_own else lam

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Labels with one more axis in front: Kornia's number of mixes, which is 1."""
        return super().labels(labels, rows)[None]


def partners(values: Tensor, rows: Tensor) -> Tensor:
    """The values of each sample's partner: ``values``, (B, …), permuted."""
    return values.index_select(0, rows[:, _PARTNER].long())


def lam_of(rows: Tensor) -> Tensor:
    """The partner's share of each sample, (B,)."""
    return rows[:, LAM]


def _bounds(given: Any) -> tuple[float, float]:
    if given is None:
        return 0.0, 1.0
    low, high = torch.as_tensor(given, dtype=torch.float32, device="cpu").tolist()
    return float(low), float(high)


LOWERED: dict[type[nn.Module], type[MixOp]] = {K.RandomMixUpV2: MixUp, K.RandomCutMixV2: CutMix}


def classes_of(given: int | None, mixes: Iterable[MixOp]) -> int | None:
    """Number of classes, as given to ``fuse`` or to a mix.

    Raises:
        ArgumentError: If two of them differ.
    """
    for mix in mixes:
        if given is not None and mix.num_classes not in (None, given):
            raise ArgumentError(
                f"num_classes of {mix.name} must be that of the rest of the pipeline, {given}, got {mix.num_classes}. "
                "Say it once, in gpuaug.fuse(…, num_classes=…)."
            )
        given = mix.num_classes if given is None else given
    return given


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """The conversion of labels to shares of the classes.

    Args:
        classes: Number of classes.
        smoothing: Part s of a label that is spread over all K classes, as by ``label_smoothing`` of torch's cross entropy: the
            label's own class has 1 - s + s / K, and all others s / K.
    """

    classes: int
    smoothing: float = 0.0

    @property
    def kept(self) -> float:
        """1 - s: the part of a share that is not spread."""
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
        """Refuse labels that are neither an index nor shares for each image.

        Raises:
            ArgumentError: If their shape is another.
        """
        if labels.shape in ((batch,), (batch, self.classes)):
            return
        raise ArgumentError(
            f"class must be ({batch},) or ({batch}, {self.classes}), got {tuple(labels.shape)}. Pass the class index of each "
            "image, or its shares of the classes, as num_classes counts them."
        )

    def type_of(self, labels: Tensor) -> torch.dtype:
        """The type of the shares: float32, or the type of labels that are floating shares already."""
        return labels.dtype if labels.ndim == 2 and labels.is_floating_point() else torch.float32

    def of(self, labels: Tensor, rows: Tensor | None) -> Tensor:
        """The shares, in torch.

        Args:
            labels: Class indices, or shares, of any type. An index that is no class, such as -100, is a row of ``off``.
            rows: A mix's, on the same device; ``None`` where nothing is mixed.

        Shape:
            - labels: (B,) or (B, K)
            - rows: (B, a mix's width), float32
            - returns: (B, K)
        """
        if labels.ndim == 2:
            made = labels.float() * self.kept + self.off
        else:
            # A comparison: scatter with an index that is no class would write outside of the row.
            values = labels.float() if labels.is_floating_point() else labels.long()
            own = values[:, None] == torch.arange(self.classes, device=labels.device)
            made = torch.full(own.shape, self.off, dtype=torch.float32, device=labels.device).masked_fill_(own, self.on)
        if rows is not None:
            lam = lam_of(rows)[:, None]
            made = torch.where(lam != 0, made * (1 - lam) + partners(made, rows) * lam, made)
        return made.to(self.type_of(labels))
