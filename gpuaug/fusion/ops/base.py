"""Ops: the lowered form of modules. An op draws the parameters of a whole batch and applies them to images.

An op knows nothing of devices, launches or passes. It turns uniform numbers into the parameters that Kornia would have drawn
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
"""The draws of one op for one batch.

- ``"apply_mask"``: bool, (B,). True for samples that the op applies to.
- A parameter by its name, mostly Kornia's: a NumPy array, (B, ...) unless the op says otherwise, or a plain number.
- ``"partner"``, of a mix: index of the other sample, int64, (B,).
- ``"field"``, of noise: index of the field of each sample, of which frame t of a clip takes that t behind, float32, (B,).
- ``"parts"``, of an op that runs one of several: (op or its index, its ``OpDraws``, samples or ``None`` for all) of each.
- ``"layers"``, of a module that picks: a tuple of ``Entry`` for each step, in order. Beside it, if the batch shares its picks,
  ``"picks"``, the indices of the children, and of a container ``"end"``, the output ``Size``.
- ``"key"``, of a module left to its library: seed of the generators under which it runs.
- ``"params"``, of a module left to Kornia: its ``params=``, repeated for the frames of clips.
- ``"frames"``, of a module left to its library: number of frames of a clip; 0: images.
"""


def cut(drawn: OpDraws, samples: slice | Array) -> OpDraws:
    """The draws of a part of the samples: a slice, or their indices."""
    own = {name: value[samples] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}
    if "parts" in own:
        own["parts"] = [(op, cut(part, samples), where[samples]) for op, part, where in own["parts"]]
    return own


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """The shape of a batch of images, (B, C, H, W), or of clips, (B, T, C, H, W).

    ``height`` and ``width`` are integers, or int64 arrays, (B,), if images differ in size.
    """

    batch: int
    """Number of images, or of clips: of samples that draw by themselves."""
    channels: int
    height: Any
    width: Any
    frames: int = 0
    """Number of frames of every clip; 0: images."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size) or self.batch != other.batch or self.channels != other.channels:
            return False
        if self.frames != other.frames:
            return False
        return bool(np.all(self.height == other.height) and np.all(self.width == other.width))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ragged(self) -> bool:
        """Whether images differ in size."""
        return isinstance(self.height, np.ndarray) or isinstance(self.width, np.ndarray)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """(B, C, H, W), or (B, T, C, H, W) of clips, with ``None`` for sides that differ."""
        height, width = (None if isinstance(side, np.ndarray) else int(side) for side in (self.height, self.width))
        frames = (self.frames,) if self.frames else ()
        return self.batch, *frames, self.channels, height, width

    @property
    def images(self) -> int:
        """Number of images, the frames of all clips included."""
        return self.batch * self.each

    @property
    def each(self) -> int:
        """Number of images that one row of the parameter table serves: the frames of a clip, or one."""
        return self.frames or 1

    def to(self, height: Any, width: Any) -> "Size":
        """The same batch with images of another size."""
        return Size(self.batch, self.channels, height, width, self.frames)

    def of(self, index: int) -> "Size":
        """The size of image ``index``, as a batch of one."""
        height, width = (int(side[index]) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(1, self.channels, height, width, self.frames)

    def taking(self, samples: Array) -> "Size":
        """The size of the samples with these indices."""
        height, width = (side[samples] if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(len(samples), self.channels, height, width, self.frames)

    def times(self, count: int) -> "Size":
        """A batch of ``count`` copies of this one."""
        if count == 1:
            return self
        height, width = (np.tile(side, count) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(count * self.batch, self.channels, height, width, self.frames)


ANY_SIDES = (np.array([4096]), np.array([4097]))
"""Placeholder for sides that differ between images and are not known yet."""


class Op(ABC):
    """One lowered module.

    Args:
        name: The module's name in its container, such as ``RandomHorizontalFlip_1``.
        module: The user's module. It is read, never changed, moved or called.
    """

    needs_own_batch: ClassVar[bool] = False
    """True if the draws of several batches cannot be made in one call."""

    counts_pixels: ClassVar[bool] = False
    """True if its row holds pixel coordinates.

    float32 represents integers exactly only up to 2**24, so larger images are refused.
    """

    words: ClassVar[str]
    """The description in ``explain()``, if it is the same for all modules of the class."""

    draws_size: bool = False
    """True if each sample draws its own output size."""

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
        """One for each enclosing container with a random choice. The op runs for samples that pass all of them."""
        self._read(module)

    def _read(self, module: Any) -> None:
        """The settings that most modules of Kornia's have."""
        self.p = float(getattr(module, "p", self.p))
        self.p_batch = float(getattr(module, "p_batch", self.p_batch))
        self.same_on_batch = bool(getattr(module, "same_on_batch", self.same_on_batch))
        self.settings = getattr(module, "flags", self.settings)

    @property
    def is_random(self) -> bool:
        """False if ``p = p_batch = 1`` and no container may skip the op.

        Backends then apply it to every sample without reading the apply mask, as Kornia does.
        """
        return not (self.p == 1.0 and self.p_batch == 1.0) or bool(self.gates)

    @property
    def launches(self) -> int:
        """Number of kernels launched for a pass that holds the op."""
        return 1

    @property
    def keepdim(self) -> bool:
        """True if a single image, (C, H, W), comes out as one."""
        return bool(getattr(self.module, "keepdim", self.package == "torchvision"))

    @property
    def read_at_draw(self) -> tuple[Any, ...]:
        """Settings that every draw reads from the module. Draws that were made ahead with other settings are dropped."""
        return ()

    @classmethod
    def unsupported_module(cls, module: nn.Module) -> str | None:  # noqa: ARG003
        """Why a module with these settings is left to its library, or ``None``."""
        return None

    def unsupported_size(self, size: Size) -> str | None:
        """Why the op cannot be lowered for images of this size, or ``None``."""
        return None

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Numbers of channels, in words, and what of the op needs them; ``None`` if its library takes ``channels``."""
        return None

    def out(self, size: Size) -> Size:
        """The output size; ``ANY_SIDES`` if each sample draws its own."""
        return size

    def out_drawn(self, drawn: OpDraws, size: Size) -> Size:
        """The output size for these draws."""
        return self.out(size)

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """The output size, or the smallest and the largest output size that may be drawn."""
        return (self.out(size),)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw for a whole batch, the apply mask (``"apply_mask"``, bool, (B,)) included."""
        drawn = self.draw_parameters(sampler.same() if self.same_on_batch else sampler, size)
        drawn["apply_mask"] = self.draw_apply_mask(sampler, size.batch)
        return drawn

    def draw_apply_mask(self, sampler: Sampler, batch: int) -> Array:
        """The apply mask, bool, (B,): ``p_batch`` is drawn once for the batch, ``p`` for each sample."""
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

    @property
    def parts(self) -> tuple["Op", ...]:
        """The ops that run in its place: of a policy those that it picks from, of any other itself."""
        return (self,)

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Settings, by name, that hold one value or one per channel, for images of ``channels`` channels."""
        return {}

    def of_parts(self, drawn: OpDraws) -> dict["Op", OpDraws]:
        """The draws of each of its parts."""
        return {self: drawn}

    def of_sample(self, drawn: OpDraws, index: int) -> OpDraws:
        """The draws of sample ``index``, as a batch of one."""
        return {name: value[index : index + 1] if isinstance(value, np.ndarray) else value for name, value in drawn.items()}

    def numbers(self, drawn: OpDraws, sample: int) -> dict[str, float]:
        """Drawn scalars of one sample by name, without the apply mask.

        Elements of an array get suffixes ``_0``, ``_1``, …, and coordinates of points ``_x``, ``_y``.
        """
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
        """The draws in the form that Kornia's module takes as ``params=``."""
        return {
            **self.kornia_parameters(drawn, size),
            "batch_prob": torch.from_numpy(drawn["apply_mask"].astype(np.float32)),
            "forward_input_shape": host_tensor([size.batch, size.channels, size.height, size.width], np.int64),
        }

    def kornia_parameters(self, drawn: OpDraws, size: Size) -> dict[str, Tensor]:
        """Entries of ``params=`` besides the apply mask and the shape. Override unless draws have Kornia's names and form."""
        return {name: torch.from_numpy(values) for name, values in drawn.items() if name != "apply_mask"}

    def describe(self) -> str:
        """A few words for ``explain()``."""
        return self.words


class Drawn(NamedTuple):
    """The draws of one op of a run of ops."""

    op: Any
    draws: OpDraws
    size: Size
    """Size of the images that the op takes."""
    out: Size
    """Size of the images that the op returns."""


def draw_each(ops: Iterable[Any], sampler: Sampler, size: Size, *, later: Mapping[Any, int] | None = None) -> Iterator[Drawn]:
    """Draw for the ops of a run in turn, each for images of the size that the op before it returns.

    Args:
        ops: Ops, or modules that are left to their library.
        sampler: Source of the numbers.
        size: Size of the images that the first op takes.
        later: Number of uniform numbers of each op that draws when its images have arrived. The draws of such an op are
            ``{"numbers": (count, B)}``, its uniform numbers.
    """
    for op in ops:
        if later and op in later:
            # uniform(0) would take a number from the sampler.
            numbers = sampler.uniform(later[op]) if later[op] else np.empty((0, sampler.batch), dtype=np.float32)
            drawn = Drawn(op, {"numbers": numbers}, size, op.out(size))
        else:
            draws = op.draw(sampler, size)
            drawn = Drawn(op, draws, size, op.out_drawn(draws, size))
        yield drawn
        size = drawn.out


class RowOp(Op):
    """An op that is computed from a sample's row of numbers, by ``apply`` and by a Triton kernel, which must agree."""

    width: ClassVar[int]
    """Length of a row. Column 0 is the apply mask: 1 to apply, 0 to keep the sample bit for bit."""

    def row_width(self, channels: int) -> int:
        """Length of a row for images of ``channels`` channels."""
        return self.width

    def rows(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill ``out``, (B, row_width) float32."""
        out[:, 0] = drawn["apply_mask"]
        self.write(drawn, size, out)

    @abstractmethod
    def write(self, drawn: OpDraws, size: Size, out: Array) -> None:
        """Fill all columns of ``out`` except column 0."""

    def spread(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Change the rows of clips, repeated for every frame, (B · T, row_width), in place to those of their frames.

        Args:
            rows: Of every frame, those of its clip.
            frame: Index of each frame in its clip, (B · T,).
            frames: T.
        """

    @abstractmethod
    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Apply the op to every sample; the caller keeps samples whose apply mask is 0.

        Args:
            images: (B, C, H, W), float32.
            rows: (B, row_width), float32, on the same device. A column is used as ``rows[:, k, None, None, None]``.
        """


class FrontOp(RowOp):
    """An op whose output pixel depends on other pixels, of its own image or of another, and so begins a pass."""

    kernel: ClassVar[str]
    """Name of its Triton kernel."""


MOST_CODES = 31
"""Largest ``PointOp.code``, of an op that stands for others. Codes are bits of a flag of 32 bits."""


class PointOp(RowOp):
    """An op whose output pixel depends on that input pixel, its coordinates and the sample's row only."""

    code: ClassVar[int]
    """Number of the branch of ``point()`` in ``backends/triton/points.py`` that computes it; each class has its own."""

    flags: int = 0
    """Bit field passed to Triton as a compile-time constant, so that the kernel omits steps this instance never takes.

    0: none. An op with flags cannot be picked by ``OneOf``.
    """

    positional: ClassVar[bool] = False
    """True if the result depends on the pixel's coordinates. If not, the op commutes with a flip."""

    fixed: ClassVar[bool] = False
    """True if the row, except the apply mask, is the same for all draws."""

    rgb_only: ClassVar[bool] = False
    """True if it mixes channels. The kernel of a pass then has all three, where it may have copies of one otherwise."""

    keeps_unit_range: bool = False
    """True if values in [0, 1] are certain to stay in [0, 1].

    In half precision, images between passes then take 16 bits per value in place of 32.
    """

    @property
    def needs_mean(self) -> bool:
        """True if it uses the mean grey of its input image."""
        return False

    @property
    def launches(self) -> int:
        """Number of kernels launched for a pass that holds the op: one more if it needs the mean."""
        return 1 + self.needs_mean

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags`` for images of ``channels`` channels, of which one row serves ``frames``."""
        return self.flags

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Ops that mix channels take RGB alone."""
        return ("3", self.name) if self.rgb_only and channels != 3 else None


class ChannelOp(PointOp, FrontOp):
    """A pointwise op that mixes any number of channels: with three within a pass, with others at the front of one.

    A thread block holds three channels, or one.
    """

    kernel = "channels"
    rgb_only = True

    def channels_taken(self, channels: int) -> tuple[str, str] | None:
        """Any number."""
        return None

    @staticmethod
    def begins_pass(op: Any, channels: int) -> bool:
        """Whether an op is one of these, and has to begin a pass for images of ``channels`` channels."""
        return isinstance(op, ChannelOp) and channels != 3


def column(rows: Tensor, index: int) -> Tensor:
    """Column ``index`` of the rows, (B, 1, 1, 1)."""
    return rows[:, index, None, None, None]


def host_tensor(values: Any, dtype: type[np.number[Any]]) -> Tensor:
    """A tensor on the host, whatever torch's default device and dtype are."""
    return torch.from_numpy(np.array(values, dtype))


def bounds(sampler: Any) -> tuple[float, float]:
    """Lower and upper bound of one of Kornia's uniform distributions."""
    return float(sampler.low), float(sampler.high)
