"""torchvision's ops that need more of the image than the pixel: blur, sharpness, equalize and autocontrast."""

from typing import Any

from torch import nn
from torchvision.transforms import v2

from gpuaug.fusion.ops import filters
from gpuaug.fusion.ops.base import Array, OpDraws, Size
from gpuaug.fusion.ops.sampler import Sampler
from gpuaug.fusion.ops.torchvision.base import Call, TorchvisionOp, Units


class Blur(TorchvisionOp, filters.BlurOp):
    """GaussianBlur: one width for both axes, over a kernel that is given across and down."""

    border = "reflect"

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        across, down = transform.kernel_size
        self.kernel_size = int(down), int(across)
        self._bounds = float(transform.sigma[0]), float(transform.sigma[1])

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The kernel, and the width of the Gaussian."""
        transform: Any = self.module
        sigma = float(drawn["sigma"][sample])
        return [("gaussian_blur", {"kernel_size": list(transform.kernel_size), "sigma": [sigma, sigma]})]


class Sharpness(TorchvisionOp, filters.SharpnessOp):
    """RandomAdjustSharpness."""

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Nothing: the factor is given."""
        return {}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factor."""
        out[:, 1] = self.module.sharpness_factor  # type: ignore[assignment]

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The factor."""
        return [("adjust_sharpness", {"sharpness_factor": self.module.sharpness_factor})]


class SharpnessJitter(Sharpness):
    """LeRobot's: RandomAdjustSharpness with a factor for each sample."""

    def __init__(self, name: str, transform: Any, units: Units) -> None:
        Sharpness.__init__(self, name, transform, units)
        self._between = float(transform.sharpness[0]), float(transform.sharpness[1])

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """The factor."""
        return {"sharpness_factor": sampler.within(*self._between)}

    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """The factor."""
        out[:, 1] = drawn["sharpness_factor"]

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """The factor."""
        return [("adjust_sharpness", {"sharpness_factor": float(drawn["sharpness_factor"][sample])})]


class Equalize(TorchvisionOp, filters.Equalize):
    """RandomEqualize: of bytes, rounded to the next; of floats as torchvision converts them to bytes."""

    keeps_values = False

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.to_levels = (255.0, 0.5 + filters.SLACK) if units == "bytes" else (255.999, 0.0)

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """No arguments."""
        return [("equalize", {})]


class Autocontrast(TorchvisionOp, filters.AutoContrast):
    """RandomAutocontrast: of bytes, rounded to the next; a channel of one level stays as it is."""

    epsilon = 0.0
    clips = True  # type: ignore[assignment]

    def __init__(self, name: str, transform: nn.Module, units: Units) -> None:
        TorchvisionOp.__init__(self, name, transform, units)
        self.rounds = units == "bytes"
        self.to_levels = (255.0, 0.5 + filters.SLACK)

    def unsupported_size(self, size: Size) -> str | None:
        """Other numbers of channels are torchvision's to refuse."""
        return None if size.channels in (1, 3) else f"takes 1 or 3 channels, the images have {size.channels}"

    def calls(self, drawn: OpDraws, sample: int, size: Size) -> list[Call]:
        """No arguments."""
        return [("autocontrast", {})]


LOWERED: dict[type[nn.Module], type[TorchvisionOp]] = {
    v2.GaussianBlur: Blur,
    v2.RandomAdjustSharpness: Sharpness,
    v2.RandomEqualize: Equalize,
    v2.RandomAutocontrast: Autocontrast,
}
