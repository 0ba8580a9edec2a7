"""Base classes of ops. An op replaces one module of the user's pipeline: the module is *lowered* to the op.

An op draws random parameters for a whole batch (``Op.draw``), converts them to Kornia's format (``Op.params``), and writes
them as float32 numbers, one *row* per sample, into its columns of the *parameter table* (``RowOp.write_rows``). A kernel, or
the method ``RowOp.apply``, reads the rows. A *pass* is one reading and writing of all images, in which one or several ops run.
Ops do not depend on passes, kernel launches or devices. A *sample* is an image or a clip; B is the number of samples. A
*fallback module* has no op: its library runs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuaug.fusion.ops.kornia_private import sampler_bounds
from gpuaug.fusion.ops.sampler import Gate, Sampler
from gpuaug.fusion.pixels import ByteRule, on_rgb

Array = NDArray[Any]
OpDraws = dict[str, Any]
"""Draws of one op for one batch: its random parameters, by name.

- ``"apply_mask"``: (B,) bool. True for samples that the op is applied to.
- Parameters, mostly under Kornia's names: NumPy arrays, (B, ...) unless documented otherwise, or plain numbers.
- ``"partner"`` of a mix, such as MixUp: index of the sample that each sample is mixed with, (B,) int64.
- ``"field"`` of noise: index of the noise field per sample, (B,) float32. Frame t of a clip uses field + t.
- ``"parts"`` of an op that runs one of several ops per sample: list of (op, its ``OpDraws``). No two apply masks overlap.
- ``"layers"`` of an op that picks some of its choices, which are lists of ops (``policies/picking.py``): one dict per round of
  picks and position in the lists, from the index of a choice to the ``OpDraws`` of its op at this position.
- ``"picks"`` of a policy of Kornia that picks per batch: indices of the picked choices, (rounds, batches) int64.
- ``"key"`` of a fallback module: seed of the random generators from which the module draws.
- ``"params"`` of a module that Kornia runs: its ``params=`` argument, repeated for the frames of clips.
- ``"frames"`` of a fallback module: number of frames per clip; 0 for images.
"""


def select_samples(draws: OpDraws, samples: slice | Array) -> OpDraws:
    """Return the draws of some samples. ``samples``: slice, or array of indices."""
    selected = {name: value[samples] if isinstance(value, np.ndarray) else value for name, value in draws.items()}
    if "parts" in selected:
        selected["parts"] = [(op, select_samples(part, samples)) for op, part in selected["parts"]]
    return selected


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """Shape of a batch of images, (B, C, H, W), or of clips, (B, T, C, H, W).

    ``height`` and ``width`` are in pixels: integers, or int64 arrays, (B,), if images differ in size.
    """

    batch: int
    """Number of samples: images, or clips. Parameters are drawn per sample."""
    channels: int
    height: Any
    width: Any
    frames: int = 0
    """Number of frames per clip; 0 for images."""
    full: tuple[Any, Any] | None = field(default=None, kw_only=True)
    """(heights, widths) of the images before the decoder downsampled them, (B,) each, for which crops are drawn; or ``None``.

    Not compared by ``==``, and left out by the methods that create another size.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Size) or self.shape[:-2] != other.shape[:-2]:
            return False
        return bool(np.all(self.height == other.height) and np.all(self.width == other.width))

    __hash__ = None  # type: ignore[assignment]

    @property
    def ragged(self) -> bool:
        """True if images may differ in size: ``height`` or ``width`` is an array."""
        return isinstance(self.height, np.ndarray) or isinstance(self.width, np.ndarray)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """(B, C, H, W), or (B, T, C, H, W) for clips. Sides that differ between images are ``None``."""
        height, width = (None if isinstance(side, np.ndarray) else int(side) for side in (self.height, self.width))
        frames = (self.frames,) if self.frames else ()
        return self.batch, *frames, self.channels, height, width

    @property
    def sides(self) -> Array:
        """(width, height) in pixels, float32: (2,), or (B, 2) if images differ in size."""
        return np.stack(np.broadcast_arrays(self.width, self.height), -1).astype(np.float32)

    @property
    def images(self) -> int:
        """Number of images, counting every frame of a clip."""
        return self.batch * self.images_per_sample

    @property
    def images_per_sample(self) -> int:
        """Number of frames per clip, or 1 for images. All frames of a clip share one row of the parameter table."""
        return self.frames or 1

    def _with_samples(self, batch: int, select: Callable[[Array], Any]) -> "Size":
        """Size of ``batch`` samples taken from this batch. ``select`` returns their entries of an array of sides, (B,)."""
        height, width = (select(side) if isinstance(side, np.ndarray) else side for side in (self.height, self.width))
        return Size(batch, self.channels, height, width, self.frames)

    def per_frame(self) -> "Size":
        """Size of the frames of clips, as a batch of images."""
        return replace(self._with_samples(self.images, lambda side: np.repeat(side, self.images_per_sample)), frames=0)

    def to(self, height: Any, width: Any) -> "Size":
        """Size of the same batch with images of another height and width."""
        return Size(self.batch, self.channels, height, width, self.frames)

    def rounded_down(self, height: Any, width: Any) -> "Size":
        """Size of the same batch with another height and width, numbers or arrays (B,), rounded down to whole pixels."""
        sides = (np.asarray(side).astype(np.int64) for side in (height, width))
        return self.to(*(side if side.ndim else int(side) for side in sides))

    def sample(self, index: int) -> "Size":
        """Size of sample ``index``, as a batch of one."""
        return self._with_samples(1, lambda side: int(side[index]))

    def select(self, samples: Array) -> "Size":
        """Size of the batch that consists of the samples with indices ``samples``."""
        return self._with_samples(len(samples), lambda side: side[samples])

    def repeat(self, count: int) -> "Size":
        """Size of ``count`` concatenated copies of the batch."""
        return self if count == 1 else self._with_samples(count * self.batch, lambda side: np.tile(side, count))


