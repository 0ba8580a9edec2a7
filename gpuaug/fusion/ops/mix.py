"""Ops of Kornia's MixUp, CutMix, mosaic and jigsaw; the weighted mean of AugMix; and conversion of labels.

Each module is *lowered* to an op, or run by Kornia. A *sample* is an image or a clip. A *row* holds an op's parameters for one
sample, in float32. Its first column is the apply mask: 1 to apply the op, 0 to skip it. Class attributes without a comment are
explained in ``base.py``.

MixUp and CutMix mix a sample with a random sample of the batch, its *partner*. They have the same columns and one kernel:
inside a rectangle an output pixel is the partner's, and outside the rectangle it is a weighted mean of both pixels. MixUp uses
an empty rectangle, CutMix a weight of 0 for the partner outside it. Mosaics and jigsaws copy *tiles*, cells of a grid, and run
in torch.

The partner has two weights: ``LABEL_WEIGHT`` in the label, and ``PIXEL_WEIGHT`` in the pixels outside the rectangle. Kornia's
labels contain a *lambda*, which is the label weight, or, for a setting of CutMix, 1 minus the label weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from kornia import augmentation as K
from torch import Tensor

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import Array, FrontOp, Op, OpDraws, Size, column, host_tensor
from gpuaug.fusion.ops.kornia_private import generator_of
from gpuaug.fusion.ops.positional import rectangle_mask
from gpuaug.fusion.ops.sampler import Sampler, extra_uniforms

_PARTNER, LABEL_WEIGHT, PIXEL_WEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM, _COLUMN_COUNT = range(1, 9)
"""Indices of the columns of a row. Column 0 is the apply mask, and ``_COLUMN_COUNT`` is the number of columns."""
RECTANGLE = slice(_LEFT, _COLUMN_COUNT)
"""Columns of the rectangle: left, top, right and bottom."""


class MixOp(FrontOp):
    """Base class of mixes.

    Columns of a row: the apply mask; the index of the partner in the batch; the partner's weight in the label; the partner's
    weight outside the rectangle; and the rectangle (left, top, right, bottom) in pixels, right and bottom exclusive. A sample
    that skips the mix is its own partner, and its weights and rectangle are 0. As in Kornia, images and labels are mixed, and
    all other inputs are an error.

    Pass type: mix.
    """

    takes_any_range = True
    keeps_unit_range = False  # weights are settings of the user, and may exceed 1

    kernel = "mix"
    column_count = _COLUMN_COUNT
    draws_one_batch_at_a_time = True

    supported_keys: ClassVar[tuple[str, ...]] = ("input", "class")

    num_classes: int | None = None
    """Setting ``num_classes`` of the user's module; ``None`` if it is not set."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the partners, a random permutation of the batch, and the weights. The partners ignore ``same_on_batch``."""
        # [0]: the permutation of the only batch, because mixes draw for one batch at a time.
        return {"partner": sampler.permutation(size.batch)[0], **self.draw_weights(sampler, size)}

    def draw_weights(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the weight of each partner, or the rectangle whose share of the image is the weight."""
        return super().draw_parameters(sampler, size)

    def write_rows(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rows of all samples into ``out``, (B, row_width) float32. Columns that ``write`` does not set are 0."""
        apply_mask = draws["apply_mask"]
        out[:, 0] = apply_mask
        out[:, _PARTNER] = draws["partner"]
        out[:, LABEL_WEIGHT:] = 0
        self.write(draws, size, out)
        if not apply_mask.all():
            out[:, _PARTNER] = np.where(apply_mask, draws["partner"], np.arange(size.batch))
            out[~apply_mask, LABEL_WEIGHT:] = 0

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the partner's pixels inside the rectangle, and weighted means outside."""
        partner, weight = partner_values(images, rows), column(rows, PIXEL_WEIGHT)
        # With weight 0 the sample must be unchanged bit for bit, but 0 times an infinite value of the partner is NaN.
        mean = torch.where(weight != 0, images * (1 - weight) + partner * weight, images)
        sides = (column(rows, index) for index in (_LEFT, _TOP, _RIGHT, _BOTTOM))
        return torch.where(rectangle_mask(images, *sides), partner, mean)

    def rows_to_frames(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Replace the index of the partner clip by the index of its frame at the same time, in the batch of all frames."""
        rows[:, _PARTNER] = rows[:, _PARTNER] * frames + frame

    def kornia_lambda(self, rows: Tensor) -> Tensor:
        """Lambda, the last number of a label in Kornia's format, (B,): the partner's weight in the label."""
        return rows[:, LABEL_WEIGHT]

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Labels in Kornia's format: the label of the sample, the label of its partner, and lambda.

        Args:
            labels: Class indices, integer or floating.
            rows: Rows of the whole batch, on the same device.

        Shape:
            - labels: (B,)
            - rows: (B, row_width)
            - returns: (B, 3) float32; CutMix adds a leading axis, as in Kornia

        Raises:
            ArgumentError: If ``labels`` does not hold one label per sample.

        Cost:
            A few launches, and no copy between host and device.
        """
        if labels.shape != rows.shape[:1]:
            raise ArgumentError(
                f"class must be one label for each of the {len(rows)} images, got {tuple(labels.shape)}. "
                "Pass class indices, (B,). gpuaug.fuse(…, num_classes=…) converts them to one-hot labels."
            )
        values = labels.float()
        return torch.stack((values, partner_values(values, rows), self.kornia_lambda(rows)), -1)


class MixUp(MixOp):
    """``RandomMixUpV2``: weighted mean of a sample and its partner."""

    lowers = (K.RandomMixUpV2,)
    description = "mixup"

    def _read(self, module: Any) -> None:
        self.bounds = {"lambda": _bounds(generator_of(module).lambda_val)}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Partners and their weights."""
        return {"mixup_pairs": torch.from_numpy(draws["partner"]), "mixup_lambdas": torch.from_numpy(draws["lambda"])}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the partner's weight, which is the same for pixels and label. The rectangle stays empty."""
        out[:, LABEL_WEIGHT] = out[:, PIXEL_WEIGHT] = draws["lambda"]


class CutMix(MixOp):
    """``RandomCutMixV2``: replaces a rectangle by the same rectangle of the partner."""

    lowers = (K.RandomCutMixV2,)
    stores_coordinates = True
    description = "cutmix"

    def _read(self, module: Any) -> None:
        generator = generator_of(module)
        self._bounds = _bounds(generator.cut_size)
        """(lower, upper) bound of the fraction of the image outside the rectangle."""
        beta = torch.as_tensor(1.0 if generator.beta is None else generator.beta, device="cpu")
        self._concentrations: list[float] = beta.flatten().tolist()
        """Parameters of the beta distribution. With more than one, the module is not lowered."""
        self._lambda_is_fraction_outside = bool(module.use_correct_lambda)
        """Whether lambda in the labels is the fraction of the image outside the rectangle, not inside."""

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        num_mix = generator_of(self.module).num_mix
        if num_mix != 1:
            return f"num_mix={num_mix}"
        return None if len(self._concentrations) == 1 else "beta has several values"

    def draw_weights(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"sides"`` and ``"start"``, the top left corner, of the rectangle in pixels, (B, 2) each, as (x, y).

        The rectangle has the aspect ratio of the image. The fraction of the image outside it is beta-distributed, and clamped.
        """
        low, high = self._bounds
        outside_fraction = np.minimum(np.maximum(sampler.beta(self._concentrations[0]), low), high)
        image_sides = np.array([size.width, size.height], dtype=np.float32)
        sides = np.floor(np.sqrt(1 - outside_fraction)[:, None] * image_sides)
        last_start = image_sides - sides
        # At most last_start, because for a uniform number close to 1 the float32 product is rounded to last_start + 1.
        return {"start": np.minimum(np.floor(sampler.uniform(2).T * (last_start + 1)), last_start), "sides": sides}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Partners, corner pixels of the rectangles, clockwise from the top left, and (height, width) of the images."""
        (left, top), (right, bottom) = draws["start"].T, (draws["start"] + draws["sides"] - 1).T
        corners = np.stack((left, top, right, top, right, bottom, left, bottom), -1).reshape(1, size.batch, 4, 2)
        return {
            "mix_pairs": torch.from_numpy(draws["partner"])[None],
            "crop_src": torch.from_numpy(corners),
            "image_shape": host_tensor([size.height, size.width], np.float32),
        }

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rectangle, and its share of the image as the label weight. The pixel weight stays 0."""
        start, sides = draws["start"], draws["sides"]
        out[:, LABEL_WEIGHT] = sides[:, 0] * sides[:, 1] / np.float32(size.width * size.height)
        out[:, _LEFT : _TOP + 1] = start
        np.add(start, sides, out=out[:, _RIGHT : _BOTTOM + 1])

    def kornia_lambda(self, rows: Tensor) -> Tensor:
        """Lambda, (B,): the label weight, or 1 - label weight. For samples that skip the mix it is 0."""
        weight = super().kornia_lambda(rows)
        return torch.where(rows[:, 0] != 0, 1 - weight, weight) if self._lambda_is_fraction_outside else weight

    def labels(self, labels: Tensor, rows: Tensor) -> Tensor:
        """Labels in Kornia's format, (1, B, 3). The length of the first axis is Kornia's setting ``num_mix``."""
        return super().labels(labels, rows)[None]


class Mosaic(MixOp):
    """``RandomMosaic``: a window of a canvas, a grid of tiles of which each shows one image of the batch.

    Columns of a row: the apply mask; left and top of the window on the canvas; width and height of the canvas; and per tile,
    column by column, the index of its image in the batch. The canvas of a sample that skips the op is the sample itself. Pixels
    outside the canvas are 0.

    Pass type: mix, in a pass that PyTorch computes for the whole batch, of images alone.
    """

    lowers = (K.RandomMosaic,)
    supported_keys = ("input",)  # Kornia adds a box without area for every box that the window does not show
    kernel = "torch"
    launches = 25
    is_random = False  # type: ignore[assignment]  # ``apply`` gives the right output for samples that skip the op, too
    keeps_unit_range = True
    stores_coordinates = True
    names = ("start_ratio_range",)
    description = "mosaic of {grid[0]}x{grid[1]} images"

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.grid: tuple[int, int] = self.settings["mosaic_grid"]

    def row_width(self, channels: int) -> int:
        """Number of columns of a row: the apply mask, four of window and canvas, and one per tile."""
        return 5 + self.grid[0] * self.grid[1]

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if self.settings["cropping_mode"] != "slice":
            return f"cropping_mode={self.settings['cropping_mode']!r}"
        low, high = self.bounds["start_ratio_range"]
        is_outside = low < 0 or (self.settings["output_size"] is None and high > min(self.grid) - 1)
        return f"start_ratio_range={self.module.start_ratio_range} reaches beyond the images" if is_outside else None

    def _sides(self, height: Any, width: Any) -> tuple[Any, Any]:
        """Return the height and width of the output: ``output_size`` of the module, by default ``height`` and ``width``."""
        sides = self.settings["output_size"]
        return (height, width) if sides is None else (int(sides[0]), int(sides[1]))

    def out_applied(self, size: Size) -> Size:
        """Output size: ``output_size`` of the module, or the input size."""
        return size.to(*self._sides(size.height, size.width))

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"images"``, the index of the image on each tile, (B, tiles), and ``"start"`` of the window in pixels, (B, 2).

        The first tile shows the sample. The other tiles of all samples show each image of the batch equally often.
        """
        tiles = self.grid[0] * self.grid[1]
        others = sampler.permutation(size.batch * (tiles - 1))[0] % max(size.batch, 1)
        images = np.concatenate((np.arange(size.batch), others)).reshape(tiles, size.batch).T
        start = [sampler.within(*self.bounds["start_ratio_range"]) * side for side in (size.width, size.height)]
        return {"images": images, "start": np.floor(np.stack(start, -1))}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Images on the tiles, input shapes, and corner pixels of windows and output images, clockwise from the top left."""
        right, bottom = self.out_applied(size).width - 1, self.out_applied(size).height - 1
        corners = np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], np.float32)
        return {
            "permutation": torch.from_numpy(draws["images"]),
            "src": torch.from_numpy(draws["start"][:, None] + corners),
            "dst": torch.from_numpy(corners).repeat(size.batch, 1, 1),
            "batch_shapes": host_tensor([[size.channels, size.height, size.width]], np.int64).repeat(size.batch, 1),
        }

    def write_rows(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rows of all samples into ``out``, (B, row_width) float32."""
        out[:, 0] = draws["apply_mask"]
        out[:, 1:3] = draws["start"]
        out[:, 3:5] = self.grid[0] * size.width, self.grid[1] * size.height
        out[:, 5:] = draws["images"]
        out[~draws["apply_mask"], 1:5] = 0, 0, size.width, size.height

    def rows_to_frames(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Replace the index of the clip on each tile by the index of its frame at the same time, in the batch of all frames."""
        rows[:, 5 : self.row_width(0)].mul_(frames).add_(frame[:, None])

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the windows of the samples of ``rows``, which may be a part of the batch. ``images`` is the whole batch."""
        channels, height, width = images.shape[1:]
        out_height, out_width = self._sides(height, width)
        x = column(rows, 1).long() + torch.arange(out_width, device=images.device)
        y = column(rows, 2).long() + torch.arange(out_height, device=images.device)[:, None]
        inside = (x < column(rows, 3)) & (y < column(rows, 4))
        tile = (x // width * self.grid[1] + y // height) * inside  # outside, any tile: its pixel is replaced by 0
        image = rows[:, 5 : self.row_width(0)].long().gather(1, tile.flatten(1)).view_as(tile)
        channel = torch.arange(channels, device=images.device)[:, None, None]
        return images[image, channel, y % height, x % width].masked_fill(~inside, 0)


class Jigsaw(FrontOp):
    """``RandomJigsaw``: permutes the tiles of a grid.

    Columns of a row: the apply mask; and per output tile, the index of the input tile that is copied to it. Output tiles are
    ordered column by column, and input tiles are counted row by row.

    Pass type: jigsaw, in a pass that PyTorch computes for the whole batch, of images and labels.
    """

    lowers = (K.RandomJigsaw,)
    takes_any_range = True
    supported_keys = ("input", "class")
    kernel = "torch"
    launches = 8
    description = "jigsaw of {grid[0]}x{grid[1]} tiles"

    def _read(self, module: Any) -> None:
        self.grid: tuple[int, int] = self.settings["grid"]
        self._unchanged = np.arange(self.grid[0] * self.grid[1]).reshape(self.grid).T.ravel()
        """Row, without the apply mask, that does not change the image."""
        self._ensures_change = bool(generator_of(module).ensure_perm)
        """Whether a permutation that does not change the image is drawn again."""

    def row_width(self, channels: int) -> int:
        """Number of columns of a row: the apply mask, and one per tile."""
        return 1 + self.grid[0] * self.grid[1]

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if the grid does not divide the sides of the images, for which Kornia raises an error; else ``None``."""
        is_multiple = size.height % self.grid[0] == 0 and size.width % self.grid[1] == 0
        return None if is_multiple else f"grid={self.grid} does not divide the sides of the image"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"permutation"``, (B, tiles) int64: a row without the apply mask. ``_ensures_change`` excludes the identity."""
        tiles = self.row_width(0) - 1
        seeds = sampler.uniform(4)
        permutation = np.empty((seeds.shape[1], tiles), np.int64)
        samples = np.arange(len(permutation))
        start = 0
        while len(samples):
            numbers, _ = extra_uniforms(seeds[:, samples], tiles, start)
            permutation[samples] = numbers.argsort(0, kind="stable").T  # equal numbers have the same order on all machines
            start += tiles
            samples = samples[(permutation[samples] == self._unchanged).all(1) & self._ensures_change]
        return {"permutation": permutation}

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the permutation."""
        out[:, 1:] = draws["permutation"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images with permuted tiles."""
        grid_rows, grid_columns = self.grid
        source = rows[:, 1 : self.row_width(0)].long()
        sample = torch.arange(len(images), device=images.device)[:, None]
        # Axes: sample, row and column of the tile in the grid, channel, line and column in the tile.
        tiles = images.unflatten(3, (grid_columns, -1)).unflatten(2, (grid_rows, -1)).permute(0, 2, 4, 1, 3, 5)
        moved: Tensor = tiles[sample, source // grid_columns, source % grid_columns].unflatten(1, (grid_columns, grid_rows))
        return moved.permute(0, 3, 2, 4, 1, 5).reshape(images.shape)


class ChainMix(FrontOp):
    """Base class of weighted means of an image and of the results of *chains*: ops that each process a copy of the image.

    Images are uint8. Columns of a row: the apply mask; the weight of the image; the weight of each result. In the parameter
    table, the columns of the ops of the chains follow (``ChainsPass`` in ``program/plan.py``). A sample that skips the op has
    weight 1 for the image, and 0 for the results.
    """

    kernel = "torch"
    supported_keys = MixOp.supported_keys

    chains: tuple[Op, ...]
    """One op per chain, which draws for the chain. All have the same settings."""

    def row_width(self, channels: int) -> int:
        """Number of columns of a row, without the columns of the chains."""
        return 2 + len(self.chains)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the weights."""
        out[:, 1:] = draws["weights"]

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Compute the weighted means, rounded down to bytes.

        Shape:
            - images: (1 + chains, B, C, H, W) uint8, the images and the results of each chain
            - rows: (B, at least ``row_width``)
            - returns: (B, C, H, W) uint8
        """
        # Not a fused multiply-add: as in torchvision, each product is rounded before it is added. A sum next to an integer may
        # otherwise be rounded down to another byte.
        mean = column(rows, 1) * images[0]
        for index, results in enumerate(images[1:], 2):
            mean.add_(column(rows, index) * results)
        return mean.to(torch.uint8)


def partner_values(values: Tensor, rows: Tensor) -> Tensor:
    """Return the value of each sample's partner, (B, …). ``values``: values of all samples, (B, …)."""
    return values.index_select(0, rows[:, _PARTNER].long())


def _bounds(values: Any) -> tuple[float, float]:
    """(lower, upper) bound from a setting of Kornia, which is a pair, or ``None`` for (0, 1)."""
    if values is None:
        return 0.0, 1.0
    low, high = torch.as_tensor(values, dtype=torch.float32, device="cpu").tolist()
    return float(low), float(high)


def merged_num_classes(num_classes: int | None, mixes: Iterable[MixOp]) -> int | None:
    """Number of classes, from the settings ``num_classes`` of ``fuse`` and of the mixes; ``None`` if none of them is set.

    Raises:
        ArgumentError: If two settings differ.
    """
    for mix in mixes:
        if num_classes is not None and mix.num_classes not in (None, num_classes):
            raise ArgumentError(
                f"num_classes of {mix.name} must equal num_classes of the rest of the pipeline, {num_classes}, got "
                f"{mix.num_classes}. Set it once, in gpuaug.fuse(…, num_classes=…)."
            )
        num_classes = mix.num_classes if num_classes is None else num_classes
    return num_classes


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """Conversion of labels to class probabilities.

    Args:
        classes: Number of classes, K.
        smoothing: Label smoothing s, as ``label_smoothing`` of ``torch.nn.CrossEntropyLoss``.
    """

    classes: int
    smoothing: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of a class probability in label smoothing, 1 - s. The summand is ``other_probability``."""
        return 1.0 - self.smoothing

    @property
    def other_probability(self) -> float:
        """Probability of each class other than the class of the label: s / K."""
        return self.smoothing / self.classes

    @property
    def label_probability(self) -> float:
        """Probability of the class of the label: 1 - s + s / K."""
        return self.scale + self.other_probability

    def check(self, labels: Tensor, batch: int) -> None:
        """Raise an error for labels that are neither class indices, (B,), nor class probabilities, (B, K). ``batch``: B.

        Raises:
            ArgumentError: If ``labels`` has another shape.
        """
        if labels.shape in ((batch,), (batch, self.classes)):
            return
        raise ArgumentError(
            f"class must be ({batch},) or ({batch}, {self.classes}), got {tuple(labels.shape)}. Pass the class index of "
            "each image, or its probabilities of num_classes classes."
        )

    def type_of(self, labels: Tensor) -> torch.dtype:
        """Output dtype: the dtype of ``labels`` if they are floating-point class probabilities, else float32."""
        return labels.dtype if labels.ndim == 2 and labels.is_floating_point() else torch.float32

    def convert(self, labels: Tensor, rows: Tensor | None) -> Tensor:
        """Convert labels to smoothed class probabilities, then mix them.

        Args:
            labels: Class indices or probabilities, of any dtype. For an index outside [0, K), such as -100, all classes get
                ``other_probability``.
            rows: Rows of a mix, on the same device; ``None`` to skip mixing.

        Shape:
            - labels: (B,) or (B, K)
            - rows: (B, ``MixOp.column_count``), float32
            - returns: (B, K)
        """
        if labels.ndim == 2:
            probabilities = labels.float() * self.scale + self.other_probability
        else:
            # A comparison, because scatter with an index outside [0, K) would write out of bounds.
            indices = labels.float() if labels.is_floating_point() else labels.long()
            is_label = indices[:, None] == torch.arange(self.classes, device=labels.device)
            probabilities = torch.full(is_label.shape, self.other_probability, dtype=torch.float32, device=labels.device)
            probabilities.masked_fill_(is_label, self.label_probability)
        if rows is not None:
            weight = rows[:, LABEL_WEIGHT, None]
            mean = probabilities * (1 - weight) + partner_values(probabilities, rows) * weight
            probabilities = torch.where(weight != 0, mean, probabilities)
        return probabilities.to(self.type_of(labels))
