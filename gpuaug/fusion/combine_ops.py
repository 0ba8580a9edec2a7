"""Ops that combine several images of a sample into one: mosaic, MixUp of detection, copy-paste.

A sample holds images and their target dicts, one per image. The images that become one are a *group*; the result is the
group's *canvas*. An op of a pipeline may have several groups per sample, whose canvases the next op combines. These ops are the
first of a pipeline. ``forms/combine.py`` runs them before the passes, in which they change nothing.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuaug.core.errors import ArgumentError
from gpuaug.fusion.ops.base import OpDraws, Size
from gpuaug.fusion.ops.geometry import IdentityOp
from gpuaug.fusion.ops.sampler import SPLITMIX_INCREMENT, Sampler, as_int64, splitmix64_mix

Sides = NDArray[np.int64]
"""Heights and widths, (…, 2)."""


class Placement(NamedTuple):
    """Places of the images of M groups on their canvases, on the host. The N images are in the order of the groups."""

    op: "CombineOp"
    draws: OpDraws
    """Draws of ``op``."""
    tiles: NDArray[np.int64]
    """(N, 12) tile of each image, as ``backends/tiles.py`` describes it."""
    used: NDArray[np.bool_]
    """(N,) mask of the images that the canvas shows."""
    canvases: Sides
    """(M, 2) sizes of the canvases."""


def fit(tiles: NDArray[np.int64], sizes: Sides, canvases: Sides) -> None:
    """Write the largest sizes with which images fit on canvases, with their aspect ratio. See ``CombineOp.place``."""
    # Side per axis if the other side of the image has the length of the canvas, rounded to the nearest integer.
    other_sides = sizes[..., ::-1]
    by_other_side = np.maximum((canvases[..., ::-1] * sizes * 2 + other_sides) // (2 * other_sides), 1)
    tiles[..., 2:4] = np.minimum(canvases, by_other_side)


class CombineOp(IdentityOp):
    """Base class of the ops."""

    package = "torchvision"

    count: ClassVar[int]
    """Number of images of a group."""
    overlays: ClassVar[bool] = False
    """Whether the second of two images is written over the first, in a second launch, and not beside it."""
    parameters: ClassVar[tuple[str, ...]]
    """Names of the draws besides ``"applies"``."""
    size: int | None = None
    """Side of the canvas, which may cut images; ``None`` if it has the size of the first image."""
    groups = 1
    """Number of groups per sample: the product of ``count`` of the following ops. The program sets it."""

    def _read_common(self, module: Any) -> None:
        """Do nothing: with the module's ``p``, a plan would expect an op that skips samples."""

    def _read(self, transform: Any) -> None:
        self.probability = float(transform.p)
        self.fill = float(transform.fill)
        """Value of pixels outside of images, of 255."""

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"applies"`` and the parameters per group, (B, groups)."""
        applies = self.probability > sampler.uniform(self.groups).T
        return {"applies": applies, **self.draw_parameters(sampler, size), "apply_mask": applies.any(1)}

    def describe(self) -> str:
        """Empty, because a pass does nothing for the op."""
        return ""

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Any]:
        """Empty, because torchvision has no function that combines images. The module itself repeats a sample."""
        return []

    @abstractmethod
    def summary(self) -> str:
        """Short description for ``explain()``."""

    def _name(self, name: str, group: int) -> str:
        """Name of a parameter in the result of ``numbers``. With several groups, the index of the group is a suffix."""
        return f"{name}_{group}" if self.groups > 1 else name

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Drawn numbers of one sample."""
        return {
            self._name(name, group): float(draws[name][sample, group])
            for name in ("applies", *self.parameters)
            for group in range(self.groups)
        }

    def draws_of_numbers(self, numbers: dict[str, float]) -> OpDraws:
        """Draws of one sample, from the result of ``numbers``; from an empty dict for a sample that no group is applied to."""
        draws: OpDraws = {
            name: np.array([[numbers.get(self._name(name, group), 0) for group in range(self.groups)]])
            for name in ("applies", *self.parameters)
        }
        applies = draws["applies"] > 0.5
        return {**draws, "applies": applies, "apply_mask": applies.any(1)}

    def used(self, draws: OpDraws) -> NDArray[np.bool_]:
        """Mask of the images that the canvases show, (B · groups · count,): all, or the first where the op is not applied."""
        mask = np.repeat(draws["applies"].reshape(-1, 1), self.count, 1)
        mask[:, 0] = True
        return mask.ravel()

    def weights(self, draws: OpDraws) -> NDArray[np.float32] | None:
        """Weight of the first image of each group, (M,); ``None`` if images are not blended."""
        return None

    def placement(self, draws: OpDraws, sizes: Sides) -> Placement:
        """Places of all images. ``sizes``: (N, 2) heights and widths of the images."""
        sizes = sizes.reshape(-1, self.count, 2)
        canvases = sizes[:, 0] if self.size is None else np.full((len(sizes), 2), self.size)
        areas = canvases[:, 0] * canvases[:, 1]
        # ``backends/tiles.py`` describes the columns: here the region, the canvas and its offset are written.
        tiles = np.zeros((len(sizes), self.count, 12), np.int64)
        tiles[..., 6:8] = tiles[..., 8:10] = canvases[:, None]
        tiles[..., 10] = (areas.cumsum() - areas)[:, None]
        self.place(draws, sizes, tiles)
        tiles[..., 11] = np.arange(sizes.shape[0] * self.count).reshape(-1, self.count)
        return Placement(self, draws, tiles.reshape(-1, 12), self.used(draws), canvases)

    def place(self, draws: OpDraws, sizes: Sides, tiles: NDArray[np.int64], first: int = 0) -> None:
        """Write the places and the regions of the images; by default, images are fitted to the canvas, and centred.

        Args:
            draws: Draws of the op.
            sizes: (M, n, 2) heights and widths of n consecutive images of each group.
            tiles: (M, n, 12) tiles, whose regions are the canvases.
            first: Index of the first of the n images in its group.
        """
        fit(tiles, sizes, tiles[..., 8:10])
        tiles[..., :2] = (tiles[..., 8:10] - tiles[..., 2:4]) // 2


