"""Ops that combine several images of a sample into one: mosaic, MixUp of detection, copy-paste.

A sample holds several images. The images that become one are a *group*, and the result is the group's *canvas*. An op may have
several groups per sample, whose canvases the next op combines: a mosaic of 2 · 4 images, then MixUp of the two mosaics. Arrays
have N images, in the order of the groups, and M groups, in the order of the samples.

These ops are the first of a pipeline. ``forms/combine.py`` runs them before the *passes*, the kernels that run all other ops.
In the passes, they change nothing. *Draws* are the random parameters of an op for a batch of B samples. An op is *applied* to a
group with a probability; otherwise the canvas shows only the first image of the group.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.errors import ArgumentError, shown
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import IdentityOp
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, Sampler, as_int64, splitmix64_mix

Sides = NDArray[np.int64]
"""Heights and widths, (…, 2)."""


class Placement(NamedTuple):
    """Where one op writes each of N images on the M canvases, on the host."""

    op: "CombineOp"
    draws: OpDraws
    """Draws of ``op``."""
    tiles: NDArray[np.int64]
    """(N, 12) tile of each image: its resized rectangle, and the part of the canvas that is written (``backends/tiles.py``)."""
    used: NDArray[np.bool_]
    """(N,) mask of the images that are visible in the results of the last op (``used_images``)."""
    canvases: Sides
    """(M, 2) heights and widths of the canvases."""


def fitted(sizes: NDArray[np.int64], rectangles: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the largest heights and widths of images, with their aspect ratio, that fit into rectangles, (2, …).

    ``sizes``: heights and widths of the images, (2, …). ``rectangles``: heights and widths, which broadcast with ``sizes``.
    """
    # Per axis, the side for which the other side equals that of the rectangle, rounded to the nearest integer, at least 1.
    other_sides = sizes[::-1]
    by_other_side = np.maximum((rectangles[::-1] * sizes * 2 + other_sides) // (2 * other_sides), 1)
    result: NDArray[np.int64] = np.minimum(rectangles, by_other_side)
    return result


class CombineOp(IdentityOp):
    """Base class of ops that combine images.

    Draws: ``"applies"``, (B, groups) bool, whether the op is applied to each group; and ``parameters``, (B, groups) each.
    """

    package = "torchvision"

    count: ClassVar[int]
    """Number of images of a group."""
    overlays: ClassVar[bool] = False
    """Whether the second image of a group is written over the first, in a second launch. False: images do not overlap."""
    parameters: ClassVar[tuple[str, ...]]
    """Names of the draws besides ``"applies"``."""
    largest_parameter = 1
    """Largest value of a draw. The smallest is 0."""
    size: int | None = None
    """Height and width of all canvases; ``None`` if each canvas has the size of the first image of its group."""
    groups = 1
    """Number of groups per sample: the product of ``count`` of the ops after this one. ``combining_ops`` sets it."""

    def _read_common(self, module: Any) -> None:
        """Do not read the module's ``p``: in the passes, the op must not count as an op that skips samples."""

    def _read(self, transform: Any) -> None:
        self.probability = float(transform.p)
        self.fill = float(transform.fill)
        """Value of the pixels of the canvas outside of images, in [0, 255] for images of any dtype."""

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"applies"``, the parameters, and ``"apply_mask"``, (B,): true if the op is applied to a group of a sample."""
        applies = self.probability > sampler.uniform(self.groups).T
        return {"applies": applies, **self.draw_parameters(sampler, size), "apply_mask": applies.any(1)}

    def describe(self) -> str:
        """Return an empty string: the op is no part of a pass."""
        return ""

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Any]:
        """Return an empty list: no function of torchvision combines images. The transform, called with ``draws``, does."""
        return []

    @abstractmethod
    def summary(self) -> str:
        """Short description for ``explain()``."""

    def _name(self, name: str, group: int) -> str:
        """Return the name of a drawn number of a group. With several groups, the index of the group is a suffix."""
        return f"{name}_{group}" if self.groups > 1 else name

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Return name → drawn number, for all groups of one sample."""
        return {
            self._name(name, group): float(draws[name][sample, group])
            for name in ("applies", *self.parameters)
            for group in range(self.groups)
        }

    def draws_of_numbers(self, numbers: dict[str, float]) -> OpDraws:
        """Return the draws of one sample from the result of ``numbers``. In an empty dict, the op is applied to no group.

        Raises:
            ArgumentError: If a value is not a number that the op draws, such as the centre of a larger mosaic.
        """
        for value in numbers.values():
            if not isinstance(value, Real) or not 0 <= value <= self.largest_parameter:
                raise ArgumentError(
                    f"draws must be numbers from 0 to {self.largest_parameter} for {self.name}, got {shown(numbers)}. Pass "
                    "draws.of(sample) of a pipeline with the same transform."
                )
        draws: OpDraws = {
            name: np.array([[numbers.get(self._name(name, group), 0) for group in range(self.groups)]])
            for name in ("applies", *self.parameters)
        }
        applies = draws["applies"] > 0.5
        return {**draws, "applies": applies, "apply_mask": applies.any(1)}

    def shown(self, draws: OpDraws) -> NDArray[np.bool_]:
        """Return the mask of the images that the canvases show, (N,): of a group all, or if the op is not applied the first."""
        mask = np.repeat(draws["applies"].reshape(-1, 1), self.count, 1)
        mask[:, 0] = True
        return mask.ravel()

    def weights(self, draws: OpDraws) -> NDArray[np.float32] | None:
        """Return the weight of the first image of each group in the weighted sum, (M,); ``None`` if images are not blended."""
        return None

    def placement(self, draws: OpDraws, sizes: Sides, used: NDArray[np.bool_]) -> Placement:
        """Return the placement of all images. ``sizes``: (N, 2) heights and widths. ``used``: see ``Placement``."""
        # In this method and in ``place``, images are along the last axes: a last axis of length 2 makes NumPy several times
        # slower.
        by_axis = np.ascontiguousarray(sizes.reshape(-1, self.count, 2).T)  # (2, n, M)
        canvases = sizes[:: self.count] if self.size is None else np.full((len(sizes) // self.count, 2), self.size)
        areas = canvases[:, 0] * canvases[:, 1]
        # 6 and 7: size of the region that the tile fills, at first the whole canvas. 8 and 9: size of the canvas. 10: offset of
        # the canvas. ``place`` writes 0 to 3, the resized image, and may change the region. 11: the image.
        tiles = np.zeros((12, *by_axis.shape[1:]), np.int64)
        tiles[6:8] = tiles[8:10] = canvases.T[:, None]
        tiles[10] = areas.cumsum() - areas
        self.place(draws, by_axis, tiles)
        tiles[11] = np.arange(len(sizes)).reshape(-1, self.count).T
        return Placement(self, draws, tiles.T.reshape(-1, 12), used, canvases)

    def place(self, draws: OpDraws, sizes: NDArray[np.int64], tiles: NDArray[np.int64], first: int = 0) -> None:
        """Write the rectangles of the resized images, ``tiles[:4]``, and their regions, ``tiles[4:8]``.

        By default, images are fitted to the canvas, and centred, and the region is the canvas.

        Args:
            draws: Draws of the op, for M groups.
            sizes: (2, n, M) heights and widths of n consecutive images of each group.
            tiles: (12, n, M) tiles, changed in place.
            first: Index in the group of the first of the n images.
        """
        tiles[2:4] = fitted(sizes, tiles[8:10])
        tiles[:2] = (tiles[8:10] - tiles[2:4]) // 2


_IS_BEYOND = np.array([(0, 0, 1, 1), (0, 1, 0, 1)])
"""(whether below the centre, whether right of it) for the tiles of a mosaic: top left and right, bottom left and right."""


class MosaicOp(CombineOp):
    """``gpuaug.Mosaic``: four images around a random centre."""

    count = 4
    parameters = ("y", "x")
    size: int

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.size = self.largest_parameter = int(transform.size)

    def out_applied(self, size: Size) -> Size:
        """Return the size of the batch of canvases."""
        return size.to(self.size, self.size)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the centre in pixels, in the middle half of each side."""
        y, x = np.floor(self.size / 4 + sampler.uniform(2 * self.groups) * (self.size / 2)).reshape(2, self.groups, -1)
        return {"y": y.T, "x": x.T}

    def place(self, draws: OpDraws, sizes: NDArray[np.int64], tiles: NDArray[np.int64], first: int = 0) -> None:
        """Place each image with a corner at the centre; if the op is not applied, the first image as the base class does."""
        is_beyond = _IS_BEYOND[:, first : first + sizes.shape[1], None]
        centres = np.array((draws["y"].ravel(), draws["x"].ravel())).astype(np.int64)[:, None]
        resized = fitted(sizes, np.full((2, 1, 1), self.size // 2))
        tiles[:2] = centres - (1 - is_beyond) * resized
        tiles[2:4] = resized
        tiles[4:6] = centres * is_beyond
        tiles[6:8] = np.abs(self.size * is_beyond - centres)
        not_applied = ~draws["applies"].ravel()
        if not_applied.any():
            first_tiles = tiles[:, 0, not_applied]
            first_tiles[4:6] = 0
            first_tiles[6:8] = self.size
            super().place(draws, sizes[:, 0, not_applied], first_tiles)
            tiles[:, 0, not_applied] = first_tiles

    def summary(self) -> str:
        """Return the number of images and the size of the canvas."""
        return f"mosaic of 4 images, {self.size}x{self.size}"


class MixUpOp(CombineOp):
    """``gpuaug.MixUpBoxes``: a weighted sum of two images."""

    count = 2
    parameters = ("weight",)
    overlays = True

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.alpha = float(transform.alpha)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the weight of the first image from Beta(alpha, alpha)."""
        return {"weight": np.stack([sampler.beta(self.alpha) for _ in range(self.groups)], 1)}

    def weights(self, draws: OpDraws) -> NDArray[np.float32]:
        """Return the weight of the first image of each group, (M,): 1 where the op is not applied."""
        weights: NDArray[np.float32] = np.where(draws["applies"], draws["weight"], 1).astype(np.float32).ravel()
        return weights

    def summary(self) -> str:
        """Return the distribution of the weight."""
        return f"weighted sum of 2 images, Beta({self.alpha:g}, {self.alpha:g})"


class CopyPasteOp(CombineOp):
    """``gpuaug.CopyPaste``: some objects of the second image, by their masks, on the first."""

    count = 2
    parameters = ("seed",)
    largest_parameter = 2**24
    overlays = True

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a seed in [0, 2²⁴), from which follows which objects are pasted."""
        return {"seed": np.floor(sampler.uniform(self.groups).T * self.largest_parameter)}

    def chosen(self, draws: OpDraws, groups: NDArray[np.int64], objects: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the mask of the objects that are pasted, (n,), if all belong to second images. Each has probability one half.

        Args:
            draws: Draws of the op.
            groups: (n,) index of the group of each object.
            objects: (n,) index of each object in its image.
        """
        seeds = draws["seed"].ravel().astype(np.int64)[groups]
        # One random word per object. Its sign bit decides.
        words = splitmix64_mix(seeds + (objects + 1) * as_int64(SPLITMIX_INCREMENT))
        chosen: NDArray[np.bool_] = draws["applies"].ravel()[groups] & (words >= 0)
        return chosen

    def summary(self) -> str:
        """Return what is pasted."""
        return "objects of the second image on the first"


def combining_ops(ops: Sequence[Any]) -> tuple[CombineOp, ...]:
    """Return the ops of a pipeline that combine images, and set their numbers of groups.

    Raises:
        ArgumentError: If such an op is not at the beginning of the pipeline.
    """
    first_ops = tuple(takewhile(lambda op: isinstance(op, CombineOp), ops))
    misplaced = next((op for op in ops[len(first_ops) :] if isinstance(op, CombineOp)), None)
    if misplaced is not None:
        raise misplaced_error(misplaced.name, f"after {ops[len(first_ops)].name}")
    groups = 1
    for op in reversed(first_ops):
        op.groups = groups
        groups *= op.count
    return first_ops


def combined_size(ops: Sequence[CombineOp], size: Size) -> Size:
    """Return the size of the canvases of the last op: of the last mosaic, or without one ``size``, of the first image."""
    return next((op.out(size) for op in reversed(ops) if op.size is not None), size)


def used_images(ops: Sequence[CombineOp], draws: Sequence[OpDraws]) -> list[NDArray[np.bool_]]:
    """Return which images are visible in the results of the last op: for each op, the mask of its images, (N,).

    ``draws``: draws of the ops. The draws of later ops of the pipeline may follow.
    """
    masks: list[NDArray[np.bool_]] = []
    for op, op_draws in zip(reversed(ops), reversed(draws[: len(ops)]), strict=True):
        shown = op.shown(op_draws)
        # The canvases of an op are the images of the next op, which comes before it in ``masks``.
        masks.append(shown & masks[-1].repeat(op.count) if masks else shown)
    return masks[::-1]


def combined_windows(ops: Sequence[CombineOp], draws: Sequence[OpDraws], sizes: Sides, image: int) -> NDArray[np.int64]:
    """Return the window that the ops read of the image ``image`` of each sample, so that only the window is decoded.

    Args:
        ops: Ops that combine images.
        draws: Draws of the ops.
        sizes: (B, 2) heights and widths of these images.
        image: Index of the image in its sample.

    Returns:
        (B, 4) top, left, height and width; all 0 if the image is not read.
    """
    is_used = used_images(ops, draws)[0][image :: ops[0].groups * ops[0].count]
    starts = np.zeros_like(sizes)
    ends = sizes
    if isinstance(ops[0], MosaicOp):
        # Only this image of each sample is placed, not all: for arrays of more than 500 values, NumPy releases the
        # interpreter's lock, and has to wait for the decoding threads to get it back.
        group, first = divmod(image, ops[0].count)
        draws_of_group = {name: draws[0][name][:, [group]] for name in ("applies", *ops[0].parameters)}
        tiles = np.zeros((12, 1, len(sizes)), np.int64)
        tiles[8:10] = ops[0].size
        by_axis = np.ascontiguousarray(sizes.T)
        ops[0].place(draws_of_group, by_axis[:, None], tiles, first)
        top_left = tiles[:2, 0]
        resized = tiles[2:4, 0]
        # A *line* is a row (y) or a column (x). First and last line of the resized image that are on the canvas.
        visible_lines = np.maximum(-top_left, 0), np.minimum(ops[0].size - top_left, resized) - 1
        # First of the two source lines between which each is interpolated. One more line is read on each side, because kernels
        # may round differently.
        source_lines = [np.floor((line + 0.5) * by_axis / resized - 0.5).astype(np.int64) for line in visible_lines]
        starts = np.maximum(source_lines[0] - 1, 0).T
        ends = np.minimum(source_lines[1] + 3, by_axis).T
    return np.concatenate((starts, ends - starts), 1) * is_used[:, None]


def misplaced_error(name: str, position: str) -> ArgumentError:
    """Return the error for a module ``name`` that combines images and is not first in the pipeline.

    ``position``: where it is, such as "after Resize_0".
    """
    return ArgumentError(
        f"{name} must stand first in the pipeline, outside of containers that pick transforms at random, got it {position}. "
        "Put all other transforms after it."
    )
