"""What a Kornia module becomes: an op that draws for a whole batch, and says what it does to an image.

An op knows nothing of devices, launches or passes. It turns uniform numbers into the parameters that Kornia would have drawn
(``Op.draw``), tells Kornia's own module about them (``Op.params``), and gives the executors one row of float32
numbers per sample. ``drawn`` is a dict of NumPy arrays with the batch first, or of plain numbers where all samples share one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.fusion.ops.sampler import Sampler, always

Array = NDArray[Any]
OpDraws = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """The shape of a batch of images, (B, C, H, W).

    Where images differ in size, ``height`` and ``width`` are not numbers but arrays of them, (B,) int64.
    """

    batch: int
    channels: int
    height: Any
    width: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size) or self.batch != other.batch or self.channels != other.channels:
            return False
        return bool(np.all(self.height == other.height) and np.all(self.width == other.width))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ragged(self) -> bool:
        """Whether images differ in size."""
        return isinstance(self.height, np.ndarray) or isinstance(self.width, np.ndarray)

    @property
    def shape(self) -> tuple[int, int, int | None, int | None]:
        """(B, C, H, W), with ``None`` for sides that differ."""
        height, width = (None if isinstance(side, np.ndarray) else int(side) for side in (self.height, self.width))
        return self.batch, self.channels, height, width

    def to(self, height: Any, width: Any) -> "Size":
        """The same batch with images of another size."""
        return Size(self.batch, self.channels, height, width)

    def of(self, index: int) -> "Size":
        """A batch of one image of this one."""
        height, width = (int(side[index]) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(1, self.channels, height, width)

    def times(self, count: int) -> "Size":
        """This batch, so often."""
        if count == 1:
            return self
        height, width = (np.tile(side, count) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(count * self.batch, self.channels, height, width)


ANY_SIDES = (np.array([4096]), np.array([4097]))
"""Stands for sizes that differ from image to image, where they are not known or make no difference."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A number a sample that all ops in a container depend on: whether it applies, which of them runs, or in what order.

    An outcome is the place of the number in [0, 1) among ``ends``, ascending: 0 before the first of them.
    """

    ends: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """The outcomes of a container's draw for which an op in it runs."""

    draw: Draw
    outcomes: tuple[bool, ...]
    """For each outcome, one more than the draw has ends."""

    def applies(self, sampler: Sampler) -> Array:
        """Which samples the op runs for, (B,) bool."""
        found: Array = np.array(self.outcomes)[np.searchsorted(self.draw.ends, sampler.shared(self.draw), side="right")]
        return found


