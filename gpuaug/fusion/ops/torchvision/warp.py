"""torchvision's rotation, affine and perspective transforms: draws and matrices.

A transform is *lowered* to an op, or run by torchvision. A *sample* is an image or a clip. Samples outside the *apply mask*
skip the op. The *canvas* is the area of the output image. *Forward* matrices map input pixels to output pixels.

Matrices map coordinates of pixel centres, in which the first pixel has x = 0. In torchvision the ``center`` of a rotation and
the points of a perspective transform are coordinates of pixel edges, in which the first pixel extends from x = 0 to x = 1.
"""

from typing import Any

import numpy as np
from torchvision.transforms import v2

from gpuaug.fusion.ops import warp
from gpuaug.fusion.ops.base import Array, Op, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, image_fill, interpolation_of, mask_fill
from gpuaug.fusion.pixels import ROUNDED


class _Warp(TorchvisionOp, warp.MatrixWarp):
    """Base class of torchvision's warps."""

    byte_rule = ROUNDED

    def _read(self, transform: Any) -> None:
        self.nearest = interpolation_of(transform) == "nearest"
        self.fill = self.unit_fill(transform, round if self.nearest else None)
        self.mask_fill = mask_fill(transform)
        # With bilinear interpolation, border pixels differ between fill=0 and fill=None. With nearest they do not.
        is_zero = image_fill(transform) is None or (self.nearest and not np.any(self.fill))
        self.edge = "zeros" if is_zero else "fill"

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        mode = interpolation_of(self.module)
        return None if mode in ("nearest", "bilinear") else f"interpolation={mode!r}"

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if samples that skip the op would have another size, because of ``expand``; else ``None``."""
        return Op.unsupported_size(self, size)

    def _options(self) -> dict[str, Any]:
        """Keyword arguments of a functional call that are settings."""
        return {"interpolation": self.module.interpolation, "fill": image_fill(self.module)}

    @property
    def _centre(self) -> tuple[float, float] | None:
        """Fixed point of a rotation, (x, y) in coordinates of pixel centres; ``None`` for the centre of the image."""
        center: Any = self.module.center
        return None if center is None else (center[0] - 0.5, center[1] - 0.5)


class Rotation(_Warp):
    """``v2.RandomRotation``, counterclockwise. With ``expand`` the canvas holds the whole rotated image.

    Support: fused, with any `center`, and any [`fill`](#conventions); `expand=True` draws [a size](#random-sizes) per
    image; `expand=True` with a `center` is not fused.
    """

    lowers = (v2.RandomRotation,)
    description = "rotate"

    def _read(self, transform: Any) -> None:
        super()._read(transform)
        first, last = (float(bound) for bound in transform.degrees)
        self.bounds = {"angle": (first, last)}
        self._expands = bool(transform.expand)
        self.draws_size = self._expands and first != last

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return "expand=True with a center" if self._expands and self.module.center is not None else super().unsupported()

    def out_applied(self, size: Size) -> Size:
        """Size of the canvas. Only for a rotation by one angle, or without ``expand``."""
        return _rotated_canvas(size, self.bounds["angle"][0]) if self._expands else size

    def drawn_size(self, draws: OpDraws, size: Size) -> Size:
        """Size of the canvas for the drawn angle of each sample."""
        return _rotated_canvas(size, draws["angle"])

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Sizes of the canvases at the smallest and the largest angle and at multiples of 90 degrees between them.

        Also the size of a square that contains every canvas.
        """
        first, last = self.bounds["angle"]
        if first == last or not self._expands:
            return super().out_bounds(size)
        quarters = np.arange(np.ceil(first / 90), np.floor(last / 90) + 1) * 90
        canvases = [_rotated_canvas(size, angle) for angle in (first, last, *quarters.tolist())]
        diagonal = np.hypot(size.height, size.width) + 1
        return (*canvases, size.rounded_down(diagonal, diagonal))

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        radians = np.deg2rad(draws["angle"].astype(np.float64))
        cosine, sine = np.cos(radians), np.sin(radians)
        canvas = _rotated_canvas(size, draws["angle"]) if self._expands else size
        shift = (canvas.width - size.width) / 2, (canvas.height - size.height) / 2
        return warp.about_centre((cosine, sine, -sine, cosine), size, self._centre, shift)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``rotate`` with ``angle`` in degrees, ``expand`` and ``center``."""
        angle = float(draws["angle"][sample])
        transform = self.module
        return [("rotate", {"angle": angle, "expand": self._expands, "center": transform.center, **self._options()})]


class Affine(_Warp):
    """``v2.RandomAffine``: shear, clockwise rotation and scale about ``center``, then translation by whole pixels.

    Support: fused, with any `center`, and any [`fill`](#conventions).
    """

    lowers = (v2.RandomAffine,)
    description = "affine"

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw angle and shears in degrees, a scale factor, and shifts in whole pixels, (B,) each."""
        transform: Any = self.module
        zeros = np.zeros(sampler.samples, np.float32)
        draws = {"angle": _within(sampler, transform.degrees), "shift_x": zeros, "shift_y": zeros}
        if transform.translate is not None:
            for name, fraction, side in zip("xy", transform.translate, (size.width, size.height), strict=True):
                draws[f"shift_{name}"] = np.rint(sampler.within(-1.0, 1.0) * np.float32(fraction * side))
        shear = (0.0, 0.0, 0.0, 0.0) if transform.shear is None else (*transform.shear, 0.0, 0.0)[:4]
        draws["scale"] = _within(sampler, transform.scale or (1.0, 1.0))
        draws["shear_x"], draws["shear_y"] = _within(sampler, shear[:2]), _within(sampler, shear[2:])
        return draws

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        angle, shear_x, shear_y = (np.deg2rad(draws[name].astype(np.float64)) for name in ("angle", "shear_x", "shear_y"))
        a, c = np.cos(angle - shear_y) / np.cos(shear_y), np.sin(angle - shear_y) / np.cos(shear_y)
        b = -a * np.tan(shear_x) - np.sin(angle)
        d = np.cos(angle) - c * np.tan(shear_x)
        scale = draws["scale"]
        shift = draws["shift_x"], draws["shift_y"]
        return warp.about_centre((scale * a, scale * b, scale * c, scale * d), size, self._centre, shift)

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``affine`` with ``angle`` and ``shear`` in degrees, ``translate`` in pixels and ``scale``."""
        scalars = {name: float(draws[name][sample]) for name in ("angle", "scale")}
        shift, shear = ([float(draws[f"{name}_{axis}"][sample]) for axis in "xy"] for name in ("shift", "shear"))
        translate = [int(pixels) for pixels in shift]
        return [
            ("affine", {**scalars, "translate": translate, "shear": shear, "center": self.module.center, **self._options()})
        ]


class Perspective(_Warp, warp.Perspective):
    """``v2.RandomPerspective``, which moves the corners of the image inwards by whole pixels.

    Support: fused, with any [`fill`](#conventions); `distortion_scale=1` is not fused.
    """

    lowers = (v2.RandomPerspective,)

    def unsupported(self) -> str | None:
        """Reason why torchvision runs the transform, or ``None`` if it is fused."""
        return "distortion_scale=1, with which corners may meet" if self.module.distortion_scale == 1 else super().unsupported()

    def unsupported_size(self, size: Size) -> str | None:
        """Reason if images are one pixel wide or high, for which torchvision raises an error; else ``None``."""
        return warp.MatrixWarp.unsupported_size(self, size)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw ``"end_points"``, (B, 4, 2): positions (x, y) of the moved corners in pixels, clockwise from the top left."""
        sides = size.sides
        scale = float(self.module.distortion_scale)  # type: ignore[arg-type]
        max_distance = np.floor(scale * (sides // 2).astype(np.float64))[..., None, :] + 1
        distance = np.floor(sampler.uniform(8).T.reshape(size.batch, 4, 2) * max_distance)
        last = np.broadcast_to((sides - 1)[..., None, :], distance.shape)
        is_right_or_bottom = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=bool)
        # Corners on the right or bottom move left or up from the last pixel, the others right or down from the first.
        return {"end_points": np.where(is_right_or_bottom, last - distance, distance).astype(np.float32)}

    def _forward_matrices(self, draws: OpDraws, size: Size) -> Array:
        """Forward matrices of pixel centres, from corners that torchvision takes for coordinates of pixel edges."""
        to_edges, to_centres = np.eye(3), np.eye(3)
        to_edges[:2, 2] = 0.5
        to_centres[:2, 2] = -0.5
        matrices: Array = to_centres @ super()._forward_matrices(draws, size) @ to_edges
        return matrices

    def calls(self, draws: OpDraws, sample: int, size: Size) -> list[Call]:
        """``perspective`` with ``startpoints`` and ``endpoints`` in pixels."""
        right, bottom = (int(side) - 1 for side in size.sample(sample).sides)
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        ends = draws["end_points"][sample].astype(int).tolist()
        return [("perspective", {"startpoints": start, "endpoints": ends, **self._options()})]


def _rotated_canvas(size: Size, angle: Any) -> Size:
    """Size of the smallest canvas that holds an image rotated by ``angle`` degrees, in float32 as in torchvision.

    ``angle`` is a number, or an array (B,).
    """
    radians = np.deg2rad(-(np.asarray(angle, np.float64) % 360))
    cosine, sine = np.abs(np.cos(radians)).astype(np.float32), np.abs(np.sin(radians)).astype(np.float32)
    half_width, half_height = np.float32(0.5) * np.float32(size.width), np.float32(0.5) * np.float32(size.height)
    half_canvas_width = half_width * cosine + half_height * sine
    half_canvas_height = half_width * sine + half_height * cosine
    # ``_pixels`` returns whole numbers, which are only converted to integers.
    return size.rounded_down(_pixels(half_canvas_height, half_height), _pixels(half_canvas_width, half_width))


def _pixels(half_canvas: Any, half_side: Any) -> Any:
    """Side of the canvas in whole pixels, from half of its side before rounding and half the side of the image.

    As in torchvision, both ends of the canvas are truncated to multiples of 1e-4 pixels.
    """
    ends = half_side - half_canvas, half_side + half_canvas
    first, last = (np.trunc(end * np.float32(1e4)) * np.float32(1e-4) for end in ends)
    return np.ceil(last) - np.floor(first)


def _within(sampler: Sampler, bounds: Any) -> Array:
    """Uniform numbers between two bounds, (B,); constant if the bounds are equal."""
    low, high = (float(bound) for bound in bounds)
    return sampler.within(low, high) if low != high else np.full(sampler.samples, low, np.float32)
