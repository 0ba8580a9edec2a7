"""torchvision's rotations, affine and perspective maps: their draws, and their matrices in torchvision's conventions.

Matrices map pixel centres, as those of Kornia's ops do. torchvision counts from the edge of the first pixel in a perspective
map and in the centre of a rotation that is given, which is half a pixel further.
"""

from typing import Any

import numpy as np
from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import warp
from gpuaug.fusion.ops.base import ANY_SIDES, Array, OpDraws, Size
from gpuaug.fusion.ops.geometry import changes_size_by_chance
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units, image_fill, interpolation_of, mask_fill, whole_sides


class _Warp(TorchvisionOp, warp.MatrixWarp):
    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.nearest = interpolation_of(transform) == "nearest"
        self.fill = self.fill_share(transform.fill)
        self.mask_fill = mask_fill(transform.fill)
        # Nothing blended with nothing once more is another border, but where no pixel is blended.
        plain = transform.fill is None or (self.nearest and not np.any(self.fill))
        self.edge = "zeros" if plain else "fill"

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        mode = interpolation_of(self.module)
        return None if mode in ("nearest", "bilinear") else f"interpolation={mode!r}"

    def unsupported_size(self, size: Size) -> str | None:
        """Any image has edges that it is normalised by."""
        return None

    def _how(self) -> dict[str, Any]:
        transform: Any = self.module
        fill = image_fill(transform.fill) if isinstance(transform.fill, dict) else transform.fill
        return {"interpolation": transform.interpolation, "fill": fill}

    @property
    def _centre(self) -> tuple[float, float] | None:
        """The pixel, (x, y), that a rotation leaves where it is; that in the middle where none is given."""
        given: Any = self.module.center
        return None if given is None else (given[0] - 0.5, given[1] - 0.5)


class Rotation(_Warp):
    """RandomRotation: against the clock, within the frame, or with ``expand`` in the least frame that holds the image."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        _Warp.__init__(self, name, transform, units)
        self._degrees = tuple(float(bound) for bound in transform.degrees)
        self._expands = bool(transform.expand)
        self.draws_size = self._expands and self._degrees[0] != self._degrees[1]

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return "expand=True with a center" if self._expands and self.module.center is not None else super().unsupported()

    def unsupported_size(self, size: Size) -> str | None:
        """A skipped sample keeps the size that it came with."""
        return changes_size_by_chance(self, size=size) if self._expands else None

    def out(self, size: Size) -> Size:
        """The frame's size, or one of each sample's own."""
        if self.draws_size:
            return size.to(*ANY_SIDES)
        return _turned(size, self._degrees[0]) if self._expands else size

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The frame of each sample's angle, or its own size where it is skipped."""
        if not self.draws_size:
            return self.out(size)
        turned = _turned(size, drawn["angle"])
        applies = drawn["apply_mask"]
        return size.to(np.where(applies, turned.height, size.height), np.where(applies, turned.width, size.width))

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Frames at the bounds and at quarter turns, the image if it may be skipped, and a square that holds any frame."""
        if not self.draws_size:
            return super().out_bounds(size)
        first, last = self._degrees
        quarters = np.arange(np.ceil(first / 90), np.floor(last / 90) + 1) * 90
        least = [_turned(size, angle) for angle in (first, last, *quarters.tolist())]
        diagonal = np.hypot(size.height, size.width) + 1
        return (*least, *([size] if self.is_random else []), whole_sides(size, diagonal, diagonal))

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """An angle a sample, in degrees."""
        return {"angle": sampler.within(*self._degrees)}

    def _forward(self, drawn: OpDraws, size: Size) -> Array:
        turned = np.deg2rad(drawn["angle"].astype(np.float64))
        cosine, sine = np.cos(turned), np.sin(turned)
        matrix = warp.about_centre(cosine, sine, -sine, cosine, size, self._centre)
        if self._expands:
            frame = _turned(size, drawn["angle"])
            matrix[:, 0, 2] += (frame.width - size.width) / 2
            matrix[:, 1, 2] += (frame.height - size.height) / 2
        return matrix

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The angle."""
        angle = float(drawn["angle"][sample])
        transform = self.module
        return [("rotate", {"angle": angle, "expand": self._expands, "center": transform.center, **self._how()})]

    def describe(self) -> str:
        """In a word."""
        return "rotate"


