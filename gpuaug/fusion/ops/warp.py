"""Kornia's rotation, shear, translation, affine and perspective modules: draws and matrices.

Each module is *lowered* to an op, or run by Kornia. A *sample* is an image or a clip. Samples outside the *apply mask* skip the
op. *Forward* matrices map input pixels to output pixels. Matrices are computed on the host in float64, so that float32 values
on the device are accurate to half a unit in the last place. Class attributes without a comment, such as ``names``, are
explained in ``base.py``.
"""

from typing import Any, Literal

import numpy as np
import torch
from kornia import augmentation as K
from kornia.constants import Resample, SamplePadding
from torch import Tensor

from gpuaug.fusion.ops.base import Array, OpDraws, Size, host_tensor, select_samples
from gpuaug.fusion.ops.geometry import WarpOp
from gpuaug.fusion.ops.kornia_private import generator_of
from gpuaug.fusion.ops.sampler import Sampler


class MatrixWarp(WarpOp):
    """Base class of ops that compute their warp from forward matrices."""

    def _read(self, module: Any) -> None:
        super()._read(module)
        self.nearest = self.settings["resample"] == Resample.NEAREST
        self.edge: Literal["zeros", "border", "fill"] = (
            "border" if self.settings.get("padding_mode") == SamplePadding.BORDER else "zeros"
        )

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if self.settings["resample"] == Resample.BICUBIC:
            return "resample='bicubic'"
        padding = self.settings.get("padding_mode", SamplePadding.ZEROS)
        if padding not in (SamplePadding.ZEROS, SamplePadding.BORDER):
            return f"padding_mode={padding.name.lower()!r}"
        return None

    def unsupported_size(self, size: Size) -> str | None:
        """Reason for images one pixel wide or high, for which Kornia divides by zero (side - 1); else ``None``."""
        return "the images are one pixel wide or high" if np.any(np.equal(size.height, 1) | np.equal(size.width, 1)) else None

    def _draw_parameter(self, name: str, sampler: Sampler, default: float) -> Any:
        """Draw a parameter per sample, (B,), by Kornia's name; ``default`` if the module does not draw the parameter."""
        limits = self.bounds.get(name)
        return np.full(sampler.samples, default, np.float32) if limits is None else sampler.within(*limits)

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        """Forward matrices, (B, 3, 3) float64, of all samples of ``draws``, whatever their apply mask."""
        raise NotImplementedError

    def matrix(self, draws: OpDraws, size: Size) -> Array:
        """Forward matrices; the identity for samples that skip the op."""
        if not self.is_random:  # no sample may skip the op
            return self._forward_matrices(draws, size)
        samples = np.flatnonzero(draws["apply_mask"])
        matrices = identities(size.batch)
        matrices[samples] = self._forward_matrices(select_samples(draws, samples), size.select(samples))
        return matrices

    def inverse(self, draws: OpDraws, size: Size) -> Array:
        """Matrices that map output to input pixels; the exact identity for samples that skip the op, which must not change."""
        return inverse_matrices(self.matrix(draws, size))


class Rotation(MatrixWarp):
    """``RandomRotation``."""

    lowers = (K.RandomRotation,)
    names = ("degrees",)
    description = "rotate"

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        radians = np.deg2rad(draws["degrees"].astype(np.float64))
        cosine, sine = np.cos(radians), np.sin(radians)
        return about_centre((cosine, sine, -sine, cosine), size)


class Rotation90(MatrixWarp):
    """``RandomRotation90``: rotates by multiples of 90 degrees. The size of the image does not change."""

    lowers = (K.RandomRotation90,)
    names = ("times",)
    description = "rotate by quarters"

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        quarters = np.rint(draws["times"]).astype(np.int64) % 4
        cosine = np.array([1.0, 0.0, -1.0, 0.0])[quarters]
        sine = np.array([0.0, 1.0, 0.0, -1.0])[quarters]
        return about_centre((cosine, sine, -sine, cosine), size)


