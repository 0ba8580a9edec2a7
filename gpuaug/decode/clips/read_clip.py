"""``read_clip``: names the frames of a video that a batch is to hold."""

import math
import os
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from gpuaug.core.errors import ArgumentError, ArgumentTypeError, one_of, shown, whole_number

Short = Literal["error", "loop", "pad"]

EARLY_S = 1e-4
"""Seconds by which a time stamp may be too early for the frame that it names: time stamps are often rounded to float32."""

_MOST_FRAMES = 2**24
"""Frames of a video: six days of it."""


class Clip:
    """Frames of a video that is not read yet. Made by ``read_clip``."""

    __slots__ = ("at", "frames", "numbers", "short", "source", "start", "start_s", "stride", "times_s")

    def __init__(
        self,
        source: str | memoryview,
        frames: int,
        stride: int,
        *,
        numbers: tuple[int, ...] | None,
        start: int | None,
        start_s: float | None,
        at: float | None,
        times_s: tuple[float, ...] | None,
        short: Short,
    ) -> None:
        self.source, self.frames, self.stride, self.numbers = source, frames, stride, numbers
        self.start, self.start_s, self.at, self.times_s, self.short = start, start_s, at, times_s, short

    def __repr__(self) -> str:
        source = repr(self.source) if isinstance(self.source, str) else f"<{len(self.source)} bytes>"
        return f"Clip({source}, {self.frames} frames)"

    def numbers_in(self, times_s: NDArray[np.float64]) -> NDArray[np.int64] | str:
        """(T,) numbers of the frames in a video whose frames have these times, or why there are none.

        Args:
            times_s: (N,) time of each frame of the video in seconds, ascending.
        """
        count = len(times_s)
        if self.numbers is not None:
            numbers = np.array(self.numbers, np.int64)
        elif self.times_s is not None:
            numbers = _shown_at(times_s, np.array(self.times_s))
        else:
            start = self.start or 0
            if self.start_s is not None:
                start = int(_shown_at(times_s, np.array([self.start_s]))[0])
            elif self.at is not None:
                starts = max(count - (self.frames - 1) * self.stride, 1)
                start = min(int(self.at * starts), starts - 1)
            numbers = start + self.stride * np.arange(self.frames)
        if numbers.max() < count:
            return numbers
        if self.short == "error":
            return f"it has {count} frames, and the clip needs frame {numbers.max()}: pass short='loop' or 'pad' to read_clip"
        return numbers % count if self.short == "loop" else np.minimum(numbers, count - 1)