class Affine(_Warp):
    """RandomAffine: shears, turns with the clock and scales, about one point, and shifts by whole pixels."""

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Angle and shears in degrees, a factor, and shifts in whole pixels."""
        transform: Any = self.module
        zeros = np.zeros(sampler.batch, np.float32)
        drawn = {"angle": _within(sampler, transform.degrees), "shift_x": zeros, "shift_y": zeros}
        if transform.translate is not None:
            for name, share, side in zip("xy", transform.translate, (size.width, size.height), strict=True):
                drawn[f"shift_{name}"] = np.rint(sampler.within(-1.0, 1.0) * np.float32(share * side))
        shear = (0.0, 0.0, 0.0, 0.0) if transform.shear is None else (*transform.shear, 0.0, 0.0)[:4]
        drawn["scale"] = _within(sampler, transform.scale or (1.0, 1.0))
        drawn["shear_x"], drawn["shear_y"] = _within(sampler, shear[:2]), _within(sampler, shear[2:])
        return drawn

    def _forward(self, drawn: OpDraws, size: Size) -> Array:
        turned, shear_x, shear_y = (np.deg2rad(drawn[name].astype(np.float64)) for name in ("angle", "shear_x", "shear_y"))
        a, c = np.cos(turned - shear_y) / np.cos(shear_y), np.sin(turned - shear_y) / np.cos(shear_y)
        b = -a * np.tan(shear_x) - np.sin(turned)
        d = np.cos(turned) - c * np.tan(shear_x)
        scale = drawn["scale"]
        matrix = warp.about_centre(scale * a, scale * b, scale * c, scale * d, size, self._centre)
        matrix[:, 0, 2] += drawn["shift_x"]
        matrix[:, 1, 2] += drawn["shift_y"]
        return matrix

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Angle, shift, scale and shears."""
        own = {name: float(drawn[name][sample]) for name in ("angle", "scale")}
        shift, shear = ([float(drawn[f"{kind}_{axis}"][sample]) for axis in "xy"] for kind in ("shift", "shear"))
        translate = [int(each) for each in shift]
        return [("affine", {**own, "translate": translate, "shear": shear, "center": self.module.center, **self._how()})]

    def describe(self) -> str:
        """In a word."""
        return "affine"


class Perspective(_Warp):
    """RandomPerspective: the corners move inwards by whole pixels."""

    kind = "perspective"

    def unsupported(self) -> str | None:
        """Why the transform is left to torchvision, or ``None``."""
        return "distortion_scale=1, by which corners may meet" if self.module.distortion_scale == 1 else super().unsupported()

    def unsupported_size(self, size: Size) -> str | None:
        """The corners of one pixel meet, which is torchvision's to say."""
        return "the images are one pixel wide or high" if np.any(np.equal(size.height, 1) | np.equal(size.width, 1)) else None

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Where the four corners go, (B, 4, 2), from the top left on with the clock."""
        sides, scale = warp.sides_of(size), float(self.module.distortion_scale)  # type: ignore[arg-type]
        reach = np.floor(scale * (sides // 2).astype(np.float64))[..., None, :] + 1
        moved = np.floor(sampler.uniform(8).T.reshape(size.batch, 4, 2) * reach)
        last = np.broadcast_to((sides - 1)[..., None, :], moved.shape)
        right_and_below = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=bool)
        # A corner on the right or below lies as far before the last pixel as one on the left or above lies behind the first.
        return {"end_points": np.where(right_and_below, last - moved, moved).astype(np.float32)}

    def _forward(self, drawn: OpDraws, size: Size) -> Array:
        """Input → output pixels: corners are pixels in name, and edges in what is done with them."""
        matrix = warp.from_unit_square(drawn["end_points"].astype(np.float64))
        matrix[:, :, :2] /= (warp.sides_of(size) - 1)[..., None, :]
        to_edges, to_centres = np.eye(3), np.eye(3)
        to_edges[:2, 2] = 0.5
        to_centres[:2, 2] = -0.5
        made: Array = to_centres @ matrix @ to_edges
        return made

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """Where the corners come from, and where they go."""
        right, bottom = (int(side) - 1 for side in warp.sides_of(size.of(sample)))
        start = [[0, 0], [right, 0], [right, bottom], [0, bottom]]
        ends = drawn["end_points"][sample].astype(int).tolist()
        return [("perspective", {"startpoints": start, "endpoints": ends, **self._how()})]

    def describe(self) -> str:
        """In a word."""
        return "perspective"


def _turned(size: Size, angle: Any) -> Size:
    """Size of the frame of images turned by ``angle`` degrees, (B,) or one number, in float32 as in torchvision."""
    turned = np.deg2rad(-(np.asarray(angle, np.float64) % 360))
    cosine, sine = np.abs(np.cos(turned)).astype(np.float32), np.abs(np.sin(turned)).astype(np.float32)
    half_width, half_height = np.float32(0.5) * np.float32(size.width), np.float32(0.5) * np.float32(size.height)
    across, down = half_width * cosine + half_height * sine, half_width * sine + half_height * cosine
    return whole_sides(size, _pixels(down, half_height), _pixels(across, half_width))


def _pixels(reach: Any, half: Any) -> Any:
    """Number of pixels between ``half - reach`` and ``half + reach``, less 1e-4 of a pixel at both ends."""
    first, last = (np.trunc(end * np.float32(1e4)) * np.float32(1e-4) for end in (half - reach, half + reach))
    return np.ceil(last) - np.floor(first)


def _within(sampler: Sampler, bounds: Any) -> Array:
    """Numbers between two bounds, or their one value, (B,)."""
    low, high = (float(bound) for bound in bounds)
    return sampler.within(low, high) if low != high else np.full(sampler.batch, low, np.float32)


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.RandomRotation: Rotation,
    v2.RandomAffine: Affine,
    v2.RandomPerspective: Perspective,
}