class Affine(MatrixWarp):
    """``RandomAffine``."""

    lowers = (K.RandomAffine,)
    # ``scale_2`` is the scale of x, or of both axes; ``scale_4`` is a separate scale of y.
    names = ("degree", "translate_x", "translate_y", "scale_2", "scale_4", "shear_x", "shear_y")
    description = "affine"

    def unsupported(self) -> str | None:
        """Reason why Kornia runs the module, or ``None`` if it is lowered."""
        if self.settings["fill_value"] is not None and self.settings["padding_mode"] == SamplePadding.FILL:
            return "padding_mode='fill'"
        return super().unsupported()

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw angle and shears in degrees, scale factors, and shifts in pixels, (B,) each."""
        scale_x = self._draw_parameter("scale_2", sampler, 1.0)
        return {
            "angle": self._draw_parameter("degree", sampler, 0.0),
            "scale_x": scale_x,
            "scale_y": self._draw_parameter("scale_4", sampler, 1.0) if "scale_4" in self.bounds else scale_x,
            "shift_x": self._draw_parameter("translate_x", sampler, 0.0) * np.float32(size.width),
            "shift_y": self._draw_parameter("translate_y", sampler, 0.0) * np.float32(size.height),
            "shear_x": self._draw_parameter("shear_x", sampler, 0.0),
            "shear_y": self._draw_parameter("shear_y", sampler, 0.0),
        }

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws under Kornia's names. Shifts and scales for x and y are stacked to (B, 2)."""
        return {
            "translations": _pair(draws["shift_x"], draws["shift_y"]),
            "center": _centre(size),
            "scale": _pair(draws["scale_x"], draws["scale_y"]),
            "angle": torch.from_numpy(draws["angle"]),
            "shear_x": torch.from_numpy(draws["shear_x"]),
            "shear_y": torch.from_numpy(draws["shear_y"]),
        }

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        # Order: shear, scale, rotation, shift. The rotation is opposite to RandomRotation's. [[a, b], [c, d]] is the linear
        # part: rotation · scale, then times the shear matrix [[1, -sx], [-sy, 1 + sx · sy]].
        radians = np.deg2rad(draws["angle"].astype(np.float64))
        cosine, sine = np.cos(radians), np.sin(radians)
        a = cosine * draws["scale_x"]
        b = -sine * draws["scale_y"]
        c, d = sine * draws["scale_x"], cosine * draws["scale_y"]
        if "shear_x" in self.bounds:
            sx, sy = _tangents(draws)
            a, b = a - b * sy, b * (1 + sx * sy) - a * sx
            c, d = c - d * sy, d * (1 + sx * sy) - c * sx
        return about_centre((a, b, c, d), size, shift=(draws["shift_x"], draws["shift_y"]))


class Shear(MatrixWarp):
    """``RandomShear``."""

    lowers = (K.RandomShear,)
    names = ("shear_x", "shear_y")
    description = "shear"

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws under Kornia's names, the shear angles, and the centre of the images."""
        return {**super().kornia_parameters(draws, size), "center": _centre(size)}

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        sx, sy = _tangents(draws)
        return about_centre((np.ones_like(sx), -sx, -sy, 1 + sx * sy), size)


class Translate(MatrixWarp):
    """``RandomTranslate``."""

    lowers = (K.RandomTranslate,)
    names = ("translate_x", "translate_y")
    description = "shift"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw two shifts per sample in pixels, (B,) each."""
        sides = zip(self.names, (size.width, size.height), strict=True)
        return {name: self._draw_parameter(name, sampler, 0.0) * np.float32(side) for name, side in sides}

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        return about_centre((1, 0, 0, 1), size, shift=(draws["translate_x"], draws["translate_y"]))


class Perspective(MatrixWarp):
    """``RandomPerspective``: moves the four corners of the image."""

    lowers = (K.RandomPerspective,)
    matrix_type = "perspective"
    description = "perspective"

    def _read(self, module: Any) -> None:
        super()._read(module)
        generator = generator_of(module)  # Kornia's generator of parameters, which has the settings
        self._distortion = float(generator.distortion_scale)
        self._moves_inwards = generator.sampling_method == "basic"

    def _corners(self, size: Size) -> Array:
        """Centres of the corner pixels, clockwise from the top left: (4, 2), or (B, 4, 2) if images differ in size."""
        corners: Array = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=np.float32) * (size.sides - 1)[..., None, :]
        return corners

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the output positions of the four corners in pixels, (B, 4, 2)."""
        reach = self._distortion * size.sides[..., None, :] / 2  # largest offset of a corner along x and y
        numbers = sampler.uniform(8).T.reshape(size.batch, 4, 2)
        if self._moves_inwards:
            offsets = reach * numbers * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], dtype=np.float32)
        else:
            offsets = 2 * reach * (numbers - np.float32(0.5))
        return {"end_points": (self._corners(size) + offsets).astype(np.float32)}

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Input and output positions of the corners, (B, 4, 2)."""
        start = torch.from_numpy(self._corners(size)).expand(size.batch, -1, -1)
        return {"start_points": start, "end_points": torch.from_numpy(draws["end_points"])}

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        matrix = _from_unit_square(draws["end_points"].astype(np.float64))
        # From pixels to the unit square: divides x and y, the first two columns, by the distance of the corner pixels.
        matrix[:, :, :2] /= (size.sides - 1)[..., None, :]
        return matrix


def about_centre(
    linear: tuple[Any, Any, Any, Any],
    size: Size,
    centre: tuple[float, float] | None = None,
    shift: tuple[Any, Any] = (0.0, 0.0),
) -> Array:
    """Matrices, (B, 3, 3), with the linear part [[a, b], [c, d]] about a centre, then a shift.

    Args:
        linear: (a, b, c, d): arrays (B,), or one number for all samples.
        size: Size of the images.
        centre: Fixed point (x, y) of the linear part in pixels; ``None`` for the centre of the image.
        shift: Shift (x, y) in pixels, numbers or arrays (B,).
    """
    a, b, c, d = linear
    x, y = ((size.width - 1) / 2, (size.height - 1) / 2) if centre is None else centre
    matrix = identities(size.batch)
    matrix[:, 0, 0] = a
    matrix[:, 0, 1] = b
    matrix[:, 0, 2] = x - a * x - b * y + shift[0]
    matrix[:, 1, 0] = c
    matrix[:, 1, 1] = d
    matrix[:, 1, 2] = y - c * x - d * y + shift[1]
    return matrix


def identities(count: int) -> Array:
    """Identity matrices, (count, 3, 3). In memory the first axis is the innermost, which makes NumPy's loops faster."""
    matrix = np.zeros((3, 3, count))
    matrix[0, 0] = matrix[1, 1] = matrix[2, 2] = 1
    return matrix.transpose(2, 0, 1)


