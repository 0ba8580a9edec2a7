"""Base classes of ops, the lowered form of modules. An op draws parameters for a whole batch and applies them to images.

An op is independent of devices, kernel launches and passes. It computes Kornia's parameters from uniform numbers
(``Op.draw``), converts them to Kornia's form (``Op.params``), and writes a float32 row per sample (``RowOp.rows``).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.fusion.ops.sampler import Gate, Sampler, always

Array = NDArray[Any]
OpDraws = dict[str, Any]
"""Draws of one op for one batch.

- ``"apply_mask"``: (B,) bool. True for samples that the op is applied to.
- Parameters by name, mostly Kornia's names: NumPy arrays, (B, ...) unless documented otherwise, or plain numbers.
- ``"partner"`` of a mix: index of the sample mixed with, (B,) int64.
- ``"field"`` of Gaussian noise: index of the noise field per sample, (B,) float32. Frame t of a clip uses field + t.
- ``"parts"`` of an op that runs one of several: tuples (op or its index, its ``OpDraws``, mask of its samples or ``None``).
- ``"layers"`` of a module that picks: one tuple of ``Entry`` per layer, in order. If the batch shares its picks, also
  ``"picks"``, indices of the children; for a container also ``"end"``, the output ``Size``.
- ``"key"`` of a fallback module: seed of the random generators that the module uses while it runs.
- ``"params"`` of a module that Kornia runs: its ``params=`` argument, repeated for the frames of clips.
- ``"frames"`` of a fallback module: number of frames per clip; 0 for images.
"""


def cut(drawn: OpDraws, samples: slice | Array) -> OpDraws:
    """Draws of the samples in a slice, or with the given indices."""
    selected = {name: value[samples] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}
    if "parts" in selected:
        selected["parts"] = [(op, cut(part, samples), where[samples]) for op, part, where in selected["parts"]]
    return selected


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """Shape of a batch of images, (B, C, H, W), or of clips, (B, T, C, H, W).

    ``height`` and ``width`` are integers, or int64 arrays, (B,), if images differ in size.
    """

    batch: int
    """Number of samples: images, or clips. Parameters are drawn per sample."""
    channels: int
    height: Any
    width: Any
    frames: int = 0
    """Number of frames per clip; 0 for images."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size) or self.batch != other.batch or self.channels != other.channels:
            return False
        if self.frames != other.frames:
            return False
        return bool(np.all(self.height == other.height) and np.all(self.width == other.width))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ragged(self) -> bool:
        """True if images differ in size."""
        return isinstance(self.height, np.ndarray) or isinstance(self.width, np.ndarray)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """(B, C, H, W), or (B, T, C, H, W) for clips. Sides that differ between images are ``None``."""
        height, width = (None if isinstance(side, np.ndarray) else int(side) for side in (self.height, self.width))
        frames = (self.frames,) if self.frames else ()
        return self.batch, *frames, self.channels, height, width

    @property
    def images(self) -> int:
        """Number of images, counting every frame of a clip."""
        return self.batch * self.each

    @property
    def each(self) -> int:
        """Number of images per row of the parameter table: the frames of a clip, or 1."""
        return self.frames or 1

    def per_frame(self) -> "Size":
        """Size of the frames of clips, as a batch of images."""
        height, width = (
            np.repeat(side, self.each) if isinstance(side, np.ndarray) else side for side in (self.height, self.width)
        )
        return Size(self.images, self.channels, height, width)

    def to(self, height: Any, width: Any) -> "Size":
        """Size of the same batch with images of another height and width."""
        return Size(self.batch, self.channels, height, width, self.frames)

    def of(self, index: int) -> "Size":
        """Size of sample ``index``, as a batch of one."""
        height, width = (int(side[index]) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(1, self.channels, height, width, self.frames)

    def taking(self, samples: Array) -> "Size":
        """Size of the batch of samples with the given indices."""
        height, width = (side[samples] if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(len(samples), self.channels, height, width, self.frames)

    def times(self, count: int) -> "Size":
        """Size of ``count`` concatenated copies of the batch."""
        if count == 1:
            return self
        height, width = (np.tile(side, count) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(count * self.batch, self.channels, height, width, self.frames)


ANY_SIDES = (np.array([4096]), np.array([4097]))
"""Placeholder (height, width) for sides that differ between images and are not drawn yet."""


class Op(ABC):
    """Base class of lowered modules.

    Args:
        name: Name of the module in its container, such as ``RandomHorizontalFlip_1``.
        module: Module of the user. It is read, never changed, moved or called.
    """

    needs_own_batch: ClassVar[bool] = False
    """True if ``draw`` cannot draw for several batches in one call."""

    counts_pixels: ClassVar[bool] = False
    """True if the row of the op holds pixel coordinates.

    float32 represents integers exactly only up to 2**24, so larger images are rejected.
    """

    words: ClassVar[str]
    """Short description for ``explain()``, if it is the same for all instances of the class."""

    draws_size: bool = False
    """True if the output size is drawn per sample.

    Set for an op that changes the size in a container that runs it for some samples only.
    """

    choice_end: tuple[int, int] | None = None
    """(height, width) of all samples after the op, if it is the last op that changes sizes in a container with a random choice.

    Samples that skip the op have this size already.
    """

    package: ClassVar[str] = "Kornia"
    """Library that the module comes from."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.p = 1.0
        self.p_batch = 1.0
        self.same_on_batch = False
        self.settings: dict[str, Any] = {}
        self.gates: tuple[Gate, ...] = ()
        """One gate per enclosing container with a random choice. The op runs for samples that pass all gates."""
        self._read(module)

    def _read(self, module: Any) -> None:
        """Read the settings that are common to Kornia's modules."""
        self.p = float(getattr(module, "p", self.p))
        self.p_batch = float(getattr(module, "p_batch", self.p_batch))
        self.same_on_batch = bool(getattr(module, "same_on_batch", self.same_on_batch))
        self.settings = getattr(module, "flags", self.settings)

    @property
    def is_random(self) -> bool:
        """True if the op may be skipped for a sample: ``p`` or ``p_batch`` is below 1, or a container may skip the op.

        If False, backends apply the op to every sample without reading the apply mask, as Kornia does.
        """
        return not (self.p == 1.0 and self.p_batch == 1.0) or bool(self.gates)

    @property
    def launches(self) -> int:
        """Number of kernel launches of a pass that holds the op."""
        return 1

    @property
    def keepdim(self) -> bool:
        """True if a single image (C, H, W) is returned without a batch dimension."""
        return bool(getattr(self.module, "keepdim", self.package == "torchvision"))

    @property
    def read_at_draw(self) -> tuple[Any, ...]:
        """Settings that every draw reads from the module. Draws made ahead under other settings are discarded."""
        return ()

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:  # noqa: ARG003
        """Reason why the module's library runs a module with these settings, or ``None`` if the module is lowered."""
        return None

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why the op cannot be fused for images of ``size``, or ``None``."""
        return None

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """``None`` if the op's library accepts images of ``channels`` channels.

        Otherwise (numbers of channels that are accepted, name of the setting or module that needs them), for an error message.
        """
        return None

    def out_applied(self, size: Size) -> Size:
        """Output size of samples that the op is applied to, if it is not drawn."""
        return size

    def out(self, size: Size) -> Size:
        """Output size; ``ANY_SIDES`` if it is drawn per sample."""
        if self.choice_end is not None:
            return size.to(*self.choice_end)
        return size.to(*ANY_SIDES) if self.draws_size else self.out_applied(size)

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """Output size for the draws ``drawn``: the input size for a skipped sample."""
        if not self.draws_size:
            return self.out(size)
        return self.where_applied(drawn, self.out_applied(size), size)

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Output sizes of samples that the op is applied to, with the smallest and the largest that may be drawn."""
        return (self.out_applied(size),)

    @staticmethod
    def where_applied(drawn: OpDraws, out: Size, size: Size) -> Size:
        """``out`` for samples that the op is applied to, ``size`` for skipped samples."""
        applies = drawn["apply_mask"]
        return size.to(np.where(applies, out.height, size.height), np.where(applies, out.width, size.width))

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the parameters and the apply mask, ``"apply_mask"``, (B,) bool, of a whole batch."""
        drawn = self.draw_parameters(sampler.same() if self.same_on_batch else sampler, size)
        drawn["apply_mask"] = self.draw_apply_mask(sampler, size.batch)
        return drawn

    def draw_apply_mask(self, sampler: Sampler, batch: int) -> Array:
        """Draw the apply mask, (B,) bool: ``p_batch`` once per batch, ``p`` per sample."""
        applies: Array = always(batch)
        if self.p < 1:
            applies = (sampler.same() if self.same_on_batch else sampler).uniform() < self.p
        if self.p_batch < 1:
            applies = applies & (sampler.number() < self.p_batch)
        for gate in self.gates:
            applies = applies & gate.applies(sampler)
        return applies

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the parameters of a whole batch, without the apply mask."""
        return {}

    @property
    def parts(self) -> tuple["Op", ...]:
        """Ops that run: for a policy the ops of its layers, for any other op the op itself."""
        return (self,)

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Settings with one value, or one value per channel, by name, for images of ``channels`` channels."""
        return {}

    def of_parts(self, drawn: OpDraws) -> dict["Op", OpDraws]:
        """Draws per op of ``parts``."""
        return {self: drawn}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """Draws of sample ``index``, as a batch of one."""
        return {name: value[index : index + 1] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Drawn numbers of one sample by name, without the apply mask.

        Names of array elements have suffixes ``_0``, ``_1``, …; names of coordinates of points ``_x``, ``_y``.
        """
        numbers: dict[str, float] = {}
        for name, values in drawn.items():
            if name == "apply_mask" or np.shape(values)[:1] != np.shape(drawn["apply_mask"]):
                continue
            for index in np.ndindex(values.shape[1:]):
                parts = [name, *map(str, index)]
                if values.shape[-1] == 2 and index:
                    parts[-1] = "xy"[index[-1]]
                numbers["_".join(parts)] = float(values[(sample, *index)])
        return numbers

    def params(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws in the form of the ``params=`` argument of Kornia's module."""
        return {
            **self.kornia_parameters(drawn, size),
            "batch_prob": torch.from_numpy(drawn["apply_mask"].astype(np.float32)),
            "forward_input_shape": host_tensor([size.batch, size.channels, size.height, size.width], np.int64),
        }

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Entries of ``params=`` without apply mask and shape. Override if draws differ from Kornia's in name or form."""
        return {name: torch.from_numpy(values) for name, values in drawn.items() if name != "apply_mask"}

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return self.words


class Drawn(NamedTuple):
    """Draws of one op in a sequence of ops."""

    op: Any
    draws: OpDraws
    size: Size
    """Size of the input images of the op."""
    out: Size
    """Size of the output images of the op."""


def draw_each(ops: Iterable[Any], sampler: Sampler, size: Size, *, later: Mapping[Any, int] | None = None) -> Iterator[Drawn]:
    """Draw for a sequence of ops in order. The input size of an op is the output size of the op before it.

    Args:
        ops: Ops and fallback modules.
        sampler: Source of random numbers.
        size: Size of the input images of the first op.
        later: Number of uniform numbers per op whose parameters are computed only when its images have arrived. The draws of
            such an op are ``{"numbers": (count, B)}``, uniform numbers in [0, 1).
    """
    for op in ops:
        if later and op in later:
            # uniform(0) would consume a number of the sampler.
            numbers = sampler.uniform(later[op]) if later[op] else np.empty((0, sampler.batch), dtype=np.float32)
            drawn = Drawn(op, {"numbers": numbers}, size, op.out(size))
        else:
            draws = op.draw(sampler, size)
            drawn = Drawn(op, draws, size, op.out_drawn(draws, size))
        yield drawn
        size = drawn.out


class RowOp(Op):
    """Op computed from one row of the parameter table per sample, by ``apply`` and by a Triton kernel, which must agree."""

    width: ClassVar[int]
    """Number of columns of a row. Column 0 is the apply mask: 1 to apply the op, 0 to keep the sample bit for bit."""

    def row_width(self, channels: int) -> int:
        """Number of columns of a row for images of ``channels`` channels."""
        return self.width

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill ``out``, (B, row_width) float32."""
        out[:, 0] = drawn["apply_mask"]
        self.write(drawn, size, out)

    @abstractmethod
    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill all columns of ``out`` except column 0."""

    def spread(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Convert rows of clips, repeated for every frame, to rows of frames, in place.

        Args:
            rows: Row of the clip per frame, (B · T, row_width).
            frame: Index of the frame in its clip, (B · T,).
            frames: Number of frames per clip, T.
        """

    @abstractmethod
    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Apply the op to every sample. The caller restores samples whose apply mask is 0.

        Args:
            images: (B, C, H, W), float32.
            rows: (B, row_width), float32, on the same device. A column is used as ``rows[:, k, None, None, None]``.
        """


class FrontOp(RowOp):
    """Op whose output pixel depends on other pixels of the image, or on another image. It begins a pass."""

    kernel: ClassVar[str]
    """Name of the Triton kernel of the op."""


MOST_CODES = 31
"""Largest ``PointOp.code``, used by ``OneOf``. Codes are bit indices in a 32-bit flag."""


class PointOp(RowOp):
    """Pointwise op: an output pixel depends on the same input pixel, its coordinates and the row of the sample only."""

    code: ClassVar[int]
    """Number of the branch of ``apply_op()`` in ``backends/triton/points.py`` that computes the op. Unique per class."""

    flags: int = 0
    """Bit field passed to Triton as a compile-time constant, so that the kernel omits branches that the op never takes.

    0 for none. An op with flags cannot be picked by ``OneOf``.
    """

    positional: ClassVar[bool] = False
    """True if the result depends on the coordinates of the pixel. If False, the op commutes with a flip."""

    fixed: ClassVar[bool] = False
    """True if the row, except the apply mask, is the same for all draws."""

    rgb_only: ClassVar[bool] = False
    """True if the op mixes channels, so that the kernel of its pass needs all three at once."""

    keeps_unit_range: bool = False
    """True if values in [0, 1] are guaranteed to stay in [0, 1].

    In half precision, images between passes then use 16 bits per value instead of 32.
    """

    @property
    def needs_mean(self) -> bool:
        """True if the op uses the mean grey value of its input image."""
        return False

    @property
    def launches(self) -> int:
        """Number of kernel launches of a pass that holds the op: one more if the op needs the mean."""
        return 1 + self.needs_mean

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags`` for images of ``channels`` channels, of which ``frames`` share one row of the parameter table."""
        return self.flags

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Require three channels if the op mixes channels."""
        return ("3", self.name) if self.rgb_only and channels != 3 else None


class ChannelOp(PointOp, FrontOp):
    """Pointwise op that mixes any number of channels. It begins a pass unless images have three channels.

    A thread block of a pass holds three channels or one.
    """

    kernel = "channels"
    rgb_only = True

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """``None``: any number of channels is accepted."""
        return None

    @staticmethod
    def begins_pass(op: Any, channels: int) -> bool:
        """True if ``op`` is a ``ChannelOp`` that begins a pass for images of ``channels`` channels."""
        return isinstance(op, ChannelOp) and channels != 3


def column(rows: Tensor, index: int) -> Tensor:
    """Column ``index`` of rows (B, row_width), as (B, 1, 1, 1)."""
    return rows[:, index, None, None, None]


def host_tensor(values: Any, dtype: type[np.number[Any]]) -> Tensor:
    """Create a CPU tensor, independent of torch's default device and dtype."""
    return torch.from_numpy(np.array(values, dtype))


def bounds(sampler: Any) -> tuple[float, float]:
    """(lower, upper) bound of a uniform distribution of Kornia."""
    return float(sampler.low), float(sampler.high)