_AFTER = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])
"""1 where the tiles of a mosaic, top left, top right, bottom left, bottom right, are below and right of the centre."""


class MosaicOp(CombineOp):
    """``gpuaug.Mosaic``: four images around a random centre."""

    count = 4
    parameters = ("y", "x")
    size: int

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        self.size = int(transform.size)

    def out_applied(self, size: Size) -> Size:
        """Size of the canvas."""
        return size.to(self.size, self.size)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the centre in pixels, in the middle half of each side."""
        y, x = np.floor(self.size / 4 + sampler.uniform(2 * self.groups) * (self.size / 2)).reshape(2, self.groups, -1)
        return {"y": y.T, "x": x.T}

    def place(self, draws: OpDraws, sizes: Sides, tiles: NDArray[np.int64], first: int = 0) -> None:
        """Place the images with a corner at the centre; the first image fitted to the canvas, if the op is not applied."""
        after = _AFTER[first : first + sizes.shape[1]]
        centres = np.stack((draws["y"], draws["x"]), -1).astype(np.int64).reshape(-1, 1, 2)
        fit(tiles, sizes, np.full(2, self.size // 2))
        tiles[..., :2] = centres - (1 - after) * tiles[..., 2:4]
        tiles[..., 4:6] = centres * after
        tiles[..., 6:8] = np.abs(self.size * after - centres)
        not_applied = ~draws["applies"].ravel()
        if not_applied.any():
            first_tiles = tiles[not_applied, 0]
            first_tiles[:, 4:8] = 0, 0, self.size, self.size
            super().place(draws, sizes[not_applied, 0], first_tiles)
            tiles[not_applied, 0] = first_tiles

    def summary(self) -> str:
        """Number of images and size of the canvas."""
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
        """Weight of the first image of each group, (M,): 1 where the op is not applied."""
        weights: NDArray[np.float32] = np.where(draws["applies"], draws["weight"], 1).astype(np.float32).ravel()
        return weights

    def summary(self) -> str:
        """Distribution of the weight."""
        return f"weighted sum of 2 images, Beta({self.alpha:g}, {self.alpha:g})"


class CopyPasteOp(CombineOp):
    """``gpuaug.CopyPaste``: some objects of the second image, by their masks, on the first."""

    count = 2
    parameters = ("seed",)
    overlays = True

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw a seed in [0, 2²⁴), from which the choice of each object follows."""
        return {"seed": np.floor(sampler.uniform(self.groups).T * 2**24)}

    def chosen(self, draws: OpDraws, groups: NDArray[np.int64], objects: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the objects that are pasted: each with probability one half.

        Args:
            draws: Draws of the op.
            groups: Index of the group of each object.
            objects: Index of each object in its image.
        """
        seeds = draws["seed"].ravel().astype(np.int64)[groups]
        # One random word per object. Its sign bit decides.
        words = splitmix64_mix(seeds + (objects + 1) * as_int64(SPLITMIX_INCREMENT))
        chosen: NDArray[np.bool_] = draws["applies"].ravel()[groups] & (words >= 0)
        return chosen

    def summary(self) -> str:
        """Number of images."""
        return "objects of the second image on the first"


def combining_ops(ops: Sequence[Any]) -> tuple[CombineOp, ...]:
    """Return the ops of a pipeline that combine images, and set their numbers of groups.

    Raises:
        ArgumentError: If such an op is not at the beginning of the pipeline.
    """
    first = tuple(takewhile(lambda op: isinstance(op, CombineOp), ops))
    misplaced = next((op for op in ops[len(first) :] if isinstance(op, CombineOp)), None)
    if misplaced is not None:
        raise misplaced_error(misplaced.name, f"after {ops[len(first)].name}")
    groups = 1
    for op in reversed(first):
        op.groups = groups
        groups *= op.count
    return first


def combined_size(ops: Sequence[CombineOp], size: Size) -> Size:
    """Size of the combined images: of the last mosaic's canvas, or ``size``, of the first image of each sample."""
    return next((op.out(size) for op in reversed(ops) if op.size is not None), size)


def combined_windows(ops: Sequence[CombineOp], draws: Sequence[OpDraws], sizes: Sides, image: int) -> NDArray[np.int64]:
    """Windows, (B, 4) top, left, height and width, that are read of one image of each sample; of size 0 if none is.

    Args:
        ops: Ops that combine images.
        draws: Draws of the ops.
        sizes: (B, 2) heights and widths of the images.
        image: Index of the image in its sample.
    """
    is_used = np.ones(len(sizes), bool)
    for op, op_draws in zip(reversed(ops), reversed(draws[: len(ops)]), strict=True):
        is_used = np.repeat(is_used, op.count) & op.used(op_draws)
    count = ops[0].groups * ops[0].count
    is_used = is_used[image::count]
    starts = np.zeros_like(sizes)
    ends = sizes
    if isinstance(ops[0], MosaicOp):
        # Only this image is placed: NumPy releases the interpreter's lock for arrays of more than 500 values, and then waits
        # for the threads that decode.
        group, first = divmod(image, ops[0].count)
        draws_of_group = {name: draws[0][name][:, [group]] for name in ("applies", *ops[0].parameters)}
        tiles = np.zeros((len(sizes), 1, 12), np.int64)
        tiles[..., 8:10] = ops[0].size
        ops[0].place(draws_of_group, sizes[:, None], tiles, first)
        top_left = tiles[:, 0, :2]
        resized = tiles[:, 0, 2:4]
        visible_lines = np.maximum(-top_left, 0), np.minimum(ops[0].size - top_left, resized) - 1
        # Source lines of the first and the last visible line. Two lines are interpolated. One more is read on each side,
        # because kernels round otherwise.
        source_lines = [np.floor((line + 0.5) * sizes / resized - 0.5).astype(np.int64) for line in visible_lines]
        starts = np.maximum(source_lines[0] - 1, 0)
        ends = np.minimum(source_lines[1] + 3, sizes)
    return np.concatenate((starts, ends - starts), 1) * is_used[:, None]


def misplaced_error(name: str, position: str) -> ArgumentError:
    """Return the error about a module ``name`` that combines images at another position than the first."""
    return ArgumentError(
        f"{name} must stand first in the pipeline, outside of containers that pick transforms at random, got it {position}. "
        "Put all other transforms after it."
    )