ANY_SIDES = (np.array([4096]), np.array([4097]))
"""Placeholder for (height, width) of *ragged* images, which differ in size: arrays of arbitrary numbers."""


class Op(ABC):
    """Base class of ops.

    Args:
        name: Name of the module in its container, such as ``RandomHorizontalFlip_1``.
        module: Module of the user. It is read, never changed, moved or called.
    """

    lowers: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes of the library that are lowered to the op. Not inherited."""

    names: ClassVar[tuple[str, ...]] = ()
    """Names of the uniform distributions in the parameter generator of Kornia's module.

    By default, a uniform number is drawn under each name, and written to the row in this order.
    """

    draws_one_batch_at_a_time: ClassVar[bool] = False
    """True if ``draw`` cannot draw for several batches in one call."""

    stores_coordinates: ClassVar[bool] = False
    """True if rows hold pixel coordinates. Sides above 2**24 pixels are then rejected: float32 does not hold all integers."""

    description: ClassVar[str]
    """Template of ``describe``, filled with attributes of the op. Not set by classes that override ``describe``."""

    draws_size: bool = False
    """True if the output size is drawn per sample, or a container runs an op that changes the size for some samples only."""

    choice_end: tuple[int, int] | None = None
    """(height, width) of all samples after this op, if a container picks it at random, as its last op that changes sizes.

    Samples that skip the op have this size already. ``None`` for all other ops.
    """

    takes_any_range: bool = False
    """True if floats in [0, 255] also give correct results, because the op's library neither clamps nor inverts values."""

    to_bytes: ByteRule | None = None
    """Rule by which the result is rounded to bytes, if the op's library reads and returns uint8 images; ``None`` for floats."""

    supported_keys: ClassVar[tuple[str, ...]] = ()
    """Data keys, such as ``"mask"``, of the inputs that a call may pass if the pipeline has the op; empty for all keys."""

    channel_counts: ClassVar[tuple[int, ...]] = ()
    """Numbers of channels that the op's library accepts; empty if it accepts any number."""

    launches: int = 1
    """Number of kernel launches of a pass that runs the op."""

    settings_of_draw: tuple[Any, ...] = ()
    """Values of settings that ``draw`` reads at every call. If one changes, draws that were computed ahead are discarded."""

    package: ClassVar[str] = "Kornia"
    """Library that the module comes from."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.p = 1.0
        self.p_batch = 1.0
        self.same_on_batch = False
        self.settings: dict[str, Any] = {}
        """Settings of the user's module by name. For Kornia's modules, the attribute ``flags``."""
        self.gates: tuple[Gate, ...] = ()
        """One condition per enclosing container that picks modules at random. The op runs for samples that meet them all."""
        self.bounds: dict[str, tuple[float, float]] = {}
        """(lower, upper) bounds of the parameters that are uniform numbers, by name."""
        self._read_common(module)
        self._read(module)

    def _read_common(self, module: Any) -> None:
        """Read the settings that all modules of Kornia have into attributes. Called by the constructor."""
        self.p = float(getattr(module, "p", self.p))
        self.p_batch = float(getattr(module, "p_batch", self.p_batch))
        self.same_on_batch = bool(getattr(module, "same_on_batch", self.same_on_batch))
        self.settings = getattr(module, "flags", self.settings)

    def _read(self, module: Any) -> None:
        """Read the other settings of the module into attributes. Called by the constructor. By default, only ``bounds``."""
        self.bounds = {name: limits for name in self.names if (limits := sampler_bounds(module, name)) is not None}

    @property
    def is_random(self) -> bool:
        """True if a sample may skip the op: ``p`` or ``p_batch`` is below 1, or an enclosing container may skip the op.

        If False, the op is applied to every sample without reading the apply mask, as in Kornia.
        """
        return not (self.p == 1.0 and self.p_batch == 1.0) or bool(self.gates)

    @property
    def keepdim(self) -> bool:
        """True if a single image (C, H, W) is returned without a batch dimension."""
        return self.package == "torchvision" or bool(getattr(self.module, "keepdim", False))

    def unsupported(self) -> str | None:
        """Reason why a module with these settings is not lowered, so that its library runs it; ``None`` if it is lowered."""
        return None

    def unsupported_size(self, size: Size) -> str | None:
        """Reason why the op cannot be fused for images of ``size``, such as samples that may keep another size; or ``None``."""
        # After an op with ``draws_size`` samples may differ in size; with ``choice_end`` they have its output size already.
        if not self.is_random or self.draws_size or self.choice_end is not None:
            return None
        out = self.out(size)
        if out == size and (not size.ragged or out.height is size.height):
            return None
        where = "in a random container" if self.gates else f"with p={self.p * self.p_batch}"
        changed = "size" if out.channels == size.channels else "number of channels"
        return f"{where} the {changed} of the output depends on the draw"

    def unsupported_channels(self, channels: int) -> tuple[str, str] | None:
        """Return (accepted numbers of channels, op or setting) for an error message; ``None`` if ``channels`` is accepted."""
        counts = self.channel_counts
        return None if not counts or channels in counts else (" or ".join(map(str, counts)), self.name)

    def out_applied(self, size: Size) -> Size:
        """Output size of samples that the op is applied to, for input images of ``size``, if the size is not drawn."""
        return size

    def out(self, size: Size) -> Size:
        """Output size for input images of ``size``, with ``ANY_SIDES`` for sides that are drawn per sample."""
        if self.choice_end is not None:
            return size.to(*self.choice_end)
        return size.to(*ANY_SIDES) if self.draws_size else self.out_applied(size)

    def out_drawn(self, draws: OpDraws, size: Size) -> Size:
        """Output size for input images of ``size`` and draws ``draws``. With ``draws_size``, samples may skip the op."""
        if not self.draws_size:
            return self.out(size)
        drawn = self.drawn_size(draws, size)
        applies = draws["apply_mask"]
        return size.to(np.where(applies, drawn.height, size.height), np.where(applies, drawn.width, size.width))

    def drawn_size(self, draws: OpDraws, size: Size) -> Size:
        """Output size of each sample if the op is applied to all samples. Called if ``draws_size`` is True."""
        return self.out_applied(size)

    def out_bounds(self, size: Size) -> tuple[Size, ...]:
        """Output sizes of samples that the op is applied to, among them the smallest and the largest that can be drawn."""
        return (self.out_applied(size),)

    def draw(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the parameters and ``"apply_mask"``, (B,) bool, for a whole batch."""
        draws = self.draw_parameters(sampler.shared_by_samples() if self.same_on_batch else sampler, size)
        draws["apply_mask"] = self.draw_apply_mask(sampler, size.batch)
        return draws

    def draw_apply_mask(self, sampler: Sampler, batch: int) -> Array:
        """Draw the apply mask, (B,) bool: for ``p_batch`` once per batch, for ``p`` per sample unless ``same_on_batch``."""
        applies: Array = np.ones(batch, dtype=bool)
        if self.p < 1:
            applies = (sampler.shared_by_samples() if self.same_on_batch else sampler).uniform() < self.p
        if self.p_batch < 1:
            applies = applies & (sampler.shared_by_samples().uniform() < self.p_batch)
        for gate in self.gates:
            applies = applies & gate.applies(sampler)
        return applies

    def draw_parameters(self, sampler: Sampler, size: Size) -> OpDraws:
        """Draw the parameters for a batch, without ``"apply_mask"``. By default, a uniform number per item of ``bounds``."""
        return {name: sampler.within(*bounds) for name, bounds in self.bounds.items()}

    @property
    def ops(self) -> tuple["Op", ...]:
        """The op itself; for an op that picks other ops, all ops that it may pick."""
        return (self,)

    @property
    def plan_ops(self) -> tuple["Op", ...]:
        """Ops that run in the passes for this op: the op itself; for a policy, ops that can each run several of ``ops``."""
        return (self,)

    def per_channel(self, channels: int) -> dict[str, Any]:
        """Values of the settings that have one value, or one per channel, by the name for error messages."""
        return {}

    def draws_by_op(self, draws: OpDraws) -> dict["Op", OpDraws]:
        """Draws of each op in ``plan_ops``."""
        return {self: draws}

    def sample_draws(self, draws: OpDraws, index: int) -> OpDraws:
        """Draws of sample ``index``, as a batch of one."""
        return select_samples(draws, slice(index, index + 1))

    def numbers(self, draws: OpDraws, sample: int) -> dict[str, float]:
        """Drawn numbers of one sample by name, without the apply mask, draws that are not per sample, and seeds of noise.

        Several numbers of one name have the suffixes ``_0``, ``_1``, … in their names; coordinates of points ``_x``, ``_y``.
        """
        numbers: dict[str, float] = {}
        for name, values in draws.items():
            if name in ("apply_mask", "field", "numbers") or np.shape(values)[:1] != np.shape(draws["apply_mask"]):
                continue
            for index in np.ndindex(values.shape[1:]):
                words = [name, *map(str, index)]
                if values.shape[-1] == 2 and index:
                    words[-1] = "xy"[index[-1]]
                numbers["_".join(words)] = float(values[(sample, *index)])
        return numbers

    def params(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Draws in the format of the ``params=`` argument of Kornia's module."""
        return {
            "batch_prob": torch.from_numpy(draws["apply_mask"].astype(np.float32)),
            "forward_input_shape": host_tensor([size.batch, size.channels, size.height, size.width], np.int64),
            **self.kornia_parameters(draws, size),
        }

    def kornia_parameters(self, draws: OpDraws, size: Size) -> dict[str, Tensor]:
        """Entries of ``params=`` from the draws. Overridden if names or shapes of the draws differ from Kornia's."""
        return {name: torch.from_numpy(values) for name, values in draws.items() if name != "apply_mask"}

    def describe(self) -> str:
        """Short description for ``explain()``."""
        return self.description.format_map(vars(self))


class RowOp(Op):
    """Op whose parameters are one row of the parameter table per sample. ``apply`` and a Triton kernel implement the op."""

    column_count: ClassVar[int] = 0
    """Number of columns of a row, without the columns per channel. The default, 0, stands for 1 + ``len(names)``. Column 0 is
    the apply mask: 1 to apply the op, 0 to leave the sample unchanged bit for bit."""

    columns_per_channel: ClassVar[int] = 0
    """Number of parameters with one column per channel. The columns of a parameter are adjacent, after all other columns."""

    def row_width(self, channels: int) -> int:
        """Number of columns of a row for images of ``channels`` channels."""
        return (self.column_count or 1 + len(self.names)) + self.columns_per_channel * channels

    def write_rows(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write the rows of all samples into ``out``, (B, row_width) float32."""
        out[:, 0] = draws["apply_mask"]
        self.write(draws, size, out)

    def write(self, draws: OpDraws, size: Size, out: Array) -> None:
        """Write all columns of ``out`` except column 0. By default, column k + 1 is the draw ``names[k]``."""
        for index, name in enumerate(self.names, 1):
            out[:, index] = draws[name]

    def rows_to_frames(self, rows: Tensor, frame: Tensor, frames: int) -> None:
        """Change, in place, the parameters that differ between the frames of a clip. By default, no parameter does.

        Args:
            rows: Rows of the clips, each repeated for its T frames, (B · T, row_width).
            frame: Index of each frame in its clip, (B · T,).
            frames: Number of frames per clip, T.
        """

    @abstractmethod
    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the images after the op, applied to all samples. The caller restores samples whose apply mask is 0.

        Args:
            images: (B, C, H, W), float32.
            rows: (B, row_width), float32, on the same device.
        """

    def apply_on_cpu(self, images: Tensor, rows: Tensor) -> Tensor:
        """Return the result of ``apply``. Overridden by ops that have a faster computation for CPUs."""
        return self.apply(images, rows)


class FrontOp(RowOp):
    """Op whose output pixel depends on other pixels of the image, or on another image: the first op, the *front*, of its pass.

    Pass type: filter.
    """

    keeps_unit_range: bool = True
    """True if values in [0, 1] are guaranteed to stay in [0, 1]."""

    kernel: ClassVar[str]
    """Name of the Triton kernel of the op; ``"torch"`` if there is none: ``apply`` runs on all devices, in its own pass."""


LARGEST_CODE = 31
"""Largest ``PointOp.code``, the code of ``policies.one_of.OneOf``, whose 32-bit ``flags`` have one bit per code."""


class PointOp(RowOp):
    """Pointwise op: an output pixel depends only on the same input pixel, its coordinates and the row of the sample.

    Pass type: pointwise.
    """

    code: ClassVar[int]
    """Number of the branch of ``apply_op()`` in ``backends/triton/points.py`` that computes the op."""

    formula: ClassVar[Callable[..., Any]]
    """Function of pixels and parameters of the op, in the functions of ``fusion/pixels.py``, so that Triton can compile it too.

    Arguments: a channel, or with ``rgb_only`` the channels r, g and b; then the columns of the row after the apply mask, where
    a parameter with one column per channel is one argument. Returns the new channel, or a tuple of three. Not set by classes
    that override ``apply``.
    """

    flags: int = 0
    """Bit field of settings that a kernel is compiled for. ``OneOf`` can run only ops with flags 0."""

    positional: ClassVar[bool] = False
    """True if the result depends on the coordinates of the pixel. Otherwise the op can run before or after a flip."""

    rgb_only: ClassVar[bool] = False
    """True if an output channel depends on all channels, so that a kernel must load three channels at once."""

    needs_mean: bool = False
    """True if the op uses the mean grey value of its input image."""

    keeps_unit_range: bool = False
    """True if values in [0, 1] are guaranteed to stay in [0, 1].

    With a 16-bit output type, images between two passes are then stored in 16 bits per value instead of 32.
    """

    def apply(self, images: Tensor, rows: Tensor) -> Tensor:
        """Call ``formula`` with the columns of ``rows`` as parameters."""
        channels = images.shape[1]
        first_channel_column = self.row_width(0)
        parameters: list[Any] = [column(rows, index) for index in range(1, first_channel_column)]
        starts = range(first_channel_column, self.row_width(channels), channels)
        parameters += [rows[:, start : start + channels, None, None] for start in starts]
        return on_rgb(self.formula, images, *parameters) if self.rgb_only else self.formula(images, *parameters)

    @property
    def launches(self) -> int:  # type: ignore[override]
        """Number of kernel launches of a pass that runs the op: 2 if the op needs the mean, else 1."""
        return 1 + self.needs_mean

    def flags_for(self, channels: int, frames: int = 1) -> int:
        """``flags`` for images of ``channels`` channels. ``frames``: number of frames per clip, 1 for images."""
        return self.flags


class ChannelOp(PointOp, FrontOp):
    """Pointwise op whose output channels depend on all channels, for any number of channels.

    For three input and output channels, the op joins a pass as any pointwise op does. For other numbers it is the front (first
    op) of its pass, because the kernels of other passes load either three channels at once or one.
    """

    kernel = "channels"
    rgb_only = True

    @staticmethod
    def begins_pass(op: Any, size: Size) -> bool:
        """True if ``op`` is a ``ChannelOp`` that must be the first op of a pass for input images of ``size``."""
        return isinstance(op, ChannelOp) and not size.channels == op.out(size).channels == 3


def column(rows: Tensor, index: int) -> Tensor:
    """Column ``index`` of rows (B, row_width), as (B, 1, 1, 1)."""
    return rows[:, index, None, None, None]


def host_tensor(values: Any, dtype: type[np.number[Any]]) -> Tensor:
    """Create a CPU tensor, independent of torch's default device and dtype."""
    return torch.from_numpy(np.array(values, dtype))