def _shown_at(times_s: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Number of the frame that is shown at each time; numbers beyond the last frame for times after its end."""
    numbers = np.maximum(np.searchsorted(times_s, wanted + EARLY_S, side="right") - 1, 0)
    count = len(times_s)
    each = (times_s[-1] - times_s[0]) / (count - 1) if count > 1 else math.inf
    late = np.maximum(np.floor((wanted + EARLY_S - times_s[-1]) / each), 0) if each > 0 else np.zeros(len(wanted))
    return numbers + np.where(numbers == count - 1, late, 0).astype(np.int64)


def _refuse_to_flatten(clip: Clip) -> NoReturn:
    raise ArgumentTypeError(
        f"Transforms of a dataset must be given frames, got {clip}, which is not decoded yet. Give the transforms to the "
        "loader: stages=[gpuaug.DecodeStage(), transform]."
    )


register_pytree_node(Clip, _refuse_to_flatten, lambda _values, _context: _refuse_to_flatten, serialized_type_name="gpuaug.Clip")


def read_clip(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | Tensor | NDArray[np.uint8],
    frames: int | Sequence[int] = 16,
    stride: int = 1,
    *,
    start: int | None = None,
    start_s: float | None = None,
    at: float | None = None,
    times_s: Sequence[float] | None = None,
    short: Short = "error",
) -> Clip:
    """Choose frames of a video for ``collate_encoded``, which packs them undecoded. A ``DecodeStage`` decodes them.

    Frames are counted from 0 in the order in which they are shown, as PyAV's ``container.decode(video=0)`` gives them. Return
    several clips of one video, or the clips of several cameras, as members or in a list.

    Args:
        source: Path of a video, or the bytes of one. Its first video stream is read.
        frames: Number of frames, or the number of each frame, in any order.
        stride: Distance from one frame to the next. 4 takes every fourth frame.
        start: Number of the first frame.
        start_s: Time of the first frame in seconds: the frame that is shown then, by the time stamps in the file.
        at: Position of the clip in the video, from 0, the first clip that there is, to 1, the last that fits.
            ``random.random()`` gives all clips the same chance; ``k / (n - 1)`` spaces n clips evenly.
        times_s: Times in seconds, in place of ``frames`` and ``stride``: for each, the frame that is shown then. A time may be
            0.1 ms early for its frame, because of rounding.
        short: For a video that ends before the clip: ``"error"``, ``"loop"`` it from its first frame, or ``"pad"`` it with its
            last.

    Returns:
        The choice. All clips of one member of a batch need the same number of frames.

    Raises:
        ArgumentError, ArgumentTypeError: For a value that cannot work, or two of ``start``, ``start_s``, ``at``, ``times_s``.
            A missing or short video is found when the batch is made, and is raised at that batch as a ``DecodeError``.

    Cost:
        No access to the file.

    Examples:
        >>> read_clip("videos/juggling.mp4", frames=16, stride=4, start_s=2.5)
        Clip('videos/juggling.mp4', 16 frames)
    """
    if isinstance(source, str | os.PathLike):
        held: str | memoryview = os.fsdecode(source)
    else:
        held = _bytes(source)
    choices = {"start": start, "start_s": start_s, "at": at, "times_s": times_s}
    used = [name for name, value in choices.items() if value is not None]
    numbers = None
    if hasattr(frames, "__len__") and getattr(frames, "shape", (1,)) != ():
        numbers = tuple(
            _listed("frames", frames, lambda each: whole_number("A frame", each, "Count frames from 0.", most=_MOST_FRAMES))
        )
        used.insert(0, "a list of frames")
        frames = len(numbers)
    if len(used) > 1:
        raise ArgumentError(
            "A clip must be chosen by one of start, start_s, at, times_s and a list of frames, got "
            f"{' and '.join(used)}. Leave one of them out."
        )
    frames = whole_number("frames", frames, "Pass how many frames the clip has.", least=1, most=_MOST_FRAMES)
    stride = whole_number("stride", stride, "1 takes all frames.", least=1, most=_MOST_FRAMES)
    if start is not None:
        start = whole_number("start", start, "Count frames from 0.", most=_MOST_FRAMES)
    if start_s is not None:
        start_s = _seconds("start_s", start_s)
    if at is not None:
        at = _seconds("at", at)
        if not 0 <= at <= 1:
            raise ArgumentError(
                f"at must be from 0 to 1, got {at}. Pass 0 for the first clip of the video, and 1 for the last."
            )
    times = None
    if times_s is not None:
        times = tuple(_listed("times_s", times_s, lambda each: _seconds("A time of times_s", each)))
        frames = len(times)
    short = one_of("short", short, ("error", "loop", "pad"), "Leave it out to have an error for a short video.")
    return Clip(held, frames, stride, numbers=numbers, start=start, start_s=start_s, at=at, times_s=times, short=short)


def _listed(name: str, values: Any, checked: Any) -> list[Any]:
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise ArgumentTypeError(f"{name} must be a number or a list of numbers, got {shown(values)}. Pass [0, 4, 8] or 16.")
    found = [checked(each) for each in values]
    if not found:
        raise ArgumentError(f"{name} must name at least one frame, got none. Leave the sample out.")
    return found


def _seconds(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bool | np.bool_) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError  # they would be numbers, too
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last for several values
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}. Pass a float.") from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be finite, got {number}. Leave it out to begin with the first frame.")
    return number


def _bytes(source: Any) -> memoryview:
    if isinstance(source, Tensor) and source.ndim == 1 and source.element_size() == 1 and source.is_cpu:
        source = source.numpy()
    if isinstance(source, bytes | bytearray | memoryview) or (
        isinstance(source, np.ndarray) and source.dtype == np.uint8 and source.ndim == 1
    ):
        return memoryview(source).cast("B")  # type: ignore[arg-type]
    raise ArgumentTypeError(
        f"source must be the path of a video or its bytes, got {shown(source)}. Pass the file's bytes as they are."
    )