class Op(ABC):
    """One lowered module.

    Args:
        name: The module's name in its container, such as ``RandomHorizontalFlip_1``.
        module: The user's module. It is read, never changed, moved or called.
    """

    needs_own_batch: ClassVar[bool] = False
    """Whether a batch's draws cannot be made together with those of other batches."""

    counts_pixels: ClassVar[bool] = False
    """Whether it reads from a sample's row, in float32, where pixels lie."""

    words: ClassVar[str]
    """What ``describe`` says, where that is the same for all modules of the kind."""

    draws_size: ClassVar[bool] = False
    """Whether each sample draws the size that it comes out with."""

    package: ClassVar[str] = "Kornia"
    """Whose the module is."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.p = float(getattr(module, "p", 1.0))
        self.p_batch = float(getattr(module, "p_batch", 1.0))
        self.same_on_batch = bool(getattr(module, "same_on_batch", False))
        self.settings: dict[str, Any] = getattr(module, "flags", {})
        self.gates: tuple[Gate, ...] = ()
        """Of the containers that it runs in by chance; each sample draws for itself."""

    @property
    def is_random(self) -> bool:
        """Whether some samples may be left as they are. As in Kornia, a certain op does not look at its apply mask."""
        return not (self.p == 1.0 and self.p_batch == 1.0) or bool(self.gates)

    @property
    def launches(self) -> int:
        """Kernels of a pass that the op is in."""
        return 1

    def unsupported_size(self, size: Size) -> str | None:
        """Why the op cannot be lowered for images of this size, or ``None``."""
        return None

    def out(self, size: Size) -> Size:
        """The size of what comes out; ``ANY_SIDES`` where each sample draws its own."""
        return size

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The size of what comes out for these draws."""
        return self.out(size)

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """The size of what comes out, or the least and the largest that may be drawn."""
        return (self.out(size),)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw for a whole batch, the apply mask (``"apply_mask"``, bool, (B,)) included."""
        drawn = self.draw_parameters(sampler.same() if self.same_on_batch else sampler, size)
        drawn["apply_mask"] = self.draw_apply_mask(sampler, size.batch)
        return drawn

    def draw_apply_mask(self, sampler: Sampler, batch: int) -> Array:
        """Which samples the op applies to: with ``p_batch`` for the batch, and with ``p`` for each sample."""
        applies: Array = always(batch)
        if self.p < 1:
            applies = (sampler.same() if self.same_on_batch else sampler).uniform() < self.p
        if self.p_batch < 1:
            applies = applies & (sampler.number() < self.p_batch)
        for gate in self.gates:
            applies = applies & gate.applies(sampler)
        return applies

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw everything but the apply mask."""
        return {}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """What was drawn for one sample, as if it were a batch."""
        return {name: value[index : index + 1] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """What one sample drew, to be read, without its apply mask: ``_x``, ``_y`` of points, ``_0``, ``_1``, … of rows."""
        found: dict[str, float] = {}
        for name, values in drawn.items():
            if name == "apply_mask" or np.shape(values)[:1] != np.shape(drawn["apply_mask"]):
                continue
            for place in np.ndindex(values.shape[1:]):
                parts = [name, *map(str, place)]
                if values.shape[-1] == 2 and place:
                    parts[-1] = "xy"[place[-1]]
                found["_".join(parts)] = float(values[(sample, *place)])
        return found

    def params(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """The same draws as Kornia's module takes them in ``params=``."""
        return {
            **self.kornia_parameters(drawn, size),
            "batch_prob": torch.from_numpy(drawn["apply_mask"].astype(np.float32)),
            "forward_input_shape": host_tensor([size.batch, size.channels, size.height, size.width], np.int64),
        }

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Everything in ``params=`` but the apply mask and the shape: what was drawn, where it has Kornia's names."""
        return {name: torch.from_numpy(values) for name, values in drawn.items() if name != "apply_mask"}

    def describe(self) -> str:
        """What the op is, in a few words for ``explain()``."""
        return self.words


class RowOp(Op):
    """An op that is computed from a sample's row of numbers, by ``apply`` and by a Triton kernel, which must agree."""

    width: ClassVar[int]
    """How many numbers a row holds. The first is the apply mask: 1 to apply, 0 to leave the sample as it is, bit for bit."""

    def row_width(self, channels: int) -> int:
        """How many numbers a row holds for images of so many channels."""
        return self.width

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill ``out``, (B, row_width) float32."""
        out[:, 0] = drawn["apply_mask"]
        self.write(drawn, size, out)

    @abstractmethod
    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill everything in ``out`` but column 0."""

    @abstractmethod
    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """The op on every sample, whatever its apply mask.

        Args:
            images: (B, C, H, W), float32.
            rows: (B, row_width), float32, on the same device. A column is used as ``rows[:, k, None, None, None]``.
        """


class FrontOp(RowOp):
    """An op that makes a pixel from others, of its own image or of another one, and so begins a pass."""

    kernel: ClassVar[str]
    """Which Triton kernel computes it."""


class PointOp(RowOp):
    """An op on each pixel by itself: it needs the pixel, its place, and the sample's row of numbers."""

    code: ClassVar[int]
    """Which branch of the kernel it is."""

    flags: int = 0
    """What the branch needs to know to leave out code that an instance cannot reach."""

    positional: ClassVar[bool] = False
    """Whether the result depends on where the pixel is. If not, the op commutes with a flip."""

    fixed: ClassVar[bool] = False
    """Whether a row depends on nothing that is drawn but the apply mask."""

    rgb_only: ClassVar[bool] = False
    """Whether it mixes channels, and so needs images of three."""

    @property
    def needs_mean(self) -> bool:
        """Whether it uses the mean grey of the image that it is given."""
        return False

    @property
    def launches(self) -> int:
        """A mean takes a kernel of its own."""
        return 1 + self.needs_mean

    def unsupported_size(self, size: Size) -> str | None:
        """Ops that mix channels take RGB alone."""
        if self.rgb_only and size.channels != 3:
            return f"needs 3 channels, the images have {size.channels}"
        return None


def column(rows: Tensor, index: int) -> Tensor:
    """One number a sample, (B, 1, 1, 1)."""
    return rows[:, index, None, None, None]


def host_tensor(values: Any, dtype: type[np.number[Any]]) -> Tensor:
    """A tensor on the host, whatever torch's default device and dtype are."""
    return torch.from_numpy(np.array(values, dtype))


def bounds(sampler: Any) -> tuple[float, float]:
    """What one of Kornia's uniform distributions draws between."""
    return float(sampler.low), float(sampler.high)