def _from_unit_square(quad: Array) -> Array:
    """Matrices, (B, 3, 3), that map (0, 0), (1, 0), (1, 1), (0, 1) to the corners of quadrilaterals, (B, 4, 2)."""
    # The matrix maps (u, v) to ((a u + b v + c) / (g u + h v + 1), (d u + e v + f) / (g u + h v + 1)). The corners (0, 0), (1,
    # 0) and (0, 1) give a to f as functions of g and h, which follow from the corner (1, 1). g = h = 0 for a parallelogram.
    x, y = quad[..., 0], quad[..., 1]
    # Edges from the corner (1, 1) to (1, 0) and to (0, 1).
    right_edge = quad[:, 1] - quad[:, 2]
    bottom_edge = quad[:, 3] - quad[:, 2]
    mismatch = quad[:, 0] - quad[:, 1] + quad[:, 2] - quad[:, 3]
    determinant = right_edge[:, 0] * bottom_edge[:, 1] - bottom_edge[:, 0] * right_edge[:, 1]
    g = (mismatch[:, 0] * bottom_edge[:, 1] - bottom_edge[:, 0] * mismatch[:, 1]) / determinant
    h = (right_edge[:, 0] * mismatch[:, 1] - mismatch[:, 0] * right_edge[:, 1]) / determinant
    matrix = np.empty((len(quad), 3, 3))
    matrix[:, 0, 0] = x[:, 1] - x[:, 0] + g * x[:, 1]
    matrix[:, 0, 1] = x[:, 3] - x[:, 0] + h * x[:, 3]
    matrix[:, 0, 2] = x[:, 0]
    matrix[:, 1, 0] = y[:, 1] - y[:, 0] + g * y[:, 1]
    matrix[:, 1, 1] = y[:, 3] - y[:, 0] + h * y[:, 3]
    matrix[:, 1, 2] = y[:, 0]
    matrix[:, 2, 0] = g
    matrix[:, 2, 1] = h
    matrix[:, 2, 2] = 1
    return matrix


def inverse_matrices(matrix: Array) -> Array:
    """Inverses of matrices (B, 3, 3) by cofactors, exact for entries 0, 1 and -1."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.transpose(1, 2, 0)
    cofactors: Array = np.array(
        (
            (e * i - f * h, c * h - b * i, b * f - c * e),
            (f * g - d * i, a * i - c * g, c * d - a * f),
            (d * h - e * g, b * g - a * h, a * e - b * d),
        )
    )
    cofactors /= a * cofactors[0, 0] + b * cofactors[1, 0] + c * cofactors[2, 0]
    return cofactors.transpose(2, 0, 1)


def _tangents(draws: OpDraws) -> tuple[Array, Array]:
    """Tangents of the shear angles along x and y, (B,) each."""
    return np.tan(np.deg2rad(draws["shear_x"].astype(np.float64))), np.tan(np.deg2rad(draws["shear_y"].astype(np.float64)))


def _centre(size: Size) -> Tensor:
    """Centre (x, y) of the images, which have one size, in pixels, (B, 2)."""
    return host_tensor([[(size.width - 1) / 2, (size.height - 1) / 2]], np.float32).expand(size.batch, -1)


def _pair(x: Array, y: Array) -> Tensor:
    """Stack values for x and y, (B,) each, to (B, 2)."""
    return torch.from_numpy(np.stack([x, y], -1).astype(np.float32))
